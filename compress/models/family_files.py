"""The tensors of a checkpoint by the names that its family writes.

Some versions of `transformers` wrote the names of modules in memory, which differ where a text model is
inside of another (`wrapper.py`). A checkpoint of either kind is read under one set of names.
"""

from pathlib import Path

import torch
from torch import Tensor

from compress.artifact.header import TensorHeader
from compress.artifact.tensors import TensorFiles
from compress.errors import UnsupportedArch
from compress.models.family import Family


class FamilyFiles:
    """Files of safetensors whose names are those that a family writes."""

    def __init__(self, path: Path, family: Family) -> None:
        self._files = TensorFiles(path)
        self._stored = {family.from_memory(name): name for name in self._files.names()}
        if len(self._stored) < len(self._files.names()):
            raise UnsupportedArch(f"{path} holds tensors under two names of one module.")

    def names(self) -> list[str]:
        return list(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def header(self, name: str) -> TensorHeader:
        return self._files.header(self._stored.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(self._stored.get(name, name))

    def dtype(self, name: str) -> torch.dtype:
        return self._files.dtype(self._stored.get(name, name))

    def get(self, name: str) -> Tensor:
        return self._files.get(self._stored.get(name, name))

"""The tensors of a checkpoint by the names that its family writes.

Some versions of `transformers` wrote the names of modules in memory, which differ where a text model is
inside of another (`wrapper.py`). A checkpoint of either kind is read under one set of names. A tensor whose
rows are stored in parts is one here, as well where some program cut it elsewhere than the family does.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from compress.artifact.header import TensorHeader
from compress.artifact.tensors import TensorFiles
from compress.errors import UnsupportedArch
from compress.models.family import Family


class FamilyFiles:
    """Files of safetensors whose names are those that a family writes, with the whole of parts."""

    def __init__(self, path: Path, family: Family) -> None:
        self._files = TensorFiles(path)
        own = {family.from_memory(name): name for name in self._files.names()}
        if len(own) < len(self._files.names()):
            raise UnsupportedArch(f"{path} holds tensors under two names of one module.")
        wholes = {whole for name in own if (whole := family.whole_of(name)) is not None}
        parts = {whole: family.parts(whole) for whole in wholes}
        for whole in sorted(parts):
            if whole in own or (absent := [part for part in parts[whole] if part not in own]):
                other = f"'{whole}', too" if whole in own else f"no '{absent[0]}'"
                raise UnsupportedArch(f"{path} holds a part of '{whole}' and {other}.")
            self._check_parts(whole, [own[part] for part in parts[whole]])
        of_parts = {part for each in parts.values() for part in each}
        self._stored = {name: (stored,) for name, stored in own.items() if name not in of_parts}
        self._stored |= {whole: tuple(own[part] for part in each) for whole, each in parts.items()}

    def names(self) -> list[str]:
        return list(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def header(self, name: str) -> TensorHeader:
        """Return the header of a tensor, of one in parts that of the first."""
        return self._files.header(self._of(name)[0])

    def shape(self, name: str) -> tuple[int, ...]:
        first, *others = (self._files.shape(each) for each in self._of(name))
        return (sum(each[0] for each in (first, *others)), *first[1:]) if others else first

    def dtype(self, name: str) -> torch.dtype:
        return self._files.dtype(self._of(name)[0])

    def holds_dense(self, name: str) -> bool:
        """Return whether a tensor exists and its numbers are weights as they are, no codes that need
        scales."""
        return name in self and _is_dense(self.dtype(name))

    def get(self, name: str) -> Tensor:
        first, *others = (self._files.get(each) for each in self._of(name))
        return torch.cat((first, *others)) if others else first

    def _check_parts(self, whole: str, parts: Sequence[str]) -> None:
        """Compare the parts of a tensor.

        Raises:
            UnsupportedArch: they are no rows of one tensor.
        """
        shapes = [self._files.shape(part) for part in parts]
        dtypes = {self._files.dtype(part) for part in parts}
        if not all(shapes) or len({shape[1:] for shape in shapes}) > 1 or len(dtypes) > 1:
            stated = ", ".join(f"{part} {list(shape)}" for part, shape in zip(parts, shapes, strict=True))
            raise UnsupportedArch(
                f"the parts of '{whole}' differ in more than their number of rows, or in dtype: {stated}."
            )

    def _of(self, name: str) -> tuple[str, ...]:
        """Return the names in the files of a tensor."""
        return self._stored.get(name, (name,))


def _is_dense(dtype: torch.dtype) -> bool:
    """Return whether numbers of a dtype are weights as they are, and no codes that need scales."""
    return dtype.is_floating_point and dtype.itemsize > 1

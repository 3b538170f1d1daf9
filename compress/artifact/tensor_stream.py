"""One safetensors file whose tensors are written one at a time, in any order, each at its place.

Names, dtypes and shapes are stated first, so the header is written before any tensor is made, and no more
than one tensor is held. The bytes are those of `save_tensors`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from compress.artifact.atomic import atomic_file
from compress.artifact.disk import explained
from compress.artifact.tensors import ELSEWHERE, layout, raw_bytes

Form = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


class TensorStream:
    """An open file that `tensor_stream` yields."""

    def __init__(self, stream: BinaryIO, forms: Mapping[str, Form]) -> None:
        header, self._places = layout(forms)
        self._stream = stream
        self._begin = len(header)
        self._missing = dict(forms)
        stream.write(header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor.

        Raises:
            ValueError: it was not stated, was written before, or has another dtype or shape.
        """
        form = self._missing.pop(name, None)
        if form != (tensor.dtype, tuple(tensor.shape)):
            raise ValueError(f"tensor '{name}' is {tensor.dtype} {list(tensor.shape)}, stated as {form}")
        self._stream.seek(self._begin + self._places[name])
        self._stream.write(raw_bytes(tensor))

    def check_complete(self) -> None:
        """Raise ValueError if a tensor that was stated is missing."""
        if self._missing:
            raise ValueError(f"tensor '{next(iter(self._missing))}' was stated and not written")


@contextmanager
def tensor_stream(path: Path, forms: Mapping[str, Form]) -> Iterator[TensorStream]:
    """Open a file that appears at `path`, whole, when the block ends without an error.

    Raises:
        UnsupportedFormat: for a dtype that is not written to safetensors files here.
        StorageError: the disk is full, read-only or not permitted.
    """
    with explained(path, hint=ELSEWHERE), atomic_file(path) as stream:
        tensors = TensorStream(stream, forms)
        yield tensors
        tensors.check_complete()

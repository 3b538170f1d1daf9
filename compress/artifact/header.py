"""The header of a safetensors file, read without torch: its tensors, their dtypes, shapes and places.

Layout of a file: u64 little-endian header length n, n bytes of JSON `{name: {dtype, shape, data_offsets:
[begin, end]}}` (offsets count from the end of the header; `__metadata__` is a map of strings), then the
tensor bytes, row-major, little-endian, without holes. What is checked here is that law: every range fits its
dtype and shape, ranges neither overlap nor leave a hole, and the file is exactly as long as its header
demands.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import StorageError, UnsupportedFormat
from compress.untrusted.fields import shown
from compress.untrusted.files import is_lfs_pointer, lfs_pointer_error, open_plain
from compress.untrusted.parse import Malformed, parse_json

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_MAX_DIMS = 32
MAX_DIM = 1 << 48
"""Above the elements of any file; Python and torch count in 64 bits without overflow below it."""
BITS_OF_DTYPE = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a file; `begin` and `end` are positions in the file, not in its data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> tuple[TensorHeader, ...]:
    """Return the tensors of one safetensors file in the order of their bytes.

    Raises:
        StorageError: the file cannot be read, is a Git LFS pointer, or is shorter or longer than its header
            demands.
        UnsupportedFormat: the header is not that of a safetensors file.
    """
    try:
        with open_plain(path) as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise StorageError(
                    f"{path} is truncated: it has {len(prefix)} bytes and a safetensors file starts with 8; "
                    f"copy it again."
                )
            header_bytes = struct.unpack("<Q", prefix)[0]
            if is_lfs_pointer(prefix):
                raise lfs_pointer_error(path)
            if header_bytes > MAX_HEADER_BYTES:
                raise UnsupportedFormat(
                    f"{path} is not a safetensors file: its first 8 bytes announce a header of "
                    f"{header_bytes} bytes."
                )
            raw = stream.read(header_bytes)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.") from error
    if len(raw) < header_bytes:
        raise StorageError(
            f"{path} is truncated inside its header ({file_bytes} bytes, header {header_bytes}); copy it "
            f"again."
        )
    data_begin = 8 + header_bytes
    headers = sorted(
        _parse(path, raw, data_begin), key=lambda header: (header.begin, header.end, header.name)
    )
    _check_ranges(path, headers, data_begin, file_bytes)
    return tuple(headers)


def _parse(path: Path, raw: bytes, data_begin: int) -> list[TensorHeader]:
    try:
        entries = parse_json(raw)
    except Malformed as error:
        raise UnsupportedFormat(
            f"{path} is not a safetensors file: its header is not valid JSON ({error})."
        ) from error
    if not isinstance(entries, dict):
        raise UnsupportedFormat(
            f"{path} is not a safetensors file: its header is a JSON {type(entries).__name__}, not an object."
        )
    return [
        _tensor(path, name, entry, data_begin) for name, entry in entries.items() if name != "__metadata__"
    ]


def _tensor(path: Path, name: str, entry: Any, data_begin: int) -> TensorHeader:
    where = f"{path} has a malformed safetensors header: tensor '{name}'"
    fields = entry if isinstance(entry, dict) else {}
    dtype = fields.get("dtype")
    shape = _counts(fields.get("shape"))
    offsets = _counts(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise UnsupportedFormat(f"{where} lacks a valid dtype, shape or data_offsets.")
    if dtype not in BITS_OF_DTYPE:
        raise UnsupportedFormat(f"{path} holds tensor '{name}' in dtype '{dtype}', which is not known here.")
    if any(size >= MAX_DIM for size in (*shape, *offsets)) or len(shape) > _MAX_DIMS:
        raise UnsupportedFormat(f"{where} has shape {shown(list(shape))}, which no file can hold.")
    if math.prod(shape) * BITS_OF_DTYPE[dtype] != 8 * (offsets[1] - offsets[0]):
        raise UnsupportedFormat(
            f"{where} of dtype {dtype} and shape {list(shape)} does not fill its byte range {list(offsets)}."
        )
    return TensorHeader(name, dtype, shape, data_begin + offsets[0], data_begin + offsets[1])


def _counts(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None


def _check_ranges(path: Path, headers: list[TensorHeader], data_begin: int, file_bytes: int) -> None:
    position = data_begin
    for header in headers:
        if header.begin != position:
            raise UnsupportedFormat(
                f"{path} has a malformed safetensors header: tensor '{header.name}' overlaps another or "
                f"follows a hole."
            )
        position = header.end
    if position > file_bytes:
        raise StorageError(
            f"{path} is truncated: its header speaks of {position} bytes and it has {file_bytes}; copy it "
            f"again."
        )
    if position < file_bytes:
        raise StorageError(
            f"{path} has {file_bytes - position} bytes after its last tensor; it is damaged or was not "
            f"written as safetensors."
        )

"""Tensors in safetensors files: deterministic writing, lazy reading, and the refusal of pickles.

The writer lays a file out as the reference implementation does (widest dtype first, then by name, header
padded with spaces to 8 bytes), so that equal tensors give equal bytes, whichever program wrote them. It
streams each tensor from memory to the file; tensors that share storage are written out each. Reading copies
the bytes of one tensor into memory of its own and leaves the file alone: a mapped file would keep every page
that was ever looked at, and a disk error would end the process with a signal, where a read raises an error.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from compress.artifact.atomic import atomic_file, sync_directory, write_atomic
from compress.artifact.disk import explained
from compress.artifact.header import TensorHeader, read_header
from compress.errors import StorageError, UnsupportedFormat, UsageError, did_you_mean
from compress.untrusted.fields import Fields
from compress.untrusted.files import check_within, open_plain
from compress.untrusted.parse import Malformed, read_json

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ELSEWHERE = "Free space there, or give another place such as another --workspace."
_NUMBERED = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<total>\d{5})\.safetensors")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# In the order of the reference implementation, whose files start with the last of these.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_RANK = {dtype: (rank, name) for rank, (name, dtype) in enumerate(DTYPES.items())}


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file in one step; the same tensors always give the same bytes. `metadata` are the
    texts of its header, by default that the tensors are torch's.

    Raises:
        UnsupportedFormat: for a dtype that has no place in a safetensors file here.
        StorageError: the disk is full, read-only or not permitted; the file is named.
    """
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    header, places = layout(forms, metadata=metadata)
    with explained(path, hint=ELSEWHERE), atomic_file(path) as stream:
        stream.write(header)
        for name in places:
            stream.write(raw_bytes(tensors[name]))


def layout(
    forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Return the beginning of a safetensors file of tensors with these dtypes and shapes, and the place of
    each tensor after it, in the order of the places.

    Raises:
        UnsupportedFormat: for a dtype that has no place in a safetensors file here.
    """
    for name, (dtype, _) in forms.items():
        if dtype not in _RANK:
            raise UnsupportedFormat(
                f"tensor '{name}' has dtype {dtype}, which is not written to safetensors files here."
            )
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    places: dict[str, int] = {}
    position = 0
    for name, (dtype, shape) in sorted(forms.items(), key=lambda item: (-_RANK[item[1][0]][0], item[0])):
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _RANK[dtype][1],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        places[name] = position
        position = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, places


def raw_bytes(tensor: Tensor) -> Any:
    """Return the elements, row-major, as a buffer of bytes; without a copy where they lie so on the CPU."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()


def load_tensors(
    path: Path, names: Iterable[str] | None = None, *, device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Return the named tensors (all by default) of a safetensors file or of a checkpoint directory.

    Raises:
        UsageError: a name is not in the file.
        StorageError, UnsupportedFormat: as `TensorFiles`.
    """
    files = TensorFiles(path)
    return {name: files.get(name, device=device) for name in (files.names() if names is None else names)}


class TensorFiles:
    """The tensors of a checkpoint: a safetensors file, or a directory with one, or with shards and an index.
    A tensor that is in a shard and not in the index counts, as it does to `transformers`. No file stays open.

    Raises:
        UsageError: there is no such file or directory, or a tensor of that name is not in it.
        UnsupportedFormat: pickles, a directory without safetensors, or a malformed file or index.
        StorageError: a shard is missing or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._headers: dict[str, TensorHeader] = {}
        self._file_of: dict[str, Path] = {}
        wanted = _indexed(path) if (path / INDEX_NAME).exists() else dict.fromkeys(_files(path), None)
        placed = {name for names in wanted.values() for name in names or ()}
        for file, names in wanted.items():
            if file != path:
                check_within(path, file)
            headers = {header.name: header for header in read_header(file)}
            if names is not None and (absent := sorted(set(names) - headers.keys())):
                raise StorageError(
                    f"{file} lacks the tensor '{absent[0]}' that {INDEX_NAME} places there; copy the "
                    f"checkpoint again."
                )
            for name in [*(names or ()), *(headers.keys() - placed)]:
                if name in self._file_of:
                    raise UnsupportedFormat(
                        f"{path} holds the tensor '{name}' in {self._file_of[name].name} and in "
                        f"{file.name}, without an index that says which counts."
                    )
                self._headers[name] = headers[name]
                self._file_of[name] = file

    def names(self) -> list[str]:
        return sorted(self._headers)

    def __contains__(self, name: str) -> bool:
        return name in self._headers

    def header(self, name: str) -> TensorHeader:
        if name not in self._headers:
            raise UsageError(
                f"{self.path} has no tensor "
                f"'{name}'.{did_you_mean(name, self._headers) if len(name) < 200 else ''}"
            )
        return self._headers[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.header(name).shape

    def dtype(self, name: str) -> torch.dtype:
        dtype = self.header(name).dtype
        if dtype not in DTYPES:
            raise UnsupportedFormat(
                f"{self._file_of[name]} holds tensor '{name}' in dtype '{dtype}', which is not read here."
            )
        return DTYPES[dtype]

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        self.header(name)
        return self._file_of[name]

    def get(self, name: str, *, device: str | torch.device = "cpu") -> Tensor:
        dtype = self.dtype(name)
        header = self.header(name)
        file = self._file_of[name]
        raw = torch.empty(header.end - header.begin, dtype=torch.uint8)
        try:
            with open_plain(file) as stream:
                stream.seek(header.begin)
                _read_into(stream, memoryview(raw.numpy().data))
        except OSError as error:
            raise StorageError(f"{file} cannot be read: {error.strerror or error}.") from error
        return raw.view(dtype).reshape(header.shape).to(device)


def _read_into(stream: BinaryIO, place: memoryview) -> None:
    """Fill a place from the stream; raise OSError when the file ends before it is full."""
    while place:
        count = stream.readinto(place)  # type: ignore[attr-defined]  # every binary stream of a file has it
        if not count:
            raise OSError("it has become shorter since its header was read")
        place = place[count:]


def _files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint without an index."""
    if path.exists() and not path.is_dir():
        if path.suffix in PICKLE_SUFFIXES:
            raise _pickle_error(path, path.parent)
        return [path]
    if not path.is_dir():
        raise UsageError(f"there is no checkpoint at {path}.")
    if (path / SINGLE_NAME).exists():
        return [path / SINGLE_NAME]
    if found := sorted(path.glob("*.safetensors")):
        _check_numbered(path, {file.name for file in found})
        return found
    if pickles := sorted(entry for entry in path.iterdir() if entry.suffix in PICKLE_SUFFIXES):
        raise _pickle_error(pickles[0], path)
    raise UnsupportedFormat(
        f"{path} holds no safetensors file; a checkpoint is a directory with {SINGLE_NAME} or {INDEX_NAME} "
        f"and its shards."
    )


def _check_numbered(path: Path, names: set[str]) -> None:
    """Check that all files are there of those that state how many they are: `model-00001-of-00003`."""
    for match in filter(None, map(_NUMBERED.fullmatch, sorted(names))):
        for number in range(1, int(match["total"]) + 1):
            shard = f"{match['stem']}-{number:05d}-of-{match['total']}.safetensors"
            if shard not in names:
                raise StorageError(f"{path} lacks the shard '{shard}'; copy the checkpoint again.")


def _pickle_error(pickle: Path, directory: Path) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"{pickle} is a pickle, which can run code when it is read, and is never opened here; convert the "
        f"checkpoint where you trust "
        f"it, with AutoModelForCausalLM.from_pretrained('{directory}', "
        f"dtype='auto').save_pretrained('{directory}-safetensors')."
    )


def _indexed(path: Path) -> dict[Path, list[str] | None]:
    """Return the tensors of each shard, from the index. A shard is a plain name in the directory of the
    index. An index none of whose shards is left is that of an earlier save, which `transformers` leaves where
    it writes a single file: the file counts.
    """
    index = path / INDEX_NAME
    try:
        check_within(path, index)
        stated = Fields(read_json(index), str(index), UnsupportedFormat)
        places = stated.mapping("weight_map")
    except Malformed as error:
        raise UnsupportedFormat(f"{index} is not an index of safetensors shards: {error}.") from None
    except OSError as error:
        raise StorageError(f"{index} cannot be read: {error.strerror or error}.") from error
    shards: dict[Path, list[str] | None] = {}
    for name, file in places.items():
        if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise UnsupportedFormat(
                f"{index} places the tensor '{name}' in '{file}', which is no safetensors file there."
            )
        names = shards.setdefault(path / file, [])
        assert names is not None
        names.append(name)
    single = path / SINGLE_NAME
    absent = next((file for file in shards if not file.exists()), None)
    if single.exists() and single not in shards:
        if shards and not any(file.exists() for file in shards):
            return {single: None}
        raise UnsupportedFormat(
            f"{path} holds {SINGLE_NAME} and the shards of {INDEX_NAME}, two checkpoints of which some "
            "programs load the one, others the other. Remove the one that is out of date."
        )
    if absent is not None:
        raise StorageError(
            f"{path} lacks the shard '{absent.name}' that {INDEX_NAME} names; copy the checkpoint again."
        )
    return shards


class ShardWriter:
    """Writes a checkpoint tensor by tensor and holds one shard in memory at most.

    The bytes depend only on the tensors, the order of `add` and `max_shard_bytes`. A larger tensor gets its
    own shard.
    """

    def __init__(self, directory: Path, *, max_shard_bytes: int = 5_000_000_000) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []
        self._names: set[str] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a copy of the tensor on the CPU; the caller may change or free its own at once."""
        if name in self._names:
            raise ValueError(f"tensor '{name}' is added twice")
        self._names.add(name)
        size_bytes = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size_bytes > self._max_shard_bytes:
            self._flush()
        self._pending[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        self._pending_bytes += size_bytes
        self._total_bytes += size_bytes

    def finish(self) -> list[Path]:
        """Give the shards their final names, write the index when there is more than one, and return the
        files written.
        """
        if not self._names:
            raise ValueError("a checkpoint without tensors")
        if self._pending:
            self._flush()
        count = len(self._shards)
        names = (
            [SINGLE_NAME]
            if count == 1
            else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        )
        for number, name in enumerate(names):
            self._partial(number).rename(self._directory / name)
        sync_directory(self._directory)
        written = [self._directory / name for name in names]
        if count > 1:
            places = {
                tensor: name for name, tensors in zip(names, self._shards, strict=True) for tensor in tensors
            }
            index = {
                "metadata": {"total_size": self._total_bytes},
                "weight_map": dict(sorted(places.items())),
            }
            write_atomic(
                self._directory / INDEX_NAME,
                (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode(),
            )
            written.append(self._directory / INDEX_NAME)
        return written

    def _flush(self) -> None:
        save_tensors(self._partial(len(self._shards)), self._pending)
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0

    def _partial(self, number: int) -> Path:
        return self._directory / f"shard-{number:05d}.partial"

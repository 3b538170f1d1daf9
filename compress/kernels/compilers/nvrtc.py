"""CUDA C++ without an installed toolkit: NVRTC compiles a source to machine code, the driver loads and
launches it.

libnvrtc comes with torch's CUDA build (the package nvidia-cuda-nvrtc); the driver is libcuda. Sources
include no headers. Compiled code is cached in the user's cache directory under the digest of (source,
options, compiler version), with a digest of its own in front, so that a torn or altered file is compiled
again. Launches go to torch's current stream and can be captured into a CUDA graph once the kernel is
loaded.

From compute capability 9.0 on, every launch may overlap the kernel before it (programmatic dependent
launch): the kernel itself waits with `griddepcontrol.wait` before it touches anything that another kernel
writes or reads.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from compress.artifact.atomic import write_atomic
from compress.errors import EnvironmentUnfit

NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_DIGEST_SIZE = 32
_MAP_BYTES = 128
_MAP_ALIGNMENT = 64
_MAP_TYPES = {1: 0, 2: 1, 4: 2, 8: 4}
_MAP_SWIZZLES = {32: 1, 64: 2, 128: 3}
_MAP_PROMOTE_128B = 2
"""Constants of cuTensorMapEncodeTiled; element types are unsigned integers, by their bytes."""
TileMap = ctypes.c_ubyte * _MAP_BYTES
"""A description of `tile_map`, as a kernel's arguments hold it."""


@dataclass(frozen=True)
class Source:
    """One kernel to compile: its text, the name of its `extern "C"` entry, and macros `(name, value)`."""

    text: str
    entry: str
    macros: tuple[tuple[str, float], ...] = ()

    def options(self, sm: int) -> tuple[str, ...]:
        architecture = f"sm_{sm}a" if sm >= 90 else f"sm_{sm}"
        defines = (f"-D{name}={value}" for name, value in self.macros)
        return (f"--gpu-architecture={architecture}", "-std=c++17", "-default-device", "--restrict", *defines)


@functools.cache
def source_text(*paths: str) -> str:
    """Concatenate CUDA sources of `compress/kernels`."""
    kernels = files("compress.kernels")
    return "".join(kernels.joinpath(path).read_text() for path in paths)


@dataclass(frozen=True)
class Launch:
    """The shape of a launch. `cluster` consecutive blocks along x share a cluster (1: no cluster)."""

    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    cluster: int = 1
    overlap: bool = False


@functools.cache
def find_nvrtc() -> ctypes.CDLL | None:
    """Find the compiler library: where the loader finds it (torch has loaded it already), or in the package
    installed next to torch."""
    for name in NVRTC_NAMES:
        found = _open(name)
        if found is not None:
            return found
    package = importlib.util.find_spec("nvidia")
    for root in package.submodule_search_locations or () if package else ():
        for name in NVRTC_NAMES:
            for path in sorted(Path(root).glob(f"*/lib/{name}")):
                # the compiler opens it by name: it must be loaded already
                for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                    _open(str(builtins))
                found = _open(str(path))
                if found is not None:
                    return found
    return None


def compile_cubin(source: Source, sm: int) -> bytes:
    """Return machine code for a compute capability, from the cache or the compiler.

    Raises:
        EnvironmentUnfit: there is no libnvrtc, or it refuses the source; the message holds its log.
    """
    nvrtc = find_nvrtc()
    if nvrtc is None:
        raise EnvironmentUnfit(
            "the CUDA kernels need libnvrtc, which neither the loader nor the package nvidia-cuda-nvrtc has. "
            "Install torch's CUDA build, or the package nvidia-cuda-nvrtc of the same CUDA version."
        )
    options = source.options(sm)
    facts = "\0".join((source.text, source.entry, *options, str(_version(nvrtc))))
    path = cache_directory() / f"{hashlib.sha256(facts.encode()).hexdigest()}.cubin"
    cubin = _read_cached(path)
    if cubin is None:
        cubin = _compile(nvrtc, source, options)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, hashlib.sha256(cubin).digest() + cubin)
        except OSError:  # a home that cannot be written costs compile time at every start, and nothing else
            return cubin
    return cubin


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compress" / "cubin"


def tile_map(view: Tensor, tile: tuple[int, ...], *, swizzled: bool = True) -> bytes:
    """Describe to the copy engine of sm_90 how to read tiles of a tensor, or of a strided view, of 1, 2, 4
    or 8 bytes a number.

    `tile` is the extent along each dimension; in shared memory, its rows (the last dimension) are nested
    in the order of the other dimensions. Swizzled rows are 32, 64 or 128 bytes, and of each 128 bytes the
    16-byte chunks of a row are permuted by the number of these 128 bytes (mod the chunks of a row). Elements
    past the end read as zero.

    Raises:
        EnvironmentUnfit: the driver refuses the description.
    """
    size = view.element_size()
    assert view.dim() == len(tile)
    assert view.stride(-1) == 1
    assert not swizzled or tile[-1] * size in _MAP_SWIZZLES
    return _encoded(
        view.data_ptr(),
        size,
        tuple(view.shape),
        view.stride()[:-1],
        tile,
        _MAP_SWIZZLES[tile[-1] * size] if swizzled else 0,
    )


@functools.lru_cache(maxsize=4096)
def _encoded(
    address: int,
    element_size: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    tile: tuple[int, ...],
    swizzle: int,
) -> bytes:
    buffer = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    at = -(-ctypes.addressof(buffer) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    rank = len(shape)  # the driver counts dimensions from the innermost
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    steps = (ctypes.c_uint64 * max(1, rank - 1))(*(stride * element_size for stride in reversed(strides)))
    box = (ctypes.c_uint32 * rank)(*reversed(tile))
    ones = (ctypes.c_uint32 * rank)(*(1 for _ in tile))
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), _MAP_TYPES[element_size], rank, ctypes.c_void_p(address), sizes, steps, box,
        ones, 0, swizzle, _MAP_PROMOTE_128B, 0,
    )  # fmt: skip
    if status:
        raise EnvironmentUnfit(
            f"the driver cannot describe tiles {tile} of a tensor {shape} to the copy engine ({status})."
        )
    return ctypes.string_at(at, _MAP_BYTES)


class Function:
    """A kernel that is loaded on one device and takes one struct by value."""

    def __init__(self, source: Source, *, device: torch.device, shared_bytes: int, sm: int) -> None:
        self._driver = _driver()
        self._entry = source.entry
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        image = compile_cubin(source, sm)
        with torch.cuda.device(device):
            torch.cuda.current_stream()
            self._check("cuModuleLoadData", self._driver.cuModuleLoadData(ctypes.byref(self._module), image))
            entry = source.entry.encode()
            self._check(
                "cuModuleGetFunction",
                self._driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, entry),
            )
            set_attribute = self._driver.cuFuncSetAttribute
            self._check(
                "cuFuncSetAttribute",
                set_attribute(self._function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            )

    def __call__(self, launch: Launch, arguments: ctypes.Structure, *, device: torch.device) -> None:
        """Launch on torch's current stream of `device`.

        Raises:
            EnvironmentUnfit: the driver refuses the launch.
        """
        attributes = (_Attribute * 2)()
        count = 0
        if launch.cluster > 1:
            attributes[count].id = _CLUSTER_DIMENSION
            attributes[count].value.cluster = (launch.cluster, 1, 1)
            count += 1
        if launch.overlap:
            attributes[count].id = _PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[count].value.flag = 1
            count += 1
        stream = torch.cuda.current_stream(device).cuda_stream
        config = _Config(
            *launch.grid, 1, launch.threads, 1, 1, launch.shared_bytes, stream, attributes, count
        )
        pointer = ctypes.c_void_p(ctypes.addressof(arguments))
        with torch.cuda.device(device):
            self._check(
                "cuLaunchKernelEx",
                self._driver.cuLaunchKernelEx(
                    ctypes.byref(config), self._function, ctypes.byref(pointer), None
                ),
            )

    def _check(self, call: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise EnvironmentUnfit(
                f"{call} of the CUDA kernel '{self._entry}' failed: {reason} ({status}). "
                "The driver and torch's CUDA version must match, and an earlier error of the device makes "
                "every later call fail."
            )


class _AttributeValue(ctypes.Union):
    _fields_ = [("pad", ctypes.c_char * 64), ("cluster", ctypes.c_uint * 3), ("flag", ctypes.c_int)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _AttributeValue)]


class _Config(ctypes.Structure):
    """CUlaunchConfig: grid x y z, block x y z, dynamic shared memory, stream, attributes and their number."""

    _fields_ = [
        *(
            (name, ctypes.c_uint)
            for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")
        ),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def _open(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


@functools.cache
def _driver() -> ctypes.CDLL:
    found = _open("libcuda.so.1")
    if found is None:
        raise EnvironmentUnfit(
            "own CUDA kernels need the NVIDIA driver (libcuda.so.1), and the loader does not find it."
        )
    return found


def _version(nvrtc: ctypes.CDLL) -> tuple[int, int]:
    major = ctypes.c_int()
    minor = ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _read_cached(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    cubin = content[_DIGEST_SIZE:]
    return cubin if hashlib.sha256(cubin).digest() == content[:_DIGEST_SIZE] else None


def _compile(nvrtc: ctypes.CDLL, source: Source, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.text.encode(), f"{source.entry}.cu".encode(), 0, None, None
    )
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        if status:
            log = _text(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise EnvironmentUnfit(
                f"NVRTC {_version(nvrtc)} refused '{source.entry}' with {' '.join(options)}:\n{log}"
            )
        return _text(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """Return the compiler's log or machine code."""
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw

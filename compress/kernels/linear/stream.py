"""Linears of few rows (decode and verification), bound by the bytes of their weights: launches `stream.cu`, which says how it sums.

A row's bits are the same in every M and beside any neighbours (`plan.py` says why). What a file of a format gives: its packed weight as a
`Streamed`, and kernels from `kernels`, one for each activation.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from compress.kernels.linear.plan import FORMATS, STATIC_BYTES, TILE_ROWS, Format, Gpu, Plan, Shape, plan
from compress.kernels.nvrtc import Function, Launch, Source, tile_map
from compress.kernels.rows import NormedRows, QuantizedRows
from compress.kernels.select import Kernel, Problem, Repack

ACTIVATIONS: tuple[str | None, ...] = (None, "silu", "gelu", "gelu_pytorch_tanh")
MAX_ROWS = 128
MIN_SM = 80


@dataclass(frozen=True)
class Streamed:
    """A weight as the kernel reads it: data of n rows (gate over up when gated), k columns; `scale_O` where rows are scaled at the end."""

    format: Format
    data: Tensor
    n: int
    k: int
    scale_O: Tensor | None = None


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for."""

    format: Format
    dtype: torch.dtype
    activation: str | None
    float32_output: bool
    token_tiles: int
    wgmma: bool
    resident: bool
    stages: int
    normed: bool = False

    @property
    def source(self) -> Source:
        macros = {
            "FORMAT": FORMATS.index(self.format),
            "F16": int(self.dtype == torch.float16),
            "ACT": ACTIVATIONS.index(self.activation),
            "OUT32": int(self.float32_output),
            "NT": self.token_tiles,
            "WGMMA": int(self.wgmma),
            "RESIDENT": int(self.resident),
            "STAGES": self.stages,
            "NORM": int(self.normed),
        }
        return Source(_text("numbers.cuh") + _text("stream.cu"), "stream_linear", tuple(macros.items()))


_TileMap = ctypes.c_ubyte * 128


class _Arguments(ctypes.Structure):
    """`Args` of stream.cu."""

    _fields_ = [
        ("x_map", _TileMap),
        *((name, ctypes.c_void_p) for name in ("w", "x", "w_scale", "x_scale", "bias", "residual", "y", "partials", "arrivals")),
        *((name, ctypes.c_int) for name in ("num_tokens", "n", "k", "num_tiles", "tiles", "parts", "segments", "arriving_bytes")),
        ("norm_weight", ctypes.c_void_p),
        ("norm_eps", ctypes.c_float),
    ]


class _NormArguments(ctypes.Structure):
    """`Args` of norm_rows.cu."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("x", "weight", "y")), ("k", ctypes.c_int), ("eps", ctypes.c_float)]


def stream(
    x: Tensor | QuantizedRows | NormedRows,
    weight: Streamed,
    bias_O: Tensor | None,
    *,
    dtype: torch.dtype,
    activation: str | None,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chosen: Plan | None = None,
) -> Tensor:
    """[T, O], or [T, O / 2] when gated: rounded to `dtype`, the model's, then the residual added and rounded again; or float32.

    `chosen` is for measuring other plans than the best; none of them changes a bit.
    """
    x_TI = x if isinstance(x, Tensor) else x.values_TK if isinstance(x, QuantizedRows) else x.x_TK
    num_rows, device = x_TI.shape[0], x_TI.device
    shape = Shape(weight.format, weight.n, weight.k, activation is not None)
    assert x_TI.shape[1] == weight.k
    assert out_dtype in (None, dtype, torch.float32)
    y_TO = torch.empty(num_rows, weight.n // 2 if shape.gated else weight.n, dtype=out_dtype or dtype, device=device)
    if num_rows == 0:
        return y_TO
    gpu = gpu_of(device)
    chosen = chosen or plan(shape, num_rows, gpu)
    partials, arrivals = _meeting_place(chosen, device) if gpu.sm < 90 else (None, None)
    x_TI, residual_TO = _readable(x_TI), None if residual_TO is None else residual_TO.contiguous()
    norm = x if isinstance(x, NormedRows) and chosen.resident else None
    if isinstance(x, NormedRows) and norm is None:
        x_TI = norm_rows(NormedRows(x_TI, x.weight_K, x.eps))
    x_scale_T = x.scale_T if isinstance(x, QuantizedRows) else None
    tensors = (weight.data, x_TI, weight.scale_O, x_scale_T, bias_O, residual_TO, y_TO, partials, arrivals)
    split = chosen.split
    copied = chosen.wgmma and weight.format != "fp8"
    arguments = _Arguments(
        _TileMap.from_buffer_copy(tile_map(x_TI, (8 * chosen.token_tiles, 64))) if copied else _TileMap(),
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(num_rows, weight.n, weight.k, shape.num_tiles, chosen.tiles, split.parts, split.segments, chosen.arriving_bytes),
        None if norm is None else norm.weight_K.data_ptr(),
        0.0 if norm is None else norm.eps,
    )
    variant = variant_of(chosen, shape, dtype, activation, out_dtype, normed=norm is not None)
    function(variant, device)(chosen.launch, arguments, device=device)
    return y_TO


def norm_rows(x: NormedRows) -> Tensor:
    """The norm alone, bit for bit as the linear computes it."""
    x_TK = _readable(x.x_TK)
    y_TK = torch.empty_like(x_TK)
    num_rows, k = x_TK.shape
    arguments = _NormArguments(x_TK.data_ptr(), x.weight_K.data_ptr(), y_TK.data_ptr(), k, x.eps)
    launch = Launch(grid=(num_rows, 1), threads=128, shared_bytes=0, overlap=gpu_of(x_TK.device).sm >= 90)
    _norm_function(x_TK.dtype, x_TK.device)(launch, arguments, device=x_TK.device)
    return y_TK


def variant_of(
    chosen: Plan, shape: Shape, dtype: torch.dtype, activation: str | None, out_dtype: torch.dtype | None, *, normed: bool = False
) -> Variant:
    float32_output = out_dtype == torch.float32
    return Variant(
        shape.format, dtype, activation, float32_output, chosen.token_tiles, chosen.wgmma, chosen.resident, chosen.stages, normed
    )  # fmt: skip


@functools.cache
def _norm_function(dtype: torch.dtype, device: torch.device) -> Function:
    source = Source(_text("numbers.cuh") + _text("norm_rows.cu"), "norm_rows", (("F16", int(dtype == torch.float16)),))
    return Function(source, device=device, shared_bytes=0, sm=gpu_of(device).sm)


@functools.cache
def function(variant: Variant, device: torch.device) -> Function:
    """The variant, compiled and loaded: once for a device."""
    gpu = gpu_of(device)
    return Function(variant.source, device=device, shared_bytes=gpu.shared_bytes - STATIC_BYTES, sm=gpu.sm)


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Gpu(10 * properties.major + properties.minor, properties.multi_processor_count, shared_bytes)


@functools.cache
def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text()


def _readable(x_TI: Tensor) -> Tensor:
    """Dense rows at an address of 16 bytes."""
    x_TI = x_TI.contiguous()
    return x_TI if x_TI.data_ptr() % 16 == 0 else x_TI.clone()


def _meeting_place(chosen: Plan, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Where segments meet without clusters: their sums, and how many have arrived."""
    if chosen.split.segments == 1:
        return None, None
    blocks = chosen.launch.grid[0] * chosen.launch.grid[1]
    block_size = 8 * chosen.token_tiles * chosen.tiles * TILE_ROWS
    sums = torch.empty(blocks * block_size, dtype=torch.float32, device=device)
    return sums, torch.zeros(blocks // chosen.split.segments, dtype=torch.int32, device=device)


def partial_tile(problem: Problem) -> str | None:
    """Refusal of formats that keep rows as they are, and so cannot pad them."""
    multiple = TILE_ROWS if problem.activation is None else 2 * 8
    return f"N = {problem.n} is no multiple of {multiple}" if problem.n % multiple else None


def kernels(
    name: str,
    *,
    schemes: tuple[str, ...],
    fn: Callable[..., Tensor],
    repack: Repack,
    refusal: Callable[[Problem], str | None],
    norms: bool = True,
) -> Iterator[Kernel]:
    """One kernel for each activation of a gated linear, and the plain one."""
    for activation in ACTIVATIONS:

        def supports(problem: Problem, activation: str | None = activation) -> str | None:
            if problem.scheme not in schemes:
                return f"for {', '.join(schemes)}"
            if problem.activation != activation:
                return f"its outputs are gated by {activation}" if activation else "its outputs are not gated"
            if problem.dtype not in (torch.bfloat16, torch.float16):
                return "computes in bfloat16 or float16"
            if not problem.row_invariant:
                return "for decode rows; a prompt's few rows take it from there"
            if problem.m_max > MAX_ROWS:
                return f"for M up to {MAX_ROWS}, where weight bytes are the bound"
            if problem.k % 128:
                return f"K = {problem.k} is no multiple of 128"
            return refusal(problem)

        bound: Callable[..., Any] = functools.partial(fn, activation=activation)
        suffix = f".{activation}" if activation else ""
        yield Kernel("linear", f"stream.{name}{suffix}", min_sm=MIN_SM, rank=20, supports=supports, fn=bound, repack=repack, norms=norms)

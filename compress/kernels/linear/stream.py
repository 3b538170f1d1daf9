"""Linears of few rows (decode and verification), bound by the bytes of their weights: launches `stream.cu`, which says how it sums.

A row's bits are the same in every M and beside any neighbours (`plan.py` says why). What a file of a format gives: its packed weight as a
`Streamed`, and kernels from `kernels`, one for each activation.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from compress.kernels.build.nvrtc import Function, Launch, Source, tile_map
from compress.kernels.linear.plan import FORMATS, STATIC_BYTES, TILE_ROWS, Format, Gpu, Plan, Shape, plan
from compress.kernels.operands.rows import FP8, QuantizedRows, RawRows
from compress.kernels.quantize_rows.fused import quantize_rows
from compress.kernels.select import Kernel, Problem, Repack

ACTIVATIONS: tuple[str | None, ...] = (None, "silu", "gelu", "gelu_pytorch_tanh")
Quantizes = Literal["no", "by row", "static"]
QUANTIZES: tuple[Quantizes, ...] = get_args(Quantizes)
"""Whether a kernel rounds raw rows to e4m3, and by which scale: the values of QUANT in the sources."""
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
    quantizes: Quantizes = "no"

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
            "QUANT": QUANTIZES.index(self.quantizes),
        }
        return Source(
            source_text("numbers.cuh", "pieces.cuh", "stream.cu"), "stream_linear", tuple(macros.items())
        )


_TileMap = ctypes.c_ubyte * 128


class _Arguments(ctypes.Structure):
    """`Args` of stream.cu."""

    _fields_ = [
        ("x_map", _TileMap),
        *(
            (name, ctypes.c_void_p)
            for name in ("w", "x", "w_scale", "x_scale", "bias", "residual", "y", "partials", "arrivals")
        ),
        *(
            (name, ctypes.c_int)
            for name in ("num_tokens", "n", "k", "num_tiles", "tiles", "parts", "segments", "arriving_bytes")
        ),
        *((name, ctypes.c_void_p) for name in ("norm_weight", "static_scale")),
        ("norm_eps", ctypes.c_float),
    ]


class _PrepareArguments(ctypes.Structure):
    """`Args` of prepare_rows.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y", "scales", "static_scale")),
        ("k", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


def stream(
    x: Tensor | QuantizedRows | RawRows,
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
    num_rows = x.shape[0]
    device = weight.data.device
    shape = Shape(weight.format, weight.n, weight.k, activation is not None)
    assert x.shape[1] == weight.k
    assert out_dtype in (None, dtype, torch.float32)
    y_TO = torch.empty(
        num_rows, weight.n // 2 if shape.gated else weight.n, dtype=out_dtype or dtype, device=device
    )
    if num_rows == 0:
        return y_TO
    gpu = gpu_of(device)
    chosen = chosen or plan(shape, num_rows, gpu)
    partials, arrivals = _meeting_place(chosen, device) if gpu.sm < 90 else (None, None)
    raw = x if isinstance(x, RawRows) and chosen.resident and (x.quant is None or gpu.sm >= 90) else None
    if isinstance(x, RawRows):
        x = x.x_TK if raw is not None else prepare_rows(x)
    x_TI, x_scale_T = (x.values_TK, x.scale_T) if isinstance(x, QuantizedRows) else (x, None)
    x_TI = readable(x_TI)
    residual_TO = None if residual_TO is None else residual_TO.contiguous()
    tensors = (weight.data, x_TI, weight.scale_O, x_scale_T, bias_O, residual_TO, y_TO, partials, arrivals)
    split = chosen.split
    copied = gpu.sm >= 90 and not chosen.resident and weight.format != "fp8"
    arguments = _Arguments(
        _TileMap.from_buffer_copy(x_map(x_TI, 8 * chosen.token_tiles, shape.stage_k))
        if copied
        else _TileMap(),
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(
            num_rows,
            weight.n,
            weight.k,
            shape.num_tiles,
            chosen.tiles,
            split.parts,
            split.segments,
            chosen.arriving_bytes,
        ),
        *raw_arguments(raw),
    )
    variant = variant_of(chosen, shape, dtype, activation, out_dtype, raw=raw)
    function(variant, device)(chosen.launch, arguments, device=device)
    return y_TO


def x_map(x_TI: Tensor, tokens: int, stage_k: int) -> bytes:
    """Tiles of one stage: subtiles of 128 bytes, one behind the other."""
    columns = 128 // x_TI.element_size()
    return tile_map(x_TI.unflatten(1, (-1, columns)).transpose(0, 1), (stage_k // columns, tokens, columns))


def prepare_rows(raw: RawRows) -> Tensor | QuantizedRows:
    """What a linear does to raw rows, alone and bit for bit."""
    x_TK = readable(raw.x_TK)
    (num_rows, k) = x_TK.shape
    device = x_TK.device
    quantizes = quantizes_of(raw)
    sm = gpu_of(device).sm
    if raw.quant is not None and sm < 90:  # no e4m3 instruction
        if raw.weight_K is not None:
            normed = prepare_rows(replace(raw, quant=None))
            assert isinstance(normed, Tensor)
            x_TK = normed
        return quantize_rows(x_TK, raw.quant)
    y_TK = torch.empty(num_rows, k, dtype=x_TK.dtype if quantizes == "no" else FP8, device=device)
    scale_T = torch.empty(num_rows, dtype=torch.float32, device=device)
    weight, static_scale, eps = raw_arguments(raw)
    arguments = _PrepareArguments(
        x_TK.data_ptr(), weight, y_TK.data_ptr(), scale_T.data_ptr(), static_scale, k, eps
    )
    threads = min(32 * -(-k // 256), 512)
    launch = Launch(grid=(num_rows, 1), threads=threads, shared_bytes=0, overlap=sm >= 90)
    kept = -(-k // (8 * threads))
    _prepare_function(x_TK.dtype, raw.weight_K is not None, quantizes, kept, device)(
        launch, arguments, device=device
    )
    return y_TK if quantizes == "no" else QuantizedRows(y_TK, scale_T)


def quantizes_of(raw: RawRows | None) -> Quantizes:
    if raw is None or raw.quant is None:
        return "no"
    return "by row" if raw.quant.static_scale is None else "static"


def raw_arguments(raw: RawRows | None) -> tuple[int | None, int | None, float]:
    """norm_weight, static_scale, norm_eps."""
    weight_K = None if raw is None else raw.weight_K
    static = None if raw is None or raw.quant is None else raw.quant.static_scale
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in (weight_K, static))
    return *pointers, 0.0 if raw is None else raw.eps  # type: ignore[return-value]


def variant_of(
    chosen: Plan,
    shape: Shape,
    dtype: torch.dtype,
    activation: str | None,
    out_dtype: torch.dtype | None,
    *,
    raw: RawRows | None = None,
) -> Variant:
    float32_output = out_dtype == torch.float32
    return Variant(
        shape.format, dtype, activation, float32_output, chosen.token_tiles, chosen.wgmma, chosen.resident, chosen.stages,
        normed=raw is not None and raw.weight_K is not None, quantizes=quantizes_of(raw),
    )  # fmt: skip


@functools.cache
def _prepare_function(
    dtype: torch.dtype, normed: bool, quantizes: Quantizes, kept: int, device: torch.device
) -> Function:
    macros = (
        ("F16", int(dtype == torch.float16)),
        ("NORM", int(normed)),
        ("QUANT", QUANTIZES.index(quantizes)),
        ("KEEP", kept),
    )
    source = Source(source_text("numbers.cuh", "prepare_rows.cu"), "prepare_rows", macros)
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
def source_text(*names: str) -> str:
    """Files of this folder, one after the other."""
    return "".join(files(__package__).joinpath(name).read_text() for name in names)


def readable(x_TI: Tensor) -> Tensor:
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


class Packed(Protocol):
    """A weight in the layout that these kernels read; `dtype` is the model's."""

    @property
    def streamed(self) -> Streamed: ...

    @property
    def dtype(self) -> torch.dtype: ...


def of_packed(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A linear of a `Packed` weight through `stream`, or another product of a `Streamed` one."""

    def linear(
        x: Tensor | QuantizedRows | RawRows,
        packed: Packed,
        bias_O: Tensor | None,
        *,
        activation: str | None,
        residual_TO: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return product(
            x,
            packed.streamed,
            bias_O,
            dtype=packed.dtype,
            activation=activation,
            residual_TO=residual_TO,
            out_dtype=out_dtype,
        )

    return linear


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
    min_sm: int = MIN_SM,
    rank: int = 20,
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
        yield Kernel(
            "linear",
            f"{name}{suffix}",
            min_sm=min_sm,
            rank=rank,
            supports=supports,
            fn=bound,
            repack=repack,
            prepares=True,
        )

"""The parts that launches of `stream.cu` and `hopper.cu` share: weights, raw rows, compiled variants and
device facts.

Shapes: T rows, K inputs, O outputs.
"""

import ctypes
import functools
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from compress.kernels.compilers.nvrtc import Function, Launch, Source, source_text, tile_map
from compress.kernels.linear.shape import FORMATS, Format, Shape
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.rows import FP8, INT8, QuantizedRows, RawRows
from compress.kernels.quantize_rows.fused import quantize_rows

ACTIVATIONS: tuple[str | None, ...] = (None, "silu", "gelu", "gelu_pytorch_tanh")
Rounding = Literal["no", "by row", "static", "to int8"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
"""How a kernel rounds raw rows: not at all, to e4m3 with a scale a row or with one given scale, or to int8
with a scale a row. The macro QUANT."""


@dataclass(frozen=True)
class KernelWeight:
    """A weight as the kernels read it: data of n rows (gate over up when gated) and k columns, and `scale_O`
    where outputs are scaled at the end, `scale_KO` [k / 128, n] where chunks of columns are. `sum_O` int32
    has the sums of the codes of int8 that asymmetric rows need; `subgroups` is that of `Shape`."""

    format: Format
    data: Tensor
    n: int
    k: int
    scale_O: Tensor | None = None
    scale_KO: Tensor | None = None
    sum_O: Tensor | None = None
    subgroups: int = 1

    def shape(self, *, gated: bool) -> Shape:
        """Return the facts that plans depend on."""
        return Shape(self.format, self.n, self.k, gated, self.subgroups)


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel's entry and source files, and `static_bytes` of shared memory that it declares itself."""

    entry: str
    files: tuple[str, ...]
    static_bytes: int


class Planned(Protocol):
    """The part of a plan that the compiled kernel depends on: `8 * token_tiles` rows a block, and the macros
    that only this program has."""

    @property
    def token_tiles(self) -> int: ...
    @property
    def macros(self) -> tuple[tuple[str, int], ...]: ...


@dataclass(frozen=True)
class Variant:
    """A program and the constants that it is compiled with."""

    program: Program
    format: Format
    dtype: torch.dtype
    activation: str | None
    float32_output: bool
    token_tiles: int
    normed: bool
    rounding: Rounding
    macros: tuple[tuple[str, int], ...]
    zero_points: bool = False
    """Whether rows have them. The macro ZEROS, left out where they have not."""
    subgroups: int = 1
    """Scale groups in 128 columns of four-bit weights. The macro SUBGROUPS, left out where it is one."""

    @property
    def source(self) -> Source:
        shared = {
            "FORMAT": FORMATS.index(self.format),
            "F16": int(self.dtype == torch.float16),
            "ACT": ACTIVATIONS.index(self.activation),
            "OUT32": int(self.float32_output),
            "NT": self.token_tiles,
            "NORM": int(self.normed),
            "QUANT": ROUNDINGS.index(self.rounding),
            **({"ZEROS": 1} if self.zero_points else {}),
            **({"SUBGROUPS": self.subgroups} if self.subgroups > 1 else {}),
        }
        return Source(source_text(*self.program.files), self.program.entry, (*shared.items(), *self.macros))


class _PrepareArguments(ctypes.Structure):
    """`Args` of prepare_rows.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y", "scales", "static_scale")),
        ("k", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


def prepare_rows(raw: RawRows) -> Tensor | QuantizedRows:
    """Normalize and round raw rows in a launch of their own, with the bits that a linear that takes raw rows
    computes."""
    x_TK = readable(raw.x_TK)
    (num_rows, k) = x_TK.shape
    device = x_TK.device
    rounding = rounding_of(raw)
    sm = gpu_of(device).sm
    if raw.quant is not None and raw.quant.dtype == FP8 and sm < 90:  # no e4m3 instruction
        if raw.weight_K is not None:
            normed = prepare_rows(replace(raw, quant=None))
            assert isinstance(normed, Tensor)
            x_TK = normed
        return quantize_rows(x_TK, raw.quant)
    dtype = x_TK.dtype if raw.quant is None else raw.quant.dtype
    y_TK = torch.empty(num_rows, k, dtype=dtype, device=device)
    scale_T = torch.empty(num_rows, dtype=torch.float32, device=device)
    weight, static_scale, eps = raw_arguments(raw)
    arguments = _PrepareArguments(
        x_TK.data_ptr(), weight, y_TK.data_ptr(), scale_T.data_ptr(), static_scale, k, eps
    )
    (threads, parts) = _spread_of(num_rows, k, gpu_of(device).num_sms)
    chunks = -(-k // (8 * threads))
    launch = Launch(grid=(num_rows, parts), threads=threads, shared_bytes=0, overlap=sm >= 90)
    _prepare_function(x_TK.dtype, raw.weight_K is not None, rounding, chunks, device)(
        launch, arguments, device=device
    )
    return y_TK if rounding == "no" else QuantizedRows(y_TK, scale_T)


def _spread_of(num_rows: int, k: int, num_sms: int) -> tuple[int, int]:
    """Return the threads of a block and the blocks of a row. Of 16 rows and more, several blocks round a long
    row sooner; of fewer, they would take multiprocessors from the linear that starts early."""
    threads = min(32 * -(-k // 512), 512)  # few, so that a block finds room beside one of a linear
    chunks = -(-k // (8 * threads))
    return threads, max(1, min(chunks, 2 * num_sms // num_rows)) if num_rows >= 16 else 1


def rounding_of(raw: RawRows | None) -> Rounding:
    """Return how a kernel that is given these raw rows rounds them."""
    if raw is None or raw.quant is None:
        return "no"
    if raw.quant.dtype == INT8:
        return "to int8"
    return "by row" if raw.quant.static_scale is None else "static"


def raw_arguments(raw: RawRows | None) -> tuple[int | None, int | None, float]:
    """Return the kernel arguments norm_weight, static_scale and norm_eps."""
    weight_K = None if raw is None else raw.weight_K
    static = None if raw is None or raw.quant is None else raw.quant.static_scale
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in (weight_K, static))
    return *pointers, 0.0 if raw is None else raw.eps  # type: ignore[return-value]


def x_map(x_TI: Tensor, tokens: int, stage_k: int) -> bytes:
    """Describe the rows of one stage to the copy engine: subtiles of 128 bytes, one after another."""
    columns = 128 // x_TI.element_size()
    return tile_map(x_TI.unflatten(1, (-1, columns)).transpose(0, 1), (stage_k // columns, tokens, columns))


def readable(x_TI: Tensor) -> Tensor:
    """Return the rows contiguous and at an address that is a multiple of 16 bytes."""
    x_TI = x_TI.contiguous()
    return x_TI if x_TI.data_ptr() % 16 == 0 else x_TI.clone()


@functools.cache
def function_of(
    program: Program,
    chosen: Planned,
    shape: Shape,
    dtype: torch.dtype,
    activation: str | None,
    device: torch.device,
    float32_output: bool,
    normed: bool,
    rounding: Rounding,
    zero_points: bool = False,
) -> Function:
    """Compile and load a program for a plan, once. Positional arguments, and the identities of program and
    plan, make the lookup of every launch quick: 130 launches of a prompt wait for the host."""
    variant = variant_of(
        program,
        chosen,
        shape,
        dtype,
        activation,
        float32_output=float32_output,
        normed=normed,
        rounding=rounding,
        zero_points=zero_points,
    )
    gpu = gpu_of(device)
    return Function(
        variant.source, device=device, shared_bytes=gpu.shared_bytes - program.static_bytes, sm=gpu.sm
    )


def variant_of(
    program: Program,
    chosen: Planned,
    shape: Shape,
    dtype: torch.dtype,
    activation: str | None,
    *,
    float32_output: bool,
    normed: bool,
    rounding: Rounding,
    zero_points: bool = False,
) -> Variant:
    """Return what a program is compiled for to serve a plan."""
    return Variant(
        program=program,
        format=shape.format,
        dtype=dtype,
        activation=activation,
        float32_output=float32_output,
        token_tiles=chosen.token_tiles,
        normed=normed,
        rounding=rounding,
        macros=chosen.macros,
        zero_points=zero_points,
        subgroups=shape.subgroups,
    )


@functools.cache
def _prepare_function(
    dtype: torch.dtype, normed: bool, rounding: Rounding, chunks: int, device: torch.device
) -> Function:
    source = prepare_source(dtype, normed, rounding, chunks)
    return Function(source, device=device, shared_bytes=0, sm=gpu_of(device).sm)


def prepare_source(dtype: torch.dtype, normed: bool, rounding: Rounding, chunks: int) -> Source:
    """Return prepare_rows.cu for rows of which a thread keeps so many chunks."""
    macros = (
        ("F16", int(dtype == torch.float16)),
        ("NORM", int(normed)),
        ("QUANT", ROUNDINGS.index(rounding)),
        ("KEEP", chunks),
    )
    return Source(source_text("operands/numbers.cuh", "linear/prepare_rows.cu"), "prepare_rows", macros)

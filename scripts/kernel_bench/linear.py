"""Fused linears as a decode step and a prefill call them, placed by the runtime's own loader: what is timed
is what is served.

gate_up applies its activation where the kernel does, o and down add the residual, the head gives float32.
Every copy of the weights is placed anew, so that a graph walks over distinct memory. Beside them torch's own
linears of the same shapes: cuBLAS in the dense dtype, `_scaled_mm` with a scale a row, `_int_mm` (sums in
int32, not scaled), `_weight_int4pack_mm` with groups of 128; without activation or residual, and in their own
layouts.

Shapes: T rows, O out, I in.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.coverage import Phase, linear_shape
from compress.kernels.operands.rows import INT8, ActivationQuant, QuantizedRows, quantize
from compress.models.ffn import activation
from compress.models.linear_groups import LINEAR_GROUPS
from compress.models.random_source import random_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse
from scripts.kernel_bench.case import DECODE_ROWS, MIN_LAUNCHES, Bench, Case, relative_error
from scripts.kernel_bench.timer import num_copies, walk

_RESIDUAL = ("o", "down")
_PREFILL_COPIES = 4
_SCALED_MM_SM = 89
_INT4 = "_weight_int4pack_mm"
_INT_MM = "_int_mm"
_INT_MM_ROWS = 17
"""Rows from which torch multiplies int8 on CUDA."""
_INT4_ROWS = 16
"""Beyond, torch's int4 product is ten times slower than cuBLAS and says nothing."""


def linear_cases(bench: Bench, schemes: Sequence[str], names: Sequence[str]) -> Iterator[Case]:
    for name in names:
        for scheme in schemes:
            yield from _linear(bench, SCHEMES.get(scheme), name)
        yield from _torch_linears(bench, name)


def _linear(bench: Bench, scheme: Scheme | None, name: str) -> Iterator[Case]:
    linears = LINEAR_GROUPS[name].linears if name in LINEAR_GROUPS else ("head",)
    weights = _weights(bench, scheme, name)
    gate = bench.arch.activation if name == "gate_up" else None
    first = fuse(linears, weights, bench.target, activation=gate)
    copies = [first]
    while len(copies) < num_copies(first.weight_bytes, bench.device):
        copies.append(fuse(linears, weights, bench.target, activation=gate))
    part = first.slices[0]
    out_features = part.decode.problem.n
    in_features = part.decode.problem.k
    most = max(_rows(bench, name))
    x = _inputs(bench, most, in_features, part.quant)
    product_TO = _product_f64(x, weights)
    residual_TO = bench.randn(most, out_features) if name in _RESIDUAL else None
    for m in _rows(bench, name):
        phase: Phase = "decode" if m <= DECODE_ROWS else "prefill"
        placed = part.decode if phase == "decode" else part.prefill
        gated = placed.problem.activation
        residual = None if residual_TO is None else residual_TO[:m]
        call = partial(
            _project,
            x=_first(x, m),
            phase=phase,
            residual=residual,
            out_dtype=torch.float32 if name == "head" else None,
        )
        launches = [
            partial(call, each) for each in (copies if phase == "decode" else copies[:_PREFILL_COPIES])
        ]
        yield Case(
            tool="compress",
            op="linear",
            name=name,
            scheme=placed.problem.scheme,
            m=m,
            kernel=placed.kernel.name,
            num_bytes=_stored_bytes(weights),
            flops=2 * m * out_features * in_features,
            launches=walk(launches, at_least=_least(phase)),
            error=partial(relative_error, expected=_expected(product_TO[:m], gated, residual)),
            limit=bench.rounding(in_features),
            phase=phase,
            shape=(out_features, in_features),
        )


def _rows(bench: Bench, name: str) -> list[int]:
    """Only rows that are sampled from reach the head: no prefill."""
    return [m for m in bench.rows if name != "head" or m <= DECODE_ROWS] or [1]


def _least(phase: Phase) -> int:
    return MIN_LAUNCHES if phase == "decode" else _PREFILL_COPIES


def _torch_linears(bench: Bench, name: str) -> Iterator[Case]:
    """Timed, not checked: their numbers are their authors'."""
    weight = random_weight(
        linear_shape(bench.arch, name), None, dtype=bench.dtype, generator=bench.generator()
    )
    assert isinstance(weight, Tensor)
    dense = [
        weight,
        *(
            weight.clone()
            for _ in range(num_copies(weight.numel() * weight.element_size(), bench.device) - 1)
        ),
    ]
    yield from _torch_cases(
        bench,
        name,
        bench.dense,
        "cublas" if bench.device.type == "cuda" else "mkl",
        weight.element_size(),
        dense,
        _dense_call,
    )
    sm = bench.target.kernel_device.problem("linear", n=0).sm
    out_features, in_features = weight.shape
    if sm >= _SCALED_MM_SM and not (out_features % 16 or in_features % 16):
        rows = quantize(weight, ActivationQuant())
        scales = rows.scale_T.unsqueeze(0)
        packed = [
            (rows.values_TK.clone().t(), scales) for _ in range(num_copies(weight.numel(), bench.device))
        ]
        yield from _torch_cases(bench, name, "FP8_DYNAMIC", "_scaled_mm", 1, packed, _scaled_call)
    if sm >= 80 and not (out_features % 8 or in_features % 8):
        rows = quantize(weight, ActivationQuant(dtype=INT8))
        codes_of_int8 = [rows.values_TK.clone().t() for _ in range(num_copies(weight.numel(), bench.device))]
        yield from _torch_cases(bench, name, "INT8_DYNAMIC", _INT_MM, 1, codes_of_int8, _int_mm_call)
    if sm >= 80 and bench.dtype == torch.bfloat16 and not in_features % 128:
        codes = torch.randint(
            256,
            (out_features, in_features // 2),
            dtype=torch.uint8,
            generator=bench.generator(),
            device=bench.device,
        )
        scales_zeros = bench.randn(in_features // 128, out_features, 2)
        int4 = [
            (torch.ops.aten._convert_weight_to_int4pack(codes, 8), scales_zeros.clone())
            for _ in range(num_copies(codes.numel(), bench.device))
        ]
        yield from _torch_cases(bench, name, "W4A16_G128_ASYM", _INT4, 0.5, int4, _int4_call)


def _torch_cases(
    bench: Bench,
    name: str,
    scheme: str,
    kernel: str,
    weight_bytes: float,
    packed: Sequence[Any],
    call: Callable[[Bench, int, int], Any],
) -> Iterator[Case]:
    out_features, in_features = linear_shape(bench.arch, name)
    for m in _rows(bench, name):
        phase: Phase = "decode" if m <= DECODE_ROWS else "prefill"
        if (kernel == _INT4 and m > _INT4_ROWS) or (kernel == _INT_MM and m < _INT_MM_ROWS):
            continue
        run = call(bench, m, in_features)
        launches = [
            partial(run, each) for each in (packed if phase == "decode" else packed[:_PREFILL_COPIES])
        ]
        yield Case(
            tool="torch",
            op="linear",
            name=name,
            scheme=scheme,
            m=m,
            kernel=kernel,
            num_bytes=int(out_features * in_features * weight_bytes)
            + _scale_bytes(scheme, out_features, in_features),
            flops=2 * m * out_features * in_features,
            launches=walk(launches, at_least=_least(phase)),
            error=None,
            limit=0.0,
            phase=phase,
            shape=(out_features, in_features),
        )


def _dense_call(bench: Bench, m: int, in_features: int) -> Callable[[Tensor], Tensor]:
    return partial(F.linear, bench.randn(m, in_features))


def _scaled_call(bench: Bench, m: int, in_features: int) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    rows = quantize(bench.randn(m, in_features), ActivationQuant())
    scale = rows.scale_T.unsqueeze(1)
    return lambda packed: torch._scaled_mm(
        rows.values_TK, packed[0], scale, packed[1], out_dtype=bench.dtype, use_fast_accum=True
    )


def _int_mm_call(bench: Bench, m: int, in_features: int) -> Callable[[Tensor], Tensor]:
    rows = quantize(bench.randn(m, in_features), ActivationQuant(dtype=INT8))
    return lambda codes: torch._int_mm(rows.values_TK, codes)


def _int4_call(bench: Bench, m: int, in_features: int) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    x_TI = bench.randn(m, in_features)
    return lambda packed: torch.ops.aten._weight_int4pack_mm(x_TI, packed[0], 128, packed[1])


def _scale_bytes(scheme: str, out_features: int, in_features: int) -> int:
    """What a scheme stores beside codes of a byte or half of one."""
    known = SCHEMES.get(scheme)
    return (
        0
        if known is None
        else known.weight_bytes(out_features, in_features) - out_features * in_features * known.num_bits // 8
    )


def _project(
    projection: FusedLinear, *, x: Any, phase: Phase, residual: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    return projection(x, phase, residual=residual, out_dtype=out_dtype)


def _weights(bench: Bench, scheme: Scheme | None, name: str) -> dict[str, Tensor | QuantizedWeight]:
    arch = bench.arch
    generator = bench.generator()
    shapes = {"head": (arch.vocab_size, arch.hidden_size)}
    if name in LINEAR_GROUPS:
        linears = LINEAR_GROUPS[name].linears
        shapes = {each: arch.layers[0].linear_shape(each, arch.hidden_size) for each in linears}
    return {
        f"{each}.weight": random_weight(shape, scheme, dtype=bench.dtype, generator=generator)
        for each, shape in shapes.items()
    }


def _stored_bytes(weights: dict[str, Tensor | QuantizedWeight]) -> int:
    """Codes, scales and zero points as the scheme counts them: what must be read, whatever a kernel's layout
    adds."""
    return sum(
        each.scheme.weight_bytes(*each.shape)
        if isinstance(each, QuantizedWeight)
        else each.numel() * each.element_size()
        for each in weights.values()
    )


def _inputs(bench: Bench, m: int, in_features: int, quant: ActivationQuant | None) -> Tensor | QuantizedRows:
    x_TI = bench.randn(m, in_features)
    return x_TI if quant is None else quantize(x_TI, quant)


def _first(x: Tensor | QuantizedRows, m: int) -> Tensor | QuantizedRows:
    return x[:m]


def _product_f64(x: Tensor | QuantizedRows, weights: dict[str, Tensor | QuantizedWeight]) -> Tensor:
    x_f64 = x.dequantize(torch.float64) if isinstance(x, QuantizedRows) else x.to(torch.float64)
    dense = (
        each.dequantize(torch.float64) if isinstance(each, QuantizedWeight) else each.to(torch.float64)
        for each in weights.values()
    )
    return torch.cat([x_f64 @ weight_OI.t() for weight_OI in dense], dim=-1)


def _expected(product_TO: Tensor, gate: str | None, residual_TO: Tensor | None) -> Tensor:
    if gate is not None:
        first, second = product_TO.chunk(2, dim=-1)
        product_TO = activation(gate, first) * second
    return product_TO if residual_TO is None else product_TO + residual_TO

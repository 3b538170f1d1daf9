"""How programs round the inputs of linears, each as its own sources say.

    scale, zero = rule(x)            of a token, of a group of its columns, or calibrated
    x ~ (grid(x / scale + zero) - zero) * scale        or x * (1 / scale), which is another code now and then

A grid is the numbers that codes stand for; rounding to it saturates. Rules also see the weight, which has
what was calibrated.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from compress.quant import e2m1
from compress.quant.scheme import QuantizedWeight, Scheme

Scales = tuple[Tensor, Tensor | float]
"""Scales, and zero points or 0, both in the shape of the inputs with a last axis of 1."""
Rule = Callable[[Tensor, QuantizedWeight], Scales]
Grid = Callable[[Tensor], Tensor]


def to_int8(x: Tensor) -> Tensor:
    return x.round().clamp(-128, 127)


def to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def by_range(x: Tensor, _: QuantizedWeight, *, largest: float, one_scale: bool = False) -> Scales:
    """The largest magnitude becomes `largest`. With `one_scale` it is that of all tokens of a call."""
    scale = x.abs().amax(dim=() if one_scale else -1, keepdim=True) / largest
    return scale.clamp_min(torch.finfo(torch.float32).tiny), 0.0


def by_both_ends(x: Tensor, _: QuantizedWeight) -> Scales:
    """The least number, or 0, becomes -128, and the greatest, or 0, 127."""
    low = x.amin(dim=-1, keepdim=True).clamp_max(0)
    scale = (x.amax(dim=-1, keepdim=True).clamp_min(0) - low) / 255
    return scale, (-128 - low / scale).round()


def by_power(x: Tensor, _: QuantizedWeight, *, below: int) -> Scales:
    """The power of two `below` that of the largest magnitude, which from 1.75 on counts as the next."""
    mantissa, exponent = torch.frexp(x.abs().amax(dim=-1, keepdim=True))  # 0.5 <= mantissa < 1
    exponent = exponent - 1 + (mantissa >= 1.75 / 2).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(mantissa), exponent - below), 0.0


def by_e4m3(x: Tensor, weight: QuantizedWeight) -> Scales:
    """The largest magnitude becomes 6, by a scale that times the global scale is an e4m3 number."""
    assert weight.input_global_scale is not None
    scale, zero = by_range(x, weight, largest=e2m1.LARGEST)
    return to_e4m3(scale * weight.input_global_scale) / weight.input_global_scale, zero


def calibrated(x: Tensor, weight: QuantizedWeight) -> Scales:
    assert weight.input_scale is not None
    zero = 0.0 if weight.input_zero_point is None else weight.input_zero_point.to(x.dtype)
    return weight.input_scale.expand_as(x[..., :1]), zero


@dataclass(frozen=True)
class Inputs:
    """How a program rounds the inputs of a linear."""

    grid: Grid
    rule: Rule
    group_size: int | None = None
    by_reciprocal: bool = False

    def __call__(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        parts = x if self.group_size is None else x.unflatten(-1, (-1, self.group_size))
        scale, zero = self.rule(parts, weight)
        steps = parts * scale.reciprocal() if self.by_reciprocal else parts / scale
        return ((self.grid(steps + zero) - zero) * scale).reshape(x.shape)


_INT8 = partial(by_range, largest=127.0)
_FP8 = partial(by_range, largest=448.0)
INPUTS = {
    ("onnxruntime", "INT8_DYNAMIC"): Inputs(to_int8, _INT8),
    ("onnxruntime_genai", "INT8_DYNAMIC"): Inputs(to_int8, _INT8),
    ("vllm", "FP8_DYNAMIC"): Inputs(to_e4m3, _FP8, by_reciprocal=True),
    ("vllm", "INT8_DYNAMIC"): Inputs(to_int8, _INT8, by_reciprocal=True),
    ("vllm", "INT8_DYNAMIC_ASYM"): Inputs(to_int8, by_both_ends, by_reciprocal=True),
    ("vllm", "INT8_STATIC"): Inputs(to_int8, calibrated),
    ("vllm", "INT8_STATIC_ASYM"): Inputs(to_int8, calibrated),
    ("transformers", "FP8_DYNAMIC"): Inputs(to_e4m3, _FP8),
    ("transformers", "FP8_STATIC"): Inputs(to_e4m3, calibrated),
    ("transformers", "INT8_DYNAMIC"): Inputs(to_int8, partial(by_range, largest=127.5)),
    ("transformers", "INT8_DYNAMIC_ASYM"): Inputs(to_int8, by_both_ends),
    ("transformers", "INT8_STATIC"): Inputs(to_int8, calibrated),
    ("transformers", "INT8_STATIC_ASYM"): Inputs(to_int8, calibrated),
    ("transformers", "W4A8_FP8"): Inputs(to_e4m3, _FP8),
    ("transformers", "FP8_BLOCK"): Inputs(to_e4m3, _FP8, group_size=128),
    ("transformers", "NVFP4_W4A4"): Inputs(e2m1.nearest, by_e4m3, group_size=16),
    ("transformers", "MXFP4_W4A4"): Inputs(e2m1.nearest, partial(by_power, below=2), group_size=32),
    ("transformers", "MXFP8"): Inputs(to_e4m3, partial(by_power, below=8), group_size=32),
}
"""(another program, scheme) -> how it rounds on a CPU; where there is none, inputs stay as they are. vLLM
takes FP8 in blocks as weights only there. `transformers` does as compressed-tensors 0.20."""
FLAT_SHARED = (
    "qwen2_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "qwen4_exp_text",
    "ernie4_5_moe",
    "afmoe",
    "flint",
    "laguna",
    "cohere2_moe",
)
"""Families of which `transformers` calls the shared expert with tokens x columns. compressed-tensors keeps a
scale for each index of the first two dimensions, and of no more than two it takes one scale for all."""
FLAT_FFN = ("opt",)
"""Families of which `transformers` calls the linears of the FFN so."""
ONE_HEAD = "attn.kv_up."
"""The linear that `transformers` calls with batch x 1 x tokens x columns: one scale for a sequence."""


def inputs_of(program: str, family: str, name: str, scheme: Scheme) -> Inputs | None:
    """Return how a program rounds the inputs of a linear, or None where it leaves them as they are."""
    inputs = INPUTS.get((program, scheme.name))
    flat = name.startswith(ONE_HEAD) or (family in FLAT_SHARED and name.startswith("moe.shared."))
    flat = flat or (family in FLAT_FFN and name.startswith("ffn."))
    by_token = scheme.activation == "token" and scheme.input_symmetric
    if inputs is None or program != "transformers" or not flat or not by_token:
        return inputs
    return replace(inputs, rule=partial(inputs.rule, one_scale=True))

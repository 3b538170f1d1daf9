"""Reference experts: every expert that is hit runs its rows through the reference linears of its scheme.

    out[t] = residual[t] + round(sum_k weights[t, k] y[t, k]),   y[t, k] = down(act(gate(x[t])) * up(x[t]))
    for the expert ids[t, k], or down(act(up(x[t]))) without a gate; each y is rounded to the model's dtype,
    the sum runs in float32 in the order of k

    silu, gelu_pytorch_tanh    act(gate) * up
    swiglu_clamped             gate s(1.702 gate) (up + 1), gate <= 7, |up| <= 7, s(x) = 1 / (1 + e^-x)
                               (gpt-oss, arXiv 2508.10925)
    silu_capped                silu(min(gate, cap)) up, |up| <= cap (Hy4)
    relu2                      max(up, 0)^2, without a gate (arXiv 2109.08668)

    With a cap c, min(act(gate), c) takes the place of act(gate), and up lies between -c and c.

The reference linears take rows one by one or in tiles of a fixed height, so a row's bits depend on the row
alone. This is the definition that faster kernels are tested against. The host reads the ids; within a CUDA
graph, where it cannot, every expert computes all rows and those that chose it are kept, with the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.act_mul.reference import act_mul, clamped, swish
from compress.kernels.linear import fp8_block, tiles
from compress.kernels.operands.routing import ExpertWeights, expert_inputs
from compress.kernels.operands.rows import ActivationQuant, quantize
from compress.kernels.problem import DENSE_SCHEMES, Problem
from compress.kernels.select import Kernel, register
from compress.models.experts import SILU_CAPPED
from compress.models.ffn import CLAMPED
from compress.quant.scheme import SCHEMES, QuantizedWeight

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", CLAMPED, SILU_CAPPED, "relu2")


@dataclass(frozen=True)
class ReferenceLinear:
    """Linears of one expert stacked along O: `packed` is what `fn` reads, and `quant` how it rounds its
    input."""

    fn: Callable[..., Tensor]
    packed: Any
    bias_O: Tensor | None
    quant: ActivationQuant | None

    def __call__(self, x_TI: Tensor, *, rows: int) -> Tensor:
        x = x_TI if self.quant is None else quantize(x_TI, self.quant)
        return self.fn(x, self.packed, self.bias_O, rows=rows)


@dataclass(frozen=True)
class ReferenceExpert:
    """One expert: gate over up, or up alone, and down."""

    gate_up: ReferenceLinear
    down: ReferenceLinear


def repack(
    experts: Sequence[ExpertWeights], *, dtype: torch.dtype, device: torch.device
) -> tuple[ReferenceExpert, ...]:
    """Repack every expert by the reference linear of its scheme."""
    linear = partial(_linear, dtype=dtype, device=device)
    gate_up_input, down_input = expert_inputs(experts, device)
    return tuple(
        ReferenceExpert(
            linear(each.gate_up, each.gate_up_bias, gate_up_input),
            linear((each.down,), (each.down_bias,), down_input),
        )
        for each in experts
    )


def _linear(
    weights: Sequence[Tensor | QuantizedWeight],
    biases: Sequence[Tensor | None],
    quant: ActivationQuant | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> ReferenceLinear:
    first = weights[0]
    given = [bias.to(device=device, dtype=dtype) for bias in biases if bias is not None]
    assert len(given) in (0, len(biases)), "gate has a bias if up has one"
    bias_O = torch.cat(given) if given else None
    scheme = first.scheme if isinstance(first, QuantizedWeight) else None
    if scheme is not None and scheme.activation == "group" and scheme.scale_type is None:
        blocks = fp8_block.repack(weights, dtype=dtype, device=device, gated=False)
        return ReferenceLinear(fp8_block.linear, blocks, bias_O, quant)
    weight = tiles.dequantized(weights, dtype=dtype, device=device, gated=False)
    return ReferenceLinear(tiles.linear_in_tiles, weight, bias_O, quant)


def gated(gate_up_TF: Tensor, activation: str, cap: float | None = None) -> Tensor:
    """Map [T, 2 F], or [T, F] without a gate, to [T, F]."""
    if activation != CLAMPED:
        return act_mul(gate_up_TF, activation, cap=cap)
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return clamped(gate, up, swish)


def experts(
    x_TD: Tensor,
    packed: Sequence[ReferenceExpert],
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: str,
    rows: int,
    residual_TD: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return [T, D]; every matrix product has exactly `rows` rows."""
    num_rows, top_k = ids_TK.shape
    y_TKD = x_TD.new_zeros(num_rows, top_k, x_TD.shape[1])

    def output(expert: ReferenceExpert, x_PD: Tensor) -> Tensor:
        return expert.down(gated(expert.gate_up(x_PD, rows=rows), activation, cap), rows=rows)

    if x_TD.is_cuda and torch.cuda.is_current_stream_capturing():
        for expert_idx, expert in enumerate(packed):
            chosen_TK1 = (ids_TK == expert_idx).unsqueeze(2)
            y_TKD = torch.where(chosen_TK1, output(expert, x_TD).unsqueeze(1), y_TKD)
        return combined(y_TKD, weights_TK, residual_TD, x_TD.dtype)
    for expert_idx in ids_TK.unique().tolist():
        token_P, choice_P = (ids_TK == expert_idx).nonzero(as_tuple=True)
        y_TKD[token_P, choice_P] = output(packed[expert_idx], x_TD[token_P])
    return combined(y_TKD, weights_TK, residual_TD, x_TD.dtype)


def combined(y_TKD: Tensor, weights_TK: Tensor, residual_TD: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum over K in its order, rounded once, then the residual added."""
    out_TD = torch.zeros(y_TKD.shape[0], y_TKD.shape[2], dtype=torch.float32, device=y_TKD.device)
    for k in range(y_TKD.shape[1]):
        out_TD += weights_TK[:, k : k + 1] * y_TKD[:, k].to(torch.float32)
    out = out_TD.to(dtype)
    return out if residual_TD is None else residual_TD + out


def _refusal(problem: Problem, *, activation: str, few_rows: bool, device: str | None) -> str | None:
    if not {*problem.scheme.split("+")} <= {*DENSE_SCHEMES.values(), *SCHEMES}:
        return f"for {', '.join((*DENSE_SCHEMES.values(), *SCHEMES))}"
    if problem.activation != activation:
        return f"for experts of the activation {activation}"
    if device is not None and problem.device != device:
        return f"its tile height is for {device}"
    if few_rows != (problem.m_max <= tiles.MAX_DECODE_ROWS or problem.row_invariant):
        return f"for M {'up to' if few_rows else 'above'} {tiles.MAX_DECODE_ROWS}"
    return None


for _activation in ACTIVATIONS:
    for _device, _rows in ((None, tiles.DECODE_ROWS), *tiles.PREFILL_ROWS.items()):
        _supports = partial(_refusal, activation=_activation, few_rows=_device is None, device=_device)
        register(
            Kernel(
                "experts",
                f"reference.tile{_rows}.{_activation}",
                min_sm=0,
                priority=0,
                supports=_supports,
                fn=partial(experts, activation=_activation, rows=_rows),
                repack_experts=repack,
            )
        )

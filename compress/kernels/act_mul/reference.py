"""Reference activation of an FFN: activation(gate) * up (arXiv 2002.05202), where gate and up are the halves
of one fused projection, or two tensors, or the activation alone where there is no gate. The clamped one of
gpt-oss is float32 and rounded once. The numbers of xIELU are those of a layer.

torch's CPU kernels compute the remainder of a vector with other code, and split a large op among threads
anywhere, also within a row: the last bit of an exponential would then depend on its place. And gelu is
oneDNN's where the operand is contiguous, torch's own where it is not. So rows are padded to whole vectors,
dense, and taken in blocks too small to be split."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, quantize
from compress.kernels.select import Kernel, anything, register
from compress.models.experts import SILU_CAPPED
from compress.models.ffn import CLAMPED, SWIGLU_ALPHA, SWIGLU_LIMIT, activation, sparse_gate
from compress.models.layer_shape import UNGATED, XIELU
from compress.models.xielu import xielu

LANES = 64
"""Elements of two of the widest CPU vectors, bfloat16 in 512 bits: torch loops over two vectors at a time."""
SERIAL_SIZE = 16384
"""Elements below which torch's activations run on one thread (gelu's limit; silu's is twice that)."""


def act_mul_rows(
    gate_up_TF: Tensor,
    activation_name: str,
    quant: ActivationQuant | None = None,
    *,
    up_TF: Tensor | None = None,
    xielu_4: Tensor | None = None,
    gate_factor: float = 1.0,
    gated: bool = True,
    cap: float | None = None,
    sparsity: float | None = None,
) -> Tensor | QuantizedRows:
    """Return the product, quantized if the next linear needs it. With `up_TF`, the first tensor is the gate
    alone; where rows are not `gated`, or the activation is one of `UNGATED`, there is no gate, and it is up.
    `xielu_4` are the numbers of the activation xielu, and `gate_factor` multiplies the gate. What the gate
    becomes is at most `cap`, or the gate itself with `silu_capped`, and up between -`cap` and `cap`, where
    there is one. With a `sparsity`, the gate is first its excess over a quantile of its row."""
    product = act_mul(
        gate_up_TF,
        activation_name,
        up_TF=up_TF,
        xielu_4=xielu_4,
        gate_factor=gate_factor,
        gated=gated,
        cap=cap,
        sparsity=sparsity,
    )
    return product if quant is None else quantize(product, quant)


def act_mul(
    gate_up_TF: Tensor,
    activation_name: str,
    *,
    up_TF: Tensor | None = None,
    xielu_4: Tensor | None = None,
    gate_factor: float = 1.0,
    gated: bool = True,
    cap: float | None = None,
    sparsity: float | None = None,
) -> Tensor:
    """Map [T, 2 F], or two of [T, F], to [T, F]; without a gate, [T, F]."""
    assert (xielu_4 is not None) == (activation_name == XIELU)
    if xielu_4 is not None:
        return in_whole_vectors(partial(xielu, numbers_4=xielu_4), gate_up_TF).contiguous()
    if activation_name in UNGATED:  # exact, and rounded once
        return activation(activation_name, gate_up_TF)
    if not gated:
        return in_whole_vectors(partial(activation, activation_name), gate_up_TF).contiguous()
    gate, up = gate_up_TF.chunk(2, dim=-1) if up_TF is None else (gate_up_TF, up_TF)
    if sparsity is not None:
        gate = sparse_gate(gate, sparsity)
    if gate_factor != 1:
        gate = gate * gate_factor
    if activation_name == CLAMPED:
        return clamped(gate, up, partial(in_whole_vectors, swish))
    if activation_name == SILU_CAPPED:
        assert cap is not None
        return in_whole_vectors(F.silu, gate.clamp(max=cap)) * up.clamp(min=-cap, max=cap)
    activated = in_whole_vectors(partial(activation, activation_name), gate)
    return activated * up if cap is None else activated.clamp(max=cap) * up.clamp(min=-cap, max=cap)


def clamped(gate_TF: Tensor, up_TF: Tensor, swish_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the clamped activation of gates and ups [T, F]; `swish_of` computes `swish`."""
    gate = gate_TF.to(torch.float32).clamp(max=SWIGLU_LIMIT)
    up = up_TF.to(torch.float32).clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (swish_of(gate) * (up + 1)).to(gate_TF.dtype)


def swish(x: Tensor) -> Tensor:
    """Return x / (1 + e^(-1.702 x)), by the reciprocal."""
    return x * (1 / (1 + torch.exp(-SWIGLU_ALPHA * x)))


def in_whole_vectors(fn: Callable[[Tensor], Tensor], x_TF: Tensor) -> Tensor:
    """Return fn(x) [T, F], on a CPU of whole vectors of dense rows in blocks of one thread."""
    if x_TF.device.type != "cpu":
        return fn(x_TF)
    size = x_TF.shape[1]
    padded = F.pad(x_TF, (0, -size % LANES)) if size % LANES else x_TF.contiguous()
    blocks = torch.split(padded, max(1, (SERIAL_SIZE - 1) // padded.shape[1]))
    done = [fn(block) for block in blocks]
    return (done[0] if len(done) == 1 else torch.cat(done))[:, :size]


register(Kernel("act_mul", "reference", min_sm=0, priority=0, supports=anything, fn=act_mul_rows))

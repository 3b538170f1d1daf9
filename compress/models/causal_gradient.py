"""Gradients of causal attention on a CPU with bfloat16 tiles; the forward is PyTorch's.

    P = softmax(scale Q K^T + mask)      dV = P^T dO
    dS = P o (scale dO V^T - rowsum(P o scale dO V^T))      dQ = dS K      dK = dS^T Q

Blocks of queries meet the keys that they see, some kv heads at once: 1.2 to 1.9 times as fast as the
backward of PyTorch's flash kernel at 128 to 2048 tokens (one core with AMX, heads of 64 and 128). Scores,
P and dS are float32, and rounded to bfloat16 where they are factors. Keys and values of several query
heads are read in place, and their gradients are summed in float32: half of PyTorch's error.

Most of the time goes to the work around the products. So factors have the layout that oneDNN takes (keys
of a block are converted anew: a slice of all keys would be copied transposed), results are written to
existing memory, Q K^T and dO V^T are one product with one scale, and the softmax and its backward are one
pass each (an exponential of -inf by itself is ten times as slow as another).

Shapes: B batch, S sequence, H heads, K kv heads, G query heads of a kv head, C head dimension, N kv heads
of all sequences, R rows of a block (query heads times queries), L keys that it sees; 2 is for queries and
the output's gradient, or for keys and values.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models.tiles import bfloat16_factors, has_bfloat16_tiles

BLOCK = 128
"""Queries of a block."""
SCORES = 1 << 21
"""Scores of a block at once, unless one kv head has more."""


def is_faster(q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor) -> bool:
    """Return whether `attend` is allowed and faster: on such a CPU, in eager mode, where a gradient will be
    needed."""
    return (
        q_BHSC.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and (torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q_BHSC.dtype)
        == torch.bfloat16
        and torch.is_grad_enabled()
        and (q_BHSC.requires_grad or k_BKSC.requires_grad or v_BKSC.requires_grad)
        and has_bfloat16_tiles()
    )


def attend(q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor) -> Tensor:
    """Causal attention in bfloat16 [B, H, S, C]: the bits of `scaled_dot_product_attention`, other
    gradients."""
    factors = (x.to(torch.bfloat16) for x in (q_BHSC, k_BKSC, v_BKSC))
    out: Tensor = _Attend.apply(*factors)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor) -> Tensor:
        ctx.save_for_backward(q_BHSC, k_BKSC, v_BKSC)
        return F.scaled_dot_product_attention(q_BHSC, k_BKSC, v_BKSC, is_causal=True, enable_gqa=True)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g_BHSC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BHSC, k_BKSC, v_BKSC = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False), bfloat16_factors():
            return gradients(q_BHSC, k_BKSC, v_BKSC, g_BHSC)


def gradients(
    q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, g_BHSC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in the dtype of q, for the gradient of the output."""
    num_kv_heads, seq_len, head_dim = k_BKSC.shape[1:]
    qg_2NGSC = torch.stack((q_BHSC, g_BHSC)).unflatten(2, (num_kv_heads, -1)).flatten(1, 2)
    kv_2NSC = torch.stack((k_BKSC, v_BKSC)).flatten(1, 2)
    dq_NGSC = torch.empty_like(qg_2NGSC[0])
    (dk_NSC, dv_NSC) = torch.zeros(kv_2NSC.shape)
    num, group = dq_NGSC.shape[:2]
    step = max(1, min(num, SCORES // (group * BLOCK * seq_len)))
    scores = torch.empty(2 * step * group * BLOCK * seq_len)
    future = torch.full((BLOCK, BLOCK), -math.inf).triu_(1)
    for part in (slice(first, first + step) for first in range(0, num, step)):
        for begin in range(0, seq_len, BLOCK):
            end = min(begin + BLOCK, seq_len)
            width = end - begin
            qg_2NRC = _wide(qg_2NGSC[:, part, :, begin:end]).flatten(2, 3)
            kv_2NLC = _wide(kv_2NSC[:, part, :end])
            p_ds = scores[: 2 * qg_2NRC[0, ..., 0].numel() * end].view(-1, qg_2NRC.shape[2], end)
            p_ds.baddbmm_(qg_2NRC.flatten(0, 1), kv_2NLC.flatten(0, 1).mT, beta=0, alpha=head_dim**-0.5)
            p_NRL, ds_NRL = p_ds.chunk(2)
            p_NRL.view(-1, width, end)[:, :, begin:].add_(future[:width, :width])
            torch.softmax(p_NRL, -1, out=p_NRL)
            torch.ops.aten._softmax_backward_data.out(ds_NRL, p_NRL, -1, torch.float32, grad_input=ds_NRL)
            dv_NSC[part, :end].baddbmm_(p_NRL.mT, qg_2NRC[1])
            dk_NSC[part, :end].baddbmm_(ds_NRL.mT, qg_2NRC[0])
            dq_NGSC[part, :, begin:end] = torch.bmm(ds_NRL, kv_2NLC[0]).view_as(dq_NGSC[part, :, begin:end])
    return (
        dq_NGSC.view(q_BHSC.shape),
        dk_NSC.to(q_BHSC.dtype).view(k_BKSC.shape),
        dv_NSC.to(q_BHSC.dtype).view(k_BKSC.shape),
    )


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32, memory_format=torch.contiguous_format)

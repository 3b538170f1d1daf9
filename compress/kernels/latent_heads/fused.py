"""Queries, keys and values of latent attention (arXiv 2405.04434) side by side, in one launch. Every number
is copied: the bits are those of the reference.
"""

from torch import Tensor

from compress.kernels.compilers.triton import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton,
    triton_refusal,
    wait,
)
from compress.kernels.select import Kernel, register
from compress.models.latent import Latent

TILE_SIZE = 1024
"""Numbers that a program copies."""


@jit()
def _latent_heads(
    q_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    rotated_ptr: tl.tensor,
    out_ptr: tl.tensor,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    ROTATED_STRIDE: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    half = c // (C // 2)
    in_half = c % (C // 2)
    rotates = in_half < R // 2
    of_rotated = in_half * 2 + half if INTERLEAVED else half * (R // 2) + in_half
    of_still = half * ((C - R) // 2) + in_half - R // 2
    real = (c < C) & (head < 3 * H)
    is_q = head < H
    is_v = head >= 2 * H
    of_head = (head % H) * (C - R + V)
    wait(PDL)
    q = tl.load(
        q_ptr + row * Q_STRIDE + head * C + tl.where(rotates, C - R + of_rotated, of_still),
        mask=real & is_q,
        other=0.0,
    )
    still = tl.load(
        kv_ptr + row * KV_STRIDE + of_head + tl.where(is_v, C - R + c, of_still),
        mask=real & ((is_v & (c < V)) | ((head >= H) & (head < 2 * H) & ~rotates)),
        other=0.0,
    )
    rotated = tl.load(
        rotated_ptr + row * ROTATED_STRIDE + of_rotated + head * 0,
        mask=real & (head >= H) & (head < 2 * H) & rotates,
        other=0.0,
    )
    x = tl.where(is_q, q, tl.where(is_v | ~rotates, still, rotated))
    tl.store(out_ptr + row * (3 * H * C) + head * C + c, x, mask=real)


def latent_heads(q_TF: Tensor, kv_TF: Tensor, rotated_TC: Tensor, latent: Latent, head_dim: int) -> Tensor:
    """Return [T, 3 H C], as the reference; the operands may be columns of wider rows."""
    num_rows = q_TF.shape[0]
    num_heads = q_TF.shape[1] // head_dim
    assert all(each.stride(1) == 1 for each in (q_TF, kv_TF, rotated_TC))
    out_TF = q_TF.new_empty(num_rows, 3 * num_heads * head_dim)
    block = triton.next_power_of_2(head_dim)
    heads = max(1, TILE_SIZE // block)
    if num_rows:
        _latent_heads[(num_rows, triton.cdiv(3 * num_heads, heads))](
            q_TF,
            kv_TF,
            rotated_TC,
            out_TF,
            Q_STRIDE=q_TF.stride(0),
            KV_STRIDE=kv_TF.stride(0),
            ROTATED_STRIDE=rotated_TC.stride(0),
            H=num_heads,
            C=head_dim,
            R=latent.rope_dim,
            V=latent.value_dim,
            INTERLEAVED=latent.interleaved,
            HEADS=heads,
            BLOCK=block,
            num_warps=4,
            **pdl_options(q_TF.device),
        )
    return out_TF


register(
    Kernel("latent_heads", "triton.tile", min_sm=80, priority=10, supports=triton_refusal, fn=latent_heads)
)

"""Keys and values of all heads of latent attention (arXiv 2405.04434) laid out by head, in one launch. Every
number is copied: the bits are those of the reference.
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

TILE_SIZE = 2048
"""Numbers of keys that a program copies."""


@jit(varying=("num_rows",))
def _latent_heads(
    kv_ptr: tl.tensor,
    rotated_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    num_rows: tl.tensor,
    head_stride: tl.tensor,
    KV_STRIDE: tl.constexpr,
    ROTATED_STRIDE: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BLOCK)[None, :]
    real = (rows < num_rows) & (c < C)
    still = c < C - P
    of_head = kv_ptr + rows * KV_STRIDE + head * (C - P + V)
    wait(PDL)
    k = tl.load(of_head + c, mask=real & still, other=0.0)
    shared = tl.load(rotated_ptr + rows * ROTATED_STRIDE + c - (C - P), mask=real & ~still, other=0.0)
    v = tl.load(of_head + C - P + c, mask=real & (c < V), other=0.0)
    at = head * head_stride + rows * C + c
    tl.store(k_ptr + at, tl.where(still, k, shared), mask=real)
    tl.store(v_ptr + at, v, mask=real)


def latent_heads(
    kv_MF: Tensor, rotated_MP: Tensor, k_HMC: Tensor, v_HMC: Tensor, *, latent: Latent, head_dim: int
) -> None:
    """Write keys and values [H, M, C], as the reference; what is read may be columns of wider rows, and what
    is written rows of longer heads."""
    (num_rows, size) = kv_MF.shape
    num_heads = size // (head_dim - latent.rope_dim + latent.value_dim)
    assert kv_MF.stride(1) == rotated_MP.stride(1) == 1
    assert k_HMC.stride() == v_HMC.stride()
    assert k_HMC.stride()[1:] == (head_dim, 1)
    block = triton.next_power_of_2(head_dim)
    rows = max(1, TILE_SIZE // block)
    if num_rows:
        _latent_heads[(triton.cdiv(num_rows, rows), num_heads)](
            kv_MF,
            rotated_MP,
            k_HMC,
            v_HMC,
            num_rows,
            k_HMC.stride(0),
            KV_STRIDE=kv_MF.stride(0),
            ROTATED_STRIDE=rotated_MP.stride(0),
            C=head_dim,
            P=latent.rope_dim,
            V=latent.value_dim,
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
            **pdl_options(kv_MF.device),
        )


register(
    Kernel("latent_heads", "triton.tile", min_sm=80, priority=10, supports=triton_refusal, fn=latent_heads)
)

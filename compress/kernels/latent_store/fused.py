"""Rotated queries of latent attention and a written cache of latents, in one launch.

A program takes a few heads of the queries of one row, or the row that the cache stores: its latent, normed
and rounded as the linear that reads it rounds its inputs, and the dimensions of keys that rotate. Both halves
of a rotation are read where they are, neighbours or half of the dimensions apart. Numbers are rounded where
the reference rounds them. Without latents there is no program for what the cache stores.

Shapes: T rows, H heads, C head dimension, R numbers of a latent, P dimensions that rotate, L positions.
"""

import torch
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
from compress.kernels.operands.e4m3 import e4m3_values, encode_e4m3
from compress.kernels.operands.page_store import nearest
from compress.kernels.operands.paged import CODED_FORMATS, LARGEST_CODE
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import LARGEST, TINY_SCALE, ActivationQuant, RowNorm, quantize
from compress.kernels.rms_norm.fused import normed_row, rms_norm
from compress.kernels.select import Kernel, register
from compress.models.latent import Latent

TILE_SIZE = 1024
"""Numbers of queries of a program."""


@jit()
def _turned(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    position: tl.tensor,
    d: tl.tensor,
    mask: tl.tensor,
    P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """Return dimensions d of the P at x that rotate, as halves, rounded as the reference does."""
    HALF: tl.constexpr = P // 2 if P > 0 else 1  # with P = 0 the mask is false everywhere
    half = d // HALF
    pair = d % HALF
    first_at = pair * 2 if INTERLEAVED else pair
    second_at = pair * 2 + 1 if INTERLEAVED else pair + HALF
    first = tl.load(x_ptr + first_at, mask=mask, other=0.0)
    second = tl.load(x_ptr + second_at, mask=mask, other=0.0)
    dtype = first.dtype
    cos = tl.load(cos_ptr + position * P + d, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * P + d, mask=mask, other=0.0).to(tl.float32)
    own = tl.where(half == 0, first, second).to(tl.float32)
    other = tl.where(half == 0, second, first).to(tl.float32)
    straight = (own * cos).to(dtype).to(tl.float32)
    across = (other * sin).to(dtype).to(tl.float32)
    return tl.where(half == 0, straight - across, straight + across).to(dtype)


@jit()
def _coded(x: tl.tensor, scale: tl.tensor, LARGEST: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    """Return numbers as codes of one scale, in bytes."""
    scaled = tl.div_rn(x.to(tl.float32), scale + tl.zeros(x.shape, tl.float32))
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    return nearest(scaled).to(tl.uint8) if FORMAT == 3 else encode_e4m3(scaled)


@jit()
def _rounded(
    x: tl.tensor,
    static_ptr: tl.tensor,
    LARGEST: tl.constexpr,
    TINY_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """Return a row as its codes and their scales give it back: a scale for GROUP numbers, or a given one."""
    parts = tl.reshape(x.to(tl.float32), [x.shape[0] // GROUP, GROUP])
    if static_ptr is None:
        absmax = tl.max(tl.abs(parts), axis=1, keep_dims=True)
        scale = tl.maximum(tl.div_rn(absmax, LARGEST + absmax * 0), TINY_SCALE)
    else:
        scale = tl.load(static_ptr)
    codes = _coded(parts, scale, LARGEST, FORMAT)
    if FORMAT == 3:
        values = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        values = e4m3_values(codes)
    return tl.reshape(values * scale, [x.shape[0]]).to(x.dtype)


@jit(unaligned=("positions_ptr", "slots_ptr"))
def _latent_store(
    q_ptr: tl.tensor,
    latent_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    static_ptr: tl.tensor,
    eps: tl.tensor,
    Q_STRIDE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    C_TILE: tl.constexpr,
    R_TILE: tl.constexpr,
    P_TILE: tl.constexpr,
    STORES: tl.constexpr,
    NORMED: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    QUANT_LARGEST: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY_SCALE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Process heads [tile HEADS, ...) of one row, or what its position stores in the program after those."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    num_tiles = tl.num_programs(1) - 1 if STORES else tl.num_programs(1)
    if tl.program_id(1) < num_tiles:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
        c = tl.arange(0, C_TILE)[None, :]
        real = (head < H) & (c < C)
        still = real & (c < C - P)
        rotates = real & (c >= C - P)
        wait(PDL)
        position = tl.load(positions_ptr + row).to(tl.int64)
        head_ptr = q_ptr + row * Q_STRIDE + head * C
        q = tl.load(head_ptr + c, mask=still, other=0.0)
        of_rotated = tl.maximum(c - (C - P), 0)
        turned_q = _turned(
            head_ptr + (C - P), cos_ptr, sin_ptr, position, of_rotated, rotates, P, INTERLEAVED
        )
        tl.store(out_ptr + (row * H + head) * C + c, tl.where(rotates, turned_q, q), mask=real)
    elif STORES:
        columns = tl.arange(0, R_TILE)
        d = tl.arange(0, P_TILE)
        of_latent = columns < R
        of_key = d < P
        weight = tl.load(norm_ptr + columns, mask=of_latent, other=0.0)
        wait(PDL)
        position = tl.load(positions_ptr + row).to(tl.int64)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        row_ptr = latent_ptr + row * LATENT_STRIDE
        x = tl.load(row_ptr + columns, mask=of_latent, other=0.0)
        if not NORMED:
            x = normed_row(x, weight, eps, R, False)
        if QUANT != 0:
            x = _rounded(x, static_ptr, QUANT_LARGEST, TINY_SCALE, GROUP, QUANT)
        turned = _turned(row_ptr + R, cos_ptr, sin_ptr, position, d, of_key, P, INTERLEAVED)
        at = pages_ptr + slot * (R + P)
        if FORMAT == 0:
            tl.store(at + columns, x, mask=of_latent)
            tl.store(at + R + d, turned, mask=of_key)
        else:
            absmax = tl.maximum(
                tl.max(tl.abs(x.to(tl.float32)), axis=0), tl.max(tl.abs(turned.to(tl.float32)), axis=0)
            )
            scale = tl.maximum(tl.div_rn(absmax, LARGEST + absmax * 0), TINY_SCALE)
            tl.store(scale_ptr + slot, scale)
            tl.store(at + columns, _coded(x, scale, LARGEST, FORMAT), mask=of_latent)
            tl.store(at + R + d, _coded(turned, scale, LARGEST, FORMAT), mask=of_key)


def _rounds(quant: ActivationQuant) -> bool:
    """Return whether the kernel rounds like this itself: to codes around zero, with float32 scales. Given
    scales of int8 reach one code further down."""
    is_given_int8 = quant.static_scale is not None and quant.dtype == torch.int8
    return quant.symmetric and quant.scale_type is None and not is_given_int8


def latent_store(
    q_TF: Tensor,
    latent_TF: Tensor | None,
    norm: RowNorm | None,
    cos_LP: Tensor,
    sin_LP: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    pages: PagedLatents,
    *,
    latent: Latent,
    head_dim: int,
    quant: ActivationQuant | None = None,
) -> Tensor:
    """Return the rotated queries [T, H, C] and write the T rows of the cache, as the reference; q and latents
    may be columns of wider rows."""
    normed = False
    stores = latent_TF is not None and norm is not None
    if latent_TF is None or norm is None:
        quant = None
    elif quant is not None and not _rounds(quant):
        rows = rms_norm(latent_TF[:, : latent.kv_rank], norm.weight, norm.eps)
        assert isinstance(rows, Tensor)
        rounded_TR = quantize(rows, quant).dequantize(rows.dtype)
        latent_TF = torch.cat((rounded_TR, latent_TF[:, latent.kv_rank :]), dim=1)
        quant = None
        normed = True
    (num_rows, size) = q_TF.shape
    num_heads = size // head_dim
    assert q_TF.stride(1) == 1
    assert latent_TF is None or latent_TF.stride(1) == 1
    assert pages.rows.is_contiguous()
    q_THC = q_TF.new_empty(num_rows, num_heads, head_dim)
    tile = triton.next_power_of_2(head_dim)
    heads = max(1, TILE_SIZE // tile)
    rank_tile = triton.next_power_of_2(latent.kv_rank)
    if num_rows:
        _latent_store[(num_rows, triton.cdiv(num_heads, heads) + stores)](
            q_TF,
            latent_TF,
            None if norm is None else norm.weight,
            cos_LP,
            sin_LP,
            positions_T,
            slots_T,
            q_THC,
            pages.rows if pages.scale is None else pages.rows.view(torch.uint8),
            pages.scale,
            None if quant is None else quant.static_scale,
            0.0 if norm is None else norm.eps,
            Q_STRIDE=q_TF.stride(0),
            LATENT_STRIDE=0 if latent_TF is None else latent_TF.stride(0),
            H=num_heads,
            C=head_dim,
            R=latent.kv_rank,
            P=latent.rope_dim,
            INTERLEAVED=latent.interleaved,
            HEADS=heads,
            C_TILE=tile,
            R_TILE=rank_tile,
            P_TILE=max(2, triton.next_power_of_2(latent.rope_dim)),
            STORES=stores,
            NORMED=normed,
            QUANT=0 if quant is None else 3 if quant.dtype == torch.int8 else 1,
            GROUP=rank_tile if quant is None or quant.group_size is None else quant.group_size,
            QUANT_LARGEST=0.0 if quant is None else LARGEST[quant.dtype],
            FORMAT=CODED_FORMATS.get(pages.format, 0),
            LARGEST=LARGEST_CODE.get(pages.rows.dtype, 0.0),
            TINY_SCALE=TINY_SCALE,
            num_warps=4,
            **pdl_options(q_TF.device),
        )
    return q_THC


register(
    Kernel("latent_store", "triton.tile", min_sm=80, priority=10, supports=triton_refusal, fn=latent_store)
)

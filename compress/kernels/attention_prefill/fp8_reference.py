"""Reference of prefill attention with products in FP8, over pages of FP8_ATTENTION.

    queries    e4m3, a scale for each token and head
    keys       e4m3 under one scale for each head and 128 positions, a power of two; and so values
    weights    w = e4m3(256 exp(s - m)) exp(m - max s), m the largest s of the 128 positions
    out = sum w v / sum w

The sum is that of the rounded weights, so that a key with nearly all of the weight is not rounded away from
1. The scale of a tile of 128 positions is that of all that the context has, later ones than a query, too:
a position whose numbers are 2^12 times as large as others of its tile, or not numbers, changes queries before
it.

Shapes: T rows of all sequences, L context of one, R sequences, B blocks of a table, H heads, K kv heads, C
head dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.paged import PagedKV, power_of_two
from compress.kernels.operands.rows import FP8_MAX, dynamic_scale
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.models.attention import causal_mask
from compress.quant.kv import FP8_ATTENTION, round_to_e4m3

KEYS = 128
"""Positions of a tile, a multiple of every block size."""
HEAD_DIMS = (64, 128)
LARGEST_WEIGHT = 256.0
QUERIES = 128
"""Query tokens whose scores are held at once."""


def attention_prefill(
    q_THC: Tensor,
    kv: PagedKV,
    block_table_RB: Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return [T, H, C]; the queries of a sequence are the last of its context, whose keys and values are all
    in the pages."""
    assert softcap is None
    assert sinks_H is None
    chunks = torch.split(q_THC, list(query_lens))
    return torch.cat(
        [
            _attend(chunk, *kv.gather(blocks_B, length, torch.float32), window, scale)
            for chunk, blocks_B, length in zip(chunks, block_table_RB, context_lens, strict=True)
        ]
    )


def _attend(q_THC: Tensor, k_KLC: Tensor, v_KLC: Tensor, window: int | None, scale: float) -> Tensor:
    group = q_THC.shape[1] // k_KLC.shape[0]
    k_HLC, v_HLC = (_rounded_tiles(each).repeat_interleave(group, dim=0) for each in (k_KLC, v_KLC))
    q_f32 = q_THC.to(torch.float32)
    q_scale_TH1 = dynamic_scale(q_f32, FP8_MAX).unsqueeze(-1)
    q_HTC = (round_to_e4m3(q_f32 / q_scale_TH1) * q_scale_TH1).transpose(0, 1)
    outputs = []
    end = k_HLC.shape[1] - len(q_THC)
    for part_HTC in q_HTC.split(QUERIES, dim=1):
        end += part_HTC.shape[1]
        seen_TL = causal_mask(part_HTC.shape[1], end, window, q_THC.device)
        scores_HTL = (part_HTC @ k_HLC[:, :end].transpose(1, 2) * scale).masked_fill(~seen_TL, -torch.inf)
        weights_HTL = _rounded_weights(scores_HTL)
        outputs.append(weights_HTL @ v_HLC[:, :end] / weights_HTL.sum(dim=-1, keepdim=True))
    return torch.cat(outputs, dim=1).transpose(0, 1).to(q_THC.dtype)


def _rounded_weights(scores_HTL: Tensor) -> Tensor:
    """Return exp(scores - their largest) of each row, rounded to e4m3 in a unit of each tile of positions."""
    num_keys = scores_HTL.shape[2]
    scores_HTNE = F.pad(scores_HTL, (0, -num_keys % KEYS), value=-torch.inf).unflatten(2, (-1, KEYS))
    own_HTN1 = scores_HTNE.amax(dim=3, keepdim=True)
    unit_HTN1 = own_HTN1.masked_fill(own_HTN1.isneginf(), 0.0)
    weights_HTNE = round_to_e4m3(LARGEST_WEIGHT * torch.exp(scores_HTNE - unit_HTN1))
    share_HTN1 = torch.exp(own_HTN1 - own_HTN1.amax(dim=2, keepdim=True))
    return (weights_HTNE * share_HTN1).flatten(2)[:, :, :num_keys]


def _rounded_tiles(x_KLC: Tensor) -> Tensor:
    """Return x rounded to e4m3 with a power of two for the scale of each head and tile of positions."""
    num_keys = x_KLC.shape[1]
    tiles_KNE = F.pad(x_KLC, (0, 0, 0, -num_keys % KEYS)).unflatten(1, (-1, KEYS)).flatten(2)
    scale_KN1 = power_of_two(dynamic_scale(tiles_KNE, FP8_MAX)).unsqueeze(-1)
    rounded_KNE = round_to_e4m3(tiles_KNE / scale_KN1) * scale_KN1
    return rounded_KNE.view(x_KLC.shape[0], -1, x_KLC.shape[2])[:, :num_keys]


def supports(problem: Problem) -> str | None:
    if problem.scheme != FP8_ATTENTION:
        return f"for {FP8_ATTENTION}"
    if problem.n not in HEAD_DIMS:
        return f"for heads of {' or '.join(map(str, HEAD_DIMS))} dimensions"
    if problem.softcap or problem.sinks:
        return "its scores have no cap, and its heads no sinks"
    if problem.relative or problem.alibi:
        return "its scores have no terms of the distance of keys"
    return None


register(
    Kernel(
        "attention_prefill",
        "reference.fp8",
        min_sm=0,
        priority=1,
        supports=supports,
        fn=attention_prefill,
    )
)

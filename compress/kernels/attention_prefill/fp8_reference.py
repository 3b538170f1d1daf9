"""Reference of prefill attention with products in FP8, over pages of FP8_ATTENTION.

    queries    e4m3, a scale for each token and head
    keys       e4m3 under one scale for each head and 128 positions, a power of two; and so values
    weights    w = e4m3(256 exp(s - max s));   out = sum w v / sum w

The sum is that of the rounded weights, so that a key with nearly all of the weight is not rounded away from
1. A kernel rounds weights as multiples of the largest score so far, so it is equal within these roundings
only.

Shapes: T rows of all sequences, L context of one, R sequences, B blocks of a table, H heads, K kv heads, C
head dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.attention_prefill.fp8_tiles import KEYS
from compress.kernels.operands.paged import PagedKV, power_of_two
from compress.kernels.operands.rows import FP8_MAX, dynamic_scale
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.models.attention import causal_mask
from compress.quant.kv import FP8_ATTENTION, round_to_e4m3

LARGEST_WEIGHT = 256.0
QUERIES = 128
"""Query tokens whose scores are there at once."""


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
    chunks = torch.split(q_THC, list(query_lens))
    return torch.cat(
        [
            _attend(chunk, *kv.gather(blocks_B, length, torch.float32), window, scale, softcap, sinks_H)
            for chunk, blocks_B, length in zip(chunks, block_table_RB, context_lens, strict=True)
        ]
    )


def _attend(
    q_THC: Tensor,
    k_KLC: Tensor,
    v_KLC: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
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
        outputs.append(_weighed(part_HTC, k_HLC[:, :end], v_HLC[:, :end], seen_TL, scale, softcap, sinks_H))
    return torch.cat(outputs, dim=1).transpose(0, 1).to(q_THC.dtype)


def _weighed(
    q_HTC: Tensor,
    k_HLC: Tensor,
    v_HLC: Tensor,
    seen_TL: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Return the weighted means of values for rounded operands, float32 [H, T, C]."""
    scores_HTL = q_HTC @ k_HLC.transpose(1, 2) * scale
    if softcap is not None:
        scores_HTL = softcap * torch.tanh(scores_HTL / softcap)
    scores_HTL = scores_HTL.masked_fill(~seen_TL, float("-inf"))
    most_HT1 = scores_HTL.amax(dim=-1, keepdim=True)
    weights_HTL = round_to_e4m3(LARGEST_WEIGHT * torch.exp(scores_HTL - most_HT1))
    total_HT1 = weights_HTL.sum(dim=-1, keepdim=True)
    if sinks_H is not None:
        sinks_H11 = sinks_H.to(torch.float32).view(-1, 1, 1)
        total_HT1 = total_HT1 + LARGEST_WEIGHT * torch.exp(sinks_H11 - most_HT1)
    return (weights_HTL @ v_HLC) / total_HT1


def _rounded_tiles(x_KLC: Tensor) -> Tensor:
    """Return x rounded to e4m3 with a power of two for the scale of each head and tile of positions."""
    num_keys = x_KLC.shape[1]
    tiles_KNE = F.pad(x_KLC, (0, 0, 0, -num_keys % KEYS)).unflatten(1, (-1, KEYS)).flatten(2)
    scale_KN1 = power_of_two(dynamic_scale(tiles_KNE, FP8_MAX)).unsqueeze(-1)
    rounded_KNE = round_to_e4m3(tiles_KNE / scale_KN1) * scale_KN1
    return rounded_KNE.view(x_KLC.shape[0], -1, x_KLC.shape[2])[:, :num_keys]


def supports(problem: Problem) -> str | None:
    return None if problem.scheme == FP8_ATTENTION else f"for {FP8_ATTENTION}"


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

"""The choice of experts for a token, and the weights of a router and of experts before they are repacked.

    logits = x W^T + b                                  float32
    scores = softmax(logits) | sigmoid(logits)          over all E experts
    chosen = the K largest of scores + selection bias   of equal ones the lowest id; the best first
    weights = scale * scores[chosen], over their sum where `renormalize`

With `softmax_topk` the softmax is taken over the K chosen logits (Mixtral, arXiv 2401.04088; gpt-oss). With
groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) only experts of the `top_groups` best groups can be
chosen; a group is as good as the sum of its two largest scores, selection bias included. Softmax keeps the
order of the logits, so without a selection bias or groups these are compared instead: they do not underflow.

Shapes: T rows, D hidden, E experts, K choices, F ffn.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.quant.scheme import QuantizedWeight

Score = Literal["softmax", "sigmoid", "softmax_topk"]
LEAST_SUM = 1e-20
"""Added to the sum of sigmoids, which may all underflow."""


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen and weighted; `selection_bias` states that the router has one."""

    num_experts: int
    top_k: int
    score: Score = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    selection_bias: bool = False

    def __post_init__(self) -> None:
        assert 0 < self.top_k <= self.num_experts, f"{self.top_k} of {self.num_experts} experts"
        assert self.num_experts % self.num_groups == 0, "groups have one size"
        assert 0 < self.top_groups <= self.num_groups, f"{self.top_groups} of {self.num_groups} groups"
        assert self.top_k <= self.top_groups * (self.num_experts // self.num_groups), (
            "the chosen groups hold too few experts"
        )

    @property
    def compares_logits(self) -> bool:
        """Whether logits themselves decide the choice."""
        return self.score == "softmax_topk" or (
            self.score == "softmax" and not self.selection_bias and self.num_groups == 1
        )


@dataclass(frozen=True)
class RouterWeights:
    """The dense weight [E, D] of a router and its biases [E], float32; `arrivals` are the zeroed counters
    [`MAX_COUNTED_ROWS`] that a kernel in several blocks counts them by, and leaves zeroed."""

    weight_ED: Tensor
    bias_E: Tensor | None
    selection_bias_E: Tensor | None
    arrivals: Tensor


MAX_COUNTED_ROWS = 16


def router_weights(
    weight_ED: Tensor,
    bias_E: Tensor | None,
    selection_bias_E: Tensor | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> RouterWeights:
    """Return the weights of a router on a device, the matrix in the model's dtype."""

    def bias(given: Tensor | None) -> Tensor | None:
        return None if given is None else given.to(device=device, dtype=torch.float32).contiguous()

    return RouterWeights(
        weight_ED.to(device=device, dtype=dtype).contiguous(),
        bias(bias_E),
        bias(selection_bias_E),
        torch.zeros(MAX_COUNTED_ROWS, dtype=torch.int32, device=device),
    )


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of one expert: gate and up [F, D], down [D, F], and their biases [F], [F] and [D]."""

    gate: Tensor | QuantizedWeight
    up: Tensor | QuantizedWeight
    down: Tensor | QuantizedWeight
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def choose(
    logits_TE: Tensor, routing: Routing, selection_bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ids int32 and weights float32, both [T, K]. This is the definition that every kernel is tested
    against."""
    assert logits_TE.dtype == torch.float32
    assert (selection_bias_E is not None) == routing.selection_bias
    if routing.score == "softmax_topk":
        scores_TE = logits_TE
    else:
        scores_TE = logits_TE.softmax(-1) if routing.score == "softmax" else logits_TE.sigmoid()
    compared_TE = logits_TE if routing.compares_logits else scores_TE
    if selection_bias_E is not None:
        compared_TE = compared_TE + selection_bias_E
    if routing.num_groups > 1:
        compared_TE = _best_groups(compared_TE, routing)
    ids_TK = _largest(compared_TE, routing.top_k)
    weights_TK = scores_TE.gather(1, ids_TK)
    if routing.score == "softmax_topk":
        weights_TK = weights_TK.softmax(-1)
    elif routing.renormalize:
        least = LEAST_SUM if routing.score == "sigmoid" else 0.0
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + least)
    return ids_TK.to(torch.int32), weights_TK * routing.scale


def _largest(x_TE: Tensor, count: int) -> Tensor:
    """Return the ids of the largest numbers, of equal ones the lowest first."""
    return (x_TE + 0.0).sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _best_groups(compared_TE: Tensor, routing: Routing) -> Tensor:
    """Return the numbers with -inf for experts outside of the best groups."""
    by_group = compared_TE.unflatten(1, (routing.num_groups, -1))
    best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _largest(best, routing.top_groups), True)
    return by_group.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)

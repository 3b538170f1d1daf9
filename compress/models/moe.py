"""A mixture of experts in the canonical decoder: routing, and the experts one after the other.

    s = score(router(x)),  chosen = the top_k largest of s (+ selection bias),  w = weights of the chosen
                           or of router(x) + selection bias, where logits have it (`Experts.biased_logits`)
    y = sum over chosen e of w_e down_e(act(gate_e(x)) * up_e(x))  [+ shared(x)]

or, where w weighs inputs (`Experts.weighs_input`), of the one chosen

    y = down_e(act(gate_e(w_e x)) * up_e(w_e x))  [+ shared(x)]

With SparseMixer (`score` = `sparsemixer`, arXiv 2409.12136) the two chosen are the largest logits, and with s
the logits that were not chosen before one of them, m,

    w = 1 / sum of exp(s - m) over s with m - s <= gap max(|s|, m)

Where every token goes to the last A experts (`Experts.always`), those are among the chosen without a
comparison, and the other top_k - A are the best of the rest.

A table may choose the experts of a token by its id (`Experts.table_size`); the router only weighs them then.
Where branches are normed apart (`Experts.branch_norms`), x is the stream, and

    y = norm(sum over chosen e of w_e down_e(act(gate_e(z)) * up_e(z))) + norm(shared(norm(x))),
    z = norm(x),  s = score(router(norm(x) / sqrt(D)))

with five norms. Where the routed experts act on latents (`Experts.latent_size`),

    y = out(sum over chosen e of w_e down_e(act(gate_e(z)) * up_e(z))) + shared(x),   z = in(x)

and with norms of latents (`Experts.latent_norms`) z = norm(in(x)), and in place of each down_e(..) there is
norm(v down_e(..)), with weights v that all experts share. An expert without weights
(`Experts.zero_experts`) adds w_e x.

Logits, scores and the sum over experts are float32 whatever the model's dtype. Of equal scores the expert
with the lower index is chosen. Softmax keeps the order of logits, so without a selection bias or groups the
logits are compared, which do not underflow. `route` is the definition that router kernels are tested against.
Experts add their outputs in the order of their indices, so the bits depend neither on the device's schedule
nor on other tokens of the batch. Not here: capacity limits, dropped tokens and noise on the router, which
only training of some models has.

Shapes: T tokens, D hidden, L numbers that an expert reads (D without latents), E experts, R chosen experts of
a token, F channels of an expert.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.attention import AttentionFn, tokens_of
from compress.models.experts import (
    ALL_TOKENS,
    BRANCH_NORMS,
    EXPERTS_OF_TOKENS,
    LATENT_NORM,
    OUT_NORM,
    ROUTER_NORM,
    SHARED_IN,
    SHARED_MID,
    Experts,
)
from compress.models.hyper_connection import Elementwise, as_torch_does
from compress.models.linear import Linear
from compress.models.tap import Tap

TOKENS = "moe_tokens"
"""The tap with the indices [t, 1] of an expert's tokens, `moe_tokens.E`."""
SUM_FLOOR = 1e-20
"""Is added to the sum of scores of `FLOORED` before a division by it, as the models' own code does."""


FLOORED = ("sigmoid", "sqrt_softplus")


@dataclass(frozen=True)
class Routing:
    """The experts of each token, best first: indices int64 [T, R] and weights float32 [T, R]."""

    experts_TR: Tensor
    weights_TR: Tensor
    num_experts: int

    def by_expert(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield for every expert its index, its tokens in order, int64 [t], and their weights [t]."""
        flat = self.experts_TR.flatten()
        order = torch.argsort(flat, stable=True)
        counts: list[int] = torch.bincount(flat, minlength=self.num_experts).tolist()
        tokens = torch.div(order, self.experts_TR.shape[1], rounding_mode="floor")
        weights = self.weights_TR.flatten()[order]
        parts = zip(tokens.split(counts), weights.split(counts), strict=True)
        for idx, (of_expert, weight) in enumerate(parts):
            yield idx, of_expert, weight


def route(
    facts: Experts,
    logits_TE: Tensor,
    selection_bias_E: Tensor | None = None,
    output_scale_E: Tensor | None = None,
    table_TR: Tensor | None = None,
    *,
    computed: Elementwise = as_torch_does,
) -> Routing:
    """Return the routing of tokens by the logits of their router, float32, to the experts that a table has
    for them, if there is one; `computed` computes functions of single logits. Experts that every token
    chooses have an infinite selection bias (`for_choice`)."""
    assert (selection_bias_E is not None) == facts.selection_bias
    assert (output_scale_E is not None) == facts.scales_weights
    assert (table_TR is not None) == bool(facts.table_size)
    if facts.score in ("softmax_topk", "sparsemixer"):
        scores_TE = logits_TE
    else:
        own = sqrt_softplus if facts.score == "sqrt_softplus" else torch.sigmoid
        scores_TE = logits_TE.softmax(-1) if facts.score == "softmax" else computed(own, logits_TE)
    choice_TE = (logits_TE if facts.compares_logits else scores_TE).detach()
    if selection_bias_E is not None:
        choice_TE = choice_TE + selection_bias_E.to(choice_TE.dtype)
    if facts.num_groups > 1:
        choice_TE = _of_best_groups(facts, choice_TE)
    experts_TR = best(choice_TE, facts.top_k) if table_TR is None else table_TR.to(torch.int64)
    weights_TR = scores_TE.gather(1, experts_TR)
    if facts.score == "sparsemixer":
        weights_TR = _mixed(logits_TE, experts_TR, facts.gap)
    elif facts.score == "softmax_topk":
        weights_TR = weights_TR.softmax(-1)
    elif facts.renormalize:
        floor = SUM_FLOOR if facts.score in FLOORED else 0.0
        weights_TR = weights_TR / (weights_TR.sum(-1, keepdim=True) + floor)
    if output_scale_E is not None:
        weights_TR = weights_TR * output_scale_E.to(weights_TR.dtype)[experts_TR]
    return Routing(experts_TR, weights_TR * facts.scale, facts.num_experts)


def for_choice(facts: Experts, selection_bias_E: Tensor) -> Tensor:
    """Return what is added to the scores of all experts where some are chosen: the selection bias, and
    infinity for those that every token chooses."""
    return F.pad(selection_bias_E, (0, facts.always), value=torch.inf)


def sqrt_softplus(logits: Tensor) -> Tensor:
    """Return the roots of the softplus of logits."""
    return F.softplus(logits).sqrt()


def _mixed(logits_TE: Tensor, experts_TR: Tensor, gap: float) -> Tensor:
    """Return the weights [T, R] that SparseMixer gives the largest logits, one after the other. The gap is
    multiplied where the paper's code divides by it, so that every program rounds as this one does."""
    weights = []
    for expert_T1 in experts_TR.split(1, dim=1):
        most_T1 = logits_TE.gather(1, expert_T1)
        sizes_TE = torch.maximum(logits_TE.abs(), most_T1)
        is_far_TE = ((most_T1 - logits_TE) > gap * sizes_TE).detach()
        near_TE = logits_TE.masked_fill(is_far_TE, -torch.inf)
        weights.append(near_TE.softmax(-1).gather(1, expert_T1))
        logits_TE = logits_TE.scatter(1, expert_T1, -torch.inf)
    return torch.cat(weights, dim=1)


def table_in_turns(num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Return a table of experts [V, K], int64, in which tokens take the experts in turns."""
    return torch.arange(num_tokens * top_k).view(num_tokens, top_k) % num_experts


def weighed(x_TD: Tensor, weights_T: Tensor) -> Tensor:
    """Return the inputs of experts times their weights, which are rounded to the dtype of the inputs first,
    as `transformers` does."""
    return x_TD * weights_T.to(x_TD.dtype).unsqueeze(1)


def weights_of_identities(is_zero_TR: Tensor, weights_TR: Tensor) -> Tensor:
    """Return the sums [T, 1] of the weights of chosen experts that return their input (`is_zero`), added in
    the order of the choice."""
    weights_TR = weights_TR.masked_fill(~is_zero_TR, 0.0)
    first_T1, *others = weights_TR.split(1, dim=1)
    for each in others:
        first_T1 = first_T1 + each
    return first_T1


def best(scores_TE: Tensor, num: int) -> Tensor:
    """Return the indices [T, num] of the largest scores, the largest first, and of equal ones the first."""
    scores_TE = scores_TE.detach() + 0.0  # a sort by bits would put 0.0 before -0.0
    return torch.argsort(scores_TE, dim=-1, descending=True, stable=True)[:, :num]


def _of_best_groups(facts: Experts, choice_TE: Tensor) -> Tensor:
    """Return the scores with those outside of the best groups at minus infinity, or at 0 with
    `zeroes_groups`."""
    groups_TGE = choice_TE.unflatten(-1, (facts.num_groups, -1))
    score_TG = groups_TGE.topk(min(facts.group_best, groups_TGE.shape[-1]), dim=-1).values.sum(-1)
    kept_TG = torch.zeros_like(score_TG, dtype=torch.bool)
    kept_TG.scatter_(1, best(score_TG, facts.top_groups), True)
    outside = 0.0 if facts.zeroes_groups else -torch.inf
    return groups_TGE.masked_fill(~kept_TG.unsqueeze(-1), outside).flatten(1)


class ExpertFfn(nn.Module, ABC):
    """The FFN of one expert, as the decoder makes it."""

    down: nn.Linear

    @abstractmethod
    def mid(self, x_BSD: Tensor) -> Tensor:
        """Return the input of `down`."""


class Moe(nn.Module):
    """A mixture of experts. `expert(module)` makes the FFN of that canonical name, with its linears
    and `mid(x)`, the input of `down`; `norm(scale=s)` makes a norm of the model over the hidden
    size whose output is multiplied by s, and `norm_of_latents(name)` one of `Experts.latent_norms`."""

    def __init__(
        self,
        facts: Experts,
        hidden_size: int,
        expert: Callable[[str], "ExpertFfn"],
        norm: Callable[..., nn.Module],
        norm_of_latents: Callable[[str], nn.Module] = lambda name: nn.Identity(),
    ) -> None:
        super().__init__()
        self.facts = facts
        self.taps_see_all = False  # set to show every token to the taps of every expert
        self.router = nn.Linear(hidden_size, facts.of_router.num_experts, bias=facts.router_bias)
        if facts.selection_bias:
            self.selection_bias = nn.Parameter(torch.zeros(facts.num_chosen), requires_grad=False)
        if facts.table_size:
            self.experts_of_tokens = nn.Parameter(
                torch.zeros(facts.dense_shapes(hidden_size)[EXPERTS_OF_TOKENS]), requires_grad=False
            )
        if facts.branch_norms:
            for name in BRANCH_NORMS:
                self.add_module(name, norm(scale=hidden_size**-0.5) if name == ROUTER_NORM else norm())
        if facts.output_scale:
            self.output_scale = nn.Parameter(torch.ones(facts.num_experts))
        if facts.one_output_scale:
            self.factor = nn.Parameter(torch.ones(1))
        if facts.shared_size:
            self.shared: ExpertFfn = expert("moe.shared")
        if facts.shared_gate:
            self.shared_gate = nn.Linear(hidden_size, 1, bias=False)
        if facts.latent_size:
            self.latent_in = Linear(hidden_size, facts.latent_size, bias=facts.latent_bias)
            self.latent_out = Linear(facts.latent_size, hidden_size, bias=facts.latent_bias)
        self.latent_norm, self.out_norm = (norm_of_latents(name) for name in (LATENT_NORM, OUT_NORM))
        self.experts = nn.ModuleList(expert(f"moe.experts.{idx}") for idx in range(facts.num_experts))

    def forward(self, x_BSD: Tensor, tap: Tap, attention: AttentionFn | None = None) -> Tensor:
        """Return the output [B, S, D] of all experts; `attention` has the tokens, where a table chooses. With
        `Experts.delayed` it is that of the shared expert and that of the others [B, S, 2 D]."""
        tap(ALL_TOKENS, x_BSD)
        x_TD = x_BSD.flatten(0, -2)
        tokens_T = None
        if self.facts.table_size:
            assert attention is not None
            tokens_T = tokens_of(attention).flatten()
        total_TD = self._normed("experts_post_norm", self._routed(x_TD, tap, tokens_T))
        if self.facts.delayed:
            both_TE = torch.cat((self._shared(x_TD, tap), total_TD), dim=-1)
            return both_TE.to(x_BSD.dtype).view(*x_BSD.shape[:-1], -1)
        if self.facts.shared_size:
            total_TD = total_TD + self._normed("shared_post_norm", self._shared(x_TD, tap))
        return total_TD.to(x_BSD.dtype).view(x_BSD.shape)

    def route(self, x_TD: Tensor, tokens_T: Tensor | None = None) -> Routing:
        """Return the experts of each token and their weights; `tokens_T` are read where a table has them."""
        bias = for_choice(self.facts, self.selection_bias) if self.facts.selection_bias else None
        table_TR = None
        if self.facts.table_size:
            assert tokens_T is not None
            table_TR = self.experts_of_tokens[tokens_T.to(self.experts_of_tokens.device)]
        return route(self.facts.of_router, self._logits(x_TD), bias, self._scale_of_weights(), table_TR)

    def _scale_of_weights(self) -> Tensor | None:
        """Return the factors of the weights of experts [E], None where they have none."""
        if self.facts.one_output_scale:
            return self.factor.expand(self.facts.of_router.num_experts)
        return self.output_scale if self.facts.output_scale else None

    def _normed(self, name: str, x_TD: Tensor) -> Tensor:
        """Return x after one of the norms `BRANCH_NORMS`; the same where a model has none."""
        return cast(Tensor, self.get_submodule(name)(x_TD)) if self.facts.branch_norms else x_TD

    def _logits(self, x_TD: Tensor) -> Tensor:
        x_TD = self._normed(ROUTER_NORM, x_TD)
        wide = torch.promote_types(torch.float32, x_TD.dtype)
        bias = None if self.router.bias is None else self.router.bias.to(wide)
        with torch.autocast(x_TD.device.type, enabled=False):  # training would compute logits in bfloat16
            logits_TE = F.linear(x_TD.to(wide), self.router.weight.to(wide), bias)
        return logits_TE if self.facts.router_scale == 1 else logits_TE * self.facts.router_scale

    def input_of(self, expert_idx: int, x_TD: Tensor) -> Tensor:
        """Return what an expert reads of tokens, whether or not they are routed to it."""
        read_TL = self._read_by_experts(x_TD)
        if not self.facts.weighs_input:
            return read_TL
        return weighed(read_TL, self._logits(x_TD)[:, expert_idx].sigmoid() * self.facts.scale)

    def _read_by_experts(self, x_TD: Tensor) -> Tensor:
        """Return what all experts read of tokens [T, L], before any weights."""
        if self.facts.latent_size:
            return cast(Tensor, self.latent_norm(self.latent_in(x_TD)))
        return self._normed("experts_norm", x_TD)

    def _routed(self, x_TD: Tensor, tap: Tap, tokens_T: Tensor | None) -> Tensor:
        """Return the sum of the chosen experts' outputs, float32 [T, D]. Every expert calls its taps, also
        without a token."""
        wide = torch.promote_types(torch.float32, x_TD.dtype)
        size = self.facts.width(x_TD.shape[-1])
        total_TL = torch.zeros((len(x_TD), size), dtype=wide, device=x_TD.device)
        for _, tokens, weights, out_tL in self.outputs(x_TD, tap, tokens_T):
            total_TL.index_add_(0, tokens, out_tL.to(wide) * weights.unsqueeze(1))
        if self.facts.zero_experts:
            routing = self.route(x_TD)
            is_zero_TR = routing.experts_TR >= self.facts.num_experts
            weights_T1 = weights_of_identities(is_zero_TR, routing.weights_TR)
            total_TL = total_TL + x_TD.to(wide) * weights_T1
        if not self.facts.latent_size:
            return total_TL
        return cast(Tensor, self.latent_out(total_TL.to(x_TD.dtype))).to(wide)

    def added(self, out_tL: Tensor) -> Tensor:
        """Return what outputs of experts add to that of the layer [t, D], before weights, norms of the sum
        and a bias that is added once."""
        if not self.facts.latent_size:
            return out_tL
        return F.linear(out_tL, self.latent_out.weight.to(out_tL))

    def outputs(
        self, x_TD: Tensor, tap: Tap, tokens_T: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yield for every expert its index, its tokens [t], the weights [t] of its outputs and its outputs
        [t, L], normed if they are, not yet weighted. Where its inputs are weighed, the weights of the outputs
        are one."""
        read_TL = self._read_by_experts(x_TD)
        for idx, tokens, weights in self.route(x_TD, tokens_T).by_expert():
            if idx >= self.facts.num_experts:  # has no weights
                break
            expert = cast(ExpertFfn, self.experts[idx])
            x_tL = read_TL[tokens]
            if self.facts.weighs_input:
                x_tL, weights = weighed(x_tL, weights), torch.ones_like(weights)
            mid_tF = expert.mid(x_tL)
            seen_TL = self.input_of(idx, x_TD) if self.taps_see_all else x_tL
            tap(f"{TOKENS}.{idx}", tokens.unsqueeze(1))
            tap(f"moe_in.{idx}", seen_TL)
            tap(f"moe_mid.{idx}", expert.mid(seen_TL) if self.taps_see_all else mid_tF)
            yield idx, tokens, weights, self.out_norm(expert.down(mid_tF))

    def _shared(self, x_TD: Tensor, tap: Tap) -> Tensor:
        """Return the shared expert's output, float32 [T, D]."""
        x_TD = self._normed("shared_norm", x_TD)
        if self.facts.branch_norms:
            tap(SHARED_IN, x_TD)
        mid_TF = self.shared.mid(x_TD)
        tap(SHARED_MID, mid_TF)
        out_TD = self.shared.down(mid_TF).to(torch.promote_types(torch.float32, x_TD.dtype))
        if not self.facts.shared_gate:
            return out_TD if self.facts.shared_scale == 1 else out_TD * self.facts.shared_scale
        gate_T1 = F.linear(x_TD.to(out_TD.dtype), self.shared_gate.weight.to(out_TD.dtype))
        return torch.sigmoid(gate_T1) * out_TD

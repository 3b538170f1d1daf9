"""The facts of a mixture of experts: how many there are, how wide, and how tokens are routed to them.

A router scores all experts for each token, the `top_k` best compute it, and their outputs are added with the
router's weights (arXiv 1701.06538). Every token also goes through the shared expert, where there is one
(arXiv 2401.06066).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from compress.models.hyper_connection import HYPER_PARAMETERS
from compress.untrusted.fields import Fields

SCORES = ("softmax", "sigmoid", "softmax_topk", "sparsemixer", "sqrt_softplus")
OF_TOKENS = ("sigmoid", "sqrt_softplus")
"""The scores that weigh experts which a table chooses."""
MIXED = 2
"""Experts that a token is routed to by SparseMixer."""
MAX_EXPERTS = 4096
MAX_EXPERT_SIZE = 1 << 24
MAX_SCALE = 1e6
ALL_TOKENS = "ffn_in"
"""The tap of what the router and the shared expert read: every token."""
SHARED_MID = "ffn_mid"
SHARED_IN = "shared_in"
"""The tap of what the shared expert reads where it is not what all read (`Experts.branch_norms`)."""
ROUTER_NORM = "router_norm"
EXPERTS_OF_TOKENS = "moe.experts_of_tokens"
"""The table of the experts of each token, whole numbers (`Experts.table_size`), int64 in a model of any dtype
and float32 in the decoder."""
BRANCH_NORMS = ("shared_norm", "shared_post_norm", "experts_norm", "experts_post_norm", ROUTER_NORM)
"""The norms before and after the branches of a mixture (`Experts.branch_norms`). What the router reads is
divided by the root of the hidden size, too."""
LATENT_IN = "latent_in"
LATENT_OUT = "latent_out"
"""The linears before and after the routed experts of a mixture with `Experts.latent_size`."""
SILU_CAPPED = "silu_capped"
"""The activation of experts that cap gates first (`Experts.caps_first`)."""
FLOAT32_PARAMETERS = (
    "moe.selection_bias",
    "moe.factor",
    "delta.A_log",
    "delta.dt_bias",
    "mamba.A_log",
    "mamba.dt_bias",
    *HYPER_PARAMETERS,
    "mamba.D",
    "attn.compressor.positions",
    "attn.indexer.positions",
)
"""Parameters that are float32 in a model of any dtype: they decide which experts are chosen and what they
weigh, and how long a recurrence remembers."""


@dataclass(frozen=True)
class Experts:
    """The experts of one layer and their routing.

    Args:
        expert_size: FFN channels of one expert.
        shared_size: FFN channels of the expert that every token goes through, 0 for none.
        shared_gate: the shared expert's output is multiplied by the sigmoid of a linear of its input.
        shared_scale: factor of the shared expert's output.
        score: `softmax` over all experts, `sigmoid` of each, `sqrt_softplus`, the root of the softplus of
            each, `softmax_topk`, over those chosen, or `sparsemixer` (arXiv 2409.12136): one expert is chosen
            after the other, and the weight of each is
            its softmax over those that were not chosen before and whose logits are near its own, m: m - s is
            at most 2 `jitter` max(|s|, m) for a logit s.
        renormalize: divide the weights of the chosen experts by their sum, which is one with `softmax_topk`.
        scale: factor of all weights.
        num_groups, top_groups, group_best: consecutive experts form groups, and only those of the
            `top_groups` groups can be chosen whose `group_best` best scores have the largest sum: two (arXiv
            2412.19437) or one (arXiv 2405.04434).
        zeroes_groups: experts of the other groups are compared with a score of 0, and chosen before one of
            those groups whose score with its bias is negative, rather than after all of them (A.X K2).
        router_bias: the router adds a bias to its logits.
        selection_bias: a bias is added to scores where experts are chosen, and not to their weights (arXiv
            2408.15664).
        biased_logits: that bias is added to the logits, which are compared in place of their sigmoids
            (Kolibri 1).
        expert_bias: the linears of the experts have biases.
        weighs_input: an expert's input is multiplied by its weight, and not its output (Llama 4); tokens go
            to one expert then.
        branch_norms: the shared expert, the others and the router each norm the input with a weight of their
            own, and the outputs of the first two are normed before they are added (Gemma 4).
        output_scale: the weights of an expert are multiplied by a number of its own, after `renormalize`.
        latent_size: the routed experts read so many numbers of a token, which a linear computes of what the
            layer gives them, and another linear computes the layer's output of their sum; 0 for none. The
            router and the shared expert read what the layer gives (Nemotron 3 Super).
        latent_bias: these two linears have biases.
        caps_first: the caps of the experts (`LayerShape.expert_cap`, and the `ffn_cap` of the shared one) are
            those of gates before their activation, and not of what they become (Hy4).
        post_norm: the sum of the outputs of all experts, the shared one among them, is normed before it is
            added to the stream, by `ffn_post_norm` of the layer (A.X K1).
        table_size: the tokens of a table that chooses the experts of each by its id, and the router weighs
            them (DeepSeek-V4); 0 where the router chooses.
        jitter: the share of a logit within which `sparsemixer` compares others with it, either way.
        always: so many of the experts, the last ones, are chosen by every token, and count in `top_k`; they
            have no selection bias, and the others do (Inkling).
        one_output_scale: all weights are multiplied by one number, a parameter of the layer.
    """

    num_experts: int
    top_k: int
    expert_size: int
    shared_size: int = 0
    shared_gate: bool = False
    shared_scale: float = 1.0
    score: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    router_bias: bool = False
    selection_bias: bool = False
    biased_logits: bool = False
    expert_bias: bool = False
    weighs_input: bool = False
    branch_norms: bool = False
    output_scale: bool = False
    latent_size: int = 0
    latent_bias: bool = False
    post_norm: bool = False
    caps_first: bool = False
    jitter: float = 0.0
    zeroes_groups: bool = False
    always: int = 0
    one_output_scale: bool = False
    table_size: int = 0

    def __post_init__(self) -> None:
        assert self.score in SCORES
        assert 1 <= self.top_k <= self.num_experts
        assert self.num_experts % self.num_groups == 0
        assert 1 <= self.top_groups <= self.num_groups
        assert self.top_k <= self.top_groups * (self.num_experts // self.num_groups)
        assert self.group_best in (1, 2)
        assert not self.weighs_input or (self.top_k == 1 and self.score == "sigmoid" and not self.renormalize)
        assert not self.branch_norms or self.shared_size
        assert self.shared_scale == 1 or (self.shared_size and not self.shared_gate and not self.branch_norms)
        assert not self.latent_size or not (self.branch_norms or self.weighs_input)
        assert self.latent_size or not self.latent_bias
        assert not self.biased_logits or (
            self.selection_bias and self.score == "sigmoid" and self.num_groups == 1
        )
        plain = not (self.renormalize or self.selection_bias or self.num_groups > 1)
        assert self.score != "sparsemixer" or (self.top_k == MIXED and plain)
        assert self.score == "sparsemixer" or not self.jitter
        assert not self.zeroes_groups or (self.selection_bias and self.score == "sigmoid")
        plain = self.score == "sigmoid" and self.selection_bias and self.num_groups == 1
        assert not self.always or (self.always < self.top_k and plain and not self.biased_logits)
        assert not (self.one_output_scale and self.output_scale)
        of_router = self.selection_bias or self.num_groups > 1 or self.score not in OF_TOKENS
        assert not self.table_size or not (of_router or self.weighs_input or self.branch_norms)

    @property
    def num_chosen(self) -> int:
        """The experts among which tokens choose: all but those that every token chooses."""
        return self.num_experts - self.always

    @property
    def scales_weights(self) -> bool:
        """Whether parameters of the layer multiply the weights of experts."""
        return self.output_scale or self.one_output_scale

    @property
    def compares_logits(self) -> bool:
        """Whether logits decide the choice: softmax keeps their order, and they do not underflow; or the
        bias is added to them."""
        plain = not self.selection_bias and self.num_groups == 1
        of_logits = self.biased_logits or self.score in ("softmax_topk", "sparsemixer")
        return of_logits or (self.score == "softmax" and plain)

    @property
    def gap(self) -> float:
        """The part of the larger of a logit's size and the largest logit by which it may be less than that
        one and counts in the weight that `sparsemixer` gives."""
        return 2 * self.jitter

    @property
    def changes_input(self) -> bool:
        """Whether an expert reads something else than what the layer gives all of them."""
        return self.weighs_input or self.branch_norms or self.latent_size > 0

    @property
    def of_any_choice(self) -> "Experts":
        """The facts but for what chooses the experts of a token, which may differ between layers."""
        if self.score != "sqrt_softplus":
            return self
        return dataclasses.replace(self, table_size=0, selection_bias=False)

    def width(self, hidden_size: int) -> int:
        """Return how many numbers of a token a routed expert reads, and adds to."""
        return self.latent_size or hidden_size

    @property
    def active_size(self) -> int:
        """FFN channels that one token computes."""
        return self.top_k * self.expert_size + self.shared_size

    @property
    def shared_parts(self) -> int:
        """The number of experts of the size of the others that add up to the shared one; 0 where they do not
        fill it, or where it reads something of its own."""
        apart = self.changes_input or self.expert_bias
        return 0 if apart or self.shared_size % self.expert_size else self.shared_size // self.expert_size

    def activation_of(self, activation: str) -> str:
        """Return the activation of the routed experts of a model with this one."""
        return SILU_CAPPED if self.caps_first else activation

    def expected_hit(self, num_rows: int) -> float:
        """Return how many experts so many rows are routed to in all, if every choice is equally likely:
        E (1 - (1 - K / E)^rows), and those that every row chooses."""
        frac = (self.top_k - self.always) / self.num_chosen
        return self.always + self.num_chosen * (1 - (1 - frac) ** num_rows)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The modules of all experts, relative to the layer: the shared one first."""
        shared = ("moe.shared",) if self.shared_size else ()
        return (*shared, *(f"moe.experts.{idx}" for idx in range(self.num_experts)))

    def dense_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return parameter -> shape of what is in no linear group and so is never quantized."""
        shapes: dict[str, tuple[int, ...]] = {"moe.router.weight": (self.num_experts, hidden_size)}
        if self.router_bias:
            shapes["moe.router.bias"] = (self.num_experts,)
        if self.selection_bias:
            shapes["moe.selection_bias"] = (self.num_chosen,)
        if self.one_output_scale:
            shapes["moe.factor"] = (1,)
        if self.shared_gate:
            shapes["moe.shared_gate.weight"] = (1, hidden_size)
        if self.branch_norms:
            shapes |= dict.fromkeys((f"moe.{name}.weight" for name in BRANCH_NORMS), (hidden_size,))
        if self.output_scale:
            shapes["moe.output_scale"] = (self.num_experts,)
        if self.table_size:
            shapes[EXPERTS_OF_TOKENS] = (self.table_size, self.top_k)
        if self.latent_size:
            rows = {LATENT_IN: (self.latent_size, hidden_size), LATENT_OUT: (hidden_size, self.latent_size)}
            shapes |= {f"moe.{name}.weight": shape for name, shape in rows.items()}
            if self.latent_bias:
                shapes |= {f"moe.{name}.bias": shape[:1] for name, shape in rows.items()}
        return shapes

    def to_json(self) -> dict[str, Any]:
        """Return the facts that are not the default."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.default is dataclasses.MISSING or getattr(self, field.name) != field.default
        }

    @staticmethod
    def from_json(stored: Fields) -> "Experts":
        """Read what `to_json` wrote; `Fields` raises its error for a value that is missing, unknown, of
        another type or out of range."""
        if odd := sorted(set(stored) - {field.name for field in dataclasses.fields(Experts)}):
            raise stored.wrong(odd[0], "a field", "absent: no fact of experts has that name")
        sizes = {
            "num_experts": (1, MAX_EXPERTS, None),
            "top_k": (1, MAX_EXPERTS, None),
            "expert_size": (1, MAX_EXPERT_SIZE, None),
            "shared_size": (0, MAX_EXPERT_SIZE, 0),
            "num_groups": (1, MAX_EXPERTS, 1),
            "top_groups": (1, MAX_EXPERTS, 1),
            "group_best": (1, 2, 2),
            "latent_size": (0, MAX_EXPERT_SIZE, 0),
            "always": (0, MAX_EXPERTS, 0),
            "table_size": (0, MAX_EXPERT_SIZE, 0),
        }
        facts: dict[str, Any] = {
            name: stored.integer(name, low, high, default=default)
            for name, (low, high, default) in sizes.items()
        }
        for name in (
            "shared_gate",
            "renormalize",
            "router_bias",
            "selection_bias",
            "biased_logits",
            "expert_bias",
            "weighs_input",
            "branch_norms",
            "output_scale",
            "latent_bias",
            "post_norm",
            "caps_first",
            "zeroes_groups",
            "one_output_scale",
        ):
            facts[name] = stored.flag(name, default=False)
        facts["score"] = stored.text("score", default="softmax")
        for name in ("scale", "shared_scale"):
            facts[name] = stored.number(name, -MAX_SCALE, MAX_SCALE, default=1.0)
        facts["jitter"] = stored.number("jitter", 0, 1, default=0.0)
        return checked(facts, stored)


def checked(facts: Mapping[str, Any], stated: Fields) -> Experts:
    """Return the facts once they fit one another; `stated` raises its error where they do not."""
    if facts.get("score", "softmax") not in SCORES:
        raise stated.wrong("score", facts["score"], f"one of {', '.join(SCORES)}")
    num_experts = facts["num_experts"]
    top_k = facts["top_k"]
    if top_k > num_experts:
        raise stated.wrong("top_k", top_k, f"at most the number of experts, {num_experts}")
    if facts.get("shared_size", 0) > MAX_EXPERT_SIZE:
        raise stated.wrong("shared_size", facts["shared_size"], f"at most {MAX_EXPERT_SIZE}")
    if facts.get("branch_norms") and not facts.get("shared_size"):
        raise stated.wrong("shared_size", 0, "at least 1 where branches are normed apart")
    apart = facts.get("shared_gate") or facts.get("branch_norms") or not facts.get("shared_size")
    if facts.get("shared_scale", 1.0) != 1 and apart:
        raise stated.wrong("shared_scale", facts["shared_scale"], "1 but for a shared expert without a gate")
    if facts.get("weighs_input") and top_k != 1:
        raise stated.wrong("top_k", top_k, "1 where a router weighs the inputs of experts")
    if facts.get("weighs_input") and (facts["score"] != "sigmoid" or facts.get("renormalize")):
        raise stated.wrong("score", facts["score"], "sigmoid where a router weighs the inputs of experts")
    if facts.get("latent_size") and (facts.get("branch_norms") or facts.get("weighs_input")):
        raise stated.wrong("latent_size", facts["latent_size"], "0 where inputs are normed apart or weighed")
    if facts.get("latent_bias") and not facts.get("latent_size"):
        raise stated.wrong("latent_size", 0, "at least 1 where the linears of latents have biases")
    is_biased = facts.get("selection_bias") and facts.get("score") == "sigmoid"
    if facts.get("biased_logits") and not (is_biased and facts.get("num_groups", 1) == 1):
        raise stated.wrong(
            "score", facts.get("score"), "sigmoid, with a bias and no groups, where logits have it"
        )
    if facts.get("zeroes_groups") and not is_biased:
        raise stated.wrong("score", facts.get("score"), "sigmoid, with a bias, where other groups score 0")
    of_router = facts.get("selection_bias") or facts.get("num_groups", 1) > 1
    changes = facts.get("weighs_input") or facts.get("branch_norms")
    fits_table = facts.get("score") in OF_TOKENS and not of_router and not changes
    if facts.get("table_size") and not fits_table:
        raise stated.wrong(
            "score", facts.get("score"), f"one of {', '.join(OF_TOKENS)}, alone, where a table chooses"
        )
    is_mixed = facts.get("score") == "sparsemixer"
    if is_mixed and top_k != MIXED:
        raise stated.wrong("top_k", top_k, f"{MIXED} where one expert is chosen after the other")
    others = ("renormalize", "selection_bias")
    if is_mixed and (any(facts.get(each) for each in others) or facts.get("num_groups", 1) > 1):
        raise stated.wrong("score", "sparsemixer", "another one with groups, a bias or divided weights")
    if facts.get("jitter", 0.0) and not is_mixed:
        raise stated.wrong("jitter", facts["jitter"], "0 where the score is not sparsemixer")
    if always := facts.get("always", 0):
        if always >= top_k:
            raise stated.wrong("always", always, f"less than the experts of a token, {top_k}")
        if not is_biased or facts.get("num_groups", 1) > 1 or facts.get("biased_logits"):
            wanted = "sigmoid, with a bias of scores and no groups, where all tokens choose some experts"
            raise stated.wrong("score", facts.get("score"), wanted)
    if facts.get("one_output_scale") and facts.get("output_scale"):
        raise stated.wrong("output_scale", True, "one number of each expert, or one of all")
    groups = facts.get("num_groups", 1)
    top_groups = facts.get("top_groups", 1)
    if num_experts % groups or top_groups > groups:
        raise stated.wrong("num_groups", groups, f"a divisor of {num_experts} experts, at least {top_groups}")
    if groups > 1 and (num_experts // groups < 2 or top_k > top_groups * (num_experts // groups)):
        raise stated.wrong("num_groups", groups, f"so few that {top_k} experts can be chosen")
    return Experts(**facts)

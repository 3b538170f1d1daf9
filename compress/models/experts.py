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

from compress.models.expert_checks import MIXED, OF_TOKENS, SCORES, check_experts
from compress.models.hyper_connection import HYPER_PARAMETERS
from compress.untrusted.fields import Fields

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
LATENT_NORM = "moe.latent_norm"
OUT_NORM = "moe.out_norm"
"""The norms of latents and of the outputs of experts (`Experts.latent_norms`)."""
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
    "mamba1.A_log",
    "mamba1.D",
    "attn.compressor.positions",
    "attn.indexer.positions",
    "hyper.sum_gates",
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
        latent_norms: the latents are normed, and the output of each routed expert is multiplied by weights,
            the same for all, and then normed (RMS), before the router's weight (Muse Spark).
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
        router_scale: factor of the router's logits.
        zero_experts: so many more experts among which tokens choose, after the others, return their input
            and have no weights (LongCat-Flash, arXiv 2509.01322).
        delayed: the output of the routed experts is added after the next layer, and that of the shared one
            by this layer (`shortcut.py`).
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
    latent_norms: bool = False
    router_scale: float = 1.0
    zero_experts: int = 0
    delayed: bool = False

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
        assert self.latent_size or not (self.latent_bias or self.latent_norms)
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
        own = self.shared_gate or self.branch_norms or self.post_norm
        assert not self.delayed or (self.shared_size and not own and self.shared_scale == 1)
        changed = (
            self.always or self.table_size or self.changes_input or self.post_norm or self.scales_weights
        )
        assert not self.zero_experts or not (changed or self.num_groups > 1)

    @property
    def num_chosen(self) -> int:
        """The experts among which tokens choose: all but those that every token chooses, and those that have
        no weights."""
        return self.num_experts + self.zero_experts - self.always

    def served_choices(self, num_choices: int) -> tuple[int, int]:
        """Return the rows that kernels of experts have of a token that goes to so many experts, and how many
        experts each of these rows goes to: a row for each choice where the outputs of experts are normed one
        by one, else one row."""
        return (self.top_k, 1) if self.latent_norms else (1, num_choices)

    @property
    def of_router(self) -> "Experts":
        """The facts by which tokens choose: experts that have no weights are as any other."""
        num_experts = self.num_experts + self.zero_experts
        return (
            dataclasses.replace(self, num_experts=num_experts, zero_experts=0) if self.zero_experts else self
        )

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
        fill it, where it reads something of its own, or where experts without weights follow the others by
        index, as parts of the shared one would."""
        apart = self.changes_input or self.expert_bias or self.delayed or self.zero_experts
        return 0 if apart or self.shared_size % self.expert_size else self.shared_size // self.expert_size

    def activation_of(self, activation: str) -> str:
        """Return the activation of the routed experts of a model with this one."""
        return SILU_CAPPED if self.caps_first else activation

    def expected_hit(self, num_rows: int) -> float:
        """Return how many experts so many rows are routed to in all, if every choice is equally likely:
        E (1 - (1 - K / E)^rows), and those that every row chooses; of those that have weights."""
        frac = (self.top_k - self.always) / self.num_chosen
        return self.always + (self.num_experts - self.always) * (1 - (1 - frac) ** num_rows)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The modules of all experts, relative to the layer: the shared one first."""
        shared = ("moe.shared",) if self.shared_size else ()
        return (*shared, *(f"moe.experts.{idx}" for idx in range(self.num_experts)))

    def dense_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return parameter -> shape of what is in no linear group and so is never quantized."""
        num_rows = self.num_experts + self.zero_experts
        shapes: dict[str, tuple[int, ...]] = {"moe.router.weight": (num_rows, hidden_size)}
        if self.router_bias:
            shapes["moe.router.bias"] = (num_rows,)
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
        if self.latent_norms:
            names = (f"{name}.weight" for name in (LATENT_NORM, OUT_NORM))
            shapes |= dict.fromkeys(names, (self.latent_size,))
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
            "zero_experts": (0, MAX_EXPERTS, 0),
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
            "latent_norms",
            "post_norm",
            "caps_first",
            "zeroes_groups",
            "one_output_scale",
            "delayed",
        ):
            facts[name] = stored.flag(name, default=False)
        facts["score"] = stored.text("score", default="softmax")
        for name in ("scale", "shared_scale", "router_scale"):
            facts[name] = stored.number(name, -MAX_SCALE, MAX_SCALE, default=1.0)
        return checked({**facts, "jitter": stored.number("jitter", 0, 1, default=0.0)}, stored)


def checked(facts: Mapping[str, Any], stated: Fields) -> Experts:
    """Return the facts once they fit one another; `stated` raises its error where they do not."""
    check_experts(facts, stated, max_size=MAX_EXPERT_SIZE)
    return Experts(**facts)

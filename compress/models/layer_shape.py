"""The shape of a decoder layer: widths, rope, and its groups of linears. Data only."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from compress.models.alibi import Alibi
from compress.models.compressed import Compressed
from compress.models.experts import SILU_CAPPED, Experts
from compress.models.indexer import BlockIndexer, EntryIndexer, Indexer
from compress.models.latent import Latent
from compress.models.layer_groups import attention_groups_of, ffn_groups_of, units_of
from compress.models.linear_groups import (
    LinearGroup,
)
from compress.models.ngrams import NGrams
from compress.models.recurrence import Recurrence
from compress.models.relative_logits import RelativeLogits
from compress.models.residual_conv import ResidualConvs


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864) of one layer and the rescaling of its frequencies.

    `rotary_dim` dimensions of a head rotate, 0 for all; the others have frequency zero. Where these are
    `leading`, they are the first of a head as linears return it, and their two halves turn with one another;
    elsewhere linears return the two halves of the whole head that do (`rope.py`). `linear` divides
    every frequency by `factor` (arXiv 2306.15595); `llama3` and `yarn` (arXiv 2309.00071) rescale each
    dimension by its wavelength against `original_max_position`; `longrope` (arXiv 2402.13753) divides each by
    its own of `short_factors`, or of `long_factors` once a sequence is longer than `original_max_position`;
    `proportional` (Gemma 4) keeps the exponents of the whole head. Each frequency is multiplied by exp(a) of
    its own of the `exponents` a, which were trained, where there are any.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    rotary_dim: int = 0
    leading: bool = False
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    exponents: tuple[float, ...] = ()


Half = Literal["mixer", "ffn"]
"""A half of a layer: attention or what takes its place, and the FFN or the experts."""
HALVES: tuple[Half, ...] = ("mixer", "ffn")
XIELU = "xielu"
"""The activation that has parameters (`xielu.py`)."""
UNGATED = ("relu", "relu2", XIELU)
"""The activations of FFNs that have no gate, `down(act(up(x)))`, by their names in `transformers`."""
GATED_OR_NOT = ("gelu", "gelu_pytorch_tanh")
"""The activations of FFNs with gates and of FFNs without; all others but `UNGATED` are those of gates."""
HeadGate = Literal["sigmoid", "softplus"]
"""The function of a gate that attention has for each head."""
HEAD_GATES: tuple[HeadGate, ...] = ("sigmoid", "softplus")


@dataclass(frozen=True)
class LayerShape:
    """The widths of one decoder layer. `window` is the number of positions that a query sees including
    itself, None for all; with a `chunk`, positions are cut into chunks of so many, and a query sees none of
    an earlier one. `rope` is None where positions are not encoded (NoPE, arXiv 2305.19466). A layer
    with `experts` has them instead of one FFN, and its `intermediate_size` is that of one expert. Where
    `keys_are_values`, the outputs of `attn.k`, neither normed nor rotated, are the values, too, and the layer
    has no `attn.v`. With a `latent` it has the linears of `latent.py` instead. With an `output_gate`, what
    attention returns is multiplied by the sigmoid of `attn.gate` of its input (arXiv 2505.06708); with a
    `head_gate`, by this function of one number for each head, which `attn.head_gate` computes of the input
    and no scheme quantizes. A layer with a `recurrence` has it in place of attention, and its heads are those
    that other layers of the model have; a `joint` layer has both, which read one input and whose outputs are
    added. A layer with a `kv_source` has no `attn.k` and no `attn.v`, or no `attn.kv_down`: it attends to
    the keys and values, or to the latents, of the layer with this index (arXiv 2405.12981). A layer has both
    halves, or the one that is its `only_half`; the widths of the other are those that other layers have
    then. An FFN, or an expert, that is not `gated` has no gate; its activation is one of `UNGATED`, or that
    of an FFN one of `GATED_OR_NOT`. The values of a head have its dimensions, or `narrow_value_dim` where
    they are narrower than the keys; a cache stores them with zeros up to the width of the keys. With a
    `block_indexer` a query attends to the blocks of positions that it chooses (`indexer.py`). Activated gates
    of the FFN, or of the shared expert, are at most its `ffn_cap`, and the outputs of its `up` between
    -`ffn_cap` and `ffn_cap` (Step 3.7); those of the routed experts have the `expert_cap`, which is that of
    gates before their activation with `Experts.caps_first`; with `caps_first` so is the `ffn_cap` of an FFN
    in a layer without experts (GLM-5.3). With a `gate_sparsity`, the share of the outputs
    of `ffn.gate` that become 0 if they are normally distributed, each becomes its excess over that quantile
    of a normal distribution with the mean and the deviation of its row (arXiv 2506.06644, `ffn.py`). The
    norms before attention and before experts have gates of `norm_gate_rank`, 0 for none (`gated_norm.py`).
    With `relative` logits, scores have a term of the query and of the distance of the key
    (`relative_logits.py`). With `residual_convs`, convolutions over so many positions are added to keys,
    to values and to the outputs of both halves (`residual_conv.py`). The outputs of a `scaled_ffn` are
    multiplied by a number of its own. With `ngrams` a layer adds embeddings of n-grams to the residual
    before its first half (`ngrams.py`). With `compressed` facts it has the linears of `compressed.py`,
    one KV head, and a window. With an `out_norm` what each head of attention returns is normed (RMS), without
    a weight, before its gate. With `sub_norms` the inputs of `attn.o` and of `ffn.down` are normed, each by a
    norm with weights (Sub-LN, arXiv 2210.06423). With `alibi`, scores fall with the distance of the key, by a
    slope of each head (`alibi.py`). With `o_bias`, `attn.o` has a bias in this layer, whatever others have.
    With `bare_input` attention reads the residual as it is, without a norm before it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: Rope | None
    window: int | None = None
    experts: Experts | None = None
    keys_are_values: bool = False
    chunk: int | None = None
    latent: Latent | None = None
    output_gate: bool = False
    head_gate: HeadGate | None = None
    recurrence: Recurrence | None = None
    kv_source: int | None = None
    only_half: Half | None = None
    gated: bool = True
    joint: bool = False
    narrow_value_dim: int | None = None
    block_indexer: BlockIndexer | None = None
    ffn_cap: float | None = None
    expert_cap: float | None = None
    gate_sparsity: float | None = None
    norm_gate_rank: int = 0
    relative: RelativeLogits | None = None
    residual_convs: int | None = None
    scaled_ffn: bool = False
    ngrams: NGrams | None = None
    compressed: Compressed | None = None
    out_norm: bool = False
    caps_first: bool = False
    sub_norms: bool = False
    alibi: Alibi | None = None
    o_bias: bool = False
    bare_input: bool = False

    @property
    def has_mixer(self) -> bool:
        """Whether the layer has attention, or a recurrence in its place."""
        return self.only_half != "ffn"

    @property
    def has_ffn(self) -> bool:
        """Whether the layer has an FFN, or experts in its place."""
        return self.only_half != "mixer"

    @property
    def norms_experts(self) -> bool:
        """Whether the layer has experts with a norm of what they add to the stream."""
        return self.experts is not None and self.experts.post_norm

    @property
    def gated_norms(self) -> tuple[str, ...]:
        """The norms of the stream that have gates, by their canonical names."""
        if not self.norm_gate_rank:
            return ()
        has_gates = {"attn_norm": self.has_mixer, "ffn_norm": self.experts is not None}
        return tuple(name for name, has_gate in has_gates.items() if has_gate)

    @property
    def has_output_gate(self) -> bool:
        """Whether numbers that attention returns have gates, of its input or of the latent of its queries."""
        return self.output_gate or (self.latent is not None and self.latent.gated)

    def cap_of(self, module: str) -> float | None:
        """Return the cap of an FFN, or of an expert, by its canonical name."""
        return self.expert_cap if module.startswith("moe.experts.") else self.ffn_cap

    def activation_of(self, module: str, activation: str) -> str:
        """Return the activation of an FFN, or an expert, by its canonical name, given that of the model."""
        if self.cap_of(module) is None:
            return activation
        caps_first = self.caps_first if self.experts is None else self.experts.caps_first
        return SILU_CAPPED if caps_first else activation

    @property
    def shared_parts(self) -> int:
        """The number of routed experts that add up to the shared one (`Experts.shared_parts`); 0 where its
        gate has another cap, or one in another place."""
        if self.experts is None or self.experts.caps_first or self.ffn_cap != self.expert_cap:
            return 0
        return self.experts.shared_parts

    @property
    def attends(self) -> bool:
        """Whether the layer has attention."""
        return self.has_mixer and (self.recurrence is None or self.joint)

    @property
    def indexer(self) -> Indexer | BlockIndexer | EntryIndexer | None:
        """The indexer of the layer; None where queries attend to all keys or those that another chooses."""
        if self.compressed is not None:
            return self.compressed.indexer
        return self.block_indexer if self.latent is None else self.latent.indexer

    def index_numbers(self, num_positions: int) -> int:
        """Return the numbers of a position that a cache holds for the indexer; 0 where sequences of at most
        `num_positions` need none. Numbers have pages of their own, or in compressed attention the layer's."""
        indexer = self.indexer
        return 0 if indexer is None or num_positions <= indexer.top_k else indexer.cached_numbers

    @cached_property
    def attention_groups(self) -> tuple[LinearGroup, ...]:
        """The linear groups of attention in execution order: first `qkv`, by which it reads the stream, and
        last `o`; none where the layer has an FFN only. In a joint layer the linears of the recurrence come
        after those of attention in `qkv`, and its own last linear after `o`."""
        return attention_groups_of(self)

    def num_turns(self, linears: Collection[str]) -> int:
        """Return the turns that rows take in a tensor that holds these linears of a layer: those of an FFN
        row by row, others head by head, of KV heads, each with its query heads, where keys are among
        them."""
        if "ffn.up" in linears:
            return self.intermediate_size
        if self.recurrence is not None and not self.joint:
            return self.recurrence.num_key_heads
        return self.num_kv_heads if "attn.k" in linears else self.num_heads

    @property
    def leading_dim(self) -> int:
        """The first dimensions of heads of q and k whose two halves turn with one another, 0 where the halves
        of the whole head do."""
        return self.rope.rotary_dim if self.rope is not None and self.rope.leading else 0

    @property
    def turning_dim(self) -> int:
        """The dimensions of a head of attention that turn, 0 without a rope."""
        return 0 if self.rope is None else self.rope.rotary_dim or self.head_dim

    @property
    def query_rank(self) -> int:
        """The width of the latent of queries, 0 where there is none."""
        return 0 if self.latent is None else self.latent.q_rank

    @property
    def latent_norm_sizes(self) -> dict[str, int]:
        """The norms of latents, by module, and how many numbers each spans."""
        if self.compressed is not None:
            return {"attn.q_latent_norm": self.compressed.q_rank, "attn.kv_norm": self.head_dim}
        if self.latent is None:
            return {}
        return self.latent.norm_sizes(reads_anothers=self.kv_source is not None)

    @property
    def has_latent_norms(self) -> bool:
        """Whether linears of attention read normed latents."""
        return self.latent is not None or self.compressed is not None

    @property
    def has_entries(self) -> bool:
        """Whether attention has compressed entries."""
        return self.compressed is not None and self.compressed.rate > 0

    @property
    def value_dim(self) -> int:
        """The dimensions of the values of a head, of which `attn.o` reads those of all heads."""
        if self.latent is not None:
            return self.latent.value_dim
        return self.narrow_value_dim or self.head_dim

    @property
    def cached_numbers(self) -> int:
        """The numbers of one position that a cache holds: keys and values, or latents; none of a recurrence,
        whose state is the same for sequences of any length, nor of an FFN, nor of a layer that reads those of
        another."""
        if not self.attends or self.kv_source is not None:
            return 0
        if self.latent is not None:
            return self.latent.cached_width
        if self.compressed is not None:
            return self.head_dim + self.compressed.raw_width(self.head_dim)
        return 2 * self.num_kv_heads * self.head_dim

    def state(self, hidden_size: int) -> Recurrence | None:
        """Return the widths of the state that a sequence has of the layer, of its recurrence or of its
        convolutions; None where it has neither."""
        if self.residual_convs is None:
            return None if self.recurrence is None else self.recurrence.of_state
        return ResidualConvs.of(self.num_kv_heads * self.head_dim, hidden_size, self.residual_convs)

    def states(self, hidden_size: int) -> tuple[Recurrence, ...]:
        """Return the widths of all states that a sequence has of the layer: `state`, and those of embeddings
        of n-grams."""
        own = self.state(hidden_size)
        of_ngrams = () if self.ngrams is None else self.ngrams.recurrences(hidden_size)
        return of_ngrams if own is None else (own, *of_ngrams)

    @cached_property
    def groups(self) -> tuple[LinearGroup, ...]:
        """The linear groups of this layer, in execution order. Each expert has two of its own."""
        return (*self.attention_groups, *(ffn_groups_of(self) if self.has_ffn else ()))

    @cached_property
    def units(self) -> tuple[LinearGroup, ...]:
        """The sets of linears that have one scheme: the linear groups, those of all experts as one, which
        consumers compute as one product, and those of all groups of heads, which are one tensor."""
        return units_of(self)

    def unit_of(self, group: LinearGroup) -> LinearGroup:
        """Return the unit that a linear group belongs to."""
        tap = group.tap.partition(".")[0]
        return next(unit for unit in self.units if unit.tap == tap)

    @cached_property
    def _taps(self) -> dict[str, str]:
        return {linear: group.tap for group in self.groups for linear in group.linears}

    @property
    def linears(self) -> dict[str, str]:
        """Canonical linear name -> the tap that observes its input, in execution order."""
        return dict(self._taps)

    @property
    def ffn(self) -> str:
        """The name of the module between the FFN norms: `ffn`, or `moe` where the layer has experts."""
        return "ffn" if self.experts is None else "moe"

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """The numbers of query heads and KV heads, the head dimension and the FFN channels."""
        return self.num_heads, self.num_kv_heads, self.head_dim, self.intermediate_size

    def token_frac(self, linear: str) -> float:
        """Return the share of all tokens that go through a linear, if the router treats experts alike."""
        if self.experts is None or not linear.startswith("moe.experts."):
            return 1.0
        facts = self.experts
        if int(linear.split(".")[2]) >= facts.num_chosen:
            return 1.0
        return (facts.top_k - facts.always) / facts.num_chosen

    def around_experts(self, hidden_size: int) -> int:
        """Return the weights of the two linears around experts that act on latents."""
        return 0 if self.experts is None else 2 * hidden_size * self.experts.latent_size

    def linear_shape(self, linear: str, hidden_size: int) -> tuple[int, int]:
        """Return [O, I] of a canonical linear of this layer."""
        if self.experts is not None and linear.startswith("moe."):
            shared = linear.startswith("moe.shared.")
            width = self.experts.shared_size if shared else self.experts.expert_size
            read = hidden_size if shared else self.experts.width(hidden_size)
            return (read, width) if linear.endswith(".down") else (width, read)
        if self.recurrence is not None and linear.startswith(f"{self.recurrence.module}."):
            return self.recurrence.linear_shapes(hidden_size)[linear]
        q_size = self.num_heads * self.head_dim
        k_size = self.num_kv_heads * self.head_dim
        ffn_size = self.intermediate_size
        shapes = {
            "attn.q": (q_size, hidden_size),
            "attn.k": (k_size, hidden_size),
            "attn.v": (self.num_kv_heads * self.value_dim, hidden_size),
            "attn.gate": (self.num_heads * self.value_dim, hidden_size),
            "attn.o": (hidden_size, self.num_heads * self.value_dim),
            "ffn.gate": (ffn_size, hidden_size),
            "ffn.up": (ffn_size, hidden_size),
            "ffn.down": (hidden_size, ffn_size),
        }
        if self.latent is not None:
            still_dim = self.head_dim - self.latent.rope_dim
            shapes |= {
                "attn.q_down": (self.latent.q_rank, hidden_size),
                "attn.q_up": self.latent.q_up_shape(self.num_heads, self.head_dim),
                "attn.kv_down": (self.latent.kv_rank + self.latent.rope_dim, hidden_size),
                "attn.kv_up": (self.num_heads * (still_dim + self.value_dim), self.latent.kv_rank),
            }
        if self.compressed is not None:
            shapes |= self.compressed.linear_shapes(hidden_size, self.num_heads, self.head_dim)
        return shapes[linear]

    def dense_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters that no scheme quantizes, other than norms, sinks and biases of
        linears and the factors of activations and layers."""
        own = (self.state(hidden_size), self.experts, self.latent, self.ngrams)
        parts = [part for part in own if part is not None]
        shapes = {name: shape for part in parts for name, shape in part.dense_shapes(hidden_size).items()}
        if self.compressed is not None:
            shapes |= self.compressed.dense_shapes(hidden_size, self.head_dim)
        if self.head_gate is not None and self.attends:
            shapes["attn.head_gate.weight"] = (self.num_heads, hidden_size)
        for name in self.gated_norms:
            shapes[f"{name}.gate_in.weight"] = (self.norm_gate_rank, hidden_size)
            shapes[f"{name}.gate_out.weight"] = (hidden_size, self.norm_gate_rank)
        if self.relative is not None:
            shapes |= self.relative.dense_shapes(self.num_heads, hidden_size)
        if self.scaled_ffn:
            shapes["ffn.factor"] = (1,)
        return shapes if self.block_indexer is None else shapes | self.block_indexer.dense_shapes(hidden_size)

    def group_shape(self, group: LinearGroup, hidden_size: int) -> tuple[int, int]:
        """Return [O, I] of the product that computes all linears of a group, their rows stacked."""
        shapes = [self.linear_shape(linear, hidden_size) for linear in group.linears]
        return sum(rows for rows, _ in shapes), shapes[0][1]

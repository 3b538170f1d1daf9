"""The facts of a decoder: shapes, rope, norms, biases. Data only, without modules and tensors.

An `Arch` holds everything that the canonical decoder needs and nothing about names on disk, which are in
`family.py`. Widths are stated per layer, because pruning may make them differ. Facts travel as JSON in an
artifact's manifest (`to_json` / `from_json` are inverse).
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from compress.models import arch_params
from compress.models.arch_checks import check_arch
from compress.models.eos import NO_TOKEN, stated_eos
from compress.models.experts import OUT_NORM
from compress.models.gated_residual import GatedResiduals, ResidualFacts
from compress.models.latent import LATENT_EPS
from compress.models.layer_manifest import layer_from_json, layer_to_json
from compress.models.layer_shape import LayerShape
from compress.models.manifest_facts import facts_from_json, facts_to_json
from compress.models.recurrence import Recurrence
from compress.models.recurrences import PREFIXES

DTYPES = ("float64", "float32", "bfloat16", "float16")
FINAL_NORM = "norm"
POST_NORMS = ("attn_post_norm", "ffn_post_norm", OUT_NORM)
"""The canonical names of the norm before the head, and of those of the outputs of half-layers and experts."""
NORMED_OUTPUTS = ("post", "sandwich")
"""The blocks in which the outputs of half-layers are normed."""
OF_NO_BIAS = (*PREFIXES, "attn.o_down.")
"""How the names of linears begin that have no bias in any model."""


@dataclass(frozen=True)
class Arch:
    """All facts of one decoder-only language model.

    `config` keeps the source's `config.json` as it was, so that export writes back every field that does
    not change the function here (token ids, initializer range, ...) and rewrites those that do.

    Facts with a default are those of few families:
        norm: `rms`, or `layer`: the mean is subtracted before (LayerNorm).
        norm_bias: the norms of the stream have a bias.
        qk_norm_bias: the norms of q and k have a bias, the same for each head.
        norm_offset: is added to the weight of every norm, 1 where checkpoints store w - 1; with
            `plain_final_norm` not to that of the last one.
        post_norm_eps: the eps of the norms of the outputs of half-layers; None for `norm_eps`.
        block: where a half-layer is normed: its input (`pre`), its output (`post`), both (`sandwich`), or
            one norm for the inputs of both halves, which run side by side (`parallel`), or one for each
            with `own_ffn_norm`.
        unit_norms: the norms of the stream have no weights.
        recurrent_block: the block of layers with a recurrence in place of attention; None for `block`.
        recurrent_norm_eps: is added to the mean square by the norms of the outputs of recurrences; None for
            `norm_eps`.
        own_ffn_norm: in a `parallel` block the FFN has a norm of its own.
        whole_qk_norm: the norms of q and k, if there are any, span all heads at once.
        own_qk_norm: those norms have a weight of its own for each head.
        rotates_first: each head of q and k is normed after it is rotated, and not before.
        v_norm: each head of the values is normed (RMS), without a weight.
        layer_scalar: the output of a layer is multiplied by a number of its own.
        embed_scale, residual_scale, logit_scale: factors of the embedding, of the output of each half-layer,
            and of the logits.
        logit_softcap, attn_softcap: c in c tanh(x / c), applied to the logits and to attention scores.
        attn_scale: factor of scores; None for 1 / sqrt(head dimension), or its square, `inverse_scale`.
        linear_factors: linears of layers, by their canonical names, and what their outputs are multiplied by.
        query_growth: (b, n): the query at position p is multiplied by 1 + b ln(1 + floor((p + o) / n)),
            o = `growth_offset` (arXiv 2501.19399); with `growth_unrotated` in layers without a rope only.
        learned_growth: head h of the query at position p is multiplied by s_h ln(p + 1) + b_h, parameters of
            the layer (the same paper).
        latent_eps: is added to the mean square by the norms of latents.
        unit_qk_norm: each head of q and k is normed (RMS), without a weight, in layers with a rope; with
            `unit_norm_unrotated` in the others, too.
        embed_norm: the embedding of a token is normed, as `norm` states, without a weight, before its scale;
            with `embed_norm_weight` it has one, and a bias with `norm_bias`.
        layer_embed_size: the width of an embedding that each token has for each layer (Gemma 3n and 4,
            "per-layer embeddings"), which the layer adds to its output (`layer_embedding.py`); 0 for none.
        layer_embed_vocab: the tokens that have such embeddings; others have those of token 0. 0 for all.
        head_bias: the linear that computes the logits, which is not the embedding then, has a bias, which
            `logit_scale` does not multiply.
        attn_sinks: each head has one score more than there are keys, to which it attends without a value
            (gpt-oss, arXiv 2309.17453); with `windowed_sinks` in layers with a window only.
        hyper: the residual is several streams (`hyper_connection.py`, `gated_residual.py`), or outputs are
            added to it with gates (`gated_sum.py`), or to what it is normed to (`normed_sum.py`); None for a
            plain sum.
        position_offset: the embedding of a token at position p has the row p + `position_offset` of a learned
            table added to it, after its scale (`embedding.py`); None without such a table. With
            `sinusoidal_positions` that row is computed (`sinusoids.py`) and no parameter.
        altup_streams: the residual of a token is so many streams, of which layers compute the first
            (`altup.py`); 0 for one.
        laurel_rank: the rank of the residual that is added around attention (`laurel.py`); 0 for none.
        qkv_clip: the outputs of the linears of q, k and v are between -`qkv_clip` and it; None for no bound.
        head_vocab: the tokens that have logits, the first ones; other rows of the head pad it. 0 for all.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_position: int
    layers: tuple[LayerShape, ...]
    norm_eps: float
    activation: str
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    ffn_bias: bool
    qk_norm: bool
    dtype: str
    config: Mapping[str, Any]
    norm: str = "rms"
    norm_offset: float = 0.0
    block: str = "pre"
    whole_qk_norm: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    attn_scale: float | None = None
    attn_softcap: float | None = None
    query_growth: tuple[float, int] | None = None
    attn_sinks: bool = False
    v_norm: bool = False
    layer_scalar: bool = False
    growth_offset: int = 0
    growth_unrotated: bool = False
    unit_qk_norm: bool = False
    rotates_first: bool = False
    layer_embed_size: int = 0
    own_qk_norm: bool = False
    plain_final_norm: bool = False
    post_norm_eps: float | None = None
    unit_norm_unrotated: bool = False
    embed_norm: bool = False
    norm_bias: bool = False
    own_ffn_norm: bool = False
    linear_factors: tuple[tuple[str, float], ...] = ()
    recurrent_block: str | None = None
    recurrent_norm_eps: float | None = None
    unit_norms: bool = False
    windowed_sinks: bool = False
    learned_growth: bool = False
    latent_eps: float = LATENT_EPS
    hyper: ResidualFacts | None = None
    head_bias: bool = False
    position_offset: int | None = None
    layer_embed_vocab: int = 0
    altup_streams: int = 0
    laurel_rank: int = 0
    embed_norm_weight: bool = False
    head_vocab: int = 0
    inverse_scale: bool = False
    qk_norm_bias: bool = False
    qkv_clip: float | None = None
    sinusoidal_positions: bool = False

    def __post_init__(self) -> None:
        check_arch(self)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_streams(self) -> int:
        """The streams of the residual of one token."""
        return max(self.altup_streams, 1) if self.hyper is None else self.hyper.num_streams

    @property
    def stream_size(self) -> int:
        """The numbers of the residual of one token: the hidden size, once for each of its streams."""
        return self.hidden_size * self.num_streams

    @property
    def norms_stream(self) -> bool:
        """Whether half-layers have norms of what they read or of their outputs, and the head has one."""
        return not isinstance(self.hyper, GatedResiduals)

    @property
    def num_position_rows(self) -> int:
        """The rows of the learned table of positions, with those before the first position; 0 without one."""
        return arch_params.num_position_rows_of(self)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same widths, as a stock `config.json` requires; dense layers and those
        with experts each have theirs."""
        kinds: list[set[Any]] = [
            {layer.widths for layer in self.layers if layer.experts is None},
            {
                (*layer.widths, layer.experts.of_any_choice)
                for layer in self.layers
                if layer.experts is not None
            },
            {layer.widths[:3] for layer in self.layers},
        ]
        return all(len(kind) <= 1 for kind in kinds)

    @cached_property
    def has_experts(self) -> bool:
        """Whether some layer is a mixture of experts."""
        return any(layer.experts is not None for layer in self.layers)

    @property
    def cached_numbers(self) -> int:
        """The numbers of one position that a cache of all layers holds, without those of indexers."""
        return sum(layer.cached_numbers for layer in self.layers)

    def numbers_cached(self, num_positions: int) -> int:
        """Return the numbers of one position that a cache of all layers holds for sequences of at most so
        many, with those of the indexers that choose keys of them."""
        return self.cached_numbers + sum(layer.index_numbers(num_positions) for layer in self.layers)

    @cached_property
    def kv_sources(self) -> frozenset[int]:
        """The layers whose keys and values later layers read, too."""
        return frozenset(layer.kv_source for layer in self.layers if layer.kv_source is not None)

    @cached_property
    def state_numbers(self) -> int:
        """The numbers of the states of all recurrences, of one sequence."""
        return sum(each.state_numbers for each in self.states)

    @property
    def step_state_bytes(self) -> int:
        """The bytes of float32 states that a decode step reads and writes for each sequence."""
        return 2 * 4 * self.state_numbers

    @cached_property
    def has_latents(self) -> bool:
        """Whether queries, keys and values are linears of latents, in all layers with attention."""
        return any(layer.latent is not None for layer in self.layers if layer.attends)

    @cached_property
    def states(self) -> list[Recurrence]:
        """The widths of all states of the layers that have some: of recurrences, of convolutions or of
        embeddings of n-grams."""
        return [each for layer in self.layers for each in layer.states(self.hidden_size)]

    @cached_property
    def has_recurrences(self) -> bool:
        """Whether some layers have a recurrence, in place of attention or with it."""
        return any(layer.recurrence is not None for layer in self.layers)

    @cached_property
    def has_ngrams(self) -> bool:
        """Whether some layers add embeddings of n-grams to the residual."""
        return any(layer.ngrams is not None for layer in self.layers)

    def has_recurrence(self, module: str) -> bool:
        """Return whether some layers have the recurrence whose module has this name."""
        return any(each.recurrence is not None and each.recurrence.module == module for each in self.layers)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = stated_eos(self.config)
        return tuple(eos) if isinstance(eos, list) else () if eos in (None, NO_TOKEN) else (eos,)

    @property
    def num_linear_params(self) -> int:
        """Weights of all decoder linears (those a weight-only scheme quantizes)."""
        return arch_params.num_linear_params_of(self)

    @property
    def num_active_linear_params(self) -> int:
        """Weights of the decoder linears that one token goes through, and of those around experts on
        latents."""
        return arch_params.num_active_linear_params_of(self)

    @property
    def num_params(self) -> int:
        """All parameters; a tied head counts once. Biases and norms included."""
        return arch_params.num_params_of(self)

    @property
    def num_outer_params(self) -> int:
        """The parameters outside of the layers that are tables or matrices."""
        return arch_params.num_outer_params_of(self)

    @property
    def layer_embed_rows(self) -> int:
        """The rows of the table of embeddings for each layer."""
        return self.layer_embed_vocab or self.vocab_size

    @property
    def num_active_params(self) -> int:
        """All parameters but those of the experts that a token is not routed to; embeddings included."""
        return arch_params.num_active_params_of(self)

    def num_norms(self, layer: LayerShape) -> int:
        """Return how many norms over the hidden size a layer has outside of its mixture of experts."""
        absent = layer.only_half is not None or (layer.experts is not None and layer.experts.branch_norms)
        norms = {"pre": 2, "post": 2, "sandwich": 4, "parallel": 1 + self.own_ffn_norm}
        return norms[self.block_of(layer)] - absent - layer.bare_input + layer.norms_experts

    def block_of(self, layer: LayerShape) -> str:
        """Return where the halves of a layer are normed, as `block` states it."""
        is_recurrent = layer.recurrence is not None and not layer.joint
        return self.recurrent_block if self.recurrent_block is not None and is_recurrent else self.block

    def norms_outputs(self, layer: LayerShape) -> bool:
        """Return whether the outputs of the halves of a layer are normed."""
        return self.block_of(layer) in NORMED_OUTPUTS

    def ends_in_norm(self, layer: LayerShape) -> bool:
        """Return whether the output of the last half of a layer is normed, alone or as that of both is."""
        return self.norms_outputs(layer) or layer.norms_experts

    @property
    def staged(self) -> bool:
        """Whether the halves of layers follow one another, with the residual alone between them."""
        others = self.altup_streams or self.laurel_rank or self.has_ngrams
        return self.block != "parallel" and not others

    @property
    def shares_norm(self) -> bool:
        """Whether both halves of a layer read the output of one norm."""
        return self.block == "parallel" and not self.own_ffn_norm

    def qk_norm_sizes(self, layer: LayerShape) -> tuple[int, int]:
        """Return the sizes of the norms of q and of k: those of a head, or of all heads."""
        of_all = self.whole_qk_norm or self.own_qk_norm
        q_heads, k_heads = (layer.num_heads, layer.num_kv_heads) if of_all else (1, 1)
        return q_heads * layer.head_dim, k_heads * layer.head_dim

    def score_scale(self, layer: LayerShape) -> float:
        """Return the factor of the attention scores of a layer."""
        of_dim = 1 / layer.head_dim if self.inverse_scale else layer.head_dim**-0.5
        return of_dim if self.attn_scale is None else self.attn_scale

    def queries_grow(self, layer: LayerShape) -> bool:
        """Return whether the queries of a layer grow with their position."""
        return self.query_growth is not None and not (self.growth_unrotated and layer.rope is not None)

    def has_sinks(self, layer: LayerShape) -> bool:
        """Return whether the heads of a layer have sinks."""
        return self.attn_sinks and layer.attends and not (self.windowed_sinks and layer.window is None)

    @property
    def norms_rotated(self) -> bool:
        """Whether heads of q and k are normed, and after they are rotated."""
        return self.qk_norm and self.rotates_first

    def has_unit_qk_norm(self, layer: LayerShape) -> bool:
        """Return whether the heads of q and k of a layer are normed without a weight."""
        return self.unit_qk_norm and (self.unit_norm_unrotated or layer.rope is not None)

    def offset_of(self, norm: str) -> float:
        """Return what a norm of the stream, by its canonical name, adds to its weight."""
        return 0.0 if self.plain_final_norm and norm == FINAL_NORM else self.norm_offset

    def eps_of(self, norm: str) -> float:
        """Return what a norm of the stream or of a recurrence, by its name, adds to the mean square."""
        own = self.post_norm_eps if norm in POST_NORMS else None
        own = self.recurrent_norm_eps if norm.startswith(PREFIXES) else own
        return self.norm_eps if own is None else own

    def factor_of(self, linear: str) -> float:
        """Return the factor of the outputs of a linear of a layer, by its canonical name."""
        return dict(self.linear_factors).get(linear, 1.0)

    def fused_activation(self, layer: LayerShape) -> str | None:
        """Return the activation that one product of gate and up may apply; None without a plain gate."""
        plain = layer.gated and layer.ffn_cap is None and layer.gate_sparsity is None and not layer.sub_norms
        return self.activation if plain and self.factor_of("ffn.gate") == 1 else None

    def has_bias(self, linear: str, layer: LayerShape | None = None) -> bool:
        """Return whether a linear has a bias, by its canonical name: in every layer, or in the one given."""
        if linear in ("attn.q_down", "attn.kv_down"):
            return self.qkv_bias
        if linear.endswith("_up") or linear in ("attn.gate", "attn.kv") or linear.startswith(OF_NO_BIAS):
            return False
        if linear in ("attn.q", "attn.k", "attn.v"):
            return self.qkv_bias and not self.has_latents
        if linear.startswith("moe.experts."):
            return self._expert_bias
        return self.ffn_bias if linear != "attn.o" else self.o_bias or (layer is not None and layer.o_bias)

    @cached_property
    def _expert_bias(self) -> bool:
        return any(layer.experts is not None and layer.experts.expert_bias for layer in self.layers)

    def replace(self, **changes: Any) -> "Arch":
        return dataclasses.replace(self, **changes)

    def to_json(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the facts as a manifest stores them: those of the model, and those of each layer. What few
        models have is left out where a model does not have it."""
        return facts_to_json(self), [layer_to_json(layer) for layer in self.layers]

    @staticmethod
    def from_json(facts: Mapping[str, Any], layers: Iterable[Mapping[str, Any]]) -> "Arch":
        """Read what `to_json` wrote; other keys of a layer's mapping (its scheme) are not the
        architecture's.

        Raises:
            StorageError: a value is missing, unknown, of another type or out of range.
        """
        stated = facts_from_json(Arch, facts)
        return Arch(**stated, layers=tuple(layer_from_json(layer, idx) for idx, layer in enumerate(layers)))


PLAIN_FACTS: Mapping[str, Any] = {
    field.name: field.default
    for field in dataclasses.fields(Arch)
    if field.default is not dataclasses.MISSING
}
"""Facts that few families have -> their values in models of the other families."""

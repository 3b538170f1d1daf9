"""MiniMax-Text-01 and MiniMax-M1 (MiniMax, arXiv 2501.08313 and 2506.13585) as `transformers` names them:
most layers have lightning attention (`lightning.py`), every eighth has attention, and all have the experts of
Mixtral. Half-layers add their outputs to the normed residual, each with a factor (`normed_sum.py`). On disk
the rows of queries, keys and values of lightning attention take turns by head.

The decays of lightning attention follow from the indices of layers. `transformers` stores them in buffers of
each such layer, too, which it computes for itself where a checkpoint has none: they stay untouched, and are
not read. A `rotary_dim` in a config is the part of a head that rotates, as in the code that the models were
published with and in vLLM; `transformers` 5.23 rotates whole heads.
"""

from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import FULL, LINEAR
from compress.models.lightning import Lightning, decay_rate_of
from compress.models.limits import MAX_LAYERS, MAX_SIZE, SCALES
from compress.models.mixture import AS_IN_MEMORY, BARE, Mixture, apart, in_one
from compress.models.module_names import LAYER_MODULES
from compress.models.normed_sum import NormedSums
from compress.models.rope_config import part_that_rotates
from compress.untrusted.fields import Fields

FACTORS = {
    "attention_residual": "full_attn_alpha_factor",
    "attention_output": "full_attn_beta_factor",
    "recurrence_residual": "linear_attn_alpha_factor",
    "recurrence_output": "linear_attn_beta_factor",
    "ffn_residual": "mlp_alpha_factor",
    "ffn_output": "mlp_beta_factor",
}
"""The factors of half-layers, and the fields that state them."""
_PART = "partial_rotary_factor"
_BUFFERS = tuple(f"self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"))
_NORM_EPS = 1e-6
"""The eps of the norms of lightning attention, which no config states."""


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers, of which every second has lightning attention where a config states
    none, and the part of a head that rotates."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    types = [LINEAR if idx % 2 else FULL for idx in range(num_layers)]
    implied: dict[str, Any] = {} if config.has("layer_types") else {"layer_types": types}
    if others := sorted(set(config.texts("layer_types", default=())) - {FULL, LINEAR}):
        raise config.wrong("layer_types", others, f"a list of {FULL} and {LINEAR} in this family")
    return {**implied, **rotated_part(config)}


def rotated_part(config: Fields) -> dict[str, Any]:
    """Return the part of a head that rotates, where a config states the number of its dimensions."""
    if not config.has("rotary_dim"):
        return {}
    return {_PART: part_that_rotates(config, _head_dim(config))}


def _facts(config: Fields) -> dict[str, Any]:
    factors = {ours: config.number(name, *SCALES) for ours, name in FACTORS.items()}
    return {"hyper": NormedSums(**factors), "recurrent_norm_eps": _NORM_EPS}


def _lightning(config: Fields) -> Lightning:
    """Return the widths of lightning attention, which has as many heads as attention, of the same width."""
    return Lightning.of(config.integer("num_attention_heads", 1, MAX_SIZE), _head_dim(config))


def _head_dim(config: Fields) -> int:
    num_heads = config.integer("num_attention_heads", 1, MAX_SIZE)
    by_default = config.integer("hidden_size", 1, MAX_SIZE) // num_heads
    return config.integer("head_dim", 1, MAX_SIZE, default=max(by_default, 1))


def _with_decays(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with the decay rates of their places."""
    del config
    return tuple(_with_decay(layer, idx, len(layers)) for idx, layer in enumerate(layers))


def _with_decay(layer: LayerShape, idx: int, num_layers: int) -> LayerShape:
    if not isinstance(layer.recurrence, Lightning):
        return layer
    rate = decay_rate_of(idx, num_layers)
    return replace(layer, recurrence=replace(layer.recurrence, decay_rate=rate))


def _restated(arch: Arch) -> dict[str, Any]:
    """Return nothing to restate of a model whose decays are those of the places of its layers.

    Raises:
        UnsupportedArch: they are others.
    """
    for idx, layer in enumerate(arch.layers):
        if _with_decay(layer, idx, arch.num_layers) != layer:
            raise UnsupportedArch(
                f"layer {idx}: its lightning attention has the decays of another place, or of a model with "
                "another number of layers, which no config.json can say: keep all layers."
            )
    return {}


MINIMAX = Family(
    model_type="minimax",
    architecture="MiniMaxForCausalLM",
    facts=_facts,
    shapes=_with_decays,
    implied=_implied,
    restated=_restated,
    recurrence=_lightning,
    computed_otherwise="Where config.json states a rotary_dim, that part of each head rotates, as in the "
    "code that MiniMax-Text-01 and MiniMax-M1 were published with; transformers rotates whole heads.",
    mixture=Mixture(
        {
            "num_experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "expert_size": "intermediate_size",
        },
        facts={"renormalize": True},
    ),
    layer_modules={
        **LAYER_MODULES,
        **dict.fromkeys(("lightning.q", "lightning.k", "lightning.v"), "self_attn.qkv_proj"),
        "lightning.gate": "self_attn.output_gate",
        "lightning.norm": "self_attn.norm",
        "lightning.o": "self_attn.out_proj",
        "moe.router": "block_sparse_moe.gate",
    },
    rows_in_turns=frozenset({"self_attn.qkv_proj"}),
    untouched_in_layers=_BUFFERS,
    expert_layouts=(
        apart("block_sparse_moe.experts", ("w1", "w3", "w2")),
        in_one(
            AS_IN_MEMORY.modules["moe.experts.*.gate"],
            AS_IN_MEMORY.modules["moe.experts.*.down"],
            suffixes=BARE,
            modules={"moe.router": "mlp.gate"},
        ),
    ),
    known_fields=frozenset(
        {
            "block_size",
            "layer_types",
            "num_local_experts",
            "num_experts_per_tok",
            "rotary_dim",
            _PART,
            *FACTORS.values(),
        }
    ),
    fixed_fields={
        "hidden_act": "silu",
        "postnorm": True,
        "shared_intermediate_size": 0,
        "sliding_window": None,
    },
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 4096 * 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        **dict.fromkeys(FACTORS.values(), 1.0),
    },
)

FAMILIES.add("minimax", MINIMAX)

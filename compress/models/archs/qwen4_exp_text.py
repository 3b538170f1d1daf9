"""The text model of Qwen4 (Qwen, 2026): the gated delta nets, the gated attention and the experts of Qwen3.5,
between streams of the residual that are read through gates (`gated_residual.py`), with indexers that choose
blocks of keys (`block_choice.py`) and embeddings of n-grams in some layers with a delta net (`ngrams.py`).
Layers that predict further tokens are untouched.

The table of n-grams is some tensors on disk, one after the other. What the hashes are computed with is
stored, too, and has to be what the config states (`ngram_buffers.py`).
"""

from dataclasses import replace
from typing import Any

from compress.models.arch import Arch
from compress.models.archs.qwen2_moe import QWEN2_MIXTURE, SHARED_EXPERT_MODULES
from compress.models.archs.qwen3_5_text import QWEN3_5
from compress.models.delta_net_config import linear_but_every_nth
from compress.models.eos import NO_TOKEN
from compress.models.family import FAMILIES
from compress.models.gated_residual import GatedResiduals
from compress.models.hyper_connection import MAX_STREAMS
from compress.models.indexer import BlockIndexer
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import FULL, LINEAR
from compress.models.limits import MAX_POSITIONS, MAX_SIZE
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart
from compress.models.ngrams import MAX_HEADS, MAX_ORDER, MAX_PARTS, MAX_ROWS, MAX_TOKENS, NGrams
from compress.models.rope_config import rope_of_text
from compress.untrusted.fields import Fields

_TYPES = "layer_types"
_INDEXED = "indexed_attention"
"""The type of layers with attention in configs that `transformers` writes; older ones have the common one."""
_BUDGET = "indexer_budget"
_BLOCK = "indexer_compress_ratio"
_HEADS = "indexer_n_heads"
_KEYS = "indexer_kv_heads"
_WIDTH = "indexer_head_dim"
_OF_INDEXERS = (_HEADS, _KEYS, _WIDTH, _BUDGET, _BLOCK)
_WITH_NGRAMS = "ple_layer_ids"
"""The field of the numbers of layers with embeddings of n-grams, from 1 on."""
_NGRAM_WIDTH = "ple_embed_dim"
_MIXERS = {"attn": "attn_hyper_connection", "ffn": "mlp_hyper_connection"}
"""The halves of a layer, and what their gated residuals are called."""
_RESIDUAL = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
_FIELDS = dict(QWEN2_MIXTURE.fields)
HEAD_OF_STREAMS = "hyper_connection_mixer"
_OF_NGRAMS = {
    "key": "key_proj",
    "value": "value_proj",
    "key_norm": "norm_key",
    "query_norm": "norm_query",
    "conv_norm": "norm_conv",
    "conv": "conv1d",
}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers in the standard spelling, and the rope of text alone."""
    implied = linear_but_every_nth(config) | rope_of_text(config)
    types = implied.get(_TYPES) or config.texts(_TYPES, default=())
    if not types:
        return implied
    if unknown := sorted(set(types) - {FULL, LINEAR, _INDEXED}):
        raise config.wrong(_TYPES, unknown, f"{LINEAR} or {_INDEXED}")
    return {**implied, _TYPES: [FULL if each == _INDEXED else each for each in types]}


def _facts(config: Fields) -> dict[str, Any]:
    """Return the offset of norms, and the streams of the residual."""
    num_streams = config.integer("hc_count", 2, MAX_STREAMS)
    return {
        "norm_offset": 1.0,
        "hyper": GatedResiduals(num_streams, config.integer("hc_lowrank", 1, MAX_SIZE)),
    }


def _indexer(config: Fields) -> BlockIndexer:
    """Return the indexer of a layer with attention. Refuse a config, as the default one is, that states no
    indexers for it."""
    if missing := [name for name in _OF_INDEXERS if not config.has(name)]:
        stated = f"a whole number each, or {_TYPES} all {LINEAR}: layers with attention have indexers"
        raise config.wrong(", ".join(missing), None, stated)
    block_size = config.integer(_BLOCK, 1, MAX_POSITIONS)
    budget = config.integer(_BUDGET, 1, MAX_POSITIONS)
    if budget % block_size:
        raise config.wrong(_BUDGET, budget, f"a multiple of {_BLOCK}, {block_size}")
    config.integer(_KEYS, 1, 1)
    return BlockIndexer(
        num_heads=config.integer(_HEADS, 1, MAX_SIZE),
        head_dim=config.integer(_WIDTH, 1, MAX_SIZE),
        block_size=block_size,
        top_blocks=budget // block_size,
        pooled=True,
    )


def _ngrams(config: Fields, index: int) -> NGrams:
    """Return the embeddings of n-grams of the layer that has so many others with some before it."""
    order = config.integer("ngram_size", 2, MAX_ORDER)
    num_heads = config.integer("heads_per_ngram", 1, MAX_HEADS)
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    width = config.integer(_NGRAM_WIDTH, 1, MAX_SIZE, default=hidden_size)
    all_heads = (order - 1) * num_heads
    if width % all_heads:
        raise config.wrong(_NGRAM_WIDTH, width, f"a multiple of {all_heads}, the heads of all n-grams")
    stated = config.integers("eos_token_id", 0, MAX_TOKENS) if config.is_list("eos_token_id") else None
    eos = stated[0] if stated else config.integer("eos_token_id", NO_TOKEN + 1, MAX_TOKENS)
    return NGrams(
        order=order,
        num_heads=num_heads,
        head_dim=width // all_heads,
        num_streams=config.integer("hc_count", 2, MAX_STREAMS),
        kernel_size=config.integer("ple_conv_kernel_size", 1, MAX_SIZE),
        base=config.integer("ngram_vocab_size_base", 1, MAX_ROWS),
        index=index,
        seed=config.integer("seed", 0, MAX_ROWS),
        eos=eos,
        divisor=config.integer("make_ngram_vocab_size_divisible_by", 1, MAX_SIZE),
        num_parts=config.integer("split_ngram_parts", 1, MAX_PARTS),
    )


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with their indexers and embeddings of n-grams."""
    numbers = sorted(set(config.integers(_WITH_NGRAMS, 1, len(layers)))) if config.has(_WITH_NGRAMS) else []
    index_of = {number - 1: index for index, number in enumerate(numbers)}
    return tuple(
        replace(
            layer,
            block_indexer=_indexer(config) if layer.attends else None,
            ngrams=_ngrams(config, index_of[idx]) if idx in index_of else None,
        )
        for idx, layer in enumerate(layers)
    )


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the types of the layers as the source names those with attention."""
    stated = arch.config.get(_TYPES) or ()
    attends = FULL if FULL in stated else _INDEXED
    return {_TYPES: [attends if layer.attends else LINEAR for layer in arch.layers]} if stated else {}


def _names_by_facts(arch: Arch) -> dict[str, str]:
    """Return the names of the tensors that hold the tables of n-grams."""
    counts = [len(layer.ngrams.part_sizes) for layer in arch.layers if layer.ngrams is not None]
    table = "ple.ple_embedding.ngram_embedding"
    return {f"ngrams.table.{idx}": f"{table}.shard_{idx}" for idx in range(max(counts, default=0))}


def outer_modules(prefix: str) -> dict[str, str]:
    """Return the names of the modules outside of the layers, those of the text model after a prefix."""
    return {
        "embed": f"{prefix}embed_tokens",
        "head": "lm_head",
        **{f"norm.hyper.{ours}": f"{prefix}{HEAD_OF_STREAMS}.{each}" for ours, each in _RESIDUAL.items()},
    }


_NORMS = ("attn_norm", "ffn_norm")
_BUFFERS = tuple(
    f"ple.ple_embedding.{name}"
    for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
)
QWEN4_EXP = replace(
    QWEN3_5,
    model_type="qwen4_exp_text",
    architecture="Qwen4ExpForCausalLM",
    facts=_facts,
    implied=_implied,
    shapes=_shapes,
    restated=_restated,
    names_by_facts=_names_by_facts,
    mtp=None,
    mixture=Mixture(_FIELDS, facts={"shared_gate": True}),
    outer_modules=outer_modules("model."),
    layer_modules={
        **{name: each for name, each in QWEN3_5.layer_modules.items() if name not in _NORMS},
        **SHARED_EXPERT_MODULES,
        **dict.fromkeys(("attn.indexer.q", "attn.indexer.k"), "self_attn.indexer.index_qk_proj"),
        **{f"attn.indexer.{each}_norm": f"self_attn.indexer.{each}_layernorm" for each in "qk"},
        **{
            f"{half}_hyper.{ours}": f"{name}.{theirs}"
            for half, name in _MIXERS.items()
            for ours, theirs in {**_RESIDUAL, "inject": "block_inject_weight"}.items()
        },
        **{f"ngrams.{ours}": f"ple.{theirs}" for ours, theirs in _OF_NGRAMS.items()},
    },
    expert_layouts=(AS_IN_MEMORY, apart("mlp.experts", methods=("compressed-tensors", "fp8"))),
    untouched_in_layers=_BUFFERS,
    ngram_buffers=_BUFFERS,
    known_fields=QWEN3_5.known_fields
    | set(_FIELDS.values())
    | {
        "hc_count",
        "hc_lowrank",
        "heads_per_ngram",
        "indexer_n_heads",
        "indexer_kv_heads",
        "indexer_head_dim",
        "make_ngram_vocab_size_divisible_by",
        "ngram_size",
        "ngram_vocab_size_base",
        "number_of_conv_states",
        "ple_conv_kernel_size",
        "seed",
        "split_ngram_parts",
        _BLOCK,
        _BUDGET,
        _NGRAM_WIDTH,
        _WITH_NGRAMS,
    },
    fixed_fields={
        "attention_bias": False,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "output_gate_type": "silu",
    },
    defaults={
        **{name: value for name, value in QWEN3_5.defaults.items() if name != "partial_rotary_factor"},
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "hc_count": 4,
        "hc_lowrank": 320,
        "heads_per_ngram": 8,
        "make_ngram_vocab_size_divisible_by": 128,
        "ngram_size": 3,
        "ngram_vocab_size_base": 20_000_000,
        "ple_conv_kernel_size": 4,
        "seed": 1234,
        "split_ngram_parts": 512,
    },
)
FAMILIES.add("qwen4_exp_text", QWEN4_EXP)

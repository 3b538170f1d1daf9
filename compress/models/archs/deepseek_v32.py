"""DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3 with an indexer in each layer (`indexer.py`), which chooses
the keys that a query attends to."""

from dataclasses import replace
from typing import Any

from compress.models.archs.deepseek_v3 import DEEPSEEK_V3
from compress.models.archs.glm4_moe import SIGMOID_MIXTURE
from compress.models.config_facts import implies_own_code
from compress.models.family import FAMILIES
from compress.models.indexer import Indexer
from compress.models.latent_config import latent_of
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import FULL
from compress.models.limits import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE
from compress.models.mixture import sparse_after_first, sparse_by_type, sparse_by_type_or_count, state_both
from compress.untrusted.fields import Fields

INDEX_PAIRS = "indexer_rope_interleave"
"""The field that states that neighbours rotate as pairs in indexers, too; `transformers` does not read it."""
_TOP_K = "index_topk"
_DENSE = "first_k_dense_replace"
_TYPES = "mlp_layer_types"
_INDEXED = "indexed_attention"
_own_code = implies_own_code("DeepseekV32Config", "DeepseekV32Model", "DeepseekV32ForCausalLM")


def _facts(config: Fields) -> dict[str, Any]:
    """Return no facts. Refuse a config of which programs read other layers as dense."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    by_count = sparse_after_first(config, num_layers)
    if config.has(_TYPES) and by_count != (by_type := sparse_by_type(config, num_layers)):
        wanted = f"{by_type.index(True) if True in by_type else num_layers}, as {_TYPES} has them, all first"
        raise config.wrong(_DENSE, config.integer(_DENSE, 0, MAX_LAYERS), wanted)
    return {}


def _implied(config: Fields) -> dict[str, Any]:
    return {**_own_code(config), **standard_types(config)}


def standard_types(config: Fields) -> dict[str, Any]:
    """Return the types of the layers in the standard spelling; `transformers` writes one of its own."""
    stated = config.texts("layer_types", default=())
    return {"layer_types": [FULL if each == _INDEXED else each for each in stated]} if stated else {}


def with_indexers(
    config: Fields, layers: tuple[LayerShape, ...], which: list[bool], **facts: Any
) -> tuple[LayerShape, ...]:
    """Return the layers with an indexer in each of those that have one; `facts` are those of the family
    (`Indexer`)."""
    indexer = Indexer(
        num_heads=config.integer("index_n_heads", 1, MAX_SIZE),
        head_dim=config.integer("index_head_dim", 1, MAX_SIZE),
        top_k=config.integer(_TOP_K, 1, MAX_POSITIONS),
        **facts,
    )
    return tuple(
        replace(layer, latent=replace(layer.latent, indexer=indexer)) if has_one and layer.latent else layer
        for layer, has_one in zip(layers, which, strict=True)
    )


def _in_each(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    return with_indexers(config, layers, [True] * len(layers))


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    latent=latent_of(True),
    facts=_facts,
    implied=_implied,
    shapes=_in_each,
    mixture=replace(SIGMOID_MIXTURE, is_sparse=sparse_by_type_or_count, state_sparse=state_both),
    layer_modules={
        **DEEPSEEK_V3.layer_modules,
        "attn.indexer.q": "self_attn.indexer.wq_b",
        "attn.indexer.k": "self_attn.indexer.wk",
        "attn.indexer.k_norm": "self_attn.indexer.k_norm",
        "attn.indexer.weights": "self_attn.indexer.weights_proj",
    },
    known_fields=(DEEPSEEK_V3.known_fields - {"rope_interleave"})
    | {_TOP_K, "index_n_heads", "index_head_dim", "layer_types", _TYPES},
    fixed_fields={
        **DEEPSEEK_V3.fixed_fields,
        "rope_interleave": True,
        "mlp_bias": False,
        INDEX_PAIRS: False,
    },
    defaults={
        **DEEPSEEK_V3.defaults,
        "max_position_embeddings": 163840,
        _TOP_K: 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
    },
)

FAMILIES.add("deepseek_v32", DEEPSEEK_V32)

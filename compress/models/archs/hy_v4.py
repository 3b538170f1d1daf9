"""Hy4 (Tencent, 2026): four residual streams that half-layers read as mixtures (`hyper_connection.py`), a
first layer that is dense and the experts of DeepSeek-V3 with capped gates, and latent attention with sinks,
gates of its outputs, and indexers that layers share. The layer that predicts a further token is not read.

The published model rotates neighbouring dimensions as pairs, which is what vLLM and llama.cpp compute; the
class of `transformers` 5.23 rotates halves. The published head is float32; here it has the dtype of the
model, and logits are float32.
"""

from dataclasses import replace
from typing import Any

from compress.models.archs.deepseek_v32 import DEEPSEEK_V32, INDEX_PAIRS, with_indexers
from compress.models.archs.glm4_moe import SIGMOID_MIXTURE
from compress.models.archs.glm_moe_dsa import indexer_kinds
from compress.models.family import FAMILIES
from compress.models.hyper_connection import MAX_FACTOR, MAX_STREAMS, HyperConnections
from compress.models.latent_config import latent_of
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import FULL
from compress.models.limits import CAPS, MAX_LAYERS, MAX_SIZE
from compress.models.mixture import (
    AS_IN_MEMORY,
    apart,
    same_dense_layers,
    sparse_by_both,
    state_both,
)
from compress.models.module_names import OUTER_MODULES
from compress.untrusted.fields import Fields

_KINDS = "indexer_types"
_PERIOD = 4
"""Every fourth layer has an indexer of its own where no config states them, counted from the second."""
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
_HYPER = {"weight": "fn", "bias": "base", "gains": "scale"}
"""The parameters of hyper-connections, and what their tensors are called."""


def _facts(config: Fields) -> dict[str, Any]:
    eps = config.number("hc_eps", 0, 1)
    return {
        **same_dense_layers(config),
        "attn_sinks": True,
        "hyper": HyperConnections(
            num_streams=config.integer("hc_mult", 2, MAX_STREAMS),
            eps=eps,
            post_factor=config.number("hc_magnitude", 0, MAX_FACTOR),
            post_eps=eps,
        ),
    }


def _kinds(config: Fields, num_layers: int) -> list[str]:
    """Return whether the indexer of each layer is its own (`full`) or `shared` with the one before."""
    if config.has(_KINDS):
        return indexer_kinds(config, num_layers)
    return ["full" if idx == 0 or idx % _PERIOD == 1 else "shared" for idx in range(num_layers)]


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers in the standard spelling, whose indexer each has, and the KV heads, as
    many as the others whatever a config states."""
    stated = config.texts("layer_types", default=())
    types = {"layer_types": [FULL if each in _INDEXED else each for each in stated]} if stated else {}
    return {
        **types,
        _KINDS: _kinds(config, config.integer("num_hidden_layers", 1, MAX_LAYERS)),
        "num_key_value_heads": config.integer("num_attention_heads", 1, MAX_SIZE),
    }


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    cap = config.number("swiglu_limit", *CAPS)
    capped = tuple(layer if layer.experts is None else replace(layer, expert_cap=cap) for layer in layers)
    which = [kind == "full" for kind in _kinds(config, len(layers))]
    norm_eps = config.number("rms_norm_eps", 0, 1)
    return with_indexers(config, capped, which, interleaved=True, rope_last=True, norm_eps=norm_eps)


FAMILIES.add(
    "hy_v4",
    replace(
        DEEPSEEK_V32,
        model_type="hy_v4",
        architecture="HYV4ForCausalLM",
        latent=latent_of(True),
        output_gate=True,
        facts=_facts,
        implied=_implied,
        shapes=_shapes,
        computed_otherwise="Dimensions that rotate do so as pairs of neighbours, as in the published model "
        "and vLLM; the class of transformers 5.23 rotates halves.",
        mtp=None,
        mixture=replace(
            SIGMOID_MIXTURE,
            facts={**SIGMOID_MIXTURE.facts, "caps_first": True},
            is_sparse=sparse_by_both,
            state_sparse=state_both,
        ),
        outer_modules={
            **OUTER_MODULES,
            **{f"norm.hyper.{ours}": f"model.hc_head.hc_head_{theirs}" for ours, theirs in _HYPER.items()},
        },
        layer_modules={
            **DEEPSEEK_V32.layer_modules,
            "attn.gate": "self_attn.linear_gate",
            "attn.sinks": "self_attn.learnable_sink_param",
            **{
                f"{half}_hyper.{ours}": f"hc_{name}_layer.hc_pre.hc_{theirs}"
                for half, name in (("attn", "attn"), ("ffn", "mlp"))
                for ours, theirs in _HYPER.items()
            },
        },
        expert_layouts=(AS_IN_MEMORY, apart("mlp.experts", methods=("compressed-tensors",))),
        ignored_tensors=r"rotary_emb\.inv_freq$|^model\.mtp_layers\.",
        in_memory={f"model.hc_head.hc_head_{each}": f"model.hc_head.hc_{each}" for each in _HYPER.values()},
        in_memory_inside={
            "self_attn.linear_gate": "self_attn.gate_proj",
            "self_attn.learnable_sink_param": "self_attn.sinks",
            **{
                f"hc_{name}_layer.hc_pre.hc_{each}": f"{half}_hc.{each}"
                for half, name in (("attn", "attn"), ("ffn", "mlp"))
                for each in _HYPER.values()
            },
        },
        aliases={"n_routed_experts": "num_local_experts"},
        known_fields=(DEEPSEEK_V32.known_fields - {"auto_map"})
        | {
            _KINDS,
            "bitwise_backward_align",
            "enable_lm_head_fp32",
            "hc_eps",
            "hc_magnitude",
            "hc_mult",
            "learnable_sink_init",
            "mtp_loss_factor",
            "swiglu_limit",
        },
        fixed_fields={
            INDEX_PAIRS: True,
            "enable_ihc": True,
            "gated_mla": True,
            "gating_type": "elementwise",
            "hidden_act": "silu",
            "learnable_sink": True,
            "use_dsa": True,
            "use_mla": True,
        },
        defaults={
            **{
                name: value
                for name, value in DEEPSEEK_V32.defaults.items()
                if name not in ("first_k_dense_replace", "rope_interleave")
            },
            "rms_norm_eps": 1e-5,
            "intermediate_size": 6912,
            "max_position_embeddings": 262144,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 768,
            "routed_scaling_factor": 2.827,
            "n_group": 1,
            "topk_group": 1,
            "index_n_heads": 16,
            "hc_mult": 4,
            "hc_magnitude": 2.0,
            "hc_eps": 1e-6,
            "swiglu_limit": 10.0,
        },
    ),
)

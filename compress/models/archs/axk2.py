"""A.X K2 (SK Telecom, 2026): latent attention and indexers of DeepSeek-V3.2. Norms before attention and
before experts have gates (`gated_norm.py`), and so have the outputs of attention, by the linear of queries
(`latent.py`). Where experts form groups, those outside of the chosen ones are compared with a score of 0. The
layer that predicts a further token is not read: no program shows how its norms are stored."""

from dataclasses import replace
from typing import Any

from compress.models.arch import Arch
from compress.models.archs.axk1 import AXK1
from compress.models.archs.deepseek_v32 import DEEPSEEK_V32, standard_types, with_indexers
from compress.models.archs.glm4_moe import SIGMOID_MIXTURE
from compress.models.config_facts import only_own_code
from compress.models.family import FAMILIES
from compress.models.layer_shape import LayerShape
from compress.models.limits import MAX_SIZE
from compress.models.mixture import (
    FIRST_DENSE,
    check_dense_layers,
    shared_of,
    sparse_by_both,
    state_first,
    state_types,
)
from compress.untrusted.fields import Fields

_GROUPS = ("n_group", "topk_group")
_RANK = "gated_norm_rank"
_CLASSES = ("AXK2Config", "AXK2Model", "AXK2ForCausalLM")


def _facts(config: Fields) -> dict[str, Any]:
    """Return no facts. Refuse a config without a latent of queries, or one that contradicts itself on which
    layers are dense."""
    if not config.has("q_lora_rank"):
        raise config.wrong("q_lora_rank", None, "the width of the latents of queries, which this family has")
    check_dense_layers(config)
    return {}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers in the standard spelling, and one group of experts where a config states
    no groups."""
    only_own_code(config, _CLASSES)
    stated = [config.has(name) for name in _GROUPS]
    if any(stated) and not all(stated):
        raise config.wrong(_GROUPS[stated.index(False)], None, "stated with the other of the two, or neither")
    return {**standard_types(config), **({} if any(stated) else dict.fromkeys(_GROUPS, 1))}


def _experts(config: Fields) -> dict[str, Any]:
    """Return the width of the shared expert, and how those outside of the best groups are compared."""
    is_grouped = config.integer("n_group", 1, MAX_SIZE, default=1) > 1
    return {**shared_of("n_shared_experts")(config), "zeroes_groups": is_grouped}


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with their indexers, and with gates of norms and of the outputs of attention."""
    rank = config.integer(_RANK, 1, MAX_SIZE)
    return tuple(
        replace(layer, latent=layer.latent and replace(layer.latent, gated=True), norm_gate_rank=rank)
        for layer in with_indexers(config, layers, [True] * len(layers))
    )


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the number of dense layers, where a config states it, and no groups where it states none."""
    is_sparse = [layer.experts is not None for layer in arch.layers]
    counted = {} if arch.config.get(FIRST_DENSE) is None else state_first(is_sparse)
    return counted | {name: None for name in _GROUPS if arch.config.get(name) is None}


_OWN = {
    f"{norm}.{ours}": f"{theirs}.{name}"
    for norm, theirs in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"))
    for ours, name in (("norm", "norm"), ("gate_in", "W_down"), ("gate_out", "W_up"))
}

FAMILIES.add(
    "axk2",
    replace(
        DEEPSEEK_V32,
        model_type="axk2",
        architecture="AXK2ForCausalLM",
        facts=_facts,
        implied=_implied,
        shapes=_shapes,
        restated=_restated,
        mtp=None,
        mixture=replace(
            SIGMOID_MIXTURE, is_sparse=sparse_by_both, state_sparse=state_types, read_more=_experts
        ),
        layer_modules={**DEEPSEEK_V32.layer_modules, **_OWN},
        in_memory_inside={
            "self_attn.q_b_proj": "self_attn.q_gate_proj",
            **{
                f"{norm}.{theirs}": f"{norm}.mlp.{name}"
                for norm in ("input_layernorm", "post_attention_layernorm")
                for theirs, name in (("W_down", "fc1"), ("W_up", "fc2"))
            },
        },
        aliases=AXK1.aliases,
        known_fields=DEEPSEEK_V32.known_fields | {_RANK},
        fixed_fields={**DEEPSEEK_V32.fixed_fields, "gated_norm": True, "attention_output_gate": True},
        defaults={
            **{name: value for name, value in DEEPSEEK_V32.defaults.items() if name != FIRST_DENSE},
            "n_group": None,
            "topk_group": None,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "num_key_value_heads": 32,
            "n_routed_experts": 128,
            "kv_lora_rank": 128,
            "q_lora_rank": 384,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "qk_nope_head_dim": 64,
            "max_position_embeddings": 131072,
            "index_n_heads": 16,
            _RANK: 16,
        },
    ),
)

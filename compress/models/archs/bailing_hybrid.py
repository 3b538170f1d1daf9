"""Ling 3.0 (Ant Group, 2026): most layers have Kimi Delta Attention (arXiv 2510.26692) with decays that are
bounded from below, the last of each group has latent attention whose heads are gated. The first layers are
dense, and the others have the experts of DeepSeek-V3. The layer that predicts a further token has latent
attention, too (`mtp.py`).

The activations of experts have caps in layers that a config lists, the last ones of Ling 3.0 Flash: vLLM
and SGLang compute them, and `transformers` 5.23 does not. They cap silu of the gate here, as in SGLang; vLLM
caps so in shared experts, and in routed ones the gate before silu, which differs by c - silu(c) at most (5e-4
for a cap c of 10). Dense layers have none. Ling 3.0 Tiny has latents of queries, which that version of
`transformers` has not.
"""

from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.archs.glm4_moe import MIXTURE_MODULES
from compress.models.archs.kimi_linear import ALIASES, MIXTURE
from compress.models.caps import caps_after, with_caps
from compress.models.config_facts import only_own_code
from compress.models.delta_net import DeltaNet
from compress.models.family import FAMILIES, Family
from compress.models.latent_config import LATENT_MODULES, latent_of
from compress.models.layer_shape import HeadGate, LayerShape
from compress.models.layer_types import LINEAR, every_nth_full
from compress.models.limits import MAX_LAYERS, MAX_SIZE
from compress.models.mixture import BARE, apart, in_one
from compress.models.module_names import LAYER_MODULES, OUTER_MODULES
from compress.models.mtp_names import AFTER_LAST_WITH_FINAL_NORM, last_attention_layer
from compress.untrusted.fields import Fields

_PERIOD = "layer_group_size"
_BOUND = "kda_lower_bound"
_LOWEST = 1e3
"""The largest bound below 0 that is read: exp(-1000) is 0 in every dtype."""
_WIDTHS = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_attention_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Fields that `transformers` writes, and those that count where a config does not have them."""
_CAPS = {"experts": "expert_swiglu_limit_list", "shared": "share_expert_swiglu_limit_list"}
_SHARED_SIZE = "moe_shared_expert_intermediate_size"
_ROTATED_PART = "partial_rotary_factor"
_TRAINED = "original_max_position_embeddings"
_PUBLISHED = apart("mlp.experts", modules={"delta.o": "attention.o_proj"})
_SAVED = apart("mlp.experts", modules={"delta.o": "attention.dense"})
"""The layouts of published checkpoints and of those that `transformers` saves."""
_STACKED = in_one(
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    suffixes=BARE,
    modules={
        "delta.o": "attention.dense",
        **dict.fromkeys(("delta.q_conv", "delta.k_conv", "delta.v_conv"), "attention.conv1d"),
    },
)
"""The layout that `transformers` has in memory."""


def _delta_of(config: Fields) -> DeltaNet:
    """Return the widths of the delta nets of a config, in which one number is the dimension of keys and of
    values."""
    num_heads, dim, kernel_size = (
        config.integer(name, 1, MAX_SIZE)
        for name in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    )
    bound = -config.number(_BOUND, -_LOWEST, 0) if config.flag("kda_safe_gate") else 0.0
    if config.flag("kda_safe_gate") and not bound:
        raise config.wrong(_BOUND, config.number(_BOUND, -_LOWEST, 0), "below 0")
    return DeltaNet(num_heads, num_heads, dim, dim, kernel_size, by_channel=True, decay_bound=bound)


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers, the widths of the delta nets, and for the dimension of heads what
    latent attention rotates. Refuse an `auto_map` that names other code than the one Ling 3.0 was published
    with, and fields that `transformers` does not compute."""
    only_own_code(config, ("BailingMoeV3Config", "BailingMoeV3Model", "BailingMoeV3ForCausalLM"))
    each = config.integer("moe_intermediate_size", 1, MAX_SIZE)
    if config.integer(_SHARED_SIZE, 1, MAX_SIZE, default=each) != each:
        wanted = f"{each}, as moe_intermediate_size, which transformers reads"
        raise config.wrong(_SHARED_SIZE, config.integer(_SHARED_SIZE, 1, MAX_SIZE), wanted)
    widths = {
        ours: config.integer(ours if config.has(ours) else theirs, 1, MAX_SIZE)
        for ours, theirs in _WIDTHS.items()
    }
    return {
        **widths,
        **_rope_of(config),
        **every_nth_full(config, config.integer(_PERIOD, 1, MAX_LAYERS), LINEAR),
        "head_dim": config.integer("qk_rope_head_dim", 2, MAX_SIZE),
    }


def _rope_of(config: Fields) -> dict[str, Any]:
    """Return the rope without the share of a head that rotates, which nobody reads of a plain one. Refuse
    another rope that does not state the positions of its training: `transformers` has those of the class then
    where the config states `model_max_length`."""
    stated = config.mapping("rope_parameters", default=config.mapping("rope_scaling", default={}))
    rope = Fields(stated, "the rope of this bailing_hybrid model", UnsupportedArch)
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        plain = {name: value for name, value in stated.items() if name != _ROTATED_PART}
        return {"rope_parameters": {**plain, "rope_type": kind}, _ROTATED_PART: 1.0}
    if kind in ("yarn", "llama3", "longrope") and not (rope.has(_TRAINED) or config.has(_TRAINED)):
        raise rope.wrong("rope_type", kind, f"one with {_TRAINED}, or the default one")
    return {}


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    return with_caps(config, layers, **_CAPS)


def _shape_of_mtp(target: Arch) -> LayerShape:
    """Return the shape of the layer that predicts a further token, whose activations have the caps that lists
    of the config state after those of the layers."""
    config = Fields(target.config, "the config of this bailing_hybrid model", UnsupportedArch)
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    shared, experts = (caps_after(config, _CAPS[name], num_layers) for name in ("shared", "experts"))
    return replace(last_attention_layer(target), ffn_cap=shared, expert_cap=experts)


def _head_gate(config: Fields) -> HeadGate:
    return "sigmoid"


BAILING_HYBRID = Family(
    model_type="bailing_hybrid",
    architecture="BailingHybridForCausalLM",
    other_names=("BailingMoeV3ForCausalLM",),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    latent=latent_of(True),
    head_gate=_head_gate,
    recurrence=_delta_of,
    shapes=_shapes,
    implied=_implied,
    computed_otherwise="Caps of the activations of experts, where config.json lists some "
    f"({_CAPS['experts']}), are computed, as in vLLM; transformers computes none.",
    aliases=ALIASES,
    mixture=MIXTURE,
    mtp=replace(AFTER_LAST_WITH_FINAL_NORM, shape=_shape_of_mtp),
    outer_modules={**OUTER_MODULES, "embed": "model.word_embeddings"},
    layer_modules={
        **{name: each.replace("self_attn", "attention") for name, each in LAYER_MODULES.items()},
        **{name: each.replace("self_attn", "attention") for name, each in LATENT_MODULES.items()},
        "attn.o": "attention.dense",
        "attn.head_gate": "attention.g_proj",
        "delta.q": "attention.q_proj",
        "delta.k": "attention.k_proj",
        "delta.v": "attention.v_proj",
        "delta.gate": "attention.g_proj",
        "delta.q_conv": "attention.q_conv1d",
        "delta.k_conv": "attention.k_conv1d",
        "delta.v_conv": "attention.v_conv1d",
        "delta.beta": "attention.b_proj",
        "delta.decay": "attention.f_proj",
        "delta.dt_bias": "attention.dt_bias",
        "delta.A_log": "attention.A_log",
        "delta.norm": "attention.o_norm",
        **MIXTURE_MODULES,
        "moe.selection_bias": "mlp.gate.expert_bias",
    },
    expert_layouts=(_PUBLISHED, _SAVED, _STACKED),
    in_memory={"model.word_embeddings": "model.embed_tokens"},
    in_memory_inside={
        "attention.dense": "self_attn.o_proj",
        **{f"attention.{name}": f"self_attn.forget_gate.{name}" for name in ("f_proj", "dt_bias", "A_log")},
        "attention": "self_attn",
        "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
    },
    known_fields=frozenset({*MIXTURE.fields.values(), *ALIASES, *_WIDTHS, *_WIDTHS.values(), *_CAPS.values()})
    | {
        "attention_bias",
        "auto_map",
        "first_k_dense_replace",
        "kda_safe_gate",
        "layer_types",
        "mlp_layer_types",
        "mtp_loss_scaling_factor",
        "n_shared_experts",
        "num_nextn_predict_layers",
        "num_mtp_layers",
        _BOUND,
        _PERIOD,
        _SHARED_SIZE,
        _ROTATED_PART,
    },
    fixed_fields={
        "gated_attention_proj_granularity_type": "head_wise",
        "group_norm_size": 1,
        "hidden_act": "silu",
        "moe_router_enable_expert_bias": True,
        "no_kda_lora": True,
        "rope_interleave": True,
        "scale_router_input": False,
        "score_function": "sigmoid",
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "up_proj_norm": False,
        "use_bias": False,
        "use_kda_lora": False,
        "use_mla_nope": False,
        "use_nGPT": False,
        "use_qkv_bias": False,
        "value_norm": False,
    },
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 6000000.0,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_local_experts": 512,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 2,
        "short_conv_kernel_size": 4,
        "kda_safe_gate": True,
        _BOUND: -5.0,
        _PERIOD: 6,
    },
)

FAMILIES.add("bailing_hybrid", BAILING_HYBRID)

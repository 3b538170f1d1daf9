"""Kimi Linear (arXiv 2510.26692): most layers have Kimi Delta Attention, a gated delta net whose states
forget each channel of a key by itself, and the others latent attention without positions. The first layer is
dense, and the others have the experts of DeepSeek-V3. A mapping in its configs states which layers attend."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.models.arch import Arch
from compress.models.archs.glm4_moe import MIXTURE_MODULES, SIGMOID_MIXTURE
from compress.models.config_facts import only_own_code
from compress.models.delta_net import DeltaNet
from compress.models.family import FAMILIES, Family
from compress.models.latent_config import LATENT_MODULES, latent_of
from compress.models.layer_types import FULL, LINEAR, no_layer
from compress.models.limits import MAX_LAYERS, MAX_SIZE
from compress.models.mixture import BARE, apart, in_one, shared_of, sparse_by_type_or_count, state_both
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_LINEAR = "linear_attn_config"
_ATTENDING = "full_attn_layers"
_OTHERS = "kda_layers"
_WIDTHS = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Fields of the class in `transformers`, and those of the mapping, which count where a config has both."""
ALIASES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
MIXTURE = replace(
    SIGMOID_MIXTURE,
    fields={**SIGMOID_MIXTURE.fields, "num_experts": "num_local_experts"},
    is_sparse=sparse_by_type_or_count,
    state_sparse=state_both,
    read_more=shared_of("n_shared_experts"),
)


_MOE = "block_sparse_moe"
_FORGET = "self_attn.forget_gate"
_STACKED = in_one(
    f"{_MOE}.experts.gate_up_proj",
    f"{_MOE}.experts.down_proj",
    suffixes=BARE,
    modules=dict.fromkeys(("delta.q_conv", "delta.k_conv", "delta.v_conv"), "self_attn.conv1d"),
)
"""The layout that `transformers` has in memory, in which other modules have their names on disk."""
_RENAMED = ("f_a_proj", "f_b_proj", "dt_bias", "A_log")


def _kimi_delta_of(config: Fields) -> DeltaNet:
    """Return the widths of the delta nets of a config, in which one number is the dimension of keys and of
    values, and the width of the latents of decays and gates."""
    num_heads = config.integer("linear_num_heads", 1, MAX_SIZE)
    dim = config.integer("linear_head_dim", 1, MAX_SIZE)
    kernel_size = config.integer("linear_conv_kernel_dim", 1, MAX_SIZE)
    return DeltaNet(num_heads, num_heads, dim, dim, kernel_size, rank=dim, by_channel=True)


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers and the widths of the delta nets in the spelling of `transformers`, and
    for the dimension of heads, which nobody reads, what the class has in its place. Refuse an `auto_map` to
    other code than the model's own from before it was in `transformers`."""
    only_own_code(config, ("KimiLinearConfig", "KimiLinearModel", "KimiLinearForCausalLM"))
    own = config.fields(_LINEAR, default={})
    stated = {name: own.integer(theirs, 1, MAX_SIZE) for name, theirs in _WIDTHS.items() if own.has(theirs)}
    rope_dim = config.integer("qk_rope_head_dim", 2, MAX_SIZE)
    return {**stated, "head_dim": rope_dim, "layer_types": _types_of(config, own)}


def _types_of(config: Fields, own: Fields) -> list[str]:
    """Return the types of the layers; those of the class of `transformers` where a config states none.

    Raises:
        UnsupportedArch: a layer is in both lists of the mapping or in neither, or `layer_types` differs.
    """
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    if not (own.has(_ATTENDING) and own.has(_OTHERS)):
        by_default = [LINEAR if idx % 4 or not idx else FULL for idx in range(num_layers)]
        return config.texts("layer_types", default=by_default)
    attending, others = (own.integers(name, 1, MAX_LAYERS) for name in (_ATTENDING, _OTHERS))
    if sorted((*attending, *others)) != list(range(1, num_layers + 1)):
        wanted = f"with the layers of {_OTHERS} all numbers from 1 to {num_layers}, each once"
        raise own.wrong(_ATTENDING, attending, wanted)
    types = [FULL if idx in attending else LINEAR for idx in range(1, num_layers + 1)]
    if config.texts("layer_types", default=types)[:num_layers] != types:
        wanted = f"the types that {_LINEAR} states, which other programs read"
        raise config.wrong("layer_types", config.texts("layer_types"), wanted)
    return types


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the mapping with the layers that a model has, where its config has one with lists of them."""
    own = arch.config.get(_LINEAR)
    if not isinstance(own, Mapping) or _ATTENDING not in own or _OTHERS not in own:
        return {}
    attends = [layer.attends for layer in arch.layers]
    lists = {
        name: [idx + 1 for idx, each in enumerate(attends) if each is attending]
        for name, attending in ((_ATTENDING, True), (_OTHERS, False))
    }
    return {_LINEAR: {**own, **lists}}


KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    rotated_layers=no_layer,
    latent=latent_of(False),
    recurrence=_kimi_delta_of,
    implied=_implied,
    restated=_restated,
    aliases=ALIASES,
    mixture=MIXTURE,
    layer_modules={
        **LAYER_MODULES,
        **LATENT_MODULES,
        "delta.q": "self_attn.q_proj",
        "delta.k": "self_attn.k_proj",
        "delta.v": "self_attn.v_proj",
        "delta.q_conv": "self_attn.q_conv1d",
        "delta.k_conv": "self_attn.k_conv1d",
        "delta.v_conv": "self_attn.v_conv1d",
        "delta.beta": "self_attn.b_proj",
        "delta.decay_down": "self_attn.f_a_proj",
        "delta.decay": "self_attn.f_b_proj",
        "delta.dt_bias": "self_attn.dt_bias",
        "delta.A_log": "self_attn.A_log",
        "delta.gate_down": "self_attn.g_a_proj",
        "delta.gate": "self_attn.g_b_proj",
        "delta.norm": "self_attn.o_norm",
        "delta.o": "self_attn.o_proj",
        **{name: each.replace("mlp.", f"{_MOE}.") for name, each in MIXTURE_MODULES.items()},
    },
    expert_layouts=(apart(f"{_MOE}.experts", ("w1", "w3", "w2")), _STACKED),
    in_memory_inside={
        **{f"self_attn.{name}": f"{_FORGET}.{name}" for name in _RENAMED},
        **{f"{_MOE}.{part}": f"mlp.{part}" for part in ("gate", "experts", "shared_experts")},
    },
    known_fields=frozenset({*MIXTURE.fields.values(), *ALIASES, *_WIDTHS, _LINEAR})
    | {
        "attention_bias",
        "auto_map",
        "first_k_dense_replace",
        "layer_types",
        "mlp_layer_types",
        "num_nextn_predict_layers",
    },
    fixed_fields={
        "hidden_act": "silu",
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "use_grouped_topk": True,
    },
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "intermediate_size": 9216,
        "max_position_embeddings": 1048576,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_local_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    },
)

FAMILIES.add("kimi_linear", KIMI_LINEAR)

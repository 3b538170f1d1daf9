"""Mistral Small 4 (Mistral AI, 2026), the text model inside `mistral3`: latent attention, queries that grow
with the position as in Ministral 3, and experts chosen by the softmax of the router."""

from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.archs.glm4_moe import MIXTURE_FIELDS, MIXTURE_MODULES, SIGMOID_MIXTURE
from compress.models.archs.ministral3 import RESTATED_GROWTH, growing_rope, growth_of_queries
from compress.models.family import Family
from compress.models.latent_config import LATENT_MODULES, head_dim_of_latents, latent_of
from compress.models.limits import MAX_SIZE
from compress.models.mixture import AS_IN_MEMORY, apart
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_PARTIAL = "partial_rotary_factor"


def _implied(config: Fields) -> dict[str, Any]:
    """Return the rope of the dimensions that rotate, of which the config states that they are a part of each
    head, and their number as `head_dim`, as other models with latents have it."""
    head_dim = head_dim_of_latents(config)
    rope_dim = config.integer("qk_rope_head_dim", 2, MAX_SIZE)
    if config.integer("head_dim", 1, MAX_SIZE, default=head_dim) != head_dim:
        wanted = f"{head_dim}, the sum of qk_nope_head_dim and qk_rope_head_dim, or absent"
        raise config.wrong("head_dim", config.integer("head_dim", 1, MAX_SIZE), wanted)
    implied = growing_rope(config, _DEFAULT_ROPE)
    rope = Fields(implied["rope_parameters"], f"the rope of {config.where}", UnsupportedArch)
    part = rope.number(_PARTIAL, 0, 1, default=rope_dim / head_dim)
    if round(part * head_dim) != rope_dim:
        raise rope.wrong(_PARTIAL, part, f"{rope_dim} / {head_dim}, the part of a head that rotates")
    plain = {name: value for name, value in implied["rope_parameters"].items() if name != _PARTIAL}
    return {**implied, "rope_parameters": plain, "head_dim": rope_dim}


MISTRAL4 = Family(
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    latent=latent_of("rope_interleave"),
    facts=growth_of_queries,
    implied=_implied,
    mixture=replace(SIGMOID_MIXTURE, facts={}),
    layer_modules={
        name: disk
        for name, disk in {**LAYER_MODULES, **LATENT_MODULES, **MIXTURE_MODULES}.items()
        if name != "moe.selection_bias"
    },
    expert_layouts=(AS_IN_MEMORY, apart("mlp.experts", methods=("compressed-tensors",))),
    aliases={"n_routed_experts": "num_local_experts"},
    known_fields=MIXTURE_FIELDS | {"attention_bias", "rope_interleave", RESTATED_GROWTH},
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "num_key_value_heads": 32,
        "intermediate_size": 12288,
        "max_position_embeddings": 1048576,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
)

"""DeepSeek-V2, its Coder and the Lite models of both (arXiv 2405.04434): latent attention, first layers that
are dense, and experts chosen by the softmax of the router. The large models choose groups of experts first,
by the best of each."""

from typing import Any

from compress.models.archs.glm4_moe import MIXTURE_MODULES
from compress.models.config_facts import implies_own_code
from compress.models.experts import MAX_EXPERTS
from compress.models.family import FAMILIES, Family
from compress.models.latent_config import LATENT_MODULES, latent_of
from compress.models.mixture import (
    AS_IN_MEMORY,
    Mixture,
    apart,
    shared_of,
    sparse_after_first,
    state_first,
)
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_FIELDS = {
    "num_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "scale": "routed_scaling_factor",
}


def _more(config: Fields) -> dict[str, Any]:
    return {**shared_of("n_shared_experts")(config), **_groups(config)}


def _groups(config: Fields) -> dict[str, int]:
    """Return how groups of experts are chosen.

    Raises:
        UnsupportedArch: another method, or groups that some programs choose by and `transformers` does not.
    """
    name = "topk_method"
    method = config.text(name, default="greedy")
    if method == "group_limited_greedy":
        sizes = {"num_groups": "n_group", "top_groups": "topk_group"}
        return {"group_best": 1} | {
            fact: config.integer(each, 1, MAX_EXPERTS) for fact, each in sizes.items()
        }
    if method != "greedy":
        raise config.wrong(name, method, "greedy or group_limited_greedy")
    num_groups = config.integer("n_group", 1, MAX_EXPERTS) if config.has("n_group") else 1
    if num_groups > 1:
        raise config.wrong(
            "n_group", num_groups, f"1 beside {name} = greedy, where programs differ on groups"
        )
    return {}


V2_MIXTURE = Mixture(
    _FIELDS,
    is_sparse=sparse_after_first,
    state_sparse=state_first,
    read_more=_more,
)
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    heads_divide_hidden=True,
    latent=latent_of(True),
    implied=implies_own_code("DeepseekV2Config", "DeepseekV2Model", "DeepseekV2ForCausalLM"),
    mixture=V2_MIXTURE,
    layer_modules={
        **LAYER_MODULES,
        **LATENT_MODULES,
        **{name: disk for name, disk in MIXTURE_MODULES.items() if name != "moe.selection_bias"},
    },
    expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
    known_fields=frozenset(
        {
            *_FIELDS.values(),
            "n_shared_experts",
            "first_k_dense_replace",
            "n_group",
            "topk_group",
            "topk_method",
            "attention_bias",
            "auto_map",
        }
    ),
    fixed_fields={
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    },
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
    },
)

FAMILIES.add("deepseek_v2", DEEPSEEK_V2)

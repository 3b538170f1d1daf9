"""Hunyuan 0.5B to 7B and the translation models Hunyuan-MT and HY-MT (Tencent): Llama with norms of each head
of q and k after they are rotated, and a rope whose base is stretched by a constant."""

from typing import Any

from compress.models.config_facts import only_own_code
from compress.models.config_values import head_dim_of
from compress.models.family import FAMILIES, Family
from compress.models.limits import MAX_SIZE
from compress.models.module_names import LAYER_MODULES
from compress.models.rope_config import rope_of_alpha
from compress.untrusted.fields import Fields

HUNYUAN_MODULES = {
    **LAYER_MODULES,
    "attn.q_norm": "self_attn.query_layernorm",
    "attn.k_norm": "self_attn.key_layernorm",
}
HUNYUAN_FIXED = {
    "use_qk_norm": True,
    "qk_norm": True,
    "use_cla": False,
    "use_rotary_pos_emb": True,
    "norm_type": "rms",
    "mlp_bias": False,
    "add_classification_head": False,
}
"""Fields that other programs read, at the values that `transformers` computes."""
HUNYUAN_FIELDS = frozenset(
    {
        "attention_bias",
        "attention_head_dim",
        "auto_map",
        "cla_share_factor",
        "eod_token_id",
        "sep_token_id",
        "org_vocab_size",
    }
)
HUNYUAN_DEFAULTS = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
}


def hunyuan_implied(config: Fields) -> dict[str, Any]:
    """Return the rope of a config in the standard spelling. Refuse an `auto_map` to other code than the
    model's own from before it was in `transformers`."""
    names = ("HunYuanConfig", "HunYuanModel", "HunYuanForCausalLM", "HunYuanForSequenceClassification")
    own = [name.replace("HunYuan", f"HunYuan{kind}") for kind in ("", "DenseV1", "MoEV1") for name in names]
    only_own_code(config, own)
    sizes = [config.integer(name, 1, MAX_SIZE) for name in ("hidden_size", "num_attention_heads")]
    return rope_of_alpha(config, head_dim_of(config, *sizes))


HUNYUAN_DENSE = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    facts=lambda config: {"rotates_first": True},
    implied=hunyuan_implied,
    layer_modules=HUNYUAN_MODULES,
    known_fields=HUNYUAN_FIELDS,
    fixed_fields={**HUNYUAN_FIXED, "num_experts": 1},
    defaults=HUNYUAN_DEFAULTS,
)
FAMILIES.add("hunyuan_v1_dense", HUNYUAN_DENSE)

"""Granite 3 mixtures of experts: Granite's four multipliers, and experts weighted by the softmax over the
chosen ones."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.limits import SCALES
from compress.models.mixture import AS_IN_MEMORY, BARE, Mixture, in_one
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
LAYOUTS = (
    in_one("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    in_one(
        AS_IN_MEMORY.modules["moe.experts.*.gate"].replace("mlp", "block_sparse_moe"),
        AS_IN_MEMORY.modules["moe.experts.*.down"].replace("mlp", "block_sparse_moe"),
        suffixes=BARE,
        modules={"moe.router": "block_sparse_moe.router"},
    ),
)
EXPERT_FIELDS = {
    "num_experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "intermediate_size",
}
DEFAULTS = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MODULES = {**LAYER_MODULES, "moe.router": "block_sparse_moe.router.layer"}


def multipliers(config: Fields) -> dict[str, Any]:
    """Return the scales of the embedding, the half-layers, the attention scores and the logits."""
    embed, residual, attn, logits = (config.number(name, *SCALES, default=1.0) for name in MULTIPLIERS)
    if logits == 0:
        raise config.wrong("logits_scaling", logits, "a number other than 0, by which logits are divided")
    return {
        "embed_scale": embed,
        "residual_scale": residual,
        "attn_scale": attn,
        "logit_scale": 1.0 / logits,
    }


FAMILIES.add(
    "granitemoe",
    Family(
        model_type="granitemoe",
        architecture="GraniteMoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        facts=multipliers,
        mixture=Mixture(EXPERT_FIELDS, facts={"score": "softmax_topk"}),
        layer_modules=MODULES,
        expert_layouts=LAYOUTS,
        known_fields=frozenset({"attention_bias", "num_local_experts", "num_experts_per_tok", *MULTIPLIERS}),
        defaults=DEFAULTS,
    ),
)

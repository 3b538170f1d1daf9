"""Mixtral 8x7B and 8x22B (arXiv 2401.04088): Mistral with experts, whose weights are renormalized over the
chosen ones."""

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import same_window
from compress.models.mixture import AS_IN_MEMORY, BARE, Mixture, apart, in_one
from compress.models.module_names import LAYER_MODULES

FAMILIES.add(
    "mixtral",
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        windows=same_window,
        mixture=Mixture(
            {
                "num_experts": "num_local_experts",
                "top_k": "num_experts_per_tok",
                "expert_size": "intermediate_size",
            },
            facts={"renormalize": True},
        ),
        layer_modules={**LAYER_MODULES, "moe.router": "block_sparse_moe.gate"},
        expert_layouts=(
            apart("block_sparse_moe.experts", ("w1", "w3", "w2")),
            in_one(
                AS_IN_MEMORY.modules["moe.experts.*.gate"],
                AS_IN_MEMORY.modules["moe.experts.*.down"],
                suffixes=BARE,
                modules={"moe.router": "mlp.gate"},
            ),
        ),
        known_fields=frozenset({"sliding_window", "num_local_experts", "num_experts_per_tok"}),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
)

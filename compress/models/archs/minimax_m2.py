"""MiniMax-M2 (MiniMax, 2025): norms of q and k over all heads, a part of each head rotated, and experts in
every layer, chosen by the sigmoids of the router with a bias that their weights do not have. Fields of the
layers that predict further tokens are not read."""

from typing import Any

from compress.models.config_facts import only_own_code
from compress.models.family import FAMILIES, Family
from compress.models.limits import MAX_SIZE
from compress.models.mixture import AS_IN_MEMORY, BARE, Mixture, apart, in_one
from compress.models.module_names import LAYER_MODULES
from compress.models.rope_config import part_that_rotates
from compress.untrusted.fields import Fields

_BIAS = "e_score_correction_bias"


def _implied(config: Fields) -> dict[str, Any]:
    """Return the part of a head that rotates, where the number of its dimensions is stated. Refuse an
    `auto_map` to other code than the model's own from before it was in `transformers`."""
    only_own_code(config, ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"))
    if not config.has("rotary_dim") or config.has("partial_rotary_factor"):
        return {}
    return {"partial_rotary_factor": part_that_rotates(config, config.integer("head_dim", 2, MAX_SIZE))}


FAMILIES.add(
    "minimax_m2",
    Family(
        model_type="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        qk_norm=True,
        facts=lambda config: {"whole_qk_norm": True},
        mixture=Mixture(
            {
                "num_experts": "num_local_experts",
                "top_k": "num_experts_per_tok",
                "expert_size": "intermediate_size",
            },
            facts={"score": "sigmoid", "selection_bias": True, "renormalize": True},
        ),
        layer_modules={
            **LAYER_MODULES,
            "moe.router": "block_sparse_moe.gate",
            "moe.selection_bias": f"block_sparse_moe.{_BIAS}",
        },
        expert_layouts=(
            apart("block_sparse_moe.experts", ("w1", "w3", "w2")),
            in_one(
                AS_IN_MEMORY.modules["moe.experts.*.gate"],
                AS_IN_MEMORY.modules["moe.experts.*.down"],
                suffixes=BARE,
                modules={"moe.router": "mlp.gate", "moe.selection_bias": f"mlp.{_BIAS}"},
            ),
        ),
        implied=_implied,
        known_fields=frozenset(
            {"auto_map", "rotary_dim", "partial_rotary_factor", "num_local_experts", "num_experts_per_tok"}
        ),
        fixed_fields={
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
        },
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5000000.0,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 1536,
            "max_position_embeddings": 196608,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
    ),
)

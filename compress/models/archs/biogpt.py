"""BioGPT (Microsoft, arXiv 2210.10341): OPT with embeddings that are scaled by the root of the hidden size,
and gelu. Its configs state an eps of norms that its class does not read."""

from dataclasses import replace
from typing import Any

from compress.models.archs.opt import NORMS_OF_OPT, OPT
from compress.models.family import FAMILIES
from compress.models.family_hooks import nothing_restated
from compress.models.limits import MAX_SIZE
from compress.untrusted.fields import Fields

SCALED = "scale_embedding"
_PARTS = ("embed_tokens", "embed_positions", "layers", "layer_norm")


def scaled_facts(config: Fields) -> dict[str, Any]:
    """Return the norms, the offset of positions, and the factor of embeddings where they have one."""
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    return {
        **NORMS_OF_OPT,
        "norm_bias": True,
        "embed_scale": hidden_size**0.5 if config.flag(SCALED) else 1.0,
    }


FAMILIES.add(
    "biogpt",
    replace(
        OPT,
        model_type="biogpt",
        architecture="BioGptForCausalLM",
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        facts=scaled_facts,
        restated=nothing_restated,
        spelled={},
        dense_size="intermediate_size",
        outer_modules={
            "embed": "biogpt.embed_tokens",
            "positions": "biogpt.embed_positions",
            "norm": "biogpt.layer_norm",
            "head": "output_projection",
        },
        layer_prefix="biogpt.layers.",
        other_prefixes={f"{each}.": f"biogpt.{each}." for each in _PARTS},
        known_fields=frozenset(
            {
                SCALED,
                "activation_dropout",
                "attention_probs_dropout_prob",
                "hidden_dropout_prob",
                "layerdrop",
            }
        ),  # dropout is for training only
        fixed_fields={},
        defaults={
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "rope_theta": 10000.0,
            "max_position_embeddings": 1024,
            SCALED: True,
        },
    ),
)

"""XGLM (Meta, arXiv 2112.10668), and the dense models of fairseq (arXiv 2112.10684) in its class: OPT with
embeddings that are scaled by the root of the hidden size, and sinusoidal positions, which no checkpoint has
to store."""

from dataclasses import replace
from typing import Any

from compress.models.archs.biogpt import SCALED, scaled_facts
from compress.models.archs.opt import OPT
from compress.models.family import FAMILIES
from compress.models.family_hooks import nothing_restated
from compress.models.limits import MAX_SIZE
from compress.untrusted.fields import Fields

_PADDING = "pad_token_id"
_MAX_ROWS = 1 << 16
"""The most rows of a table that is computed; no tensor on disk has them."""


def _facts(config: Fields) -> dict[str, Any]:
    """Return the norms, the positions and the factor of embeddings.

    Raises:
        UnsupportedArch: the padding token has the row of a position, which is zeros then, or the hidden size
            has no halves.
    """
    facts = scaled_facts(config)
    padding = config.integer(_PADDING, 0, MAX_SIZE) if config.has(_PADDING) else 0
    if padding >= facts["position_offset"]:
        raise config.wrong(
            _PADDING, padding, "0 or 1: the class of this family has zeros for the position of that row"
        )
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    if hidden_size % 2 or hidden_size < 4:
        raise config.wrong("hidden_size", hidden_size, "even and at least 4 in this family")
    config.integer("max_position_embeddings", 1, _MAX_ROWS)
    return {**facts, "sinusoidal_positions": True}


FAMILIES.add(
    "xglm",
    replace(
        OPT,
        model_type="xglm",
        architecture="XGLMForCausalLM",
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        facts=_facts,
        restated=nothing_restated,
        spelled={
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "attention_heads",
            "hidden_act": "activation_function",
        },
        outer_modules={"embed": "model.embed_tokens", "norm": "model.layer_norm", "head": "lm_head"},
        layer_prefix="model.layers.",
        other_prefixes={f"{each}.": f"model.{each}." for each in ("embed_tokens", "layers", "layer_norm")},
        ignored_tensors=r"^(model\.)?embed_positions\.weights$",  # which older programs stored
        known_fields=frozenset(
            {
                SCALED,
                "ffn_dim",
                "decoder_start_token_id",
                "dropout",
                "activation_dropout",
                "layerdrop",
                "init_std",
            }
        ),  # dropout is for training only
        fixed_fields={"add_cross_attention": False},
        defaults={
            "activation_function": "gelu",
            "tie_word_embeddings": True,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            SCALED: True,
        },
    ),
)

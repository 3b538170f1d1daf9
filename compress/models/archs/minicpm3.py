"""MiniCPM3 (OpenBMB, arXiv 2404.06395): latent attention in a dense model, with factors of the embeddings, of
what each half of a layer adds and of the logits. The second is less in a deeper model."""

from typing import Any

from compress.models.arch import Arch
from compress.models.config_facts import only_own_code
from compress.models.family import FAMILIES, Family
from compress.models.latent_config import LATENT_MODULES, latent_of
from compress.models.limits import MAX_LAYERS, MAX_SIZE, SCALES
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_DEPTH = "scale_depth"
_BASE = "dim_model_base"


def _facts(config: Fields) -> dict[str, Any]:
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    depth = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    facts = {"embed_scale": config.number("scale_emb", *SCALES)}
    if config.has(_DEPTH):
        facts["residual_scale"] = config.number(_DEPTH, *SCALES) / depth**0.5
    if config.has(_BASE):
        facts["logit_scale"] = config.integer(_BASE, 1, MAX_SIZE) / hidden_size
    return facts


def _implied(config: Fields) -> dict[str, Any]:
    """Return the width of a value where a config states none, and refuse an `auto_map` to other code than the
    model's own from before it was in `transformers`."""
    kinds = ("Model", "ForCausalLM", "ForSequenceClassification", "Config")
    only_own_code(config, [f"MiniCPM3{kind}" for kind in kinds])
    if config.has("v_head_dim"):
        return {}
    heads = config.integer("num_attention_heads", 1, MAX_SIZE)
    return {"v_head_dim": config.integer("hidden_size", 1, MAX_SIZE) // heads}


def _of_depth(arch: Arch) -> dict[str, Any]:
    """Return the fields of a model with another number of layers than its source, which adds as much."""
    if arch.config.get("num_hidden_layers") == arch.num_layers:
        return {}
    return {_DEPTH: arch.residual_scale * arch.num_layers**0.5}


FAMILIES.add(
    "minicpm3",
    Family(
        model_type="minicpm3",
        architecture="MiniCPM3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        ffn_bias="mlp_bias",
        heads_divide_hidden=True,
        facts=_facts,
        latent=latent_of(False),
        implied=_implied,
        restated=_of_depth,
        layer_modules={**LAYER_MODULES, **LATENT_MODULES},
        known_fields=frozenset({"attention_bias", "mlp_bias", "scale_emb", _DEPTH, _BASE, "auto_map"}),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "num_key_value_heads": 40,
            "max_position_embeddings": 32768,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12,
            _DEPTH: 1.4,
            _BASE: 256,
        },
    ),
)

"""Molmo 2 (Ai2, 2026): Qwen3 or OLMo 3 with a vision tower. In models of OLMo 3 norms follow the halves of a
layer, and the rope of some layers is not rescaled. The embedding of image tokens, which have no logits, is a
tensor of its own, and stays untouched. `transformers` cuts both embeddings into equal halves when it saves.
It splits stacked linears while it loads, but not their packed codes: those of compressed-tensors are apart.
"""

from dataclasses import replace
from typing import Any

from compress.models.config_facts import implies_own_code
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape, Rope
from compress.models.limits import MAX_LAYERS
from compress.models.wrapper import wrapper
from compress.untrusted.fields import Fields

_AFTER = "norm_after"
_NORMS = "qk_norm_type"
_WHOLE = "olmo"
_KINDS = ("qwen3", _WHOLE)
_RESCALED = "rope_scaling_layers"
_MORE_TOKENS = "additional_vocab_size"
_TOWER = "model.vision_backbone"


def _facts(config: Fields) -> dict[str, Any]:
    """Return where norms are, and whether those of queries and keys span all heads.

    Raises:
        UnsupportedArch: norms of queries and keys of an unknown kind.
    """
    kind = config.text(_NORMS)
    if kind not in _KINDS:
        raise config.wrong(_NORMS, kind, " or ".join(_KINDS))
    return {"block": "post" if config.flag(_AFTER) else "pre", "whole_qk_norm": kind == _WHOLE}


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers, with a plain rope of the same base in those that are not listed as rescaled."""
    if not config.has(_RESCALED):
        return layers
    rescaled = config.integers(_RESCALED, 0, MAX_LAYERS)
    return tuple(
        layer if layer.rope is None or idx in rescaled else replace(layer, rope=Rope(theta=layer.rope.theta))
        for idx, layer in enumerate(layers)
    )


_TEXT = Family(
    model_type="molmo2_text",
    architecture="Molmo2TextModel",
    qkv_bias="attention_bias",
    qk_norm=True,
    facts=_facts,
    shapes=_shapes,
    implied=implies_own_code("Molmo2TextConfig", "Molmo2TextModel"),
    aliases={"attention_bias": "qkv_bias", "rms_norm_eps": "layer_norm_eps"},
    outer_modules={
        "embed": "model.transformer.wte",
        "norm": "model.transformer.ln_f",
        "head": "lm_head",
    },
    layer_prefix="model.transformer.blocks.",
    layer_modules={
        "attn_norm": "attn_norm",
        "attn_post_norm": "attn_norm",
        "attn": "self_attn",
        **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "self_attn.att_proj"),
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
        "attn.o": "self_attn.attn_out",
        "ffn_norm": "ff_norm",
        "ffn_post_norm": "ff_norm",
        **dict.fromkeys(("ffn.up", "ffn.gate"), "mlp.ff_proj"),
        "ffn.down": "mlp.ff_out",
    },
    apart={
        **{f"attn.{name}": f"self_attn.{name}_proj" for name in "qkv"},
        **{f"ffn.{name}": f"mlp.{name}_proj" for name in ("gate", "up")},
    },
    apart_methods=("compressed-tensors",),
    embed_parts=("model.transformer.wte.embedding", "model.transformer.wte.new_embedding"),
    in_memory={
        "model.transformer.blocks.": "model.language_model.layers.",
        "model.transformer.ln_f.": "model.language_model.norm.",
        "model.transformer.wte.": "model.language_model.embed_tokens.",
        f"{_TOWER}.image_vit.transformer.resblocks.": "model.vision_tower.layers.",
        f"{_TOWER}.image_vit.": "model.vision_tower.",
        f"{_TOWER}.image_pooling_2d.": "model.multi_modal_projector.image_pooling_2d.",
        f"{_TOWER}.image_projector.": "model.multi_modal_projector.image_projector.",
    },
    in_memory_inside={
        "attn_norm": "input_layernorm",
        "ff_norm": "post_attention_layernorm",
        "self_attn.attn_out": "self_attn.o_proj",
        "mlp.ff_out": "mlp.down_proj",
    },
    known_fields=frozenset(
        {
            _AFTER,
            _NORMS,
            _RESCALED,
            _MORE_TOKENS,
            "attention_bias",
            "auto_map",
            "embedding_dropout",
            "residual_dropout",
        }
    ),
    fixed_fields={"tie_word_embeddings": False, "use_qk_norm": True},
    defaults={
        "vocab_size": 151936,
        _MORE_TOKENS: 128,
        "hidden_size": 4096,
        "hidden_act": "silu",
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 36864,
        "tie_word_embeddings": False,
        _AFTER: False,
        _NORMS: "qwen3",
    },
)

FAMILIES.add(
    "molmo2",
    wrapper(
        "molmo2",
        "Molmo2ForConditionalGeneration",
        _TEXT,
        more_tokens=_MORE_TOKENS,
        untouched=tuple(f"{_TOWER}.{part}" for part in ("image_vit", "image_pooling_2d", "image_projector")),
    ),
)

"""Gemma 3n, the text model: four streams of the residual of which layers compute one (AltUp), a low-rank
residual around attention (LAuReL), sparse gates in the first layers, and embeddings of tokens for each layer,
which are added to the other streams. The last layers read the keys and values of the last layer of their type
before them. FFNs may differ in width (MatFormer, arXiv 2310.07707).

Tokens of images and sound, the last of the vocabulary, have embeddings in the towers of the whole model, and
the class of `transformers` around this one takes those; here they have rows of the table like others.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.models.archs.gemma4_text import layer_embed_modules, sources_of_keys
from compress.models.family import FAMILIES, Family
from compress.models.hyper_connection import MAX_STREAMS
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import every_nth_full, rope_by_layer_type, stated_windows_by_layer_type
from compress.models.limits import MAX_LAYERS, MAX_SIZE, SCALES, SPARSITIES, THETAS
from compress.models.module_names import LAYER_MODULES, OUTER_MODULES, SANDWICH_NORMS
from compress.untrusted.fields import Fields

_PERIOD = 5
_SPARSE_LAYERS = 10
_SPARSITIES = "activation_sparsity_pattern"


def altup_modules(prefix: str) -> Mapping[str, str]:
    """Return the modules of the streams outside of the layers -> those on disk, under the text model."""
    places = {"embed": "altup_projections", "norm": "altup_unembed_projections"}
    return {
        f"{place}.streams.{idx}": f"{prefix}.{name}.{idx}"
        for place, name in places.items()
        for idx in range(MAX_STREAMS - 1)
    }


def _facts(config: Fields) -> dict[str, Any]:
    cap = "final_logit_softcapping"
    rows = config.integer("vocab_size_per_layer_input", 1, MAX_SIZE)
    num_tokens = config.integer("vocab_size", 1, MAX_SIZE)
    if rows > num_tokens:
        raise config.wrong("vocab_size_per_layer_input", rows, f"at most {num_tokens}, the vocab_size")
    return {
        "block": "sandwich",
        "v_norm": True,
        "embed_scale": config.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        "attn_scale": 1.0,
        "layer_embed_size": config.integer("hidden_size_per_layer_input", 1, MAX_SIZE),
        "layer_embed_vocab": 0 if rows == num_tokens else rows,
        "altup_streams": config.integer("altup_num_inputs", 2, MAX_STREAMS),
        "laurel_rank": config.integer("laurel_rank", 1, MAX_SIZE),
        "logit_softcap": config.number(cap, 1e-3, SCALES[1]) if config.has(cap) else None,
    }


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with the sparsity of their gates, the last of which read the keys and values of
    earlier ones."""
    sparsities = config.numbers(_SPARSITIES, 0, SPARSITIES[1])
    if len(sparsities) != len(layers):
        raise config.wrong(_SPARSITIES, sparsities, f"a number for each of {len(layers)} layers")
    if odd := [each for each in sparsities if 0 < each < SPARSITIES[0]]:
        raise config.wrong(_SPARSITIES, odd[0], f"0, or at least {SPARSITIES[0]}")
    sources = sources_of_keys(config, layers)
    return tuple(
        replace(layer, kv_source=source, gate_sparsity=sparsity or None)
        for layer, source, sparsity in zip(layers, sources, sparsities, strict=True)
    )


def _implied(config: Fields) -> dict[str, Any]:
    full_theta = config.number("rope_theta", *THETAS, default=1e6)
    sliding_theta = config.number("rope_local_base_freq", *THETAS, default=1e4)
    implied = every_nth_full(config, _PERIOD) | rope_by_layer_type(config, full_theta, sliding_theta)
    if not config.has(_SPARSITIES):
        num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
        num_sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        implied[_SPARSITIES] = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    return implied


GEMMA3N_TEXT = Family(
    model_type="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    heads_divide_hidden=True,
    ffn_by_layer=True,
    windows=stated_windows_by_layer_type,
    facts=_facts,
    shapes=_shapes,
    implied=_implied,
    spelled={"hidden_act": "hidden_activation"},
    outer_modules={**OUTER_MODULES, **layer_embed_modules("model"), **altup_modules("model")},
    layer_modules={
        **LAYER_MODULES,
        **SANDWICH_NORMS,
        "altup.router": "altup.modality_router",
        "altup.router_norm": "altup.router_norm",
        "altup.predict": "altup.prediction_coefs",
        "altup.correct": "altup.correction_coefs",
        "altup.output_scale": "altup.correct_output_scale",
        "laurel.left": "laurel.linear_left",
        "laurel.right": "laurel.linear_right",
        "laurel.norm": "laurel.post_laurel_norm",
        "layer_embed.gate": "per_layer_input_gate",
        "layer_embed.out": "per_layer_projection",
        "layer_embed.norm": "post_per_layer_input_norm",
    },
    # `altup_coef_clip` bounds coefficients in training alone.
    known_fields=frozenset(
        {
            "attention_bias",
            "sliding_window",
            "layer_types",
            "rope_local_base_freq",
            "final_logit_softcapping",
            "hidden_size_per_layer_input",
            "vocab_size_per_layer_input",
            "num_kv_shared_layers",
            "altup_num_inputs",
            "altup_coef_clip",
            "laurel_rank",
            _SPARSITIES,
        }
    ),
    fixed_fields={"altup_active_idx": 0, "altup_correct_scale": True},
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 35,
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
    },
)

FAMILIES.add("gemma3n_text", GEMMA3N_TEXT)

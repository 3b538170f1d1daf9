"""Gemma 4, the text model: Gemma 3 with normed values and a factor for the output of each layer. Layers with
full attention have wider heads, of which a part rotates, and may take their keys for values.

In the model with experts (26B-A4B) each layer has its dense FFN, too: it is the shared expert of a mixture
whose branches are normed apart. In the models named E tokens have embeddings for each layer, and the last
layers read the keys and values of the last layer of their type before them; their FFNs may be twice as wide.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.config_writer import PER_LAYER
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import FULL, SLIDING, every_nth_full, stated_windows_by_layer_type
from compress.models.limits import MAX_LAYERS, MAX_SIZE, SCALES
from compress.models.mixture import BARE, Mixture, apart, in_one
from compress.models.module_names import LAYER_MODULES, OUTER_MODULES, SANDWICH_NORMS
from compress.models.rope_config import check_plain_ropes
from compress.untrusted.fields import Fields, shown

_PERIOD = 6
_OWN_WIDTHS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""Fields of widths -> those that state them for layers with full attention."""


def layer_embed_modules(prefix: str) -> Mapping[str, str]:
    """Return the modules of the embeddings for each layer -> those on disk, under the text model."""
    return {
        "layer_embeds.table": f"{prefix}.embed_tokens_per_layer",
        "layer_embeds.proj": f"{prefix}.per_layer_model_projection",
        "layer_embeds.norm": f"{prefix}.per_layer_projection_norm",
    }


def _facts(config: Fields) -> dict[str, Any]:
    _check_causal(config)
    check_plain_ropes(config, (FULL, SLIDING))
    cap = "final_logit_softcapping"
    return {
        "block": "sandwich",
        "v_norm": True,
        "layer_scalar": True,
        "embed_scale": config.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        "attn_scale": 1.0,
        "layer_embed_size": _layer_embed_size(config),
        "logit_softcap": config.number(cap, 1e-3, SCALES[1]) if config.has(cap) else None,
    }


def _check_causal(config: Fields) -> None:
    """Refuse text with attention to later positions.

    Raises:
        UnsupportedArch: the config states it.
    """
    # Among images, `vision` lets positions see later ones; text is causal.
    name = "use_bidirectional_attention"
    if config.has(name) and config.text(name) != "vision":
        raise UnsupportedArch(
            f"{config.where} has {name} = {shown(config.text(name))}: the decoder lacks attention to later "
            "positions."
        )


def _layer_embed_size(config: Fields) -> int:
    size = config.integer("hidden_size_per_layer_input", 0, MAX_SIZE, default=0)
    own = "vocab_size_per_layer_input"
    all_tokens = config.integer("vocab_size", 1, MAX_SIZE)
    if size and config.has(own) and config.integer(own, 1, MAX_SIZE) != all_tokens:
        raise config.wrong(own, config.integer(own, 1, MAX_SIZE), f"{all_tokens}, the vocab_size")
    return size


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers, the last of which read the keys and values of earlier ones."""
    factor = 2 if config.flag("use_double_wide_mlp", default=False) else 1
    if factor == 2 and any(layer.experts is not None for layer in layers):
        raise config.wrong("use_double_wide_mlp", True, "false in a model with experts")
    return tuple(
        layer
        if source is None
        else replace(
            layer,
            kv_source=source,
            keys_are_values=False,
            intermediate_size=layer.intermediate_size * factor,
        )
        for layer, source in zip(layers, sources_of_keys(config, layers), strict=True)
    )


def sources_of_keys(config: Fields, layers: tuple[LayerShape, ...]) -> list[int | None]:
    """Return for each layer the one whose keys and values it reads, None where they are its own."""
    num_shared = config.integer("num_kv_shared_layers", 0, MAX_LAYERS, default=0)
    num_own = max(len(layers) - num_shared, 0)
    sources = {layer.window: idx for idx, layer in enumerate(layers[:num_own])}
    if any(layer.window not in sources for layer in layers):
        raise config.wrong(
            "num_kv_shared_layers",
            num_shared,
            f"at most as many as leave a layer of each type before them, of {len(layers)}",
        )
    return [None] * num_own + [sources[layer.window] for layer in layers[num_own:]]


def _restated(arch: Arch) -> dict[str, Any]:
    """Return no fields.

    Raises:
        UnsupportedArch: the last layer has a window, which no config can state.
    """
    if arch.layers[-1].window is not None:
        raise UnsupportedArch(f"the last layer has a window; in {arch.family} models it has full attention.")
    return {}


def _implied(config: Fields) -> dict[str, Any]:
    stated = every_nth_full(config, _PERIOD).get("layer_types") or config.texts("layer_types")
    types = [*stated[:-1], FULL]  # as `transformers` does, which warns where another type is stated
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    is_full = [kind == FULL for kind in types[:num_layers]]
    return {"layer_types": types, **_widths_of_full(config, is_full)}


def _widths_of_full(config: Fields, is_full: list[bool]) -> dict[str, int]:
    """Return the widths of layers with full attention, by the fields that state them."""
    if config.has(PER_LAYER):
        return _widths_by_layer(config, is_full)
    own = "num_global_key_value_heads"
    read = own if config.flag("attention_k_eq_v") and config.has(own) else "num_key_value_heads"
    return {own: config.integer(read, 1, MAX_SIZE)}


def _widths_by_layer(config: Fields, is_full: list[bool]) -> dict[str, int]:
    """Return the widths of layers with full attention from a config that states them for each.

    Raises:
        UnsupportedArch: they differ, other layers have widths of their own, or other fields are stated.
    """
    stated = config.mapping(PER_LAYER)
    layers = {str(idx).lstrip("0") or "0": each for idx, each in stated.items() if each}
    full = [str(idx) for idx, each in enumerate(is_full) if each]
    own = Fields(layers.get(full[0], {}) if full else {}, f"{PER_LAYER} of {config.where}", UnsupportedArch)
    expected = dict.fromkeys(full, layers[full[0]]) if list(own) else {}
    if layers != expected or set(own) - _OWN_WIDTHS.keys():
        raise config.wrong(
            PER_LAYER,
            stated,
            f"the same {' and '.join(_OWN_WIDTHS)} for every layer with full attention, and nothing else",
        )
    return {
        field: (own if own.has(name) else config).integer(name, 1, MAX_SIZE)
        for name, field in _OWN_WIDTHS.items()
    }


def _is_sparse(config: Fields, num_layers: int) -> list[bool]:
    return [config.flag("enable_moe_block", default=False)] * num_layers


GEMMA4_TEXT = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    windows=stated_windows_by_layer_type,
    full_widths={"head_dim": "global_head_dim", "num_kv_heads": "num_global_key_value_heads"},
    full_keys_are_values="attention_k_eq_v",
    facts=_facts,
    shapes=_shapes,
    implied=_implied,
    restated=_restated,
    spelled={"hidden_act": "hidden_activation"},
    mixture=Mixture(
        {
            "num_experts": "num_experts",
            "top_k": "top_k_experts",
            "expert_size": "moe_intermediate_size",
            "shared_size": "intermediate_size",
        },
        facts={"renormalize": True, "branch_norms": True, "output_scale": True},
        is_sparse=_is_sparse,
    ),
    outer_modules={**OUTER_MODULES, **layer_embed_modules("model")},
    layer_modules={
        **LAYER_MODULES,
        **SANDWICH_NORMS,
        "layer_scalar": "layer_scalar",
        "layer_embed.gate": "per_layer_input_gate",
        "layer_embed.out": "per_layer_projection",
        "layer_embed.norm": "post_per_layer_input_norm",
        "moe.router": "router.proj",
        "moe.router_norm.weight": "router.scale",
        "moe.output_scale": "router.per_expert_scale",
        "moe.shared.gate": "mlp.gate_proj",
        "moe.shared.up": "mlp.up_proj",
        "moe.shared.down": "mlp.down_proj",
        "moe.shared_norm": "pre_feedforward_layernorm",
        "moe.shared_post_norm": "post_feedforward_layernorm_1",
        "moe.experts_norm": "pre_feedforward_layernorm_2",
        "moe.experts_post_norm": "post_feedforward_layernorm_2",
    },
    expert_layouts=(
        in_one("experts.gate_up_proj", "experts.down_proj", suffixes=BARE),
        apart("experts", methods=("compressed-tensors",)),
    ),
    known_fields=frozenset(
        {
            "attention_bias",
            "sliding_window",
            "layer_types",
            "partial_rotary_factor",
            "final_logit_softcapping",
            "attention_k_eq_v",
            "global_head_dim",
            "num_global_key_value_heads",
            PER_LAYER,
            "hidden_size_per_layer_input",
            "vocab_size_per_layer_input",
            "num_kv_shared_layers",
            "use_double_wide_mlp",
            "enable_moe_block",
            "num_experts",
            "top_k_experts",
            "moe_intermediate_size",
            "use_bidirectional_attention",
        }
    ),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 30,
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
        },
    },
)

FAMILIES.add("gemma4_text", GEMMA4_TEXT)

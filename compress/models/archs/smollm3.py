"""SmolLM3 (Hugging Face): Llama whose every fourth layer encodes no positions (NoPE, arXiv 2501.18795)."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import FULL, SLIDING, layer_types, one_window, windows_by_layer_type
from compress.models.limits import MAX_LAYERS
from compress.untrusted.fields import Fields


def _implied(config: Fields) -> dict[str, Any]:
    """Return which layers rotate (`no_rope_layers` has 1 for those that do), and their types."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    rotates = rotated_layers(config, num_layers)
    implied: dict[str, Any] = {"no_rope_layers": [int(each) for each in rotates]}
    slides = config.flag("use_sliding_window") and one_window(config) is not None
    if not config.has("layer_types"):
        implied["layer_types"] = [SLIDING if slides and not each else FULL for each in rotates]
    elif not slides and SLIDING in layer_types(config, num_layers):
        raise config.wrong("use_sliding_window", False, f"true, as layer_types has {SLIDING}")
    return implied


def rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers encode positions: those that a config states, or all but every n-th."""
    if not config.has("no_rope_layers"):
        interval = config.integer("no_rope_layer_interval", 1, MAX_LAYERS)
        return [idx % interval != 0 for idx in range(1, num_layers + 1)]
    stated = config.integers("no_rope_layers", 0, 1)
    if len(stated) < num_layers:
        raise config.wrong("no_rope_layers", stated, f"a list of {num_layers} numbers")
    return [each == 1 for each in stated[:num_layers]]


FAMILIES.add(
    "smollm3",
    Family(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        ffn_bias="mlp_bias",
        windows=windows_by_layer_type,
        rotated_layers=rotated_layers,
        implied=_implied,
        known_fields=frozenset(
            {
                "attention_bias",
                "mlp_bias",
                "use_sliding_window",
                "sliding_window",
                "layer_types",
                "no_rope_layers",
                "no_rope_layer_interval",
            }
        ),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "rope_theta": 2000000.0,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
        },
    ),
)

"""Phi-4-multimodal (Microsoft, arXiv 2503.01743) by the name under which it was published, with its own code.
Each linear of a layer is the base of two adapters (LoRA) in the same files, for images and for sound. Text
does without them: they stay untouched, and so does what they read."""

from dataclasses import replace
from typing import Any

from compress.models.archs.phi3 import PHI3, check_rope_of_phi
from compress.models.config_facts import only_own_code
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper
from compress.untrusted.fields import Fields

_CODE = ("Phi4MMConfig", "Phi4MMForCausalLM", "Phi4MMTokenizer")
_LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def _implied(config: Fields) -> dict[str, Any]:
    only_own_code(config, _CODE)
    check_rope_of_phi(config)
    return {}


def _base(name: str) -> str:
    return f"{name}.base_layer" if name in _LINEARS else name


_TEXT = replace(
    PHI3,
    model_type="phi4mm",
    architecture="Phi4MMForCausalLM",
    implied=_implied,
    layer_modules={ours: _base(theirs) for ours, theirs in PHI3.layer_modules.items()},
    fixed_fields={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
    defaults={**PHI3.defaults, "max_position_embeddings": 131072},
)

FAMILIES.add(
    "phi4mm",
    wrapper(
        "phi4mm",
        "Phi4MMForCausalLM",
        _TEXT,
        text_paths=(),
        has_adapters=True,
        layers_are_numbered=True,
        untouched=("model.embed_tokens_extend",),
        untouched_in_layers=tuple(f"{each}.lora_{side}" for each in _LINEARS for side in "AB"),
        outside=frozenset(
            {"audio_processor", "img_processor", "embd_layer", "speech_lora", "vision_lora"},
        ),
    ),
)

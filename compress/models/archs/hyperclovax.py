"""HyperCLOVA X SEED (NAVER, 2025): Granite whose logits are multiplied by what divides them there, with norms
of the outputs of both halves of a layer."""

from dataclasses import replace
from typing import Any

from compress.models.arch import SCALES
from compress.models.archs.granite import GRANITE
from compress.models.config_facts import implies_own_code
from compress.models.family import FAMILIES
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    name = "attention_multiplier"
    return {
        "embed_scale": config.number("embedding_multiplier", *SCALES),
        "residual_scale": config.number("residual_multiplier", *SCALES),
        "attn_scale": config.number(name, *SCALES) if config.has(name) else None,
        "logit_scale": config.number("logits_scaling", *SCALES),
        "block": "sandwich" if config.flag("use_post_norm") else "pre",
    }


FAMILIES.add(
    "hyperclovax",
    replace(
        GRANITE,
        model_type="hyperclovax",
        architecture="HyperCLOVAXForCausalLM",
        heads_divide_hidden=True,
        facts=_facts,
        implied=implies_own_code("HyperCLOVAXConfig", "HyperCLOVAXModel", "HyperCLOVAXForCausalLM"),
        layer_modules={**LAYER_MODULES, "attn_post_norm": "post_norm1", "ffn_post_norm": "post_norm2"},
        known_fields=GRANITE.known_fields | {"use_post_norm", "auto_map"},
        defaults={
            **{name: value for name, value in GRANITE.defaults.items() if name != "attention_multiplier"},
            "use_post_norm": True,
        },
    ),
)

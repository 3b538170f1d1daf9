"""HyperCLOVA X SEED Think (NAVER, 2025): Granite with a norm of the output of each half of a layer, and a
factor of the logits instead of a divisor."""

from typing import Any

from compress.models.archs.granite import GRANITE
from compress.models.config_facts import implies_own_code
from compress.models.family import FAMILIES, Family
from compress.models.limits import SCALES
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_POST_NORM = "use_post_norm"
_ATTN_SCALE = "attention_multiplier"


def _facts(config: Fields) -> dict[str, Any]:
    own = {"attn_scale": config.number(_ATTN_SCALE, *SCALES)} if config.has(_ATTN_SCALE) else {}
    return {
        **own,
        "block": "sandwich" if config.flag(_POST_NORM) else "pre",
        "embed_scale": config.number("embedding_multiplier", *SCALES),
        "residual_scale": config.number("residual_multiplier", *SCALES),
        "logit_scale": config.number("logits_scaling", *SCALES),
    }


FAMILIES.add(
    "hyperclovax",
    Family(
        model_type="hyperclovax",
        architecture="HyperCLOVAXForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        ffn_bias="mlp_bias",
        heads_divide_hidden=True,
        facts=_facts,
        implied=implies_own_code("HyperCLOVAXConfig", "HyperCLOVAXModel", "HyperCLOVAXForCausalLM"),
        layer_modules={**LAYER_MODULES, "attn_post_norm": "post_norm1", "ffn_post_norm": "post_norm2"},
        known_fields=GRANITE.known_fields | {_POST_NORM, "auto_map"},
        defaults={
            **{name: value for name, value in GRANITE.defaults.items() if name != _ATTN_SCALE},
            _POST_NORM: True,
        },
    ),
)

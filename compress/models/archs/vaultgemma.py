"""VaultGemma (Google, arXiv 2510.15001), trained with differential privacy: Gemma 2 with norms before the
halves of a layer only."""

from dataclasses import replace
from typing import Any

from compress.models.archs.gemma2 import GEMMA2
from compress.models.family import FAMILIES
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    return {**GEMMA2.facts(config), "block": "pre"}


FAMILIES.add(
    "vaultgemma",
    replace(
        GEMMA2,
        model_type="vaultgemma",
        architecture="VaultGemmaForCausalLM",
        facts=_facts,
        layer_modules={**LAYER_MODULES, "ffn_norm": "pre_feedforward_layernorm"},
    ),
)

"""Nemotron 3 Nano Omni (NVIDIA, 2026) by the name under which it was published."""

from dataclasses import replace

from compress.models.archs.nemotron_h_omni import NEMOTRON_H_OMNI
from compress.models.family import FAMILIES

_NAME = "NemotronH_Nano_Omni_Reasoning_V3"

FAMILIES.add(_NAME, replace(NEMOTRON_H_OMNI, model_type=_NAME, architecture=_NAME))

"""Falcon Mamba 7B (TII, arXiv 2410.05355): Mamba whose mixers norm dt, B and C, without weights."""

from dataclasses import replace
from functools import partial
from typing import Any

from compress.models.archs.mamba import MAMBA
from compress.models.family import FAMILIES
from compress.models.mamba1_config import mamba1_of
from compress.untrusted.fields import Fields

_EPS = "mixer_rms_eps"


def _facts(config: Fields) -> dict[str, Any]:
    return {"recurrent_norm_eps": config.number(_EPS, 0, 1)}


FAMILIES.add(
    "falcon_mamba",
    replace(
        MAMBA,
        model_type="falcon_mamba",
        architecture="FalconMambaForCausalLM",
        facts=_facts,
        recurrence=partial(mamba1_of, norms="unit"),
        known_fields=MAMBA.known_fields | {_EPS},
        defaults={**MAMBA.defaults, _EPS: 1e-6},
    ),
)

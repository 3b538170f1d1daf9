"""Mamba (arXiv 2312.00752), the models of state-spaces in the format of `transformers` (`mamba-*-hf`): every
layer is one Mamba-1 mixer, without attention and without an FFN."""

from functools import partial

from compress.models.attention_free import (
    DEFAULTS,
    FIXED_FIELDS,
    IN_FLOAT32,
    KNOWN_FIELDS,
    MIXER_MODULES,
    OUTER_NAMES,
    SPELLED,
    no_attention,
)
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import no_layer
from compress.models.mamba1_config import MAMBA1_MODULES, mamba1_of

MAMBA = Family(
    model_type="mamba",
    architecture="MambaForCausalLM",
    attention_free=True,
    computed_otherwise=IN_FLOAT32,
    rotated_layers=no_layer,
    half_layers=True,
    spelled={**SPELLED, "mamba_dt_rank": "time_step_rank", "mamba_d_ssm": "intermediate_size"},
    implied=no_attention,
    recurrence=partial(mamba1_of, norms=None),
    outer_modules=OUTER_NAMES,
    layer_prefix="backbone.layers.",
    layer_modules={
        **{name: each.replace("mamba.", "mixer.") for name, each in MAMBA1_MODULES.items()},
        **MIXER_MODULES,
    },
    known_fields=KNOWN_FIELDS,
    fixed_fields={**FIXED_FIELDS, "hidden_act": "silu"},
    defaults={**DEFAULTS, "state_size": 16, "time_step_rank": "auto", "tie_word_embeddings": True},
)

FAMILIES.add("mamba", MAMBA)

"""Models without attention: every layer has a recurrence and no FFN, as in Mamba (arXiv 2312.00752).

Their configs state no widths of attention or of an FFN, and no number of positions. The first have the least
values here, which no layer uses; nothing in such a model bounds the second, which are those of the longest
sequences that one was trained for.
"""

from typing import Any

from compress.models.layer_types import LINEAR
from compress.models.limits import MAX_LAYERS
from compress.untrusted.fields import Fields

MAX_TRAINED = 1 << 18
"""The positions of Mamba-Codestral 7B."""
MIXER_MODULES = {"attn": "mixer", "attn_norm": "norm"}
"""The names of a layer's modules on disk, but for those in its mixer."""
OUTER_NAMES = {"embed": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"}
SPELLED = {
    "rms_norm_eps": "layer_norm_epsilon",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_conv_bias": "use_conv_bias",
}
"""Standard fields, and the names that Mamba and Mamba-2 have for them."""
KNOWN_FIELDS = frozenset(
    {"residual_in_fp32", "time_step_min", "time_step_scale", "time_step_init_scheme", "time_step_rank"}
)
"""Fields of the first values of parameters, and of the rounding of the residual."""
FIXED_FIELDS = {"use_bias": False}
DEFAULTS: dict[str, Any] = {
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "hidden_act": "silu",
}
IN_FLOAT32 = (
    "The residual has the dtype of the model; the class of transformers keeps it in float32 where "
    "residual_in_fp32 is true, as it is by default."
)


def no_attention(config: Fields) -> dict[str, Any]:
    """Return the standard fields that no config without attention states."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    return {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "intermediate_size": 1,
        "max_position_embeddings": MAX_TRAINED,
        "layer_types": [LINEAR] * num_layers,
    }

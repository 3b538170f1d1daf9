"""Mamba-2 mixers (arXiv 2405.21060) in `config.json`, in the fields of Bamba and Granite 4 (`Family.spelled`
maps those of others to them), and their names on disk."""

import math

from compress.models.limits import MAX_SIZE
from compress.models.mamba2 import Mamba2
from compress.untrusted.fields import Fields

_FIELDS = {
    "num_heads": "mamba_n_heads",
    "num_key_heads": "mamba_n_groups",
    "key_dim": "mamba_d_state",
    "kernel_size": "mamba_d_conv",
}
_LIMIT = "time_step_limit"
_UNLIMITED = ([0, math.inf], [0, {"__float__": "Infinity"}])
"""In memory, and as `transformers` writes it."""
MAMBA_FIELDS = frozenset(
    {*_FIELDS.values(), "mamba_d_head", "mamba_expand", "mamba_conv_bias", "mamba_chunk_size", _LIMIT}
)
"""Chunks are a matter of the program, and change no number but by rounding."""
MAMBA_FIXED = {"mamba_proj_bias": False, "hidden_act": "silu"}
"""The activation is that of the convolution, too."""
MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
"""The classes of Bamba and Granite 4 have these where a config states nothing."""
MAMBA_MODULES = {
    "mamba.gate": "mamba.in_proj",
    "mamba.x": "mamba.in_proj",
    "mamba.B": "mamba.in_proj",
    "mamba.C": "mamba.in_proj",
    "mamba.dt": "mamba.in_proj",
    "mamba.conv": "mamba.conv1d",
    "mamba.dt_bias": "mamba.dt_bias",
    "mamba.A_log": "mamba.A_log",
    "mamba.D": "mamba.D",
    "mamba.norm": "mamba.norm",
    "mamba.o": "mamba.out_proj",
}


def mamba2_of(config: Fields, *, normed: bool = True) -> Mamba2:
    """Return the widths of the Mamba-2 mixers of a config. The heads are in sum as wide as `mamba_d_ssm`, or
    where it states none and `mamba_expand` so many times as wide as the hidden states."""
    if config.has(_LIMIT):
        limit = config.items(_LIMIT)
        if limit not in _UNLIMITED:
            raise config.wrong(_LIMIT, limit, "[0.0, Infinity]: the decoder bounds no step of time")
    widths = {name: config.integer(stated, 1, MAX_SIZE) for name, stated in _FIELDS.items()}
    value_dim = _value_dim(config, widths["num_heads"])
    return Mamba2(**widths, value_dim=value_dim, conv_bias=config.flag("mamba_conv_bias"), normed=normed)


def _value_dim(config: Fields, num_heads: int) -> int:
    if config.has("mamba_d_ssm"):
        inner_size = config.integer("mamba_d_ssm", 1, MAX_SIZE)
    elif config.has("mamba_expand"):
        hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
        inner_size = config.integer("mamba_expand", 1, MAX_SIZE) * hidden_size
    else:
        return config.integer("mamba_d_head", 1, MAX_SIZE)
    value_dim, rest = divmod(inner_size, num_heads)
    if rest:
        raise config.wrong("mamba_n_heads", num_heads, f"a divisor of {inner_size}")
    if config.is_integer("mamba_d_head") or config.text("mamba_d_head") != "auto":
        stated_dim = config.integer("mamba_d_head", 1, MAX_SIZE)
        if stated_dim != value_dim:
            raise config.wrong("mamba_d_head", stated_dim, f"{inner_size} / {num_heads}")
    return value_dim

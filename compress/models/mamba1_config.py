"""Mamba-1 mixers (arXiv 2312.00752) in `config.json`, in the fields of Jamba, and their names on disk."""

from typing import Literal

from compress.models.limits import MAX_SIZE
from compress.models.mamba1 import NORMS, Mamba1
from compress.untrusted.fields import Fields

_RANK = "mamba_dt_rank"
_HIDDEN_OF_RANK = 16
"""A rank that follows from the hidden size is a sixteenth of it, rounded up."""
MAMBA1_FIELDS = frozenset({"mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_conv_bias", _RANK})
MAMBA1_FIXED = {"mamba_proj_bias": False, "hidden_act": "silu"}
"""The activation is that of the convolution, too."""
MAMBA1_DEFAULTS = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    _RANK: "auto",
}
"""The class of Jamba has these where a config states nothing."""
MAMBA1_MODULES = {
    "mamba1.x": "mamba.in_proj",
    "mamba1.gate": "mamba.in_proj",
    "mamba1.conv": "mamba.conv1d",
    "mamba1.x_proj": "mamba.x_proj",
    "mamba1.dt_proj": "mamba.dt_proj",
    "mamba1.A_log": "mamba.A_log",
    "mamba1.D": "mamba.D",
    **{f"mamba1.{name}": f"mamba.{name.split('_')[0].lower()}_layernorm" for name in NORMS},
    "mamba1.o": "mamba.out_proj",
}


def mamba1_of(config: Fields, *, norms: Literal["weighted", "unit"] | None = "weighted") -> Mamba1:
    """Return the widths of the Mamba-1 mixers of a config, whose norms of dt, B and C have weights or none,
    if there are any. The channels are `mamba_d_ssm`, or where none are stated `mamba_expand` times the hidden
    size."""
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    if config.is_integer(_RANK) or config.text(_RANK) != "auto":
        rank = config.integer(_RANK, 1, MAX_SIZE)
    else:
        rank = -(-hidden_size // _HIDDEN_OF_RANK)
    if config.has("mamba_d_ssm"):
        channels = config.integer("mamba_d_ssm", 1, MAX_SIZE)
    else:
        channels = config.integer("mamba_expand", 1, MAX_SIZE) * hidden_size
    return Mamba1.of(
        channels,
        config.integer("mamba_d_state", 1, MAX_SIZE),
        config.integer("mamba_d_conv", 1, MAX_SIZE),
        rank,
        conv_bias=config.flag("mamba_conv_bias"),
        normed=norms is not None,
        unit_norms=norms == "unit",
    )

"""Gated delta nets (arXiv 2412.06464) in `config.json`, in the fields of Qwen3-Next, and their names on
disk."""

from typing import Any

from compress.models.delta_net import DeltaNet
from compress.models.layer_types import LINEAR, every_nth_full
from compress.models.limits import MAX_LAYERS, MAX_SIZE
from compress.untrusted.fields import Fields

_PERIOD = "full_attention_interval"
_FIELDS = {
    "num_heads": "linear_num_value_heads",
    "num_key_heads": "linear_num_key_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel_size": "linear_conv_kernel_dim",
}
DELTA_FIELDS = frozenset({*_FIELDS.values(), _PERIOD, "layer_types"})
DELTA_DEFAULTS = {
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
"""The classes of Qwen3-Next and Qwen3.5 have these where a config states nothing."""
DELTA_MODULES = {
    "delta.q": "linear_attn.in_proj_qkv",
    "delta.k": "linear_attn.in_proj_qkv",
    "delta.v": "linear_attn.in_proj_qkv",
    "delta.gate": "linear_attn.in_proj_z",
    "delta.beta": "linear_attn.in_proj_b",
    "delta.decay": "linear_attn.in_proj_a",
    "delta.conv": "linear_attn.conv1d",
    "delta.dt_bias": "linear_attn.dt_bias",
    "delta.A_log": "linear_attn.A_log",
    "delta.norm": "linear_attn.norm",
    "delta.o": "linear_attn.out_proj",
}
GATE_AFTER_QUERY = {"attn.gate": "self_attn.q_proj"}
"""The output gate of attention in the tensor of the queries, whose rows take turns by head."""


DELTA_FIXED = {"attn_output_gate": True, "output_gate_type": "swish", "hidden_act": "silu"}
"""Other programs read the first two, of the gates of attention and of delta nets; `transformers` has their
values for constants. The activation is that of the convolution, too."""


def delta_net_of(config: Fields) -> DeltaNet:
    """Return the widths of the delta nets of a config."""
    widths = {name: config.integer(stated, 1, MAX_SIZE) for name, stated in _FIELDS.items()}
    return DeltaNet(
        widths["num_heads"],
        widths["num_key_heads"],
        widths["key_dim"],
        widths["value_dim"],
        widths["kernel_size"],
    )


def linear_but_every_nth(config: Fields) -> dict[str, Any]:
    """Return the `layer_types` of a config; where it states none, every fourth layer, or as it states, has
    full attention, and the others have delta nets."""
    return every_nth_full(config, config.integer(_PERIOD, 1, MAX_LAYERS, default=4), LINEAR)


def stated_widths(delta: DeltaNet) -> dict[str, int]:
    """Return the fields that state the widths of delta nets."""
    return {stated: getattr(delta, name) for name, stated in _FIELDS.items()}

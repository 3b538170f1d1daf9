"""Taps: where a forward shows the inputs of its linears."""

from collections.abc import Callable

from torch import Tensor

Tap = Callable[[str, Tensor], None]
"""A hook that is called with (tap name, input of a linear group); the names are attn_in, attn_out, ffn_in
and ffn_mid; with latent attention also q_latent and kv_latent, where a recurrence joins attention also
recurrent_out, and in a mixture of experts moe_in.E and moe_mid.E, with the tokens of expert E."""


def no_tap(name: str, x: Tensor) -> None:
    """Ignore the input: the tap of a forward that nobody observes."""

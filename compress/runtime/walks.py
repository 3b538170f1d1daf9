"""Which layers of a loaded model run their linears in one launch (`kernels/linear/walk.py`) when very few rows are decoded."""

import torch
from torch import Tensor

from compress.kernels.linear.stream import gpu_of
from compress.kernels.linear.w4a16 import PackedW4
from compress.kernels.linear.walk import MAX_TOKENS, Link, Walk, refusal
from compress.runtime.loader import ModelWeights, Projection


def walks_of(weights: ModelWeights) -> tuple[Walk, ...]:
    """One for each layer; none at all where some layer's linears cannot be joined."""
    device, layers = weights.target.device, weights.layers
    if device.type != "cuda":
        return ()
    walks = []
    for layer, following in zip(layers, (*layers[1:], None), strict=True):
        links = [_link(layer.o), _link(layer.gate_up, norm=layer.ffn_norm), _link(layer.down)]
        if following is not None:
            links.append(_link(following.qkv, norm=following.attn_norm))
        o, gate_up, down, *last = links
        if o is None or gate_up is None or down is None or None in last or not layer.gate_up.gated("decode"):
            return ()
        counters = torch.zeros(2, dtype=torch.int32, device=device)
        walks.append(Walk(o, gate_up, down, last[0] if last else None, weights.arch.activation, weights.arch.norm_eps, counters))
    return tuple(walks)


def rows_walked(walks: tuple[Walk, ...]) -> int:
    """The most rows that every layer's linears are walked for; 0 where they are not."""
    if not walks:
        return 0
    gpu = gpu_of(walks[0].counters.device)
    served = [rows for rows in range(1, MAX_TOKENS + 1) if all(refusal(walk, rows, gpu) is None for walk in walks)]
    return max(served, default=0)


def _link(projection: Projection, *, norm: Tensor | None = None) -> Link | None:
    packed = projection.parts[0].decode.packed
    if len(projection.parts) > 1 or not isinstance(packed, PackedW4):
        return None
    return Link(packed, projection.parts[0].bias_O, norm)

"""A model that computes what another does, with one head of its keys or values so large that one scale for a
whole layer cannot hold both.

    values: rows of v in the head times 2^p, the columns of o that read it times 2^-p
            (attention is linear in v)
    keys:   rows of k in the head times 2^p, the rows of q that meet it times 2^-p
            (a score is a product of the two)

`ChannelOutliers` makes one channel of every head's keys large instead, with the partner that rope turns it
with: four-bit codes then spend the range of the head on two of its numbers.

Powers of two change no bit of a product, so in 16 or 32 bits the model is the same to the last bit. Under a
scheme with a scale a row the codes of k and q stay the same too, as long as the scales can be stored: those
of FP8 can, those of integers, which are numbers of float16 as well (`quant/numerics.py`), are zero below
2^-24.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape
from compress.models.weights import WeightSource, dense
from compress.quant.scheme import QuantizedWeight


@dataclass(frozen=True)
class Outliers:
    """`base`, dense, with one KV head of one layer scaled. Without norms of q and k: those undo a scale of
    their input."""

    base: WeightSource
    layer_idx: int
    head: int
    power: int
    of: Literal["k", "v"] = "k"
    kv_format: str | None = None

    @property
    def arch(self) -> Arch:
        return self.base.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self.base.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        weights = self.base.layer(layer_idx)
        shape = self.arch.layers[layer_idx]
        if layer_idx != self.layer_idx:
            return weights
        assert not self.arch.qk_norm or self.of == "v"
        scale_KC = torch.ones(shape.num_kv_heads, shape.head_dim)
        scale_KC[self.head] = 2.0**self.power
        return _scaled(weights, shape, scale_KC, self.of)


@dataclass(frozen=True)
class ChannelOutliers:
    """`base`, dense, with the keys of one channel of every head, and of its partner under rope, times
    2^power."""

    base: WeightSource
    channel: int
    power: int
    kv_format: str | None = None

    @property
    def arch(self) -> Arch:
        return self.base.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self.base.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        assert not self.arch.qk_norm
        shape = self.arch.layers[layer_idx]
        scale_KC = torch.ones(shape.num_kv_heads, shape.head_dim)
        scale_KC[:, [self.channel, self.channel + shape.head_dim // 2]] = 2.0**self.power
        return _scaled(self.base.layer(layer_idx), shape, scale_KC, "k")


def _scaled(
    weights: dict[str, Tensor | QuantizedWeight], shape: LayerShape, scale_KC: Tensor, of: Literal["k", "v"]
) -> dict[str, Tensor | QuantizedWeight]:
    """Return the weights of a layer with its keys or values multiplied by a scale, and what reads them
    divided by it."""
    of_queries = scale_KC.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=0).flatten()
    larger = f"attn.{of}"
    smaller = "attn.q" if of == "k" else "attn.o"
    changed = {
        f"{larger}.weight": dense(weights[f"{larger}.weight"]) * _like(scale_KC.flatten()[:, None], weights)
    }
    if f"{larger}.bias" in weights:
        changed[f"{larger}.bias"] = dense(weights[f"{larger}.bias"]) * _like(scale_KC.flatten(), weights)
    rows_or_columns = of_queries[:, None] if of == "k" else of_queries
    changed[f"{smaller}.weight"] = dense(weights[f"{smaller}.weight"]) / _like(rows_or_columns, weights)
    if of == "k" and f"{smaller}.bias" in weights:
        changed[f"{smaller}.bias"] = dense(weights[f"{smaller}.bias"]) / _like(of_queries, weights)
    return weights | changed


def _like(scale: Tensor, weights: dict[str, Tensor | QuantizedWeight]) -> Tensor:
    return scale.to(dense(weights["attn.q.weight"]).dtype)

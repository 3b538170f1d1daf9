"""Models whose layers have one half, made of those with both, and what each has to compute."""

from dataclasses import replace

import torch

from compress.models.arch import Arch
from compress.models.layer_shape import Half, LayerShape
from compress.models.weights import Weights, WeightSource, dense

OF_FFN = ("ffn.", "ffn_norm.", "moe.")


def halved_arch(arch: Arch) -> Arch:
    """Layer 2 i has the mixer of layer i, and layer 2 i + 1 its FFN."""
    return arch.replace(layers=tuple(half for layer in arch.layers for half in _halves(layer)))


def _halves(layer: LayerShape) -> tuple[LayerShape, LayerShape]:
    source = None if layer.kv_source is None else 2 * layer.kv_source
    mixer = replace(layer, only_half="mixer", experts=None, kv_source=source)
    return mixer, replace(layer, only_half="ffn", recurrence=None, kv_source=None, window=None, rope=None)


class Halved:
    """The source with each layer as two. A layer is scaled at its end, so its first half is not."""

    kv_format: str | None = None

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.arch = halved_arch(source.arch)

    def outer(self) -> Weights:
        return self._source.outer()

    def layer(self, layer_idx: int) -> Weights:
        whole = dict(self._source.layer(layer_idx // 2))
        scale = {name: whole.pop(name) for name in ("layer_scalar",) if name in whole}
        is_ffn = layer_idx % 2 == 1
        if not is_ffn:
            scale = {name: torch.ones_like(each) for name, each in scale.items()}  # type: ignore[arg-type]
        return {name: each for name, each in whole.items() if name.startswith(OF_FFN) == is_ffn} | scale


class HalfKept:
    """The source with one half of each layer alone."""

    kv_format: str | None = None

    def __init__(self, source: WeightSource, half: Half) -> None:
        self._source = source
        self._is_ffn = half == "ffn"
        self.arch = source.arch.replace(
            layers=tuple(_halves(layer)[self._is_ffn] for layer in source.arch.layers)
        )

    def outer(self) -> Weights:
        return self._source.outer()

    def layer(self, layer_idx: int) -> Weights:
        return {
            name: each
            for name, each in self._source.layer(layer_idx).items()
            if name.startswith(OF_FFN) == self._is_ffn or name == "layer_scalar"
        }


class HalfSilenced:
    """The source whose layers add nothing in the other half: its last linears are zero."""

    kv_format: str | None = None

    def __init__(self, source: WeightSource, half: Half) -> None:
        self._source = source
        self._ends = ("attn.o.weight",) if half == "ffn" else ("down.weight",)
        self.arch = source.arch

    def outer(self) -> Weights:
        return self._source.outer()

    def layer(self, layer_idx: int) -> Weights:
        return {
            name: torch.zeros_like(dense(each)) if name.endswith(self._ends) else each
            for name, each in self._source.layer(layer_idx).items()
        }

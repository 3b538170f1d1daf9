"""A model whose layers a run of the weight stages stored."""

from pathlib import Path

from torch import Tensor

from compress.models.arch import Arch
from compress.models.canonical import layer_name, load_weights
from compress.models.weights import WeightSource
from compress.quant.kv import FP8_STATIC
from compress.quant.scheme import QuantizedWeight, Schemes


class WithStoredLayers:
    """A source with the layers that a run stored, whose cache has calibrated scales."""

    kv_format: str | None = FP8_STATIC

    def __init__(self, source: WeightSource, directory: Path, schemes: Schemes) -> None:
        self._source = source
        self._directory = directory
        self._schemes = schemes

    @property
    def arch(self) -> Arch:
        return self._source.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return load_weights(
            self._directory / layer_name(layer_idx), self._schemes, prefix=f"layers.{layer_idx}."
        )

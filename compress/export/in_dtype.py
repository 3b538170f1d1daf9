"""A source of weights whose dense tensors are stored in another dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.models.arch import Arch
from compress.models.experts import EXPERTS_OF_TOKENS
from compress.models.weights import Weights, WeightSource
from compress.quant.scheme import QuantizedWeight


@dataclass(frozen=True)
class InDtype:
    """The weights of a source, dense ones rounded to the nearest number of `dtype`; quantized ones are left
    to their codec. Float32 holds those of 16 bits exactly. `arch.dtype` stays the dtype in which the model
    computes.

    Raises:
        UnsupportedFormat: from `outer` and `layer`, where a weight is too large for the dtype.
    """

    source: WeightSource
    dtype: torch.dtype

    @property
    def arch(self) -> Arch:
        return self.source.arch

    @property
    def kv_format(self) -> str | None:
        return self.source.kv_format

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._stored(self.source.outer(), "")

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return self._stored(self.source.layer(layer_idx), f"layers.{layer_idx}.")

    def _stored(self, weights: Weights, prefix: str) -> dict[str, Tensor | QuantizedWeight]:
        stored: dict[str, Tensor | QuantizedWeight] = {}
        for name, value in weights.items():
            stored[name] = value
            if isinstance(value, Tensor) and not name.endswith(EXPERTS_OF_TOKENS):
                stored[name] = rounded = value.to(self.dtype)
                if not bool(torch.isfinite(rounded).all()):
                    raise UnsupportedFormat(
                        f"[finite-weights] {prefix}{name} has weights that are no finite numbers of "
                        f"{self.dtype}; its largest is {float(value.abs().max()):.4g}."
                    )
        return stored

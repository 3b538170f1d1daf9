"""What a quantized weight is, as data: number of bits, symmetry, how scales are shared, and the codes themselves.

Codes are signed integers in [-2^(b-1), 2^(b-1) - 1] for symmetric and asymmetric schemes alike (the convention of compressed-tensors);
value = (code - zero_point) * scale. Packing to words on disk is `packing.py`'s, choosing scales and codes is `numerics.py`'s.

Shapes: O out, I in, G groups along I (one group for a channel scheme).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from compress.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Scheme:
    """Integer weights with 16-bit activations. `group_size` None means one scale per output channel."""

    name: str
    num_bits: int
    symmetric: bool
    group_size: int | None

    @property
    def min_code(self) -> int:
        return -(1 << (self.num_bits - 1))

    @property
    def max_code(self) -> int:
        return (1 << (self.num_bits - 1)) - 1

    @property
    def strategy(self) -> Literal["group", "channel"]:
        return "channel" if self.group_size is None else "group"

    def num_groups(self, in_features: int) -> int:
        """Groups along I.

        Raises:
            UsageError: the group size does not divide I; a padded group would be read differently by every consumer.
        """
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            raise UsageError(
                f"scheme {self.name} needs every K to be a multiple of {self.group_size}, but a linear has K = {in_features}. "
                "Choose a smaller group size or a channel scheme."
            )
        return in_features // self.group_size

    def weight_bytes(self, out_features: int, in_features: int, *, scale_bytes: int = 2) -> int:
        """Bytes of codes, scales and zero points of an [O, I] weight on disk and on the device."""
        groups = self.num_groups(in_features)
        zero_points = 0 if self.symmetric else groups * out_features * self.num_bits // 8
        return out_features * in_features * self.num_bits // 8 + groups * out_features * scale_bytes + zero_points

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> "Scheme":
        return Scheme(**facts)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("W4A16_G128", num_bits=4, symmetric=True, group_size=128),
        Scheme("W4A16_G128_ASYM", num_bits=4, symmetric=False, group_size=128),
        Scheme("W8A16", num_bits=8, symmetric=True, group_size=None),
    )
}


def scheme_named(name: str) -> Scheme:
    if name not in SCHEMES:
        raise UsageError(f"unknown scheme '{name}'.{did_you_mean(name, SCHEMES)}")
    return SCHEMES[name]


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes int8 [O, I], scale [O, G] in the stored dtype, zero_point int8 [O, G] or None when symmetric."""

    scheme: Scheme
    codes_OI: Tensor
    scale_OG: Tensor
    zero_point_OG: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes_OI.shape[0], self.codes_OI.shape[1]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Weights [O, I]: the product is exact in float32 and rounded once to `dtype` (default: the scale's, as every consumer does)."""
        out_features, in_features = self.shape
        groups = self.scale_OG.shape[1]
        codes_OGI = self.codes_OI.to(torch.float32).view(out_features, groups, in_features // groups)
        if self.zero_point_OG is not None:
            codes_OGI = codes_OGI - self.zero_point_OG.to(torch.float32).unsqueeze(-1)
        weight_OI = (codes_OGI * self.scale_OG.to(torch.float32).unsqueeze(-1)).view(out_features, in_features)
        return weight_OI.to(dtype if dtype is not None else self.scale_OG.dtype)

"""Checkpoints of BitNet b1.58 (arXiv 2402.17764, 2504.12285), read only: their linears have 16-bit weights,
and compute with others.

    m = mean |W|                      one number a linear, at least 1e-5
    c = clamp(round(W / m), -1, 1)    codes of weights, int8
    y = (m c) q(x)                    q: 8-bit integers, one scale a token: its largest magnitude / 127

So they compute in the scheme INT8_DYNAMIC, with the scale m for all channels, and the codes are exact there:
they are read in that scheme, and any format that has it can be written. Checkpoints whose codes are packed in
bytes (`quantization_mode: offline`) are refused, as are linears with norms of their own (`use_rms_norm`).

Shapes: O outputs, I inputs.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.export import READ_ONLY
from compress.export.fp8 import names
from compress.export.rules import in_layers
from compress.quant.codec import check_leaf, check_matrix
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from compress.untrusted.fields import Fields

SCHEME = SCHEMES["INT8_DYNAMIC"]
LEAST_MEAN = 1e-5
"""The least number that codes are multiplied by."""
_FIELDS = ("quant_method", "linear_class", "quantization_mode", "use_rms_norm", "rms_norm_eps")
_DENSE = "modules_to_not_convert"


def ternary(w_OI: Tensor) -> QuantizedWeight:
    """Return the codes and the scale by which a linear with these weights computes, the scale in their dtype.
    The mean is summed in float64, so that it has the same bits on every machine."""
    mean = w_OI.to(torch.float64).abs().mean().clamp(min=LEAST_MEAN).to(torch.float32)
    codes_OI = (w_OI.to(torch.float32) * (1.0 / mean)).round().clamp(-1, 1).to(SCHEME.code_dtype)
    return QuantizedWeight(SCHEME, codes_OI, mean.to(w_OI.dtype).expand(len(w_OI), 1).contiguous())


class BitNetCodec:
    """Reads weights as the codes that their linears compute with."""

    aliases: Mapping[str, str] = MappingProxyType({})

    def leaves(self, scheme: Scheme) -> frozenset[str]:
        """Return the last parts of the names of a weight's tensors."""
        return frozenset({"weight"})

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Raise UnsupportedFormat: these checkpoints are not written."""
        raise UnsupportedFormat("bitnet is a form of checkpoints that is read and not written.")

    def decode(self, leaves: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
        """Return the codes of a weight.

        Raises:
            UnsupportedFormat: it holds codes, or is no matrix.
        """
        return ternary(check_leaf(leaves, "weight", None, check_matrix(leaves, "weight")))

    def schemes(self, quantization_config: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
        """Return INT8_DYNAMIC for every linear of a layer that is not named as dense.

        Raises:
            UnsupportedFormat: the config states packed codes, norms of linears, or a field that is not read.
        """
        stated = Fields(quantization_config, "quantization_config", UnsupportedFormat)
        if odd := sorted(set(stated) - {*_FIELDS, _DENSE}):
            raise UnsupportedFormat(
                f"the checkpoint is quantized with bitnet and its quantization_config has {odd[0]}, which is "
                "not read."
            )
        mode = stated.text("quantization_mode", default="offline")
        kind = stated.text("linear_class", default="bitlinear")
        if (mode, kind) != ("online", "autobitlinear"):
            raise UnsupportedFormat(
                f"the checkpoint is quantized with bitnet in quantization_mode {mode} and linear_class "
                f"{kind}, whose codes are packed in bytes; weights of 16 bits are read (online, "
                "autobitlinear): name the checkpoint that has them, such as "
                "microsoft/bitnet-b1.58-2B-4T-bf16."
            )
        if stated.flag("use_rms_norm", default=False):
            raise UnsupportedFormat(
                "the checkpoint is quantized with bitnet and use_rms_norm, a norm in each linear, which is "
                "not read; name one without."
            )
        dense = stated.texts(_DENSE, default=())
        return {each: SCHEME for each in in_layers(linears) if not any(names(name, each) for name in dense)}

    def kv_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        """Return None: these configs state no KV cache."""
        return None


READ_ONLY.add("bitnet", BitNetCodec())

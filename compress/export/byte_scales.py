"""The tensors of compressed-tensors for floats whose scales are one byte: NVFP4, MXFP4 and MXFP8, with or
without rounded inputs (`compressed_tensors.py` has the table).

Global scales of weights and of inputs are stored as they divide: value = code * scale / global scale. Both
are [1]; shape [] is read too.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.quant import e2m1
from compress.quant.codec import check_leaf, check_matrix, decoded_scales, encoded_scales
from compress.quant.scale_grid import LARGEST_BYTE
from compress.quant.scheme import QuantizedWeight, Scheme


def encode_byte_scales(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of a weight by leaf."""
    if weight.scheme.num_bits == 4:
        leaves = {"weight_packed": e2m1.pack(weight.codes_OI)}
    else:
        leaves = {"weight": weight.codes_OI}
    leaves |= {f"weight_{leaf}": each for leaf, each in encoded_scales(weight).items()}
    if weight.input_global_scale is not None:
        leaves["input_global_scale"] = weight.input_global_scale
    return {leaf: each.reshape(1) if leaf.endswith("global_scale") else each for leaf, each in leaves.items()}


def decode_byte_scales(leaves: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
    """Return the weight that these tensors hold.

    Raises:
        UnsupportedFormat: tensors of other dtypes or shapes, or scales that are no positive numbers.
    """
    codes_OI = _codes(leaves, scheme)
    out_features, in_features = codes_OI.shape
    if not in_features or in_features % (scheme.group_size or 1):
        raise UnsupportedFormat(f"its K is {in_features}, no multiple of {scheme.group_size}.")
    dtype = torch.float8_e4m3fn if scheme.scale_type == "e4m3" else torch.uint8
    shape = (out_features, scheme.num_groups(in_features))
    found = {"scale": check_leaf(leaves, "weight_scale", dtype, shape)}
    if scheme.scale_type == "e4m3":
        found["global_scale"] = _global_scale(leaves, "weight_global_scale")
        is_valid = bool((found["scale"].to(torch.float32) >= 0).all())
    else:
        is_valid = not bool((found["scale"] > LARGEST_BYTE).any())
    if not is_valid:
        raise UnsupportedFormat("one of its scales is no positive number that bfloat16 has.")
    return QuantizedWeight(
        scheme,
        codes_OI,
        **decoded_scales(found, scheme),
        input_global_scale=_global_scale(leaves, "input_global_scale")
        if scheme.has_input_global_scale
        else None,
    )


def _codes(leaves: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """Return the codes, float8_e4m3fn [O, I]."""
    if scheme.num_bits == 8:
        return check_leaf(leaves, "weight", torch.float8_e4m3fn, check_matrix(leaves, "weight"))
    shape = check_matrix(leaves, "weight_packed")
    return e2m1.unpack(check_leaf(leaves, "weight_packed", torch.uint8, shape))


def _global_scale(leaves: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a global scale, float32 []."""
    stated = leaves[name]
    if stated.dtype != torch.float32 or stated.numel() != 1:
        raise UnsupportedFormat(f"its {name} is not one float32 number.")
    if not bool((stated > 0) & (stated < torch.inf)):
        raise UnsupportedFormat(f"its {name} is no positive number that bfloat16 has.")
    return stated.reshape(())

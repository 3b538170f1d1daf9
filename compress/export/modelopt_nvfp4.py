"""The tensors of modelopt for NVFP4, with inputs in 16 bits (`W4A16_NVFP4`) or in NVFP4 too (`NVFP4`).

    <module>.weight           uint8 [O, I/2], e2m1, the lower column in the low half of a byte
    <module>.weight_scale     float8_e4m3fn [O, I/16]
    <module>.weight_scale_2   float32 []: value = code * weight_scale * weight_scale_2
    <module>.input_scale      float32 [], `NVFP4` only: the largest input of the calibration set / (6 * 448)

modelopt multiplies by float32 numbers where this project and compressed-tensors divide by global scales.
Those that are chosen here are powers of two, whose reciprocals are exact. A `weight_scale_2` that has no
exact reciprocal stays in the products that are the scales of the weight, and is found again. Programs take
1 / input_scale in float32 as the global scale of inputs, and so it is read; what is written again is a
float32 number with that reciprocal, of which there may be two, one step apart.

Checked against the export of modelopt 0.47 and the sources of vLLM 0.32, TensorRT-LLM and SGLang.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.quant import e2m1
from compress.quant.codec import check_leaf, check_matrix
from compress.quant.global_scale import with_one_global_scale
from compress.quant.scheme import QuantizedWeight, Scheme


def nvfp4_leaves(scheme: Scheme) -> frozenset[str]:
    """Return the leaves of an NVFP4 weight."""
    of_weights = frozenset({"weight", "weight_scale", "weight_scale_2"})
    return of_weights | {"input_scale"} if scheme.has_input_global_scale else of_weights


def encode_nvfp4(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of an NVFP4 weight. Its second scale is the float32 number next to the reciprocal of
    the global scale with which the products are the scales of the weight.

    Raises:
        UnsupportedFormat: there is no such number, or the global scale of inputs is the reciprocal of none.
    """
    if weight.global_scale is None:
        (weight,) = with_one_global_scale([weight])
    assert weight.global_scale is not None
    scale_OG = weight.scale_OG.to(torch.float32)
    stored_OG = (scale_OG * weight.global_scale).clamp(max=448.0).to(torch.float8_e4m3fn)
    of_inputs = {}
    if weight.input_global_scale is not None:
        of_inputs["input_scale"] = _input_scale(weight.input_global_scale)
    for second in _next_to_reciprocal(weight.global_scale):
        if torch.equal(stored_OG.to(torch.float32) * second, scale_OG):
            return {
                "weight": e2m1.pack(weight.codes_OI),
                "weight_scale": stored_OG,
                "weight_scale_2": second.clone(),
                **of_inputs,
            }
    raise UnsupportedFormat(
        "[exact-scales] the scales of a linear are no e4m3 numbers times one float32 number, as modelopt "
        "stores them: compressed-tensors divides by its global scale, and this one has no exact reciprocal."
    )


def decode_nvfp4(leaves: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
    """Return the weight that these tensors hold.

    Raises:
        UnsupportedFormat: tensors of other dtypes or shapes, or scales that are no positive numbers.
    """
    out_features, half = check_matrix(leaves, "weight")
    packed_OI = check_leaf(leaves, "weight", torch.uint8, (out_features, half))
    if not half or 2 * half % (scheme.group_size or 1):
        raise UnsupportedFormat(f"its K is {2 * half}, no multiple of {scheme.group_size}.")
    shape = (out_features, scheme.num_groups(2 * half))
    stored_OG = check_leaf(leaves, "weight_scale", torch.float8_e4m3fn, shape).to(torch.float32)
    if not bool((stored_OG >= 0).all()):
        raise UnsupportedFormat("one of its scales is no positive number.")
    second = _factor(leaves, "weight_scale_2")
    return QuantizedWeight(
        scheme,
        e2m1.unpack(packed_OI),
        stored_OG * second,
        global_scale=second.reciprocal(),
        input_global_scale=_factor(leaves, "input_scale").reciprocal()
        if scheme.has_input_global_scale
        else None,
    )


def _input_scale(global_scale: Tensor) -> Tensor:
    """Return a float32 number whose reciprocal in float32 is the global scale of inputs, its own reciprocal
    where that is one.

    Raises:
        UnsupportedFormat: there is none.
    """
    wanted = global_scale.to(torch.float32)
    for factor in _next_to_reciprocal(wanted):
        if torch.equal(factor.reciprocal(), wanted):
            return factor.clone()
    raise UnsupportedFormat(
        "[exact-scales] the global scale of a linear's inputs is the reciprocal of no float32 number, and "
        "modelopt stores the reciprocal: compressed-tensors keeps the scale itself."
    )


def _next_to_reciprocal(global_scale: Tensor) -> Tensor:
    """Return the reciprocal, float32, and the two numbers on either side of it, the nearest first [5]."""
    nearest = global_scale.to(torch.float32).reciprocal()
    steps = nearest.view(torch.int32) + torch.tensor([0, 1, -1, 2, -2], dtype=torch.int32)
    return steps.view(torch.float32)


def _factor(leaves: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a scale by which programs multiply, float32 [].

    Raises:
        UnsupportedFormat: it is not one float32 number, or not a positive one that has a reciprocal.
    """
    stated = leaves[name]
    if stated.dtype != torch.float32 or stated.numel() != 1:
        raise UnsupportedFormat(f"its {name} is not one float32 number.")
    factor = stated.reshape(())
    if not bool((factor > 0) & (factor < torch.inf) & (factor.reciprocal() < torch.inf)):
        raise UnsupportedFormat(f"its {name} is no positive number with a reciprocal in float32.")
    return factor

"""Codecs: the tensors that a quantized weight is stored as. A codec converts it to named tensors and back,
bit for bit.

`CanonicalCodec` is the form of this project's own intermediate artifacts; `export/` has the codecs of formats
that other programs read.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.quant import e2m1
from compress.quant.global_scale import with_one_global_scale
from compress.quant.packing import pack, unpack
from compress.quant.scale_grid import from_e4m3, from_e8m0, to_e4m3, to_e8m0
from compress.quant.scheme import QuantizedWeight, Scheme


class Codec(Protocol):
    """One on-disk form of a quantized linear. A leaf is the last part of a tensor's name
    (`weight_packed`)."""

    def leaves(self, scheme: Scheme) -> frozenset[str]:
        """Return the leaf names of a weight of this scheme."""

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return the tensors of a weight by leaf."""

    def decode(self, leaves: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
        """Return the weight that `encode` turned into these tensors."""


class ForeignCodec(Codec, Protocol):
    """A codec of a published checkpoint format, whose `config.json` states what is quantized and how."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Leaf -> the other name under which some programs store it."""

    def schemes(self, quantization_config: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
        """Return the scheme of every quantized linear among `linears` (module names on disk), from a
        checkpoint's config.

        Raises:
            UnsupportedFormat: the config states a form that this codec does not read.
        """

    def kv_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        """Return the format of the KV cache (`quant/kv.py`) that the config states, None where it states
        none.

        Raises:
            UnsupportedFormat: the config states a format that is not supported.
        """


def check_leaf(
    leaves: Mapping[str, Tensor], name: str, dtype: torch.dtype | None, shape: Sequence[int]
) -> Tensor:
    """Return one tensor of a quantized weight that has this dtype (None: any float) and shape.

    Raises:
        UnsupportedFormat: it has another.
    """
    tensor = leaves[name]
    is_of = tensor.dtype.is_floating_point if dtype is None else tensor.dtype == dtype
    if not is_of or tuple(tensor.shape) != tuple(shape):
        raise UnsupportedFormat(
            f"its {name} is {_dtype_name(tensor.dtype)} {list(tensor.shape)}, where "
            f"{'a float' if dtype is None else _dtype_name(dtype)} {list(shape)} belongs."
        )
    return tensor


def check_matrix(leaves: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    """Return the shape of a tensor that must be a matrix.

    Raises:
        UnsupportedFormat: it is none.
    """
    shape = tuple(leaves[name].shape)
    if len(shape) != 2:
        raise UnsupportedFormat(f"its {name} has shape {list(shape)}, where a matrix belongs.")
    return shape[0], shape[1]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def byte_scale_leaves(scheme: Scheme) -> tuple[str, ...]:
    """Return the leaves of scales that are stored in a byte each."""
    return ("scale", "global_scale") if scheme.scale_type == "e4m3" else ("scale",)


def input_leaves(scheme: Scheme) -> tuple[str, ...]:
    """Return the leaves of static inputs."""
    if scheme.has_input_global_scale:
        return ("input_global_scale",)
    if scheme.activation != "tensor":
        return ()
    return ("input_scale",) if scheme.input_symmetric else ("input_scale", "input_zero_point")


def encoded_scales(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the leaves `scale` and, for e4m3, `global_scale` (float32 []) of a weight."""
    if weight.scheme.scale_type == "e8m0":
        return {"scale": to_e8m0(weight.scale_OG)}
    (weight,) = with_one_global_scale([weight])
    assert weight.global_scale is not None
    return {
        "scale": to_e4m3(weight.scale_OG, weight.global_scale),
        "global_scale": weight.global_scale,
    }


def decoded_scales(leaves: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Tensor]:
    """Return the fields of a weight with these leaves; the inverse of `encoded_scales`."""
    if scheme.scale_type == "e8m0":
        return {"scale_OG": from_e8m0(leaves["scale"])}
    global_scale = leaves["global_scale"]
    return {"scale_OG": from_e4m3(leaves["scale"], global_scale), "global_scale": global_scale}


class CanonicalCodec:
    """The form of intermediate artifacts: leaf `scale` [O, G] ([R, G] for blocks of rows) in the model's
    dtype, and

    integer codes: `packed` int32 [O, ceil(I * b / 32)], `shape` int64 [2] = [O, I] (a last word may be
                   padded), and `zero_point` int8 [O, G] for asymmetric schemes;
    e4m3 codes:    `codes` float8_e4m3fn [O, I];
    e2m1 codes:    `packed` uint8 [O, I / 2], the lower column in the low half of a byte;
    byte scales:   `scale` is float8_e4m3fn and goes with `global_scale` float32 [], or uint8 (e8m0);
    static inputs: `input_scale` float32 [], and `input_zero_point` int8 [] where they are asymmetric;
                   `input_global_scale` float32 [] where their blocks have e4m3 scales.
    """

    def leaves(self, scheme: Scheme) -> frozenset[str]:
        if scheme.scale_type is not None:
            codes = "packed" if scheme.num_bits == 4 else "codes"
            return frozenset({codes, *byte_scale_leaves(scheme), *input_leaves(scheme)})
        if scheme.type == "float":
            return frozenset({"codes", "scale", *input_leaves(scheme)})
        zero_point = () if scheme.symmetric else ("zero_point",)
        return frozenset({"packed", "shape", "scale", *zero_point, *input_leaves(scheme)})

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        if weight.scheme.scale_type is not None:
            of_inputs = weight.input_global_scale
            return {
                **(
                    {"packed": e2m1.pack(weight.codes_OI)}
                    if weight.scheme.num_bits == 4
                    else {"codes": weight.codes_OI}
                ),
                **encoded_scales(weight),
                **({} if of_inputs is None else {"input_global_scale": of_inputs}),
            }
        leaves = {"scale": weight.scale_OG}
        if weight.scheme.type == "float":
            leaves["codes"] = weight.codes_OI
        else:
            leaves["packed"] = pack(weight.codes_OI, weight.scheme.num_bits)
            leaves["shape"] = torch.tensor(weight.shape, dtype=torch.int64)
        if weight.zero_point_OG is not None:
            leaves["zero_point"] = weight.zero_point_OG
        if weight.input_scale is not None:
            leaves["input_scale"] = weight.input_scale
        if weight.input_zero_point is not None:
            leaves["input_zero_point"] = weight.input_zero_point
        return leaves

    def decode(self, leaves: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
        if scheme.scale_type is not None:
            return QuantizedWeight(
                scheme,
                e2m1.unpack(leaves["packed"]) if scheme.num_bits == 4 else leaves["codes"],
                **decoded_scales(leaves, scheme),
                input_global_scale=leaves.get("input_global_scale"),
            )
        if scheme.type == "float":
            codes_OI = leaves["codes"]
        else:
            codes_OI = unpack(leaves["packed"], scheme.num_bits, int(leaves["shape"][1]))
        return QuantizedWeight(
            scheme,
            codes_OI,
            leaves["scale"],
            leaves.get("zero_point"),
            leaves.get("input_scale"),
            input_zero_point=leaves.get("input_zero_point"),
        )

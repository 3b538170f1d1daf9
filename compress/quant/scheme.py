"""Schemes and quantized weights: number of bits, symmetry, how scales are shared, how the input is rounded;
codes and scales.

Integer codes are signed, in [-2^(b-1), 2^(b-1) - 1] for symmetric and asymmetric schemes alike (the
convention of compressed-tensors; W4A8_FP8 chooses none below -7); value = (code - zero_point) * scale. Float
codes are numbers of the e4m3 grid (arXiv 2209.05433: 4 bits of exponent, 3 of mantissa, largest 448, no
infinity); value = code * scale. Float codes of four bits are numbers of e2m1 (`e2m1.py`), with scales of one
byte (`scale_grid.py`).
`packing.py` packs codes into words, `numerics.py` chooses scales and codes.

A scheme with an `activation` also rounds the input of the linear to eight bits, of the weight's type or of
`activation_type`, so that the product runs on 8-bit tensor cores: `token` computes one scale for each row at
run time, `group` one for each row and group of columns, `tensor` has one fixed scale for the whole input,
found by calibration. Integer inputs may be asymmetric: then a zero point goes with each of these scales.

A scheme whose weights have scales of one byte rounds its inputs to the weights' own form, if it rounds them:
codes of as many bits in groups of as many columns, with scales on the same grid that are computed at run
time (`block_inputs.py`). Where these are e4m3, a global scale goes with them, found by calibration.

Shapes: O out, I in, G scale groups along I (one for a channel scheme), R rows of scales: O, or the number of
blocks of rows.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from compress.errors import StorageError, UsageError, did_you_mean
from compress.quant import e2m1
from compress.untrusted.fields import Fields

FP8_MAX = 448
"""Largest number of e4m3."""
DENSE = "dense"
"""Name of the absent scheme: the weight stays in the model's dtype."""


class Schemes(Protocol):
    """A mapping from linears, by canonical name (`layers.3.ffn.down`, `head`), to schemes."""

    def for_linear(self, linear: str) -> "Scheme | None":
        """Return the scheme of one linear, None if its weight stays dense."""

    @property
    def all(self) -> "tuple[Scheme, ...]":
        """Every scheme that occurs, once."""


@dataclass(frozen=True)
class Scheme:
    """How a weight is quantized.

    `group_size` None means one scale per output channel; `activation` None means that inputs stay in 16 bits.
    With `block_rows` > 1 so many output channels share the scales of their scale groups, and a scale belongs
    to a block of the weight.

    `scale_type` names the grid of scales that are stored in one byte (`scale_grid.py`), None for scales in
    the model's dtype. Float codes of four bits have such scales, groups of 16 (NVFP4) or 32 (MXFP4, OCP
    Microscaling Formats 1.0), and inputs in 16 bits or in the same form (`_W4A4`). Codes of e4m3 in groups of
    32 with e8m0 scales, and inputs in the same form, are MXFP8.

    Other float codes, and integer codes whose inputs are rounded to integers, are symmetric and of 8 bits.
    They have one scale per output channel or (e4m3 only) one for each block of 128 x 128, with inputs in
    groups of 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3): the forms that the 8-bit kernels of every
    consumer take. Integer codes of four bits, symmetric and in groups of 128, may have e4m3 inputs (W4A8,
    QServe, arXiv 2405.04532, has int8 inputs).

    Only inputs that are rounded to integers have `input_symmetric` False.
    """

    name: str
    num_bits: int
    symmetric: bool
    group_size: int | None
    type: Literal["int", "float"] = "int"
    activation: Literal["token", "tensor", "group"] | None = None
    block_rows: int = 1
    scale_type: Literal["e4m3", "e8m0"] | None = None
    activation_type: Literal["int", "float"] | None = None
    input_symmetric: bool = True

    def for_linear(self, linear: str) -> "Scheme":
        """Return this scheme: alone, it is the scheme of every linear."""
        return self

    @property
    def all(self) -> "tuple[Scheme, ...]":
        return (self,)

    @property
    def min_code(self) -> int:
        """The least code that is chosen; integers by e4m3 inputs leave out the one without a negative."""
        is_even = self.type == "float" or self.activation_type == "float"
        return -self.max_code if is_even else -(1 << (self.num_bits - 1))

    @property
    def max_code(self) -> int:
        if self.type == "float":
            return FP8_MAX if self.num_bits == 8 else int(e2m1.LARGEST)
        return (1 << (self.num_bits - 1)) - 1

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.type == "float" else torch.int8

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that inputs are rounded to; None where they stay in 16 bits."""
        if self.activation is None:
            return None
        return torch.float8_e4m3fn if (self.activation_type or self.type) == "float" else torch.int8

    @property
    def has_static_inputs(self) -> bool:
        """Whether calibration finds a number that the rounding of inputs needs."""
        return self.activation == "tensor" or self.has_input_global_scale

    @property
    def has_input_global_scale(self) -> bool:
        """Whether the block scales of inputs are e4m3 numbers over a global scale."""
        return self.activation == "group" and self.scale_type == "e4m3"

    @property
    def strategy(self) -> Literal["group", "channel", "block"]:
        if self.block_rows > 1:
            return "block"
        return "channel" if self.group_size is None else "group"

    def num_groups(self, in_features: int) -> int:
        """Return the number of scale groups along I.

        Raises:
            UsageError: the group size does not divide I; consumers disagree on how to read a padded group.
        """
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            raise UsageError(
                f"scheme {self.name} needs every K to be a multiple of {self.group_size}, but a linear has "
                f"K = {in_features}. Take a scheme whose groups divide it or one of channels, or keep those "
                "linears `dense` by overrides."
            )
        return in_features // self.group_size

    def num_scale_rows(self, out_features: int) -> int:
        """Return R; the last block of rows may be incomplete."""
        return -(-out_features // self.block_rows)

    def by_row(self, scale_RG: Tensor, out_features: int) -> Tensor:
        """Return the scale of each output channel, [R, G] -> [O, G]."""
        return (
            scale_RG
            if self.block_rows == 1
            else scale_RG.repeat_interleave(self.block_rows, dim=0)[:out_features]
        )

    def weight_bytes(self, out_features: int, in_features: int, *, scale_bytes: int = 2) -> int:
        """Return the bytes of codes, scales, zero points and float32 scalars (the scale of inputs, and global
        scales) of an [O, I] weight, on disk and, from four bits on, on the device."""
        num_scales = self.num_scale_rows(out_features) * self.num_groups(in_features)
        zero_points = 0 if self.symmetric else num_scales * self.num_bits // 8
        scalars = 4 * (self.has_static_inputs + (self.scale_type == "e4m3"))
        scalars += self.activation == "tensor" and not self.input_symmetric
        scale_bytes = scale_bytes if self.scale_type is None else 1
        return (
            out_features * in_features * self.num_bits // 8 + num_scales * scale_bytes + zero_points + scalars
        )

    def to_json(self) -> dict[str, Any]:
        """Return the scheme as JSON; newer fields are left out at their default, so that manifests of older
        schemes keep their digest."""
        defaults = {each.name: each.default for each in fields(self)}
        return {key: value for key, value in asdict(self).items() if value != defaults[key]}

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> "Scheme":
        """Read what `to_json` wrote.

        Raises:
            StorageError: a value is missing, unknown, of another type or out of range.
        """
        scheme = Fields(facts, "a scheme of a manifest", StorageError)
        if odd := sorted(set(scheme) - {each.name for each in fields(Scheme)}):
            raise StorageError(f"a scheme of a manifest has unknown fields: {', '.join(odd)}.")
        for name, choices in (
            ("type", ("int", "float")),
            ("activation", ("token", "tensor", "group")),
            ("scale_type", ("e4m3", "e8m0")),
            ("activation_type", ("int", "float")),
        ):
            if scheme.has(name) and scheme.text(name) not in choices:
                raise scheme.wrong(name, scheme.text(name), f"one of {', '.join(choices)}")
        _check_form(scheme)
        return Scheme(
            name=scheme.text("name"),
            num_bits=scheme.integer("num_bits", 1, 8),
            symmetric=scheme.flag("symmetric"),
            group_size=scheme.integer("group_size", 1, 1 << 24) if scheme.has("group_size") else None,
            type=cast(Any, scheme.text("type", default="int")),
            activation=cast(Any, scheme.text("activation")) if scheme.has("activation") else None,
            block_rows=scheme.integer("block_rows", 1, 1 << 24, default=1),
            scale_type=cast(Any, scheme.text("scale_type")) if scheme.has("scale_type") else None,
            activation_type=(
                cast(Any, scheme.text("activation_type")) if scheme.has("activation_type") else None
            ),
            input_symmetric=_input_symmetric(scheme),
        )


def _check_form(scheme: Fields) -> None:
    """Raise StorageError where a scheme in a manifest has codes, scales or inputs that no scheme has."""
    num_bits = scheme.integer("num_bits", 1, 8)
    scale_type = scheme.text("scale_type") if scheme.has("scale_type") else None
    activation = scheme.text("activation") if scheme.has("activation") else None
    if scheme.text("type", default="int") == "float":
        in_bytes = (4, "e4m3"), (4, "e8m0"), (8, "e8m0")
        is_known = num_bits == 8 if scale_type is None else (num_bits, scale_type) in in_bytes
    else:
        is_known = scale_type is None
    if not is_known:
        raise StorageError(
            "a scheme of a manifest has floats of other than 8 bits, or of 4 with scales of one byte, or "
            "integers with scales of one byte."
        )
    if scale_type is not None and (activation not in (None, "group") or scheme.has("activation_type")):
        raise StorageError(
            "a scheme of a manifest has weights with scales of one byte and inputs in another form."
        )


def _input_symmetric(scheme: Fields) -> bool:
    """Return whether inputs of a scheme in a manifest are symmetric.

    Raises:
        StorageError: they are not, and are no integers.
    """
    symmetric = scheme.flag("input_symmetric", default=True)
    type_of_inputs = "activation_type" if scheme.has("activation_type") else "type"
    if not symmetric and (
        not scheme.has("activation")
        or scheme.text("activation") == "group"
        or scheme.text(type_of_inputs, default="int") == "float"
    ):
        raise StorageError("a scheme of a manifest has asymmetric inputs that are not rounded to integers.")
    return symmetric


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("W4A16_G128", 4, True, 128),
        Scheme("W4A16_G128_ASYM", 4, False, 128),
        Scheme("W4A16_G64", 4, True, 64),
        Scheme("W4A16_G64_ASYM", 4, False, 64),
        Scheme("W4A16_G32", 4, True, 32),
        Scheme("W4A16_G32_ASYM", 4, False, 32),
        Scheme("W4A16_CHANNEL", 4, True, None),
        Scheme("W4A16_CHANNEL_ASYM", 4, False, None),
        Scheme("W3A16_G128", 3, True, 128),
        Scheme("W3A16_G128_ASYM", 3, False, 128),
        Scheme("W3A16_G64", 3, True, 64),
        Scheme("W3A16_G64_ASYM", 3, False, 64),
        Scheme("W2A16_G128", 2, True, 128),
        Scheme("W2A16_G128_ASYM", 2, False, 128),
        Scheme("W2A16_G64", 2, True, 64),
        Scheme("W2A16_G64_ASYM", 2, False, 64),
        Scheme("NVFP4", 4, True, 16, type="float", scale_type="e4m3"),
        Scheme("MXFP4", 4, True, 32, type="float", scale_type="e8m0"),
        Scheme("NVFP4_W4A4", 4, True, 16, type="float", activation="group", scale_type="e4m3"),
        Scheme("MXFP4_W4A4", 4, True, 32, type="float", activation="group", scale_type="e8m0"),
        Scheme("MXFP8", 8, True, 32, type="float", activation="group", scale_type="e8m0"),
        Scheme("W4A8_FP8", 4, True, 128, activation="token", activation_type="float"),
        Scheme("W8A16", 8, True, None),
        Scheme("INT8_DYNAMIC", 8, True, None, activation="token"),
        Scheme("INT8_DYNAMIC_ASYM", 8, True, None, activation="token", input_symmetric=False),
        Scheme("INT8_STATIC", 8, True, None, activation="tensor"),
        Scheme("INT8_STATIC_ASYM", 8, True, None, activation="tensor", input_symmetric=False),
        Scheme("FP8_DYNAMIC", 8, True, None, type="float", activation="token"),
        Scheme("FP8_STATIC", 8, True, None, type="float", activation="tensor"),
        Scheme("FP8_BLOCK", 8, True, 128, type="float", activation="group", block_rows=128),
    )
}


def scheme_named(name: str) -> Scheme:
    """Return the scheme of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in SCHEMES:
        raise UsageError(f"unknown scheme '{name}'.{did_you_mean(name, SCHEMES)}")
    return SCHEMES[name]


def known_scheme(scheme: Scheme) -> Scheme:
    """Return the member of SCHEMES that equals `scheme` in everything but its name; `scheme` itself if there
    is none."""
    return next((each for each in SCHEMES.values() if replace(each, name=scheme.name) == scheme), scheme)


def weight_only_scheme(num_bits: int, *, symmetric: bool, group_size: int | None) -> Scheme:
    """Return the weight-only integer scheme of these facts, as a checkpoint states them; it may have no name
    in SCHEMES."""
    channel = "" if num_bits == 8 else "_CHANNEL"
    group = channel if group_size is None else f"_G{group_size}"
    name = f"W{num_bits}A16{group}{'' if symmetric else '_ASYM'}"
    return known_scheme(Scheme(name, num_bits, symmetric, group_size))


def name_of(scheme: Scheme | None) -> str:
    """Return the scheme's name, `dense` for None."""
    return DENSE if scheme is None else scheme.name


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight.

    Codes [O, I] are int8, or float8_e4m3fn for float schemes; the scale is [O, G] ([R, G] for blocks of rows)
    in the stored dtype; the zero point is int8 [O, G], or None when symmetric. `input_scale` is a float32
    scalar for schemes whose activation is `tensor`, else None: x ~ e4m3(x / s) * s, or for integers
    (clamp(round(x / s) + z, -128, 127) - z) * s, with the `input_zero_point` z, an int8 scalar, of asymmetric
    inputs; symmetric ones have z = 0 and None. `global_scale` is a
    float32 scalar for weights whose scales are stored as e4m3: the stored numbers are the scales times it;
    None before it is chosen, which storing does. `input_global_scale` is one of inputs whose block scales are
    e4m3 numbers (`block_inputs.py`), else None.
    """

    scheme: Scheme
    codes_OI: Tensor
    scale_OG: Tensor
    zero_point_OG: Tensor | None = None
    input_scale: Tensor | None = None
    global_scale: Tensor | None = None
    input_zero_point: Tensor | None = None
    input_global_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes_OI.shape[0], self.codes_OI.shape[1]

    @property
    def has_one_scale(self) -> bool:
        """Whether all codes have the same scale."""
        return bool((self.scale_OG == self.scale_OG.flatten()[0]).all())

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weights [O, I]: exact products in float32, rounded once to `dtype` (default: the
        scale's, as every consumer does)."""
        out_features, in_features = self.shape
        scale_OG = self.scheme.by_row(self.scale_OG, out_features).to(torch.float32)
        groups = scale_OG.shape[1]
        codes_OGI = self.codes_OI.to(torch.float32).view(out_features, groups, in_features // groups)
        if self.zero_point_OG is not None:
            codes_OGI = codes_OGI - self.zero_point_OG.to(torch.float32).unsqueeze(-1)
        weight_OI = (codes_OGI * scale_OG.unsqueeze(-1)).view(out_features, in_features)
        return weight_OI.to(dtype if dtype is not None else self.scale_OG.dtype)

"""Schemes are data; a quantized weight stands for exactly (code - zero_point) * scale."""

import dataclasses
import json
from fractions import Fraction

import pytest
import torch

from compress.errors import UsageError
from compress.quant import e2m1
from compress.quant.codec import CanonicalCodec
from compress.quant.model_scheme import ModelScheme
from compress.quant.numerics import nearest_codes, storable
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme, scheme_named


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_schemes_survive_json(scheme: Scheme) -> None:
    assert Scheme.from_json(scheme.to_json()) == scheme
    assert scheme_named(scheme.name) is scheme


@pytest.mark.parametrize("head", [None, "FP8_DYNAMIC", "W8A16"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_schemes_of_a_whole_model_survive_json(scheme: Scheme, head: str | None) -> None:
    whole = ModelScheme(scheme, SCHEMES[head] if head else None)
    facts = json.loads(json.dumps(whole.to_json()))
    assert ModelScheme.from_json(facts) == whole
    assert facts["name"] == scheme.name


def test_a_weight_only_scheme_is_said_in_four_facts() -> None:
    """As manifests always said it: their digests depend on it."""
    assert SCHEMES["W4A16_G128"].to_json() == {
        "name": "W4A16_G128",
        "num_bits": 4,
        "symmetric": True,
        "group_size": 128,
    }
    assert SCHEMES["FP8_STATIC"].to_json().keys() > {"type", "activation"}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_codes_fill_their_type(scheme: Scheme) -> None:
    if scheme.type == "float" and scheme.num_bits == 4:
        assert (scheme.min_code, scheme.max_code) == (-max(e2m1.VALUES), max(e2m1.VALUES))
        assert 2 * len(e2m1.VALUES) == 2**scheme.num_bits
    elif scheme.type == "float":
        limits = torch.finfo(scheme.code_dtype)
        assert (scheme.min_code, scheme.max_code, limits.bits) == (limits.min, limits.max, scheme.num_bits)
    elif scheme.activation_type == "float":
        assert (scheme.min_code, scheme.max_code) == (-7, 7), "three bits and a sign"
    else:
        assert scheme.max_code - scheme.min_code + 1 == 2**scheme.num_bits
        assert scheme.min_code + scheme.max_code == -1
        assert scheme.code_dtype == torch.int8


def test_an_unknown_scheme_names_the_near_one() -> None:
    with pytest.raises(UsageError, match="Did you mean 'W4A16_G128'"):
        scheme_named("W4A16_G12")


def test_a_group_that_does_not_divide_the_inputs_is_refused() -> None:
    with pytest.raises(UsageError, match=r"multiple of 128.*K = 192"):
        SCHEMES["W4A16_G128"].num_groups(192)
    assert SCHEMES["W8A16"].num_groups(193) == 1
    assert (SCHEMES["W4A16_G64"].num_groups(192), SCHEMES["W4A16_G32"].num_groups(192)) == (3, 6)


def test_a_name_says_bits_group_and_symmetry() -> None:
    for name, scheme in SCHEMES.items():
        if scheme.type == "int" and scheme.num_bits == 4 and scheme.activation is None:
            group = "CHANNEL" if scheme.group_size is None else f"G{scheme.group_size}"
            assert name == f"W4A16_{group}" + ("" if scheme.symmetric else "_ASYM")


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bytes_are_those_of_the_stored_parts(scheme: Scheme, dtype: torch.dtype) -> None:
    """Zero points are counted packed, as the published formats keep them."""
    weight = random_weight(scheme, 24, 256, dtype)
    leaves = CanonicalCodec().encode(weight)
    stored = sum(
        leaves[name].numel() * leaves[name].element_size() for name in leaves.keys() - {"shape", "zero_point"}
    )
    stored += 0 if weight.zero_point_OG is None else weight.zero_point_OG.numel() * scheme.num_bits // 8
    assert scheme.weight_bytes(24, 256) == stored


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantizing_rounds_the_exact_product_once(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = random_weight(scheme, 131, 256, dtype)
    values = weight.dequantize()
    assert values.dtype == dtype
    groups = scheme.num_groups(256)
    for row in (0, 1, 63, 127, 128, 130):
        for column in range(0, 256, 7):
            group = column * groups // 256
            zero = 0 if weight.zero_point_OG is None else int(weight.zero_point_OG[row, group])
            exact = Fraction(float(weight.codes_OI[row, column]) - zero) * Fraction(
                float(weight.scale_OG[row // scheme.block_rows, group])
            )
            rounded = torch.tensor(float(exact), dtype=torch.float64).to(
                dtype
            )  # exact: 8 + 24 bits fit in 53
            assert values[row, column] == rounded


@pytest.mark.parametrize("in_features", [30, 32, 33, 256])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_the_canonical_codec_is_an_inverse_pair_for_every_width(scheme: Scheme, in_features: int) -> None:
    if scheme.scale_type is not None:
        in_features += in_features % 2  # two codes are a byte
    scheme = scheme if scheme.group_size is None else dataclasses.replace(scheme, group_size=in_features)
    weight = random_weight(scheme, 7, in_features, torch.bfloat16)
    codec = CanonicalCodec()
    leaves = codec.encode(weight)
    assert set(leaves) == codec.leaves(scheme)
    again = codec.decode(leaves, scheme)
    assert again.codes_OI.dtype == scheme.code_dtype
    assert torch.equal(again.codes_OI.view(torch.uint8), weight.codes_OI.view(torch.uint8))
    assert (again.input_scale, again.input_scale is None) == (
        weight.input_scale,
        scheme.activation != "tensor",
    )
    assert (again.input_zero_point is None) == (scheme.input_symmetric or scheme.activation != "tensor")
    assert again.input_zero_point == weight.input_zero_point
    assert again.input_global_scale == weight.input_global_scale
    assert torch.equal(again.scale_OG.to(weight.scale_OG.dtype), weight.scale_OG)
    assert (again.zero_point_OG is None) == scheme.symmetric
    if weight.zero_point_OG is not None and again.zero_point_OG is not None:
        assert torch.equal(again.zero_point_OG, weight.zero_point_OG)


def random_weight(scheme: Scheme, out_features: int, in_features: int, dtype: torch.dtype) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(1)
    low = scheme.min_code
    high = scheme.max_code + 1
    drawn_OI = torch.randint(low, high, (out_features, in_features), generator=generator)
    codes_OI = nearest_codes(drawn_OI, scheme, torch.ones(()), None).to(scheme.code_dtype)
    groups = scheme.num_groups(in_features)
    scale_OG = (torch.rand(scheme.num_scale_rows(out_features), groups, generator=generator) + 0.1).to(dtype)
    scale_OG = scale_OG if scheme.scale_type is None else storable(scale_OG, scheme, dtype)
    zero_OG = (
        None
        if scheme.symmetric
        else torch.randint(low, high, (out_features, groups), generator=generator).to(torch.int8)
    )
    input_global = torch.tensor(83.7) if scheme.name == "NVFP4_W4A4" else None
    input_scale = torch.tensor(0.037) if scheme.activation == "tensor" else None
    input_zero = None
    if input_scale is not None and not scheme.input_symmetric:
        input_zero = torch.tensor(-60, dtype=torch.int8)
    return QuantizedWeight(
        scheme,
        codes_OI,
        scale_OG,
        zero_OG,
        input_scale,
        input_zero_point=input_zero,
        input_global_scale=input_global,
    )

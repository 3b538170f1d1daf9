"""GPTQ and AWQ tensors against an unpacker in numpy that was written from the description of the formats,
over odd shapes.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import UnsupportedFormat
from compress.export import FORMATS
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from tests.support import packed_numpy

LINEARS = ["model.layers.0.mlp.up_proj", "model.layers.10.self_attn.q_proj", "lm_head"]
G128 = SCHEMES["W4A16_G128"]
G128_ASYM = SCHEMES["W4A16_G128_ASYM"]
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
}
SHAPES = st.tuples(st.integers(1, 21), st.integers(1, 3), st.sampled_from([1, 5, 8, 24]))


def weight(
    scheme: Scheme, out_features: int, num_groups: int, size: int, *, least_zero: int | None = None
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(out_features)
    scheme = dataclasses.replace(scheme, group_size=size)
    low = scheme.min_code
    high = scheme.max_code + 1
    codes_OI = torch.randint(low, high, (out_features, num_groups * size), generator=generator).to(torch.int8)
    scale_OG = (torch.rand(out_features, num_groups, generator=generator) + 0.1).to(torch.bfloat16)
    start = low if least_zero is None else least_zero
    zero_OG = (
        None
        if scheme.symmetric
        else torch.randint(start, high, scale_OG.shape, generator=generator).to(torch.int8)
    )
    return QuantizedWeight(scheme, codes_OI, scale_OG, zero_OG)


def in_numpy(leaves: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in leaves.items()}


def same(found: QuantizedWeight, expected: QuantizedWeight) -> None:
    assert torch.equal(found.codes_OI, expected.codes_OI)
    assert found.codes_OI.is_contiguous()
    assert torch.equal(found.scale_OG.to(torch.bfloat16), expected.scale_OG)
    assert (found.zero_point_OG is None) == (expected.zero_point_OG is None)
    assert found.zero_point_OG is None or torch.equal(
        found.zero_point_OG,
        expected.zero_point_OG,  # type: ignore[arg-type]
    )


@settings(deadline=None, max_examples=60)
@given(shape=SHAPES, bits=st.sampled_from([2, 3, 4, 8]), symmetric=st.booleans())
def test_gptq_tensors_mean_what_numpy_reads_and_come_back(
    shape: tuple[int, int, int], bits: int, symmetric: bool
) -> None:
    scheme = Scheme("any", bits, symmetric, None)
    given_weight = weight(scheme, *shape, least_zero=scheme.min_code + 1)
    codec = FORMATS.get("gptq").codec
    leaves = codec.encode(given_weight)
    read = packed_numpy.gptq_unpacked(in_numpy(leaves), bits=bits)
    assert np.array_equal(read.values(), given_weight.dequantize(torch.float32).numpy())
    assert leaves["scales"].dtype == torch.float16
    assert (leaves["qweight"].dtype, leaves["qzeros"].dtype, leaves["g_idx"].dtype) == (torch.int32,) * 3
    same(codec.decode(leaves, given_weight.scheme), given_weight)


@settings(deadline=None, max_examples=60)
@given(shape=SHAPES, symmetric=st.booleans())
def test_awq_tensors_mean_what_numpy_reads_and_come_back(
    shape: tuple[int, int, int], symmetric: bool
) -> None:
    given_weight = weight(Scheme("any", 4, symmetric, None), *shape)
    codec = FORMATS.get("awq").codec
    leaves = codec.encode(given_weight)
    read = packed_numpy.awq_unpacked(in_numpy(leaves))
    assert np.array_equal(read.values(), given_weight.dequantize(torch.float32).numpy())
    assert leaves["scales"].dtype == torch.float16
    same(codec.decode(leaves, given_weight.scheme), given_weight)


def test_symmetric_zero_points_are_stored_as_consumers_expect_them() -> None:
    """Sevens in GPTQ (8 - 1), eights in AWQ."""
    four_bits = weight(G128, 16, 2, 8)
    eight_bits = weight(SCHEMES["W8A16"], 16, 2, 8)
    assert set(FORMATS.get("gptq").codec.encode(four_bits)["qzeros"].flatten().tolist()) == {0x77777777}
    assert set(FORMATS.get("gptq").codec.encode(eight_bits)["qzeros"].flatten().tolist()) == {0x7F7F7F7F}
    eights = FORMATS.get("awq").codec.encode(four_bits)["qzeros"].flatten()
    assert {value & 0xFFFFFFFF for value in eights.tolist()} == {0x88888888}


def test_one_awq_word_written_by_hand() -> None:
    """Eight columns with codes 0..7 (stored): the kernel's order puts 0 2 4 6 1 3 5 7 into nibbles 0..7."""
    codes_OI = (torch.arange(8, dtype=torch.int8) - 8).view(8, 1)
    alone = QuantizedWeight(Scheme("any", 4, True, 1), codes_OI, torch.ones(8, 1, dtype=torch.float16))
    assert FORMATS.get("awq").codec.encode(alone)["qweight"].tolist() == [[0x75316420]]


def test_a_zero_point_that_programs_read_in_two_ways_is_refused_both_ways() -> None:
    codec = FORMATS.get("gptq").codec
    ambiguous = weight(G128_ASYM, 8, 1, 8)
    assert ambiguous.zero_point_OG is not None
    ambiguous.zero_point_OG[3, 0] = -8
    with pytest.raises(UnsupportedFormat, match="0 or as 16"):
        codec.encode(ambiguous)
    ambiguous.zero_point_OG[:] = 1
    leaves = codec.encode(ambiguous)
    leaves["qzeros"] = leaves["qzeros"] | 0xF
    with pytest.raises(UnsupportedFormat, match="0 or as 16"):
        codec.decode(leaves, ambiguous.scheme)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_zero_points_that_contradict_a_symmetric_config_are_refused(name: str) -> None:
    codec = FORMATS.get(name).codec
    leaves = codec.encode(weight(G128, 8, 1, 8))
    leaves["qzeros"] = leaves["qzeros"] ^ 1
    with pytest.raises(UnsupportedFormat, match="symmetric"):
        codec.decode(leaves, dataclasses.replace(G128, group_size=8))


@pytest.mark.parametrize("name", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("value", "held"),
    [(2.0**-17, True), (1 + 2.0**-7, True), (2.0**-18 * 1.0078125, False), (65536.0, False)],
)
def test_a_scale_that_float16_does_not_hold_is_refused_and_counted(
    name: str, value: float, held: bool
) -> None:
    coded = weight(G128, 6, 2, 8)
    coded.scale_OG[:2, 0] = value
    if held:
        assert float(FORMATS.get(name).codec.encode(coded)["scales"][0, 1]) == value
        return
    with pytest.raises(UnsupportedFormat, match=r"\[exact-scales\] 2 of 12"):
        FORMATS.get(name).codec.encode(coded)


def test_activation_order_is_refused_with_the_reason() -> None:
    codec = FORMATS.get("gptq").codec
    coded = weight(G128, 8, 2, 8)
    leaves = codec.encode(coded)
    leaves["g_idx"] = leaves["g_idx"].flip(0)
    with pytest.raises(UnsupportedFormat, match="activation order"):
        codec.decode(leaves, coded.scheme)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_scales_of_another_group_size_than_stated_are_refused(name: str) -> None:
    codec = FORMATS.get(name).codec
    coded = weight(G128, 8, 2, 8)
    leaves = codec.encode(coded)
    leaves["scales"] = leaves["scales"][:1]
    with pytest.raises(UnsupportedFormat, match="1 groups of scales"):
        codec.decode(leaves, coded.scheme)


@pytest.mark.parametrize(
    ("said", "scheme"),
    [
        (GPTQ, G128),
        ({**GPTQ, "sym": False, "checkpoint_format": "gptq", "damp_percent": 0.01}, G128_ASYM),
        ({**GPTQ, "bits": 8, "group_size": -1}, SCHEMES["W8A16"]),
        ({**GPTQ, "bits": 3}, SCHEMES["W3A16_G128"]),
        ({**GPTQ, "bits": 2, "group_size": 64, "sym": False}, SCHEMES["W2A16_G64_ASYM"]),
        ({**GPTQ, "group_size": 16}, Scheme("W4A16_G16", 4, True, 16)),
        (AWQ, G128_ASYM),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"},
            G128_ASYM,
        ),
        ({**AWQ, "zero_point": False}, G128),
        ({**AWQ, "modules_to_not_convert": None, "sym": True}, G128),
        ({**AWQ, "group_size": 16}, Scheme("W4A16_G16_ASYM", 4, False, 16)),
    ],
)
def test_a_config_of_another_tool_gives_the_scheme_of_the_layers(
    said: dict[str, Any], scheme: Scheme
) -> None:
    schemes = FORMATS.get(said["quant_method"]).codec.schemes(said, LINEARS)
    assert schemes == dict.fromkeys(LINEARS[:2], scheme)  # the head is dense


def test_a_config_says_which_linears_are_left_out_or_added() -> None:
    up, q, head = LINEARS
    gptq = FORMATS.get("gptq").codec
    awq = FORMATS.get("awq").codec
    assert set(gptq.schemes({**GPTQ, "lm_head": True}, LINEARS)) == {up, q, head}
    assert set(gptq.schemes({**GPTQ, "dynamic": {r"-:.*\.mlp\..*": {}}}, LINEARS)) == {q}
    assert set(awq.schemes({**AWQ, "modules_to_not_convert": ["lm_head", "mlp"]}, LINEARS)) == {q}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint_format": "gptq_v2"}, "gptq_v2"),
        ({"is_marlin_format": True}, "checkpoint_format"),
        ({"pack_dtype": "int16"}, "int16"),
        ({"bits": 5}, "5 bits"),
        ({"group_size": 0}, "groups of 0"),
        ({"group_size": None}, "groups of None"),
        ({"modules_in_block_to_quantize": [["mlp.up_proj"]]}, "modules_in_block_to_quantize"),
        ({"dynamic": {"+:.*": {"bits": 8}}}, "scheme of its own"),
    ],
)
def test_what_is_not_read_of_gptq_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        FORMATS.get("gptq").codec.schemes({**GPTQ, **change}, LINEARS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "gemv"}, "gemv"),
        ({"backend": "llm-awq"}, "llm-awq"),
        ({"bits": 8}, "8 bits"),
        ({"group_size": None}, "groups of None"),
        ({"lm_head": True}, "lm_head"),
    ],
)
def test_what_is_not_read_of_awq_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        FORMATS.get("awq").codec.schemes({**AWQ, **change}, LINEARS)

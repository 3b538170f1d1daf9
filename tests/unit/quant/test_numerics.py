"""Scales and codes against compressed-tensors' own arithmetic, the range search against its own measure, and
the corner cases of groups.
"""

import dataclasses

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from torch import Tensor

from compress.quant import e2m1
from compress.quant.numerics import (
    ScaleChoice,
    choose_scale,
    diagonal_blocks,
    grouped,
    min_max_scale,
    nearest_weight,
    output_error,
    round_to_nearest,
    search_scale,
    static_input_scale,
    stored_scale,
    ungrouped,
)
from compress.quant.scheme import SCHEMES, Scheme

ALL = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
SYMMETRIC = SCHEMES["W4A16_G128"]
ASYMMETRIC = SCHEMES["W4A16_G128_ASYM"]


def weights(out_features: int = 9, in_features: int = 384, seed: int = 0) -> Tensor:
    """Heavy tails, so that the range search has something to find."""
    generator = torch.Generator().manual_seed(seed)
    w_OI = torch.randn(out_features, in_features, generator=generator)
    return 0.02 * w_OI * (1 + torch.randn(out_features, in_features, generator=generator).abs() ** 3)


def moment(in_features: int = 384, num_tokens: int = 1000, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(in_features, in_features, generator=generator) * in_features**-0.5
    spread = torch.exp(torch.randn(in_features, generator=generator))
    x_TI = torch.randn(num_tokens, in_features, generator=generator) @ mixing * spread
    return x_TI.t() @ x_TI / num_tokens


def library_args(scheme: Scheme) -> QuantizationArgs:
    block = (
        {"block_structure": [scheme.block_rows, scheme.group_size]}
        if scheme.strategy == "block"
        else {"group_size": scheme.group_size}
    )
    return QuantizationArgs(
        num_bits=scheme.num_bits,
        type=scheme.type,
        symmetric=scheme.symmetric,
        strategy=scheme.strategy,
        **block,
    )


def codes_of(scheme: Scheme) -> Tensor:
    """Every number that is a code, as float32."""
    if scheme.type == "int":
        return torch.arange(scheme.min_code, scheme.max_code + 1).to(torch.float32)
    if scheme.num_bits == 4:
        return torch.tensor([sign * each for each in e2m1.VALUES for sign in (1, -1)])
    numbers = torch.arange(256).to(torch.uint8).view(scheme.code_dtype).to(torch.float32)
    return numbers[torch.isfinite(numbers)]


@pytest.mark.parametrize(
    "scheme",
    [each for each in SCHEMES.values() if each.scale_type is None and each.activation_type is None],
    ids=lambda each: each.name,
)
def test_scales_codes_and_values_are_those_of_compressed_tensors(scheme: Scheme) -> None:
    w_OI = weights(131)
    w_OGN = grouped(w_OI, scheme)
    args = library_args(scheme)
    scale_OG, zero_OG = min_max_scale(w_OGN, scheme, torch.float32)
    their_scale_OG, their_zero_OG = calculate_qparams(w_OGN.amin(-1), w_OGN.amax(-1), args)
    assert torch.allclose(scale_OG, their_scale_OG, rtol=2 * torch.finfo(torch.float32).eps, atol=0)
    assert zero_OG is None or torch.equal(zero_OG, their_zero_OG.to(torch.int8))
    ours = round_to_nearest(w_OI, scheme, scale_OG, zero_OG)
    zero = torch.zeros_like(their_zero_OG) if zero_OG is None else zero_OG
    their_codes = quantize(w_OI, scale_OG, zero, args, dtype=scheme.code_dtype)
    away_from_ties = ((grouped(w_OI, scheme) / scale_OG.unsqueeze(-1)).frac().abs() - 0.5).abs() > 1e-4
    # The largest of a group is such a tie, 7.5 steps; and half of 448 float codes are halves themselves.
    assert away_from_ties.float().mean() > (0.998 - 1 / w_OGN.shape[-1] if scheme.type == "int" else 0.9)
    our_numbers, their_numbers = (
        grouped(codes.to(torch.float32), scheme) for codes in (ours.codes_OI, their_codes)
    )
    assert torch.equal(our_numbers[away_from_ties], their_numbers[away_from_ties])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stored = dataclasses.replace(ours, scale_OG=scale_OG.to(dtype))
        assert torch.equal(stored.dequantize(), dequantize(ours.codes_OI, stored.scale_OG, zero, args))


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_are_the_nearest_for_the_stored_scale(scheme: Scheme, dtype: torch.dtype) -> None:
    """By exhaustion over all codes, with the scale as it will be read back."""
    w_OI = weights(3, 128 if scheme.num_bits <= 4 else 16)
    scheme = scheme if scheme.num_bits <= 4 else dataclasses.replace(scheme, group_size=None)
    scale_OG, zero_OG = min_max_scale(grouped(w_OI, scheme), scheme, dtype)
    assert scale_OG.dtype == dtype
    weight = round_to_nearest(w_OI, scheme, scale_OG, zero_OG)
    assert torch.equal(ungrouped(grouped(w_OI, scheme), scheme, w_OI.shape), w_OI)
    values = codes_of(scheme)
    offset = 0.0 if zero_OG is None else zero_OG.to(torch.float32).unsqueeze(-1)
    grid_OGNV = (values - offset).unsqueeze(-2) * scale_OG.to(torch.float32).unsqueeze(-1).unsqueeze(-1)
    best_OGN = (grid_OGNV - grouped(w_OI, scheme).unsqueeze(-1)).abs().amin(-1)
    actual_OGN = (grouped(weight.dequantize(torch.float32), scheme) - grouped(w_OI, scheme)).abs()
    assert torch.allclose(actual_OGN, best_OGN, rtol=1e-5, atol=1e-6 * float(w_OI.abs().max()))


def test_the_pinned_baseline_is_absmax_over_seven_and_a_half() -> None:
    w_OGN = grouped(weights(), SYMMETRIC)
    scale_OG, _ = min_max_scale(w_OGN, SYMMETRIC, torch.float32)
    assert torch.allclose(scale_OG * 7.5, w_OGN.abs().amax(-1))


FP8 = pytest.mark.parametrize(
    "scheme",
    [
        dataclasses.replace(each, group_size=None)
        for each in SCHEMES.values()
        if each.type == "float" and each.num_bits == 8 and each.scale_type is None
    ],
    ids=lambda each: each.name,
)
"""In rows of any length."""


@FP8
def test_a_float_code_is_the_nearest_number_of_e4m3_and_ties_go_to_even_mantissas(scheme: Scheme) -> None:
    numbers = codes_of(scheme).sort().values.unique()
    middles = (numbers[:-1] + numbers[1:]) / 2  # exact: 5 bits
    for weights_V in (numbers, middles, middles * (1 - 2**-20), middles * (1 + 2**-20)):
        weight = round_to_nearest(weights_V.unsqueeze(0), scheme, torch.ones(1, 1), None)
        distance = (weights_V.unsqueeze(1) - numbers).abs()
        assert torch.equal((weight.dequantize()[0] - weights_V).abs(), distance.amin(1))
    ties = round_to_nearest(middles.unsqueeze(0), scheme, torch.ones(1, 1), None)
    assert bool((ties.codes_OI.view(torch.uint8) % 2 == 0).all())


@FP8
def test_what_lies_beyond_the_largest_float_code_saturates(scheme: Scheme) -> None:
    w_OI = torch.tensor([[500.0, -500.0, 1e30, -1e30, 449.0, 447.0]])
    assert round_to_nearest(w_OI, scheme, torch.ones(1, 1), None).dequantize().tolist() == [
        [448, -448, 448, -448, 448, 448]
    ]


@FP8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_static_scale_takes_the_largest_input_to_the_largest_code(
    scheme: Scheme, dtype: torch.dtype
) -> None:
    for absmax in (1e-2, 0.7, 3.0, 447.9, 1234.5):
        scale = static_input_scale(torch.tensor(absmax), scheme, dtype)
        assert (scale.dtype, scale.shape) == (torch.float32, ())
        assert scale.to(dtype).to(torch.float32) == scale  # a consumer may keep it in the model's dtype
        largest = round_to_nearest(torch.tensor([[absmax]]), scheme, scale.view(1, 1), None)
        assert float(largest.codes_OI) == 448
    assert (
        static_input_scale(torch.tensor(0.0), scheme, dtype) == 1
    )  # an input that is always zero divides nothing by zero


def test_an_asymmetric_range_holds_zero_exactly_and_covers_the_group() -> None:
    w_OI = weights() + 0.5  # all positive: zero is outside the values
    scale_OG, zero_OG = min_max_scale(grouped(w_OI, ASYMMETRIC), ASYMMETRIC, torch.float32)
    assert zero_OG is not None
    assert torch.all((zero_OG >= ASYMMETRIC.min_code) & (zero_OG <= ASYMMETRIC.max_code))
    weight = round_to_nearest(torch.zeros_like(w_OI), ASYMMETRIC, scale_OG, zero_OG)
    assert torch.count_nonzero(weight.dequantize()) == 0
    values_OGN = grouped(round_to_nearest(w_OI, ASYMMETRIC, scale_OG, zero_OG).dequantize(), ASYMMETRIC)
    assert torch.all((values_OGN - grouped(w_OI, ASYMMETRIC)).abs() <= 0.501 * scale_OG.unsqueeze(-1))


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.one_in(3)
def test_groups_of_zeros_stay_zeros_and_divide_nothing_by_zero(scheme: Scheme, dtype: torch.dtype) -> None:
    w_OI = weights()
    w_OI[2] = 0
    w_OI[4, 128:256] = 0
    for choice in ("min_max", "mse", "hessian"):
        scale_OG, zero_OG = choose_scale(w_OI, scheme, dtype, choice=choice, h_II=moment())
        assert bool((scale_OG > 0).all())
        values_OI = round_to_nearest(w_OI, scheme, scale_OG, zero_OG).dequantize()
        assert torch.isfinite(values_OI).all()
        assert torch.count_nonzero(values_OI[2]) == 0
        assert torch.count_nonzero(values_OI[4, 128:256]) == 0


def group_error(w_OI: Tensor, scheme: Scheme, scales: tuple[Tensor, Tensor | None], h_GNN: Tensor) -> Tensor:
    """d H d^T of every group, in float64 and by another route than the code under test."""
    values_OI = round_to_nearest(w_OI, scheme, *scales).dequantize(torch.float32)
    delta_OGN = (values_OI.double() - w_OI.double()).view(len(w_OI), len(h_GNN), -1)
    errors_OG = torch.einsum("ogn,gnm,ogm->og", delta_OGN, h_GNN.double(), delta_OGN)
    return torch.stack([rows.sum(dim=0) for rows in errors_OG.split(scheme.block_rows)])


def has_a_search(scheme: Scheme) -> bool:
    """Whether a smaller range can be better. Half a power of two as the scale of e4m3 codes clips, and gives
    nothing: they have as many digits in every binade."""
    return (scheme.type, scheme.num_bits, scheme.scale_type) != ("float", 8, "e8m0")


@ALL
@pytest.mark.parametrize("choice", ["mse", "hessian"])
def test_the_search_is_never_worse_than_the_full_range_in_its_own_measure(
    scheme: Scheme, choice: ScaleChoice
) -> None:
    w_OI = weights()
    h_II = moment()
    measure = h_II if choice == "hessian" else torch.eye(w_OI.shape[1])
    h_GNN = diagonal_blocks(measure, scheme)
    found = group_error(
        w_OI, scheme, choose_scale(w_OI, scheme, torch.bfloat16, choice=choice, h_II=h_II), h_GNN
    )
    plain = group_error(
        w_OI, scheme, choose_scale(w_OI, scheme, torch.bfloat16, choice="min_max", h_II=None), h_GNN
    )
    assert bool((found <= plain * (1 + 1e-4)).all())
    if has_a_search(scheme):
        assert float(found.sum()) < float(plain.sum())


@ALL
def test_the_searches_differ_by_their_measure_only(scheme: Scheme) -> None:
    w_OGN = grouped(weights(), scheme)
    members = w_OGN.shape[-1] // scheme.block_rows
    identity = torch.eye(members).expand(w_OGN.shape[1], members, members)
    plain = search_scale(w_OGN, scheme, torch.float32, h_GNN=None)
    weighted = search_scale(w_OGN, scheme, torch.float32, h_GNN=identity)
    assert torch.equal(plain[0], weighted[0])
    hessian = search_scale(w_OGN, scheme, torch.float32, h_GNN=diagonal_blocks(moment(), scheme))
    assert torch.equal(plain[0], hessian[0]) != has_a_search(scheme)


@ALL
def test_rows_do_not_see_one_another(scheme: Scheme) -> None:
    w_OI = weights(11 if scheme.block_rows == 1 else 4 * scheme.block_rows)
    h_II = moment()
    rows = scheme.block_rows
    for choice in ("min_max", "mse", "hessian"):
        scale_OG, zero_OG = choose_scale(w_OI, scheme, torch.bfloat16, choice=choice, h_II=h_II)
        for part in (slice(0, 1), slice(3, len(scale_OG))):
            alone = choose_scale(
                w_OI[part.start * rows : part.stop * rows], scheme, torch.bfloat16, choice=choice, h_II=h_II
            )
            assert torch.equal(alone[0], scale_OG[part])
            if zero_OG is not None and alone[1] is not None:
                assert torch.equal(alone[1], zero_OG[part])


def test_diagonal_blocks_are_the_blocks_of_the_groups() -> None:
    h_II = moment(256)
    assert torch.equal(diagonal_blocks(h_II, SYMMETRIC), torch.stack([h_II[:128, :128], h_II[128:, 128:]]))
    assert torch.equal(diagonal_blocks(h_II, SCHEMES["W8A16"]), h_II.unsqueeze(0))


def test_output_error_is_the_error_of_explicit_outputs() -> None:
    x_TI = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)).double()
    w_OI = weights(7, 64).double()
    candidate_OI = weights(7, 64, seed=9).double()
    exact = float(((x_TI @ (candidate_OI - w_OI).t()) ** 2).sum() / ((x_TI @ w_OI.t()) ** 2).sum())
    assert output_error(w_OI, candidate_OI, x_TI.t() @ x_TI / 500) == pytest.approx(exact, rel=1e-4)
    assert output_error(w_OI, candidate_OI, torch.zeros(64, 64)) == 0.0


def test_small_scales_of_integers_are_numbers_of_float16_too() -> None:
    scale = (torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()).clamp_max(1000.0)
    integer = SCHEMES["W4A16_G128"]
    floating = SCHEMES["FP8_DYNAMIC"]
    stored = stored_scale(scale, integer, torch.bfloat16)
    assert torch.equal(stored.to(torch.float16).to(torch.bfloat16), stored)
    assert bool((stored > 0).all()), "what float16 has no number for becomes 1, as a group of zeros does"
    ordinary = scale >= 2.0**-17
    assert torch.equal(stored[ordinary], scale[ordinary].to(torch.bfloat16))
    assert torch.equal(stored_scale(scale, floating, torch.bfloat16), scale.to(torch.bfloat16)), (
        "floats stay in formats of their own"
    )


@pytest.mark.parametrize("name", ["W8A16", "W4A16_G128_ASYM"])
def test_rows_of_very_small_weights_do_not_become_zeros(name: str) -> None:
    """Their scale is below float16's least number, which they get instead."""
    w_OI = torch.linspace(-3e-7, 3e-7, 256).view(2, 128)
    weight = nearest_weight(w_OI, SCHEMES[name], torch.bfloat16)
    assert weight.scale_OG.to(torch.float16).to(torch.bfloat16).equal(weight.scale_OG)
    assert (weight.dequantize(torch.float32) - w_OI).abs().max() <= 2.0**-24

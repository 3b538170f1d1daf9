"""Inputs in blocks with scales of one byte: against exhaustion in exact arithmetic, against
compressed-tensors, and through calibration and serving."""

import itertools
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import Tensor

from compress.calibrate.input_range import range_stats, static_input
from compress.calibrate.stats import AbsMax, InputStats
from compress.errors import StorageError, UsageError
from compress.kernels.operands.rows import activation_quant, input_quant, quantize
from compress.models.weights import build_decoder
from compress.quant import e2m1
from compress.quant.block_inputs import global_scale_of_inputs, quantize_blocks
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from compress.runtime.engine import Engine
from compress.stages.quantize.spec import HEAD_SCHEMES, Quantize
from compress.stages.quantize_by_name.spec import SCHEMES_BY_NAME
from tests.support.tiny_decoder import tiny_source, tiny_tokens
from tests.unit.quant.test_fp8 import ARCH, CPU, TOKENS, Upto, quantized

NAMES = ("NVFP4_W4A4", "MXFP4_W4A4", "MXFP8")
EACH = pytest.mark.parametrize("scheme", [SCHEMES[name] for name in NAMES], ids=lambda each: each.name)
GLOBAL = torch.tensor(83.7)
E4M3 = [float(each) for each in torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn)]
"""Numbers of e4m3 that are not negative, in order; the index is the code, so that an even one ends in 0."""


def inputs(scheme: Scheme, num_rows: int = 40) -> Tensor:
    """Rows of bfloat16 numbers of many sizes, with ties, zeros, and numbers that saturate in places."""
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(num_rows, 4 * (scheme.group_size or 0), generator=generator)
    x_TK *= torch.exp2(torch.randint(-12, 5, x_TK.shape, generator=generator))
    x_TK[1] = torch.tensor(e2m1.VALUES).repeat(x_TK.shape[1])[: x_TK.shape[1]] * 0.75
    x_TK[2, :16] = 0
    x_TK[3] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(x_TK.shape[1] // 8)
    x_TK[4] *= 1e-9
    x_TK[5] *= 1e6
    x_TK[6] *= -1e-30
    return x_TK.to(torch.bfloat16).to(torch.float32)


def rounded(scheme: Scheme, x_TK: Tensor, global_scale: Tensor = GLOBAL) -> tuple[Tensor, Tensor]:
    found = global_scale if scheme.has_input_global_scale else None
    rows = quantize(x_TK, activation_quant(scheme, global_scale=found))
    return rows.values_TK.to(torch.float32), rows.scale_T


def nearest(x: Fraction, numbers: list[float]) -> float:
    """The nearest of these numbers by exhaustion, of two the one with the even index."""
    return min(enumerate(numbers), key=lambda each: (abs(Fraction(each[1]) - x), each[0] % 2))[1]


def float32(x: Fraction) -> Fraction:
    """The nearest float32 number."""
    return Fraction(float(torch.tensor(x.numerator / x.denominator, dtype=torch.float64).float()))


@EACH
def test_codes_and_scales_are_those_of_exhaustion(scheme: Scheme) -> None:
    """Each operation of float32 in exact arithmetic, then rounded; a power of two by counting up."""
    x_TK = inputs(scheme, 12)
    values_TK, scale_TG = rounded(scheme, x_TK)
    numbers = list(e2m1.VALUES) if scheme.num_bits == 4 else E4M3
    size = scheme.group_size or 0
    for row, block in itertools.product(range(len(x_TK)), range(4)):
        block_N = [Fraction(float(each)) for each in x_TK[row, block * size : (block + 1) * size]]
        wanted = float32(max(map(abs, block_N)) / Fraction(numbers[-1]))
        if scheme.scale_type == "e4m3":
            g = Fraction(float(GLOBAL))
            stored = Fraction(nearest(min(float32(wanted * g), Fraction(448)), E4M3))
            scale = float32(stored / g)
        else:
            scale = next(power for exp in range(-126, 126) if (power := Fraction(2) ** exp) >= wanted)
        assert float(scale_TG[row, block]) == float(scale)
        for column, x in enumerate(block_N):
            step = float32(abs(x) / scale) if scale else Fraction(0)
            expected = nearest(min(step, Fraction(numbers[-1])), numbers) * (-1 if x < 0 else 1)
            assert float(values_TK[row, block * size + column]) == expected, (row, block, column)
    assert {abs(float(each)) for each in values_TK.flatten()} >= set(e2m1.VALUES)


def test_nvfp4_inputs_are_rounded_as_compressed_tensors_does() -> None:
    scheme = SCHEMES["NVFP4_W4A4"]
    args = preset_name_to_scheme("NVFP4", ["Linear"]).input_activations
    x_TK = inputs(scheme)
    x_TK[6] = 0  # a block that is all but zero has a scale of 2^-3 there, and of 0 here: codes are 0 in both
    values_TK, scale_TG = rounded(scheme, x_TK)
    their_scale, zero = compute_dynamic_scales_and_zp(x_TK, args, torch.nn.Module(), global_scale=GLOBAL)
    is_zero = scale_TG == 0
    assert torch.equal(scale_TG[~is_zero], (their_scale.to(torch.float32) / GLOBAL)[~is_zero])
    assert torch.count_nonzero(is_zero) > 4
    theirs = fake_quantize(x_TK, their_scale, zero, args, global_scale=GLOBAL)
    ours = (values_TK.view(*scale_TG.shape, -1) * scale_TG.unsqueeze(-1)).flatten(1)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("name", "preset"), [("MXFP4_W4A4", "MXFP4"), ("MXFP8", "MXFP8")])
def test_compressed_tensors_finds_the_same_codes_at_our_powers_of_two(name: str, preset: str) -> None:
    """And powers of two of its own that are ours, or half of them where that cuts at most a seventh."""
    scheme = SCHEMES[name]
    args = preset_name_to_scheme(preset, ["Linear"]).input_activations
    x_TK = inputs(scheme)
    x_TK[2] = x_TK[6] = x_TK[7]
    values_TK, scale_TG = rounded(scheme, x_TK)
    theirs = fake_quantize(x_TK, scale_TG, torch.zeros_like(scale_TG), args)
    ours = (values_TK.view(*scale_TG.shape, -1) * scale_TG.unsqueeze(-1)).flatten(1)
    assert torch.equal(ours, theirs)
    exponents, _ = compute_dynamic_scales_and_zp(x_TK, args, torch.nn.Module())
    ratio = exponents.to(torch.float32) / scale_TG
    largest = x_TK.view(*scale_TG.shape, -1).abs().amax(-1) / exponents
    if scheme.num_bits == 4:
        assert set(ratio.flatten().tolist()) == {0.5, 1.0}
        assert bool((largest[ratio == 0.5] > 6).all())
        assert float(largest.max()) <= 7
    else:
        assert set(ratio.flatten().tolist()) <= {1.0, 2.0}


@EACH
def test_a_power_of_two_is_the_least_that_cuts_nothing(scheme: Scheme) -> None:
    if scheme.scale_type == "e4m3":
        pytest.skip("an e4m3 scale is the nearest number, which may cut half a step of it")
    x_TK = inputs(scheme)[7:]
    _, scale_TG = rounded(scheme, x_TK)
    largest_TG = x_TK.view(*scale_TG.shape, -1).abs().amax(-1)
    assert bool((scale_TG * scheme.max_code >= largest_TG).all())
    assert bool((scale_TG / 2 * scheme.max_code < largest_TG).all())


@EACH
def test_blocks_follow_their_own_numbers_alone(scheme: Scheme) -> None:
    x_TK = inputs(scheme)
    values_TK, scale_TG = rounded(scheme, x_TK)
    size = scheme.group_size or 0
    for row, block in ((0, 1), (5, 3), (9, 0)):
        alone = x_TK[row : row + 1, block * size : (block + 1) * size]
        codes, scale = rounded(scheme, alone)
        assert torch.equal(codes[0], values_TK[row, block * size : (block + 1) * size])
        assert torch.equal(scale[0, 0], scale_TG[row, block])


@EACH
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_block_with_a_number_that_is_not_finite_is_not_hidden(scheme: Scheme, broken: float) -> None:
    x_TK = inputs(scheme)
    expected, _ = rounded(scheme, x_TK)
    x_TK[0, 1] = broken
    values_TK, scale_TG = rounded(scheme, x_TK)
    assert bool(scale_TG[0, 0].isnan())
    assert torch.count_nonzero(scale_TG.isnan()) == 1
    assert torch.equal(values_TK[0, (scheme.group_size or 0) :], expected[0, (scheme.group_size or 0) :])


@pytest.mark.parametrize("largest", [3e-20, 0.013, 1.0, 6.0, 47.3, 3e5])
def test_a_global_scale_leaves_room_above_and_digits_below(largest: float) -> None:
    scheme = SCHEMES["NVFP4_W4A4"]
    global_scale = global_scale_of_inputs(torch.tensor(largest))
    mantissa, _ = torch.frexp(global_scale)
    assert float(mantissa) == 0.5
    assert 128 <= largest / 6 * float(global_scale) < 256
    for size in (1.75, 2.0**-13):
        x_TK = torch.full((1, 16), largest * size)
        values_TK, scale_TG = rounded(scheme, x_TK, global_scale)
        error = (values_TK * scale_TG - x_TK).abs().max() / x_TK.max()
        assert float(error) <= 2.0**-4  # half a step of three bits of mantissa
    assert float(global_scale_of_inputs(torch.zeros(()))) == 1


def test_of_several_global_scales_the_one_that_saturates_none_serves() -> None:
    weights = [
        QuantizedWeight(
            SCHEMES["NVFP4_W4A4"], torch.zeros(1, 16), torch.ones(1, 1), input_global_scale=torch.tensor(each)
        )
        for each in (64.0, 32.0, 512.0)
    ]
    quant = input_quant(weights, CPU)
    assert quant is not None
    assert quant.global_scale == 32
    assert (quant.num_bits, quant.group_size, quant.scale_type) == (4, 16, "e4m3")


def test_calibration_observes_the_range_where_a_global_scale_is_needed() -> None:
    schemes = [SCHEMES[name] for name in NAMES]
    assert [range_stats([each]) for each in schemes] == [(AbsMax,), (), ()]
    assert [each for each in NAMES if Quantize(scheme=each, round={"kind": "rtn"}).needs_activations] == [
        "NVFP4_W4A4"
    ]
    assert {each for each in NAMES if each in HEAD_SCHEMES} == {"MXFP8"}
    assert {each for each in NAMES if each in SCHEMES_BY_NAME} == {"MXFP4_W4A4", "MXFP8"}
    stats = InputStats(AbsMax())
    stats[AbsMax].update(torch.tensor([[1.0, -7.5], [0.5, 2.0]]))
    assert static_input(stats, schemes[0], torch.bfloat16).global_scale == 128
    stats[AbsMax].update(torch.full((1, 2), torch.inf))
    with pytest.raises(UsageError, match="NaN or infinity"):
        static_input(stats, schemes[0], torch.bfloat16)


@pytest.mark.parametrize("change", [{"activation": "token"}, {"activation_type": "int"}], ids=str)
def test_a_manifest_names_only_inputs_that_there_are(change: dict[str, str]) -> None:
    for name in NAMES:
        with pytest.raises(StorageError, match="inputs in another form"):
            Scheme.from_json(SCHEMES[name].to_json() | change)
        assert Scheme.from_json(SCHEMES[name].to_json()) == SCHEMES[name]


def rounding(value: QuantizedWeight) -> Callable[[object, tuple[Tensor, ...]], tuple[Tensor]]:
    """Return a hook that rounds the inputs of a linear as its weight says."""

    def hook(_: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        scheme = value.scheme
        codes_TK, scale_TG = quantize_blocks(
            inputs[0].flatten(0, -2),
            block_size=scheme.group_size or 0,
            num_bits=scheme.num_bits,
            global_scale=value.input_global_scale,
        )
        x_TGN = codes_TK.to(torch.float32).view(*scale_TG.shape, -1) * scale_TG.unsqueeze(-1)
        return (x_TGN.view_as(inputs[0]),)

    return hook


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_engine_serves_what_the_decoder_computes_of_rounded_inputs(name: str, tmp_path: Path) -> None:
    """To float32's precision in most logits: sums in another order move an input over a tie now and then."""
    source = tiny_source(ARCH.replace(dtype="float32"))
    store = Upto(
        source, *quantized(tmp_path / "store", {"scheme": name, "round": {"kind": "rtn"}}, source), end=2
    )
    decoder, unrounded = (build_decoder(store, dtype=torch.float32, device=CPU) for _ in range(2))
    for idx in range(ARCH.num_layers):
        for linear, value in store.layer(idx).items():
            if isinstance(value, QuantizedWeight):
                assert (value.input_global_scale is None) != (name == "NVFP4_W4A4")
                module = decoder.get_submodule(f"layers.{idx}.{linear.removesuffix('.weight')}")
                module.register_forward_pre_hook(rounding(value))
    tokens = tiny_tokens(ARCH, 3, 40, seed=5)
    engine = Engine(store, device=CPU)
    served, expected = engine.runner.score(tokens), decoder(tokens)
    of_rounding = (unrounded(tokens) - expected).abs()
    difference = (served - expected).abs()
    assert difference.median() < 1e-3 * of_rounding.median()
    assert difference.max() < of_rounding.max()
    kernels = {row["kernel"] for row in engine.kernel_report() if row["scheme"] == name}
    assert kernels
    assert all(each.startswith("reference.dequantized.") for each in kernels)


@torch.no_grad()
def test_a_global_scale_is_that_of_the_inputs_behind_the_layers_already_quantized(tmp_path: Path) -> None:
    """Against inputs caught in a decoder whose earlier layer is the quantized one; linears over one input
    share it."""
    source = tiny_source(ARCH.replace(dtype="float32"))
    spec = {"scheme": "NVFP4_W4A4", "round": {"kind": "rtn"}}
    directory, scheme = quantized(tmp_path / "store", spec, source)
    for layer_idx in range(ARCH.num_layers):
        decoder = build_decoder(
            Upto(source, directory, scheme, end=layer_idx), dtype=torch.float32, device=CPU
        )
        coded = {
            linear: value
            for linear, value in Upto(source, directory, scheme, end=2).layer(layer_idx).items()
            if isinstance(value, QuantizedWeight)
        }
        largest: dict[str, float] = {}

        def catch(_: object, seen: tuple[Tensor], key: str, found: dict[str, float] = largest) -> None:
            found[key] = float(seen[0].abs().max())

        for idx in range(layer_idx + 1):
            for linear, value in Upto(source, directory, scheme, end=2).layer(idx).items():
                if isinstance(value, QuantizedWeight):
                    module = decoder.get_submodule(f"layers.{idx}.{linear.removesuffix('.weight')}")
                    hook = rounding(value) if idx < layer_idx else partial(catch, key=linear)
                    module.register_forward_pre_hook(hook)
        decoder(TOKENS)
        assert set(largest) == set(coded)
        for linear, value in coded.items():
            assert value.input_global_scale == global_scale_of_inputs(torch.tensor(largest[linear]))
        assert len({float(coded[f"attn.{each}.weight"].input_global_scale or 0) for each in "qkv"}) == 1


def test_rounded_inputs_cost_more_in_four_bits_than_in_eight() -> None:
    x_TK = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    errors = {}
    for name in NAMES:
        values_TK, scale_TG = rounded(SCHEMES[name], x_TK)
        back = (values_TK.view(*scale_TG.shape, -1) * scale_TG.unsqueeze(-1)).flatten(1)
        errors[name] = float((back - x_TK).square().mean())
    assert errors["MXFP8"] < errors["NVFP4_W4A4"] / 4 < errors["MXFP4_W4A4"] / 4
    weight = nearest_weight(x_TK, SCHEMES["MXFP8"], torch.bfloat16)
    assert float((weight.dequantize(torch.float32) - x_TK).square().mean()) == pytest.approx(errors["MXFP8"])

"""Floats with scales of one byte against compressed-tensors: the same bytes, the same weights, and laws of
their scales."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from torch import Tensor

from compress.calibrate.stats import InputStats, SecondMoment
from compress.errors import StorageError, UnsupportedFormat
from compress.export import FORMATS
from compress.export.config_groups import group_of, read_groups
from compress.methods.quantize.descent import Descent
from compress.models.checkpoint_writer import with_shared_scales
from compress.quant import e2m1, scale_grid
from compress.quant.codec import CanonicalCodec
from compress.quant.global_scale import with_one_global_scale
from compress.quant.mxfp4 import from_mxfp4
from compress.quant.numerics import choose_scale, nearest_weight, output_error, round_to_nearest
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from tests.support.tiny_decoder import LLAMA, tiny_arch

NVFP4 = SCHEMES["NVFP4"]
MXFP4 = SCHEMES["MXFP4"]
W4A4 = SCHEMES["NVFP4_W4A4"]
MXFP8 = SCHEMES["MXFP8"]
BOTH = pytest.mark.parametrize("scheme", [NVFP4, MXFP4], ids=lambda each: each.name)
CODEC = FORMATS.get("compressed-tensors").codec
LIBRARY: dict[str, tuple[str, Any]] = {
    "NVFP4": ("NVFP4A16", NVFP4PackedCompressor),
    "MXFP4": ("MXFP4A16", MXFP4PackedCompressor),
    "NVFP4_W4A4": ("NVFP4", NVFP4PackedCompressor),
    "MXFP4_W4A4": ("MXFP4", MXFP4PackedCompressor),
    "MXFP8": ("MXFP8", MXFP8QuantizationCompressor),
}
ALL = pytest.mark.parametrize("scheme", [SCHEMES[name] for name in LIBRARY], ids=LIBRARY)


def with_inputs(weight: QuantizedWeight, global_scale: float = 83.7) -> QuantizedWeight:
    """Return the weight with the global scale of its inputs, where its scheme has one."""
    if not weight.scheme.has_input_global_scale:
        return weight
    return replace(weight, input_global_scale=torch.tensor(global_scale))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moment(size: int) -> Tensor:
    x_TI = randn(300, size, seed=1) @ randn(size, size, seed=2) * size**-0.5
    return x_TI.t() @ x_TI / len(x_TI)


def test_codes_are_rounded_and_packed_as_compressed_tensors_does() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat([randn(1, 500) * 3, middles.view(1, -1), -middles.view(1, -1), randn(1, 20) * 0.1], dim=1)
    codes = e2m1.nearest(x)
    assert torch.equal(codes, cast_to_fp4(x.clone()))
    stored = codes.to(torch.float8_e4m3fn)
    theirs = pack_fp4_to_uint8(codes)
    assert torch.equal(e2m1.pack(stored), theirs)
    assert torch.equal(e2m1.unpack(theirs).view(torch.uint8), stored.view(torch.uint8))
    wide = unpack_fp4_from_uint8(theirs, 1, x.shape[1], torch.float32)
    assert torch.equal(e2m1.unpack(theirs).to(torch.float32), wide)


@ALL
def test_the_library_decompresses_our_tensors_to_our_weights(scheme: Scheme) -> None:
    weight = with_inputs(nearest_weight(0.02 * randn(24, 256), scheme, torch.bfloat16))
    name, compressor = LIBRARY[scheme.name]
    preset = preset_name_to_scheme(name, ["Linear"])
    parsed = QuantizationScheme.model_validate(
        {key: value for key, value in group_of(scheme, ["Linear"]).items() if value is not None}
    )
    assert parsed.weights.model_dump(exclude={"zp_dtype"}) == preset.weights.model_dump(exclude={"zp_dtype"})
    if scheme.activation is not None:
        fields = {"zp_dtype", "observer"}
        ours, given = parsed.input_activations, preset.input_activations
        assert ours.model_dump(exclude=fields) == given.model_dump(exclude=fields)
    leaves = CODEC.encode(weight)
    assert set(leaves) == CODEC.leaves(scheme)
    of_theirs = set(compressor.compression_param_names(preset)) - {"weight_zero_point"}
    # that of inputs is a parameter of the linear there, and none of the weight's
    assert set(leaves) - {"input_global_scale"} == of_theirs
    theirs = compressor.decompress(dict(leaves), parsed)["weight"]
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs, weight.dequantize(torch.bfloat16))
    again = {key: value for key, value in leaves.items() if key not in ("weight_packed", "weight")}
    scales = again["weight_scale"]
    wide = scales.to(torch.float32) if scheme.scale_type == "e4m3" else scale_grid.from_e8m0(scales)
    compressed = compressor.compress({**again, "weight": theirs, "weight_scale": wide}, parsed)
    codes = "weight" if scheme.num_bits == 8 else "weight_packed"
    signs = 127 if scheme.num_bits == 8 else 0x77  # -0 may come back as 0
    assert torch.equal(compressed[codes].view(torch.uint8) & signs, leaves[codes].view(torch.uint8) & signs)
    assert torch.equal(compressed["weight_scale"].view(torch.uint8), scales.view(torch.uint8))


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_dtype_holds_the_weights_exactly(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = nearest_weight(0.02 * randn(16, 256), scheme, dtype)
    wide = weight.dequantize(torch.float32)
    assert torch.equal(wide.to(dtype).to(torch.float32), wide)
    stored = CanonicalCodec().decode(CanonicalCodec().encode(weight), scheme)
    assert torch.equal(stored.dequantize(torch.float32), wide)
    assert scheme.weight_bytes(16, 256) == sum(
        each.numel() * each.element_size() for each in CanonicalCodec().encode(weight).values()
    )


def test_gpt_oss_blocks_are_the_same_numbers() -> None:
    weight = nearest_weight(0.02 * randn(16, 256), MXFP4, torch.bfloat16)
    leaves = CODEC.encode(weight)
    blocks = leaves["weight_packed"].view(16, -1, 16)
    assert torch.equal(from_mxfp4(blocks, leaves["weight_scale"]), weight.dequantize(torch.bfloat16))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_is_the_nearest_number_of_its_grid(scheme: Scheme, dtype: torch.dtype) -> None:
    powers = [2.0**each for each in range(-20, 9)]
    steps = [1 + each / 8 for each in range(8)] if scheme is NVFP4 else [1.0]
    grid = torch.tensor([power * step for power in powers for step in steps])
    wanted = grid.min() + torch.rand(4000, generator=torch.Generator().manual_seed(0)) ** 4 * 200
    found = scale_grid.nearest(wanted, str(scheme.scale_type), dtype).to(torch.float32)
    assert bool(torch.isin(found, grid).all())
    distance = (wanted.unsqueeze(1) - grid).abs().amin(1)
    assert torch.equal((found - wanted).abs(), distance)
    unplaced = torch.tensor([0.0, -1.3])
    assert torch.equal(scale_grid.nearest(unplaced, str(scheme.scale_type), torch.float32), unplaced)


def test_min_max_scales_of_powers_of_two_cut_nothing() -> None:
    w_OI = randn(64, 256)
    weight = nearest_weight(w_OI, MXFP4, torch.bfloat16)
    largest = w_OI.view(64, -1, 32).abs().amax(-1)
    assert bool((6 * weight.scale_OG.to(torch.float32) >= largest).all())
    assert bool((3 * weight.scale_OG.to(torch.float32) < largest).all())


@pytest.mark.parametrize("exponent", [-12, -3, 0, 6])
def test_a_global_scale_keeps_the_largest_scale_in_range(exponent: int) -> None:
    scale_OG = scale_grid.nearest(torch.rand(7, 5) + 0.01, "e4m3", torch.float32) * 2.0**exponent
    global_scale = scale_grid.global_scale_of(scale_OG)
    stored = scale_grid.to_e4m3(scale_OG, global_scale)
    assert float(stored.to(torch.float32).max()) <= 256
    assert torch.equal(scale_grid.from_e4m3(stored, global_scale), scale_OG)


def test_weights_that_are_multiplied_as_one_get_one_global_scale() -> None:
    small, large = (nearest_weight(size * randn(8, 64), NVFP4, torch.float32) for size in (0.02, 4.0))
    apart = [CODEC.encode(each)["weight_global_scale"] for each in (small, large)]
    assert apart[0] == 512
    assert apart[1] < 512
    shared = with_one_global_scale([small, large])
    for each, before in zip(shared, (small, large), strict=True):
        leaves = CODEC.encode(each)
        assert leaves["weight_global_scale"] == apart[1]
        assert torch.equal(each.dequantize(), before.dequantize())  # e4m3 has room for both
    ints = [nearest_weight(randn(8, 128), SCHEMES["W4A16_G128"], torch.float32)] * 2
    assert all(each.global_scale is None for each in with_one_global_scale(ints))


@BOTH
def test_search_and_descent_lower_their_losses_and_stay_on_the_grid(scheme: Scheme) -> None:
    w_OI = 0.05 * randn(32, 128)
    h_II = moment(128)
    stats = InputStats(SecondMoment())
    stats[SecondMoment].update(randn(300, 128, seed=1) @ randn(128, 128, seed=2) * 128**-0.5)
    losses = []
    for choice in ("min_max", "mse", "hessian"):
        scale_OG, _ = choose_scale(w_OI, scheme, torch.bfloat16, choice=choice, h_II=h_II)  # type: ignore[arg-type]
        weight = round_to_nearest(w_OI, scheme, scale_OG, None)
        losses.append(output_error(w_OI, weight.dequantize(torch.float32), h_II))
    assert losses[2] < losses[0]
    better = Descent(sweeps=3).refine(w_OI, weight, stats).weight
    assert output_error(w_OI, better.dequantize(torch.float32), h_II) < 0.8 * losses[2]
    wide = better.scale_OG.to(torch.float32)
    assert torch.equal(scale_grid.nearest(wide, str(scheme.scale_type), torch.float32), wide)
    assert bool(torch.isin(better.codes_OI.to(torch.float32).abs(), torch.tensor(e2m1.VALUES)).all())
    if scheme is NVFP4:  # a neighbouring power of two is rarely better
        assert not torch.equal(better.scale_OG, weight.scale_OG)


@pytest.mark.parametrize(
    ("scheme", "leaf", "value", "reason"),
    [
        (NVFP4, "weight_global_scale", torch.tensor([0.0]), "no positive number"),
        (NVFP4, "weight_global_scale", torch.tensor([1.0, 1.0]), "not one float32 number"),
        (NVFP4, "weight_scale", torch.full((8, 4), -1.0).to(torch.float8_e4m3fn), "no positive number"),
        (NVFP4, "weight_scale", torch.ones(8, 4), "a"),
        (MXFP4, "weight_scale", torch.full((8, 2), 255, dtype=torch.uint8), "no positive number"),
        (MXFP4, "weight_scale", torch.ones(8, 3, dtype=torch.uint8), r"\[8, 3\]"),
        (MXFP4, "weight_packed", torch.zeros(8, 24, dtype=torch.uint8), "K is 48"),
        (MXFP4, "weight_packed", torch.zeros(8, 32), "weight_packed"),
        (W4A4, "input_global_scale", torch.tensor([-1.0]), "input_global_scale is no positive number"),
        (W4A4, "input_global_scale", torch.tensor([torch.inf]), "input_global_scale is no positive number"),
        (W4A4, "input_global_scale", torch.ones(1, dtype=torch.bfloat16), "not one float32 number"),
        (MXFP8, "weight", torch.zeros(8, 64, dtype=torch.int8), "weight is int8"),
        (MXFP8, "weight", torch.zeros(8, 48).to(torch.float8_e4m3fn), "K is 48"),
        (MXFP8, "weight_scale", torch.ones(8, 2), "weight_scale is float32"),
    ],
)
def test_spoiled_tensors_are_refused(scheme: Scheme, leaf: str, value: Tensor, reason: str) -> None:
    leaves = CODEC.encode(with_inputs(nearest_weight(randn(8, 64), scheme, torch.float32)))
    with pytest.raises(UnsupportedFormat, match=reason):
        CODEC.decode({**leaves, leaf: value}, scheme)


@BOTH
@pytest.mark.parametrize(
    "change", [{"group_size": 64}, {"symmetric": False}, {"strategy": "channel"}, {"num_bits": 8}]
)
def test_a_config_of_another_form_is_refused(scheme: Scheme, change: dict[str, Any]) -> None:
    group = group_of(scheme, ["Linear"])
    config = {"config_groups": {"group_0": {**group, "weights": {**group["weights"], **change}}}}
    with pytest.raises(UnsupportedFormat, match="inputs in 16 bits"):
        read_groups(config, ["a.0.b"])


def test_a_config_as_the_library_writes_it_is_read() -> None:
    """The library leaves fields out, and gives a scale's dtype or not."""
    for scheme_name, (name, _) in LIBRARY.items():
        scheme = SCHEMES[scheme_name]
        dumped = preset_name_to_scheme(name, ["Linear"]).model_dump(mode="json")
        dumped["format"] = group_of(scheme, ())["format"]
        assert read_groups({"config_groups": {"a": dumped}}, ["a.0.b"]) == {"a.0.b": scheme}
        for changed in ({"num_bits": 4}, {**(dumped["input_activations"] or {}), "group_size": 64}):
            inputs = {**dumped, "input_activations": changed}
            with pytest.raises(UnsupportedFormat, match="input activations"):
                read_groups({"config_groups": {"a": inputs}}, ["a.0.b"])
    weights_only = preset_name_to_scheme("MXFP8A16", ["Linear"]).model_dump(mode="json")
    with pytest.raises(UnsupportedFormat, match="inputs of the same form"):
        read_groups({"config_groups": {"a": {**weights_only, "format": "mxfp8-quantized"}}}, ["a.0.b"])


@ALL
def test_tensors_of_another_tool_come_back_bit_for_bit(scheme: Scheme) -> None:
    """Any codes and scales, and global scales that are no powers of two, through reading and writing; and
    through an intermediate artifact on the way."""
    generator = torch.Generator().manual_seed(0)
    groups = 128 // (scheme.group_size or 128)
    draw = {"generator": generator, "dtype": torch.uint8}
    if scheme.num_bits == 4:
        leaves = {"weight_packed": torch.randint(0, 256, (8, 64), **draw)}
    else:
        numbers = torch.randint(0, 127, (8, 128), **draw) | (torch.randint(0, 2, (8, 128), **draw) << 7)
        leaves = {"weight": numbers.view(torch.float8_e4m3fn)}
    if scheme.scale_type == "e4m3":
        leaves["weight_scale"] = torch.randint(0, 127, (8, groups), **draw).view(torch.float8_e4m3fn)
        leaves["weight_global_scale"] = torch.tensor([2688 / 0.37])
    else:
        leaves["weight_scale"] = torch.randint(100, 140, (8, groups), **draw)
    if scheme.has_input_global_scale:
        leaves["input_global_scale"] = torch.tensor([2688 / 7.3])
    weight = CODEC.decode(leaves, scheme)
    stored = CanonicalCodec().decode(CanonicalCodec().encode(weight), scheme)
    assert stored.input_global_scale == weight.input_global_scale
    for each in (weight, stored):
        written = CODEC.encode(each)
        assert set(written) == set(leaves)
        for name, value in written.items():
            assert value.shape == leaves[name].shape
            assert torch.equal(value.view(torch.uint8), leaves[name].view(torch.uint8)), name


def test_a_global_scale_of_another_tool_comes_back_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    stored = (torch.rand(8, 4, generator=generator) * 448).to(torch.float8_e4m3fn)
    leaves = {
        "weight_packed": torch.randint(0, 256, (8, 32), generator=generator, dtype=torch.uint8),
        "weight_scale": stored,
        "weight_global_scale": torch.tensor([2688 / 0.37]),
    }
    weight = CODEC.decode(leaves, NVFP4)
    assert isinstance(weight, QuantizedWeight)
    for name, each in CODEC.encode(weight).items():
        assert torch.equal(each.view(torch.uint8), leaves[name].view(torch.uint8)), name
    theirs = NVFP4PackedCompressor.decompress(leaves, preset_name_to_scheme("NVFP4A16", ["Linear"]))
    assert torch.equal(theirs["weight"], weight.dequantize(torch.bfloat16))


def test_a_group_of_zeros_moves_no_global_scale() -> None:
    w_OI = 0.02 * randn(8, 64)
    w_OI[3, 16:32] = 0
    weight = nearest_weight(w_OI, NVFP4, torch.bfloat16)
    assert CODEC.encode(weight)["weight_global_scale"] == 512
    assert torch.equal(CODEC.decode(CODEC.encode(weight), NVFP4).dequantize(), weight.dequantize())


@pytest.mark.parametrize("large", [3.0, 0.02])
def test_weights_that_are_nothing_beside_the_others_stay_so(large: float) -> None:
    w_OI = large * randn(8, 64)
    w_OI[2] *= 1e-6
    weight = nearest_weight(w_OI, NVFP4, torch.float32)
    stored = CODEC.decode(CODEC.encode(weight), NVFP4)
    assert float(stored.dequantize()[2].abs().max()) < 2.0**-9 * large
    others = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(stored.dequantize()[others], weight.dequantize()[others])


def test_foreign_global_scales_are_not_rounded_away() -> None:
    """Linears of one group stay as they came; what must become one matrix is refused."""
    weights = {
        f"attn.{name}.weight": CODEC.decode(
            CODEC.encode(nearest_weight(size * randn(8, 64), NVFP4, torch.float32))
            | {"weight_global_scale": torch.tensor([2688 / size])},
            NVFP4,
        )
        for name, size in (("q", 0.03), ("k", 0.02), ("v", 0.01))
    }
    shape = tiny_arch(LLAMA).layers[0]
    kept = with_shared_scales(shape, weights)
    assert all(kept[name] is weight for name, weight in weights.items())
    with pytest.raises(UnsupportedFormat, match="several global scales"):
        with_one_global_scale(list(weights.values()))


def test_fields_that_change_no_number_are_passed_over() -> None:
    group = group_of(NVFP4, ["Linear"])
    extra = {"zp_dtype": "torch.float8_e4m3fn", "actorder": "static"}
    config = {"config_groups": {"group_0": {**group, "weights": {**group["weights"], **extra}}}}
    assert read_groups(config, ["a.0.b"]) == {"a.0.b": NVFP4}
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    with pytest.raises(UnsupportedFormat, match="actorder group"):
        read_groups(config, ["a.0.b"])


@pytest.mark.parametrize(
    "change", [{"scale_type": None}, {"num_bits": 8}, {"num_bits": 5}, {"type": "int"}], ids=str
)
def test_a_manifest_names_only_floats_that_there_are(change: dict[str, Any]) -> None:
    facts = {key: value for key, value in (NVFP4.to_json() | change).items() if value is not None}
    with pytest.raises(StorageError, match="floats of other than"):
        Scheme.from_json(facts)
    assert Scheme.from_json(NVFP4.to_json()) == NVFP4

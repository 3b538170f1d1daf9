"""The compressed-tensors config is read with care: whatever it says that is not honoured here is refused, and
its own library agrees with it.
"""

import copy
import json
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.lifecycle.forward import quantize as library_quantize
from torch import nn

from compress.errors import UnsupportedFormat
from compress.export import FORMATS
from compress.export.config_groups import group_of
from compress.kernels.operands.rows import activation_quant, quantize
from compress.quant.model_scheme import ModelScheme
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from tests.support.tiny_decoder import LLAMA, tiny_arch

FORM = FORMATS.get("compressed-tensors")
LINEARS = ["model.layers.0.mlp.up_proj", "lm_head"]
WIDE = {
    **LLAMA,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def config(scheme: str = "W4A16_G128") -> dict[str, Any]:
    return copy.deepcopy(FORM.quantization_config(ModelScheme(SCHEMES[scheme]), head="lm_head"))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_the_library_parses_the_config_to_the_same_scheme(scheme: Scheme) -> None:
    parsed = QuantizationConfig.model_validate(config(scheme.name))
    (group,) = parsed.config_groups.values()
    weights = group.weights
    group_size = scheme.group_size if scheme.strategy == "group" else None
    assert (weights.num_bits, weights.symmetric, weights.group_size) == (
        scheme.num_bits,
        scheme.symmetric,
        group_size,
    )
    assert weights.block_structure == ([128, 128] if scheme.strategy == "block" else None)
    assert weights.strategy == ("tensor_group" if scheme.scale_type == "e4m3" else scheme.strategy)
    assert weights.type == scheme.type
    assert not weights.dynamic
    assert parsed.ignore == ["lm_head"]
    unpacked = "float-quantized" if scheme.type == "float" else "int-quantized"
    in_bytes = {(4, "e4m3"): "nvfp4-pack-quantized", (4, "e8m0"): "mxfp4-pack-quantized"}
    in_bytes |= {(8, "e8m0"): "mxfp8-quantized"}
    unpacked = in_bytes.get((scheme.num_bits, str(scheme.scale_type)), unpacked)
    assert (
        parsed.format
        == group.format
        == ("pack-quantized" if scheme.type == "int" and scheme.input_dtype != torch.int8 else unpacked)
    )
    inputs = group.input_activations
    assert (inputs is None) == (scheme.activation is None)
    if inputs is not None and scheme.scale_type is not None:
        as_weights = {"dynamic", "observer"}
        assert inputs.model_dump(exclude=as_weights) == weights.model_dump(exclude=as_weights)
        assert inputs.dynamic == ("local" if scheme.scale_type == "e4m3" else True)
    elif inputs is not None:
        assert (inputs.num_bits, inputs.type, inputs.symmetric) == (
            8,
            scheme.activation_type or scheme.type,
            scheme.input_symmetric,
        )
        assert (inputs.strategy, inputs.dynamic) == (scheme.activation, scheme.activation != "tensor")
        assert inputs.group_size == (128 if scheme.activation == "group" else None)


@pytest.mark.parametrize("name", ["INT8_STATIC", "INT8_STATIC_ASYM"])
def test_the_library_rounds_static_inputs_to_the_same_codes(name: str) -> None:
    """But for halves: the library rounds after it added the zero point, which may be odd."""
    scheme = SCHEMES[name]
    scale = torch.tensor(0.013)
    zero = None if scheme.input_symmetric else torch.tensor(-77, dtype=torch.int8)
    (group,) = QuantizationConfig.model_validate(config(name)).config_groups.values()
    x_TI = torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    theirs = library_quantize(
        x_TI, scale.reshape(1), None if zero is None else zero.reshape(1), group.input_activations
    )
    ours = quantize(x_TI, activation_quant(scheme, scale, zero)).values_TK
    assert {-128, 127} <= set(ours.flatten().tolist())
    moved = (ours.to(torch.int32) - theirs.to(torch.int32)).abs()
    assert moved.max() <= 1
    assert torch.count_nonzero(moved) <= (0 if zero is None else 3)


@pytest.mark.parametrize("head", ["FP8_DYNAMIC", "W8A16", "INT8_DYNAMIC"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_library_gives_the_head_its_own_scheme(scheme: str, head: str) -> None:
    said = FORM.quantization_config(ModelScheme(SCHEMES[scheme], SCHEMES[head]), head="lm_head")
    parsed = QuantizationConfig.model_validate(copy.deepcopy(said))
    model = nn.ModuleDict({"up_proj": nn.Linear(256, 256), "lm_head": nn.Linear(256, 256)})
    apply_quantization_config(model, parsed, show_progress=False)
    for name, expected in (("up_proj", SCHEMES[scheme]), ("lm_head", SCHEMES[head])):
        found = model[name].quantization_scheme
        assert (found.weights.num_bits, found.weights.type, found.weights.strategy) == (
            expected.num_bits,
            expected.type,
            "tensor_group" if expected.scale_type == "e4m3" else expected.strategy,
        )
        assert (found.input_activations is None) == (expected.activation is None)
    kinds = {
        (
            each.type,
            each.type == "int" and each.input_dtype != torch.int8,
            each.scale_type and (each.num_bits, each.scale_type),
        )
        for each in (SCHEMES[scheme], SCHEMES[head])
    }
    one_form = len(kinds) == 1
    assert (parsed.format == "mixed-precision") != one_form


def test_a_scheme_that_has_no_name_here_is_read_all_the_same() -> None:
    said = config()
    said["config_groups"]["group_0"]["weights"].update(group_size=16, symmetric=False)
    assert FORM.codec.schemes(said, LINEARS)["model.layers.0.mlp.up_proj"] == Scheme(
        "W4A16_G16_ASYM", 4, symmetric=False, group_size=16
    )


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_scheme_that_has_a_name_here_is_read_under_it(scheme: Scheme) -> None:
    assert FORM.codec.schemes(config(scheme.name), LINEARS) == {LINEARS[0]: scheme}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("sparsity_config",), {"format": "dense"}, "sparsity_config"),
        (("config_groups", "group_0", "targets"), ["LlamaAttention"], "LlamaAttention"),
        (("config_groups", "group_0", "targets"), ["model.layers.7.mlp.up_proj"], r"layers\.7"),
        (("config_groups", "group_0", "weights", "num_bits"), 5, "5 bits"),
        (("config_groups", "group_0", "weights", "type"), "float", "type float"),
        (("config_groups", "group_0", "weights", "strategy"), "block", "strategy block"),
        (("config_groups", "group_0", "weights", "actorder"), "group", "actorder"),
        (("config_groups", "group_0", "format"), "int-quantized", "int-quantized"),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}, "activations"),
    ],
)
def test_what_is_not_honoured_is_refused(path: tuple[str, ...], value: Any, message: str) -> None:
    said = config()
    place = said
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(UnsupportedFormat, match=message):
        FORM.codec.schemes(said, LINEARS)


def test_the_library_reads_the_kv_cache_that_the_config_states() -> None:
    said = config() | copy.deepcopy(FORM.static_kv.beside)
    stated = QuantizationConfig.model_validate(copy.deepcopy(said)).kv_cache_scheme
    assert (stated.num_bits, stated.type, stated.strategy, stated.symmetric, stated.dynamic) == (
        8,
        "float",
        "tensor",
        True,
        False,
    )
    assert FORM.codec.kv_format(said) == "FP8_STATIC"
    assert FORM.codec.kv_format(config()) is None
    assert (
        FORM.codec.kv_format(json.loads(QuantizationConfig.model_validate(said).model_dump_json()))
        == "FP8_STATIC"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_bits", 4),
        ("type", "int"),
        ("symmetric", False),
        ("strategy", "attn_head"),
        ("strategy", None),
        ("dynamic", True),
    ],
)
def test_a_kv_cache_that_is_not_honoured_is_refused(key: str, value: Any) -> None:
    said = config() | copy.deepcopy(FORM.static_kv.beside)
    said["kv_cache_scheme"][key] = value
    with pytest.raises(UnsupportedFormat, match=f"kv_cache_scheme is .*{key} {value}"):
        FORM.codec.kv_format(said)


def test_a_checkpoint_whose_cache_alone_is_quantized_has_dense_linears() -> None:
    said = copy.deepcopy(FORM.static_kv.alone)
    assert FORM.codec.schemes(said, LINEARS) == {}
    read = QuantizationConfig.model_validate(copy.deepcopy(said))
    assert (read.config_groups, FORM.codec.kv_format(json.loads(read.model_dump_json()))) == (
        {},
        "FP8_STATIC",
    )
    with pytest.raises(UnsupportedFormat, match="no config_groups"):
        FORM.codec.schemes({**said, "kv_cache_scheme": None}, LINEARS)


def test_ignore_takes_exact_names_and_regular_expressions() -> None:
    said = config("W4A16_G128") | {"ignore": ["lm_head", "re:.*down_proj"]}
    linears = ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"]
    assert list(FORM.codec.schemes(said, linears)) == ["model.layers.0.mlp.up_proj"]


def group(scheme: str, *targets: str) -> dict[str, Any]:
    return config(scheme)["config_groups"]["group_0"] | {"targets": list(targets)}


def test_a_full_name_goes_before_a_pattern_and_a_pattern_before_the_class() -> None:
    linears = [
        "lm_head",
        *(f"model.layers.{idx}.{name}" for idx in range(2) for name in ("mlp.up_proj", "self_attn.q_proj")),
    ]
    groups = {
        "a": group("W4A16_G128", "Linear"),
        "b": group("FP8_DYNAMIC", r"re:.*self_attn\..*"),
        "c": group("W8A16", "model.layers.1.self_attn.q_proj"),
    }
    schemes = FORM.codec.schemes(config() | {"config_groups": groups}, linears)
    assert {linear: scheme.name for linear, scheme in schemes.items()} == {
        "model.layers.0.mlp.up_proj": "W4A16_G128",
        "model.layers.0.self_attn.q_proj": "FP8_DYNAMIC",
        "model.layers.1.mlp.up_proj": "W4A16_G128",
        "model.layers.1.self_attn.q_proj": "W8A16",
    }
    without_class = FORM.codec.schemes(config() | {"config_groups": {"b": groups["b"]}}, linears)
    assert set(without_class) == {linear for linear in linears if "self_attn" in linear}


def test_two_groups_of_one_target_contradict_each_other() -> None:
    with pytest.raises(UnsupportedFormat, match="two of the"):
        FORM.codec.schemes(
            config() | {"config_groups": {"a": group("W8A16", "Linear"), "b": group("FP8_STATIC", "Linear")}},
            LINEARS,
        )


@pytest.mark.parametrize(
    "change",
    [
        {"dynamic": True},
        {"symmetric": False},
        {"num_bits": 4},
        {"type": "int"},
        {"strategy": "group", "group_size": 128, "dynamic": True},
    ],
)
def test_other_activations_than_those_computed_here_are_refused(change: dict[str, Any]) -> None:
    said = config("FP8_STATIC")
    said["config_groups"]["group_0"]["input_activations"].update(change)
    with pytest.raises(UnsupportedFormat, match="input activations"):
        FORM.codec.schemes(said, LINEARS)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("weights", {"block_structure": [64, 128]}),
        ("weights", {"block_structure": None, "strategy": "channel"}),
        ("input_activations", {"group_size": 64}),
        ("input_activations", {"strategy": "token", "group_size": None}),
        ("input_activations", {"strategy": "tensor", "group_size": None, "dynamic": False}),
    ],
)
def test_other_blocks_than_those_computed_here_are_refused(part: str, change: dict[str, Any]) -> None:
    said = config("FP8_BLOCK")
    said["config_groups"]["group_0"][part].update(change)
    with pytest.raises(
        UnsupportedFormat, match="in blocks of 128 x 128 with inputs dynamic per group of 128"
    ):
        FORM.codec.schemes(said, LINEARS)


def test_a_block_structure_in_the_old_spelling_is_read() -> None:
    said = config("FP8_BLOCK")
    said["config_groups"]["group_0"]["weights"].update(block_structure="128x128", observer="static_minmax")
    assert FORM.codec.schemes(said, LINEARS) == {LINEARS[0]: SCHEMES["FP8_BLOCK"]}


def test_scales_that_are_not_one_a_block_are_refused() -> None:
    codes_OI = torch.zeros(200, 256, dtype=torch.float8_e4m3fn)
    FORM.codec.decode({"weight": codes_OI, "weight_scale": torch.ones(2, 2)}, SCHEMES["FP8_BLOCK"])
    for shape in ((1, 2), (2, 1), (200, 2), (200, 1), (1,)):
        with pytest.raises(UnsupportedFormat, match=r"200 x 256 with scales .*where FP8_BLOCK has \(2, 2\)"):
            FORM.codec.decode({"weight": codes_OI, "weight_scale": torch.ones(shape)}, SCHEMES["FP8_BLOCK"])


def test_vllm_does_not_fuse_linears_that_end_within_a_block() -> None:
    """As its own check: q, k and gate whole blocks, what comes last may be ragged."""
    for changes, ragged in (
        ({}, []),
        ({"num_key_value_heads": 1}, ["attn.k"]),
        ({"intermediate_size": 320}, ["ffn.gate"]),
    ):
        arch = tiny_arch({**WIDE, **changes})
        (vllm,) = (
            each for each in FORM.consumers(arch, ModelScheme(SCHEMES["FP8_BLOCK"])) if each.name == "vLLM"
        )
        assert vllm.loads == (not ragged)
        assert all(name in vllm.note for name in ragged)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("input_activations", {"dynamic": False}),
        ("input_activations", {"symmetric": None}),
        ("input_activations", {"dynamic": "local"}),
        ("input_activations", {"type": "float"}),
        ("input_activations", {"strategy": "tensor"}),
        ("weights", {"symmetric": False}),
        ("weights", {"num_bits": 4}),
        ("weights", {"strategy": "group", "group_size": 128}),
    ],
)
def test_other_int8_linears_than_those_computed_here_are_refused(part: str, change: dict[str, Any]) -> None:
    said = config("INT8_DYNAMIC")
    said["config_groups"]["group_0"][part].update(change)
    with pytest.raises(UnsupportedFormat, match="int-quantized of 8 bits"):
        FORM.codec.schemes(said, LINEARS)


@pytest.mark.parametrize("name", ["INT8_DYNAMIC", "INT8_DYNAMIC_ASYM", "INT8_STATIC", "INT8_STATIC_ASYM"])
def test_a_config_says_how_integer_inputs_are_rounded(name: str) -> None:
    said = config(name)
    inputs = said["config_groups"]["group_0"]["input_activations"]
    assert inputs["symmetric"] is not name.endswith("_ASYM")
    assert (inputs["strategy"], inputs["dynamic"]) == (
        ("tensor", False) if "STATIC" in name else ("token", True)
    )
    assert FORM.codec.schemes(said, LINEARS) == {LINEARS[0]: SCHEMES[name]}


@pytest.mark.parametrize(
    "zero_point", [torch.tensor([1, 2]), torch.tensor(0.5), torch.tensor([200]), torch.tensor([-129])]
)
def test_an_input_zero_point_that_is_no_code_is_refused(zero_point: torch.Tensor) -> None:
    codes_OI = torch.zeros(6, 4, dtype=torch.int8)
    leaves = {"weight": codes_OI, "weight_scale": torch.ones(6, 1), "input_scale": torch.ones(1)}
    scheme = SCHEMES["INT8_STATIC_ASYM"]
    with pytest.raises(UnsupportedFormat, match="one integer of 8 bits belongs"):
        FORM.codec.decode({**leaves, "input_zero_point": zero_point}, scheme)
    read = FORM.codec.decode({**leaves, "input_zero_point": torch.tensor([-5])}, scheme)
    assert read.input_zero_point is not None
    assert (read.input_zero_point.dtype, read.input_zero_point.item()) == (torch.int8, -5)


def test_the_naive_name_of_a_form_is_read_by_the_type_of_its_numbers() -> None:
    for name in ("INT8_DYNAMIC", "FP8_STATIC"):
        said = config(name)
        said["config_groups"]["group_0"]["format"] = "naive-quantized"
        assert FORM.codec.schemes(said, LINEARS) == {LINEARS[0]: SCHEMES[name]}


def test_int8_lies_unpacked_as_the_librarys_own_compressor_lays_it() -> None:
    scheme = SCHEMES["INT8_DYNAMIC"]
    codes_OI = torch.randint(-128, 128, (6, 5), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    leaves = FORM.codec.encode(QuantizedWeight(scheme, codes_OI, torch.full((6, 1), 0.5)))
    assert {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in leaves.items()} == {
        "weight": (torch.int8, (6, 5)),
        "weight_scale": (torch.float32, (6, 1)),
    }
    with pytest.raises(UnsupportedFormat, match=r"stores them as torch\.uint8, not int8"):
        FORM.codec.decode({**leaves, "weight": leaves["weight"].view(torch.uint8)}, scheme)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_a_whole_matrix_is_read_as_one_for_each_channel(shape: tuple[int, ...]) -> None:
    """As checkpoints of the first FP8 tools have them, with the input scale in the model's dtype."""
    said = config("FP8_STATIC")
    said["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    scheme = FORM.codec.schemes(said, LINEARS)["model.layers.0.mlp.up_proj"]
    assert scheme == SCHEMES["FP8_STATIC"]
    codes_OI = torch.randn(6, 4).to(torch.float8_e4m3fn)
    leaves = {
        "weight": codes_OI,
        "weight_scale": torch.full(shape, 0.25),
        "input_scale": torch.full(shape, 0.5, dtype=torch.bfloat16),
    }
    weight = FORM.codec.decode(leaves, scheme)
    assert torch.equal(weight.dequantize(), codes_OI.to(torch.float32) * 0.25)
    assert weight.scale_OG.shape == (6, 1)
    assert weight.input_scale is not None
    assert (weight.input_scale.shape, weight.input_scale.dtype, float(weight.input_scale)) == (
        (),
        torch.float32,
        0.5,
    )


def test_float_weights_in_another_type_than_they_claim_are_refused() -> None:
    leaves = {"weight": torch.zeros(2, 2, dtype=torch.float8_e5m2), "weight_scale": torch.ones(2, 1)}
    with pytest.raises(UnsupportedFormat, match="float8_e5m2"):
        FORM.codec.decode(leaves, SCHEMES["FP8_DYNAMIC"])


@pytest.mark.parametrize("name", ["W3A16_G128", "W3A16_G64_ASYM", "W2A16_G64"])
def test_codes_of_few_bits_are_what_the_format_library_decompresses(name: str) -> None:
    scheme = SCHEMES[name]
    w_OI = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight = nearest_weight(w_OI, scheme, torch.bfloat16)
    group = group_of(scheme, ["Linear"])
    args = QuantizationScheme.model_validate({key: group[key] for key in ("targets", "weights", "format")})
    theirs = PackedQuantizationCompressor.decompress(FORM.codec.encode(weight), args)
    assert torch.equal(theirs["weight"], weight.dequantize())


def test_three_bits_with_ten_codes_a_word_are_refused() -> None:
    """Words of compressed-tensors before 0.20 begin like ours, and mean something else."""
    scheme = SCHEMES["W3A16_G128"]
    leaves = {
        "weight_packed": torch.zeros(8, -(-256 // 10), dtype=torch.int32),
        "weight_scale": torch.ones(8, 2),
        "weight_shape": torch.tensor([8, 256]),
    }
    with pytest.raises(UnsupportedFormat, match=r"weight_packed is int32 \[8, 26\].*\[8, 24\]"):
        FORM.codec.decode(leaves, scheme)

"""What every export format must keep, over all schemes: tensors and config come back as they went out, and
limits have names.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import UnsupportedFormat
from compress.export import FORMATS, Consumer, ExportFormat, OneScaleFormat, codecs, open_checkpoint
from compress.export.format_writer import write_format
from compress.export.refusals import check_rules
from compress.models.arch import Arch
from compress.models.family import family_of
from compress.models.random_source import RandomSource
from compress.quant.model_scheme import ModelScheme
from compress.quant.numerics import nearest_codes, storable
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}
LINEARS = [f"model.layers.{idx}.self_attn.{name}" for idx in (0, 1, 10) for name in ("q_proj", "o_proj")] + [
    "lm_head"
]


def arch(**changes: Any) -> Arch:
    return family_of(CONFIG).read_config({**CONFIG, **changes})


def supported() -> list[tuple[ExportFormat, Scheme]]:
    smaller = [
        dataclasses.replace(scheme, group_size=32)
        for scheme in SCHEMES.values()
        if scheme.strategy == "group" and scheme.scale_type is None
    ]
    schemes = [*SCHEMES.values(), *smaller]
    return [
        (form, scheme)
        for _, form in FORMATS.items()
        for scheme in schemes
        if not form.broken_rules(arch(), ModelScheme(scheme))
    ]


def with_heads() -> list[tuple[ExportFormat, Scheme, Scheme | None]]:
    """Every format and scheme with a dense head and with each head that the format supports beside it."""
    dense: list[Scheme | None] = [None]
    heads = [
        (form, scheme, head)
        for form, scheme in supported()
        for head in [*dense, SCHEMES["FP8_DYNAMIC"], SCHEMES["W8A16"]]
    ]
    return [
        (form, scheme, head)
        for form, scheme, head in heads
        if not form.broken_rules(arch(), ModelScheme(scheme, head))
    ]


EACH = pytest.mark.parametrize(("form", "scheme"), supported())
EACH_FORMAT = pytest.mark.parametrize("name", FORMATS.names())


def random_weight(scheme: Scheme, out_features: int, in_features: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(out_features)
    low = scheme.min_code
    high = scheme.max_code + 1
    groups = scheme.num_groups(in_features)
    scale_OG = (torch.rand(scheme.num_scale_rows(out_features), groups, generator=generator) + 0.1).to(
        torch.bfloat16
    )
    zero_OG = (
        None
        if scheme.symmetric
        else torch.randint(low, high, (out_features, groups), generator=generator).to(torch.int8)
    )
    drawn_OI = torch.randint(low, high, (out_features, in_features), generator=generator)
    codes_OI = nearest_codes(drawn_OI, scheme, torch.ones(()), None).to(scheme.code_dtype)
    scale_OG = scale_OG if scheme.scale_type is None else storable(scale_OG, scheme, torch.bfloat16)
    input_scale = torch.tensor(0.037) if scheme.activation == "tensor" else None
    input_zero = (
        None if scheme.input_symmetric or input_scale is None else torch.tensor(-71, dtype=torch.int8)
    )
    global_scale = torch.tensor(64.0) if scheme.has_input_global_scale else None
    return QuantizedWeight(
        scheme,
        codes_OI,
        scale_OG,
        zero_OG,
        input_scale,
        input_zero_point=input_zero,
        input_global_scale=global_scale,
    )


@EACH_FORMAT
def test_a_format_supports_a_scheme_and_is_found_by_its_quant_method(name: str) -> None:
    assert any(form is FORMATS.get(name) for form, _ in supported())
    assert codecs()[FORMATS.get(name).quant_method] is FORMATS.get(name).codec


@EACH
@pytest.mark.parametrize("out_features", [64, 7, 1])
def test_tensors_come_back_as_they_went_out(form: ExportFormat, scheme: Scheme, out_features: int) -> None:
    weight = random_weight(scheme, out_features, 256)
    if isinstance(form, OneScaleFormat) and form.takes_one_scale(scheme):
        with pytest.raises(UnsupportedFormat, match="one-scale"):
            form.codec.encode(random_weight(scheme, 64, 256))
        weight.scale_OG[:] = weight.scale_OG[0, 0].clone()
    leaves = form.codec.encode(weight)
    assert set(leaves) == form.codec.leaves(scheme)
    assert all(tensor.is_contiguous() for tensor in leaves.values())
    again = form.codec.decode(leaves, scheme)
    assert again.codes_OI.dtype == weight.codes_OI.dtype
    assert torch.equal(again.codes_OI.view(torch.uint8), weight.codes_OI.view(torch.uint8))
    assert torch.equal(again.scale_OG.to(torch.float32), weight.scale_OG.to(torch.float32))
    in_memory = weight.scale_OG.dtype if scheme.scale_type is None else torch.float32
    assert again.scale_OG.dtype == (form.scale_dtype or in_memory)
    for one, other in (
        (again.input_scale, weight.input_scale),
        (again.input_zero_point, weight.input_zero_point),
    ):
        assert (one is None) == (other is None)
        assert one is None or other is None or (one.dtype == other.dtype and torch.equal(one, other))
    assert (again.zero_point_OG is None) == (weight.zero_point_OG is None)
    if weight.zero_point_OG is not None and again.zero_point_OG is not None:
        assert torch.equal(again.zero_point_OG, weight.zero_point_OG)
    assert again.scheme == scheme
    assert again.input_scale is None or (again.input_scale.dtype, again.input_scale.shape) == (
        torch.float32,
        (),
    )
    assert (again.input_scale, again.input_scale is None) == (weight.input_scale, weight.input_scale is None)


@pytest.mark.parametrize(("form", "scheme", "head"), with_heads())
def test_the_config_says_which_linears_have_which_scheme(
    form: ExportFormat, scheme: Scheme, head: Scheme | None
) -> None:
    ignore = ["model.layers.1.self_attn.q_proj"]
    whole = ModelScheme(scheme, head, tuple((linear, None) for linear in ignore))
    config = json.loads(json.dumps(form.quantization_config(whole, head="lm_head")))
    assert config["quant_method"] == form.quant_method
    schemes = form.codec.schemes(config, LINEARS)
    assert set(schemes) == set(LINEARS) - set(ignore) - (
        set() if head else {"lm_head"}
    )  # layer 10 is not taken for layer 1
    assert schemes.pop("lm_head", None) == whole.head
    for found in schemes.values():
        assert dataclasses.replace(found, name=scheme.name) == scheme
    unignored = form.codec.schemes(
        form.quantization_config(ModelScheme(scheme, head), head="lm_head"), LINEARS
    )
    assert set(unignored) == set(LINEARS) - (set() if head else {"lm_head"})


@EACH
def test_the_order_in_which_linears_are_ignored_does_not_show(form: ExportFormat, scheme: Scheme) -> None:
    orders = ((("b", None), ("a", None)), (("a", None), ("b", None)))
    configs = [form.quantization_config(ModelScheme(scheme, None, dense), head="lm_head") for dense in orders]
    assert configs[0] == configs[1]


@EACH_FORMAT
def test_a_broken_rule_is_refused_by_name_before_anything_is_written(name: str) -> None:
    narrow = arch(hidden_size=192, num_attention_heads=6, num_key_value_heads=2)
    uneven = arch()
    uneven = uneven.replace(
        layers=(uneven.layers[0], dataclasses.replace(uneven.layers[1], intermediate_size=256))
    )
    four_bits = ModelScheme(SCHEMES["W4A16_G128"])
    for broken in (narrow, uneven):
        rules = FORMATS.get(name).broken_rules(broken, four_bits)
        assert rules
        assert all(rule.name and rule.problem.endswith(".") for rule in rules)
        with pytest.raises(UnsupportedFormat) as refusal:
            check_rules(name, broken, four_bits)
        assert all(f"[{rule.name}]" in str(refusal.value) for rule in rules)
    five_bits = ModelScheme(Scheme("W5A16", 5, symmetric=True, group_size=None))
    assert any(rule.name == "bits" for rule in FORMATS.get(name).broken_rules(arch(), five_bits))


@EACH_FORMAT
def test_a_model_that_is_written_opens_with_the_same_codes(name: str, tmp_path: Path) -> None:
    scheme = next(each for form, each in supported() if form is FORMATS.get(name))
    source = RandomSource(arch(), device=torch.device("cpu"), dtype=torch.bfloat16, scheme=scheme)
    write_format(name, tmp_path, source, ModelScheme(scheme))
    opened = open_checkpoint(tmp_path)
    for idx in range(source.arch.num_layers):
        layer = opened.layer(idx)
        for key, weight in source.layer(idx).items():
            if isinstance(weight, QuantizedWeight):
                again = layer[key]
                assert isinstance(again, QuantizedWeight)
                assert torch.equal(again.codes_OI.view(torch.int8), weight.codes_OI.view(torch.int8))
                assert torch.equal(again.dequantize(torch.float32), weight.dequantize(torch.float32))


@EACH
def test_a_tied_head_is_not_quantized_behind_the_embeddings_back(form: ExportFormat, scheme: Scheme) -> None:
    assert not form.broken_rules(arch(tie_word_embeddings=True), ModelScheme(scheme))
    heads = [scheme, SCHEMES["FP8_DYNAMIC"], SCHEMES["W8A16"]]
    assert all(
        "tied-head"
        in [
            rule.name for rule in form.broken_rules(arch(tie_word_embeddings=True), ModelScheme(scheme, each))
        ]
        for each in heads
    )


@EACH
def test_a_format_says_who_loads_it_and_our_own_runtime_does(form: ExportFormat, scheme: Scheme) -> None:
    consumers = form.consumers(arch(), ModelScheme(scheme))
    assert all(isinstance(each, Consumer) and each.name and each.note for each in consumers)
    assert any(each.name == "compress runtime" and each.loads for each in consumers)


@EACH_FORMAT
@pytest.mark.parametrize("damage", [{"config_groups": {}}, {"config_groups": {"a": {}, "b": {}}}])
def test_a_config_that_says_more_than_is_read_is_refused(name: str, damage: dict[str, Any]) -> None:
    form = FORMATS.get(name)
    said = form.quantization_config(ModelScheme(SCHEMES["W8A16"]), head="lm_head")
    if "config_groups" not in said:
        pytest.skip("the format has no config groups")
    with pytest.raises(UnsupportedFormat):
        form.codec.schemes({**said, **damage}, LINEARS)

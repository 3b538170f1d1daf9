"""Which linears a budget of mixed precision decides together."""

from typing import Any

import pytest

from compress.errors import UsageError
from compress.export import FORMATS
from compress.models.arch import Arch
from compress.models.family import family_of
from compress.models.known import known_config
from compress.models.overrides import overridden
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.stages.budget.costs import GroupSchemes, costs_of, schemes_by_group
from compress.stages.budget.spec import Budget, Mixed
from compress.stages.budget.tables import latency_table
from compress.stages.budget.times import TableTimes

MIXED = Mixed.model_validate({"budget": {"size_ratio": 0.5}, "schemes": ["W4A16_G128", "W8A16"]})


def arch_of(name: str) -> Arch:
    config = known_config(name)
    assert config is not None
    return family_of(config).read_config(config)


def of_layer(groups: list[GroupSchemes], layer_idx: int) -> dict[str, GroupSchemes]:
    return {each.name: each for each in groups if each.layer_idx == layer_idx}


def test_the_experts_of_a_layer_get_one_scheme_and_cost_what_their_products_cost() -> None:
    arch = arch_of("qwen3-30b-a3b")
    groups = schemes_by_group(MIXED, {}, arch)
    first = of_layer(groups, 0)
    assert list(first) == ["qkv", "o", "experts"]
    experts = first["experts"]
    assert len(experts.linears) == 3 * 128
    apart = [GroupSchemes(0, (group,), experts.schemes) for group in experts.groups]
    for scheme in experts.schemes:
        assert experts.num_bytes(arch, scheme) == sum(each.num_bytes(arch, scheme) for each in apart)
    budget = Budget.model_validate({"latency_ratio": 1.0, "device": "NVIDIA H200"})
    times = TableTimes(latency_table("NVIDIA H200"), 1)
    (together,) = costs_of(budget, [experts], arch, outer_bytes=0, times=times).us
    one_by_one = costs_of(budget, apart, arch, outer_bytes=0, times=times).us
    for name, us in together.items():
        assert us == pytest.approx(sum(each[name] for each in one_by_one))


def test_overrides_part_the_experts_that_they_decide_and_the_others() -> None:
    arch = arch_of("glm-4.5-air")
    downs = {
        f"layers.{idx}.{linear}": SCHEMES["W8A16"]
        for idx, layer in enumerate(arch.layers)
        for linear in layer.linears
        if ".experts." in linear and linear.endswith(".down")
    }
    found = of_layer(schemes_by_group(MIXED, downs, arch), 1)
    assert found["experts.down"].schemes == (SCHEMES["W8A16"],)
    assert len(found["experts.gate_up"].schemes) == 2
    assert found["shared.down"].groups[0].name == "shared.down"
    downs.popitem()
    with pytest.raises(UsageError, match="Give all of them one scheme"):
        schemes_by_group(MIXED, downs, arch)


@pytest.mark.parametrize(
    ("form", "scheme_name"),
    [
        ("compressed-tensors", "W4A16_G128"),
        ("fp8", "FP8_BLOCK"),
        ("gptq", "W4A16_G128"),
        ("awq", "W4A16_G128_ASYM"),
        ("modelopt", "FP8_STATIC"),
    ],
)
@pytest.mark.parametrize(
    ("override", "loads"),
    [
        ({"*.moe.experts.*.down": "W8A16"}, False),
        ({"*.moe.experts.*.down": None}, False),
        ({"*.moe.experts.*": None}, True),
        ({"*.attn.o": None}, True),
    ],
)
def test_vllm_is_stated_to_load_experts_of_one_scheme(
    form: str, scheme_name: str, override: dict[str, Any], loads: bool
) -> None:
    """It raises "All MoE projections need to have same quantization scheme" for others (vLLM 0.32)."""
    arch = arch_of("qwen3-30b-a3b")
    schemes = {name: SCHEMES[each] if each else None for name, each in override.items()}
    scheme = overridden(SCHEMES[scheme_name], schemes, arch)
    stated = {each.name: each for each in FORMATS.get(form).consumers(arch, scheme)}
    assert stated["vLLM"].loads is loads
    assert loads or "one scheme" in stated["vLLM"].note


@pytest.mark.parametrize(
    ("model_type", "fields", "loads"),
    [
        ("afmoe", {"sliding_window": 8, "head_dim": 8}, True),
        ("afmoe", {"sliding_window": 8, "head_dim": 8, "attention_bias": True}, False),
        ("flint", {"sliding_window": 8, "head_dim": 8}, False),
        ("internlm3", {}, False),
        ("llama", {}, True),
    ],
)
def test_families_that_vllm_does_not_know_are_stated(
    model_type: str, fields: dict[str, Any], loads: bool
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    config = {"model_type": model_type, **sizes, **heads, **fields}
    arch = family_of(config).read_config(config)
    scheme = ModelScheme(SCHEMES["W4A16_G32"])
    stated = {each.name: each for each in FORMATS.get("compressed-tensors").consumers(arch, scheme)}
    assert stated["vLLM"].loads is loads

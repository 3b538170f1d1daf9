"""What vLLM's CPU build is stated to load of mixtures."""

from dataclasses import replace

import pytest

from compress.export import FORMATS, Consumer
from compress.export.vllm import why_vllm_refuses
from compress.models.overrides import linear_names
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from scripts.interop_cases import arch_of, is_expert


def on_a_cpu(family: str, form: str, scheme: ModelScheme) -> Consumer:
    consumers = FORMATS.get(form).consumers(arch_of(family), scheme)
    return next(each for each in consumers if each.name == "vLLM on a CPU")


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_experts_of_four_bits_are_not_loaded_behind_a_router_with_a_bias_of_selection(form: str) -> None:
    scheme = ModelScheme(SCHEMES["W4A16_G128"])
    for family in ("glm4_moe", "dots1", "afmoe"):
        assert "a bias of selection" in on_a_cpu(family, form, scheme).note
        assert not on_a_cpu(family, form, scheme).loads
    for family in ("qwen3_moe", "cohere2_moe"):
        assert on_a_cpu(family, form, scheme).loads


def test_dense_experts_are_loaded_behind_any_router() -> None:
    experts = [name for name in linear_names(arch_of("glm4_moe")) if is_expert(name)]
    scheme = ModelScheme(SCHEMES["W4A16_G128"], exceptions=tuple((name, None) for name in experts))
    assert on_a_cpu("glm4_moe", "compressed-tensors", scheme).loads


@pytest.mark.parametrize("family", ["stablelm", "glm4"])
def test_some_classes_load_no_codes_of_gate_and_up_in_gptq(family: str) -> None:
    scheme = ModelScheme(SCHEMES["W4A16_G128"])
    assert "loads no codes of gate and up" in on_a_cpu(family, "gptq", scheme).note
    assert not on_a_cpu(family, "gptq", scheme).loads
    assert on_a_cpu(family, "compressed-tensors", scheme).loads


def test_bloom_is_loaded_with_a_byte_for_each_weight_and_a_tied_head() -> None:
    def consumer(form: str, scheme: str) -> Consumer:
        return on_a_cpu("bloom", form, ModelScheme(SCHEMES[scheme]))

    assert consumer("compressed-tensors", "INT8_DYNAMIC").loads
    assert consumer("compressed-tensors", "FP8_DYNAMIC").loads
    for form, scheme in (
        ("compressed-tensors", "W4A16_G128"),
        ("gptq", "W4A16_G128"),
        ("compressed-tensors", "W8A16"),
        ("compressed-tensors", "FP8_BLOCK"),
    ):
        assert not consumer(form, scheme).loads
        assert "orders rows of q, k and v" in consumer(form, scheme).note
    apart = replace(arch_of("bloom"), tied_head=False)
    refusal = why_vllm_refuses(apart, ModelScheme(SCHEMES["INT8_DYNAMIC"]))
    assert refusal is not None
    assert "no head apart" in refusal

"""Aria: what its experts cannot have, and which programs load them."""

from typing import Any

import pytest

from compress.errors import UnsupportedArch
from compress.export import FORMATS
from compress.models.family import family_of
from compress.models.overrides import decide
from compress.quant.model_scheme import with_exceptions
from compress.quant.scheme import SCHEMES
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config


def config_of(**fields: Any) -> dict[str, Any]:
    config: dict[str, Any] = build_config(*CASES["aria"]).to_dict()
    config["text_config"] |= fields
    return config


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_act", "gelu"), ("mlp_bias", True), ("moe_num_shared_experts", 0)]
)
def test_a_field_by_which_routed_and_shared_experts_would_differ_is_refused(name: str, value: Any) -> None:
    config = config_of(**{name: value})
    with pytest.raises(UnsupportedArch, match=name):
        family_of(config).read_config(config)


@pytest.mark.parametrize(
    ("form", "scheme", "loads"), [("compressed-tensors", "FP8_DYNAMIC", False), ("fp8", "FP8_BLOCK", True)]
)
def test_other_programs_load_the_experts_of_aria_where_one_tensor_holds_all(
    form: str, scheme: str, loads: bool
) -> None:
    config = config_of()
    arch = family_of(config).read_config(config)
    dense = with_exceptions(SCHEMES[scheme], decide({"*.moe.experts.*": None}, arch))
    consumers = {each.name: each.loads for each in FORMATS.get(form).consumers(arch, dense)}
    assert (consumers["vLLM"], consumers["transformers"]) == (loads, loads)

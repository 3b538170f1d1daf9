"""The compressed-tensors config is read with care: whatever it says that is not honoured here is refused, and its own library agrees with
it."""

import copy
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig

from compress.errors import UnsupportedFormat
from compress.export import FORMATS
from compress.quant.scheme import SCHEMES, Scheme

FORM = FORMATS.get("compressed-tensors")
LINEARS = ["model.layers.0.mlp.up_proj", "lm_head"]


def config(scheme: str = "W4A16_G128") -> dict[str, Any]:
    return copy.deepcopy(FORM.quantization_config(SCHEMES[scheme], ignore=["lm_head"]))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_the_library_parses_the_config_to_the_same_scheme(scheme: Scheme) -> None:
    parsed = QuantizationConfig.model_validate(config(scheme.name))
    (group,) = parsed.config_groups.values()
    weights = group.weights
    assert (weights.num_bits, weights.symmetric, weights.group_size) == (scheme.num_bits, scheme.symmetric, scheme.group_size)
    assert weights.strategy == scheme.strategy
    assert weights.type == "int"
    assert not weights.dynamic
    assert group.input_activations is None
    assert parsed.ignore == ["lm_head"]
    assert parsed.format == "pack-quantized"


def test_a_scheme_that_has_no_name_here_is_read_all_the_same() -> None:
    said = config()
    said["config_groups"]["group_0"]["weights"].update(group_size=64, symmetric=False)
    assert FORM.codec.schemes(said, LINEARS)["model.layers.0.mlp.up_proj"] == Scheme("W4A16_G64_ASYM", 4, symmetric=False, group_size=64)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("sparsity_config",), {"format": "dense"}, "sparsity_config"),
        (("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme"),
        (("config_groups", "group_0", "targets"), ["re:.*mlp.*"], r"re:\.\*mlp"),
        (("config_groups", "group_0", "weights", "num_bits"), 3, "3 bits"),
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


def test_ignore_takes_exact_names_and_regular_expressions() -> None:
    said = config("W4A16_G128") | {"ignore": ["lm_head", "re:.*down_proj"]}
    linears = ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"]
    assert list(FORM.codec.schemes(said, linears)) == ["model.layers.0.mlp.up_proj"]

"""A format that cannot hold a model is refused with the formats that can."""

import pytest

from compress.errors import UnsupportedFormat
from compress.export import FORMATS
from compress.export.refusals import check_rules
from compress.models.arch import Arch
from compress.models.family import family_of
from compress.models.known import known_config
from compress.quant.kv import FP8_STATIC, INT8_TOKEN_HEAD
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES


def known(name: str) -> Arch:
    config = known_config(name)
    assert config is not None
    return family_of(config).read_config(config)


def refusal(name: str, model: str, scheme: str | None, kv_format: str | None = None) -> str | None:
    """Return the sentences of the refusal, None where the format takes the model."""
    try:
        check_rules(name, known(model), None if scheme is None else ModelScheme(SCHEMES[scheme]), kv_format)
    except UnsupportedFormat as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("form", "scheme", "kv_format", "sentence"),
    [
        ("gptq", "INT8_DYNAMIC", None, "compressed-tensors and onnx can hold it."),
        ("awq", "W4A8_FP8", None, "compressed-tensors can hold it."),
        ("onnx", "W4A16_G128", INT8_TOKEN_HEAD, "compressed-tensors, awq, gptq and modelopt can hold it."),
        ("onnx", None, INT8_TOKEN_HEAD, "compressed-tensors can hold it."),
        ("modelopt", None, FP8_STATIC, "compressed-tensors can hold it."),
        ("gptq", "FP8_STATIC", None, "] FP8_STATIC is not a scheme of integer weights with 16-bit inputs. "),
    ],
)
def test_the_formats_that_can_hold_a_model_are_named(
    form: str, scheme: str | None, kv_format: str | None, sentence: str
) -> None:
    found = refusal(form, "llama-3.1-8b", scheme, kv_format)
    assert found is not None
    assert sentence in found
    named = found.rpartition(". ")[2].removesuffix(" can hold it.").replace(" and ", ", ").split(", ")
    assert named
    assert all(refusal(each, "llama-3.1-8b", scheme, kv_format) is None for each in named)
    taken = {each for each in FORMATS.names() if refusal(each, "llama-3.1-8b", scheme, kv_format) is None}
    assert taken - set(named) <= {"modelopt"}  # which stores one scale for a linear of FP8_STATIC


def test_a_graph_that_lacks_parts_of_a_model_gives_no_advice_on_its_scheme() -> None:
    found = refusal("onnx", "gpt-oss-20b", "W4A16_G32")
    assert found is not None
    graph, _, rest = found.partition(
        " No other format can hold it as it is; in compressed-tensors this remains: "
    )
    assert "[attention-sinks]" in graph
    assert "overrides" not in graph
    assert "Leave the experts dense" in rest
    dense = refusal("onnx", "gpt-oss-20b", None)
    assert dense is not None
    assert dense.endswith("compressed-tensors can hold it.")


def test_a_rule_that_two_formats_share_is_stated_once() -> None:
    found = refusal("gptq", "gpt-oss-20b", "W4A16_G128")
    assert found is not None
    assert found.count("[experts-apart]") == 1
    assert found.count("[whole-groups]") == 1
    assert "attn.q has K = 2880, like 98 other linears, not a multiple of 128." in found

"""Exports of families whose name transformers does not know."""

import json
from pathlib import Path

import pytest

from compress.export import FORMATS
from compress.models.family import family_of
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES

GOLDEN = Path(__file__).parents[2] / "golden/configs/deepseek.json"


@pytest.mark.parametrize(
    ("form", "scheme"), [("compressed-tensors", "FP8_DYNAMIC"), ("fp8", "FP8_BLOCK"), ("gptq", "W4A16_G128")]
)
def test_transformers_is_stated_to_load_no_kimi_k2_where_it_loads_deepseek_v3(form: str, scheme: str) -> None:
    rows = {row["name"]: row["config"] for row in json.loads(GOLDEN.read_text())}
    config = rows["moonshotai/Kimi-K2-Instruct"]
    loads = {}
    for model_type in ("kimi_k2", "deepseek_v3"):
        read = {name: each for name, each in config.items() if name != "quantization_config"}
        read |= {"model_type": model_type}
        arch = family_of(read).read_config(read)
        consumers = FORMATS.get(form).consumers(arch, ModelScheme(SCHEMES[scheme]))
        loads[model_type] = {each.name: each.loads for each in consumers}
    assert not loads["kimi_k2"]["transformers"]
    assert loads["kimi_k2"]["vLLM"]
    assert loads["deepseek_v3"]["transformers"] == (form != "gptq")

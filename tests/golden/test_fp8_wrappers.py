"""Linears of towers in exports in the format `fp8`: vLLM looks up dense modules there by their whole names,
and reads linears that it does not find as codes, without an error."""

from pathlib import Path

import pytest

from compress.export.format_writer import write_format
from compress.models.checkpoint import Checkpoint
from compress.models.config_file import read_config
from compress.models.weights import UNTOUCHED
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.support.wrappers import Rounded, wide


@pytest.mark.parametrize(
    "case", ["gemma3-vision", "qwen2_5_vl", "llava-llama", "mistral3-mistral", "qwen3_vl", "internvl"]
)
def test_each_linear_of_a_tower_is_listed_by_its_whole_name(case: str, tmp_path: Path) -> None:
    wide(case, tmp_path / "source")
    source = Checkpoint(tmp_path / "source")
    scheme = ModelScheme(SCHEMES["FP8_BLOCK"])
    (tmp_path / "out").mkdir()
    write_format("fp8", tmp_path / "out", Rounded(source, scheme), scheme)
    listed = read_config(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]
    linears = [
        name.removeprefix(UNTOUCHED).removesuffix(".weight")
        for name, each in source.outer().items()
        if name.startswith(UNTOUCHED) and name.endswith(".weight") and len(each.shape) == 2
    ]
    assert linears
    for linear in linears:
        assert source.family.to_memory(linear) in listed, linear
    of_text = [name for name in listed if ".layers." in name and "language_model" in name]
    assert not [name for name in of_text if name.endswith(("q_proj", "down_proj"))]

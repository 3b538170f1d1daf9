"""Qwen2.5-Omni: the text model of the thinker is Qwen2.5, and what speaks is written back as it came."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved

GOLDEN = Path(__file__).parents[2] / "golden/configs/wrappers.json"
PUBLISHED = [
    row["config"]
    for row in json.loads(GOLDEN.read_text())
    if row["config"]["model_type"].startswith("qwen2_5_omni")
]


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: str(config["model_type"]))
def test_the_text_model_has_the_parameters_of_qwen2_5_7b(config: dict[str, object]) -> None:
    assert family_of(config).read_config(config).num_params == 7_615_616_512


def test_what_speaks_keeps_its_tensors_and_their_dtypes(tmp_path: Path) -> None:
    saved(tmp_path / "model", *CASES["qwen2_5_omni"], dtype=torch.bfloat16)
    file = tmp_path / "model/model.safetensors"
    spoken = {
        "talker.model.layers.0.mlp.gate_proj.weight": torch.randn(8, 4, dtype=torch.bfloat16),
        "talker.codec_head.weight": torch.randn(8, 4, dtype=torch.bfloat16),
        "token2wav.code2wav_dit_model.proj_out.weight": torch.randn(4, 4),
    }
    save_file({**load_file(file), **spoken}, file)
    (tmp_path / "written").mkdir()
    source = Checkpoint(tmp_path / "model")
    write_checkpoint(tmp_path / "written", source)
    written = load_file(tmp_path / "written/model.safetensors")
    assert written.keys() == load_file(file).keys()
    for name, tensor in spoken.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor)


def test_the_class_of_the_published_config_stays() -> None:
    config = next(each for each in PUBLISHED if each["model_type"] == "qwen2_5_omni")
    family = family_of(config)
    written = family.write_config(family.read_config(config))
    assert written["architectures"] == ["Qwen2_5OmniModel"]
    assert written["talker_config"] == config["talker_config"]

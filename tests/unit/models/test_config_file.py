"""Directories that hold no model, and the sentences that say what they hold."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress.artifact.manifest import open_artifact
from compress.errors import UsageError
from compress.export import open_weights
from compress.models.config_file import read_config
from tests.support.tiny_model import write_tiny_model


def test_an_adapter_in_the_place_of_a_model_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UsageError, match=r"no config\.json\. Its adapter_config\.json .* merge the adapter"):
        read_config(tmp_path)


def test_a_config_beside_the_tensors_of_an_adapter_makes_no_model(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(4, 128)}, model / "model.safetensors")
    with pytest.raises(
        UsageError, match=f"holds the tensor '{name}' of an adapter that is not merged: merge"
    ):
        open_weights(model)


def test_a_repository_of_the_hub_cache_names_its_snapshots(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "0123").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"no config\.json\. It is a repository .* in its snapshots/"):
        read_config(tmp_path)


def test_the_directory_of_a_run_names_its_artifact(tmp_path: Path) -> None:
    (tmp_path / "artifacts" / "export").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"no config\.json\.$"):
        read_config(tmp_path)
    (tmp_path / "artifacts" / "export" / "compress.json").write_text("{}")
    for read in (read_config, open_artifact):
        with pytest.raises(UsageError, match=r"directory of a run, whose artifact is .*/export\."):
            read(tmp_path)

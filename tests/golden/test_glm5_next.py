"""GLM-5.3 against `transformers`: configs as they are published, the layer that predicts a further token, and
the gates of decays."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.weights import build_decoder
from tests.golden.test_families import tolerance
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import auto_class, saved, tokens

CPU = torch.device("cpu")
PREDICTS = "model.language_model.layers.45"


def rewritten(directory: Path, **changes: Any) -> None:
    """Give the text config of a checkpoint other fields; None removes one."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    text = {**config["text_config"], **changes}
    config["text_config"] = {name: value for name, value in text.items() if value is not None}
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("bound", [-5.0, -0.25])
def test_a_config_as_it_is_published_means_the_same_here_and_in_transformers(
    bound: float, tmp_path: Path
) -> None:
    saved(tmp_path, *CASES["glm5_next"])
    rewritten(
        tmp_path,
        layer_types=["linear_attention", "deepseek_sparse_attention", "linear_attention"],
        linear_head_dim=None,
        linear_num_heads=None,
        linear_conv_kernel_dim=None,
        linear_lower_bound=None,
        linear_attn_config={
            "kda_layers": [0, 2],
            "full_attn_layers": [1],
            "num_heads": 3,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": bound,
        },
        first_k_dense_replace=1,
        mhc=True,
        mla_use_nope=True,
        index_kpool_compress=True,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    )
    model = auto_class("glm5_next").from_pretrained(tmp_path, attn_implementation="eager").eval()
    decoder = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    with torch.no_grad():
        expected = model(tokens(2, 45)).logits
        found = decoder(tokens(2, 45))
    assert (found - expected).abs().max() <= tolerance(expected)


def test_the_layer_that_predicts_a_further_token_is_left_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    saved(source, *CASES["glm5_next"])
    file = source / "model.safetensors"
    tensors = load_file(file)
    more = {f"{PREDICTS}.eh_proj.weight": torch.ones(48, 96), f"{PREDICTS}.enorm.weight": torch.ones(48)}
    save_file({**tensors, **more}, file, metadata={"format": "pt"})
    rewritten(source, num_nextn_predict_layers=1)
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", Checkpoint(source))
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)

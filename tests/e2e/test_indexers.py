"""A whole run of a model with indexers: pruned, distilled, quantized, with a pruned draft, and exported; the
indexers stay as they are, but for heads that go with KV heads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact.manifest import open_artifact
from compress.export import open_checkpoint
from compress.models.weights import dense
from tests.e2e.test_distill import DISTILL
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_run import NUM_LAYERS, RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, _, EXPORT, _ = RECIPE["stages"]
QUANTIZE = {"kind": "quantize", "scheme": "W4A16_G32"}
INDEXED: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": NUM_LAYERS,
    "index_topk": 24,
    "index_n_heads": 2,
    "index_head_dim": 32,
}

OF_BLOCKS: dict[str, Any] = {
    "model_type": "minimax_m3_vl_text",
    "architectures": ["MiniMaxM3VLForCausalLM"],
    "dense_intermediate_size": 128,
    "num_attention_heads": 8,
    "mlp_layer_types": ["dense"] * NUM_LAYERS,
    "layer_types": ["minimax_m3_sparse"] * NUM_LAYERS,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_block_size": 16,
    "index_topk_blocks": 8,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("indexed"), **INDEXED)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_indexers_stay_as_they_are_through_training_and_rounding(
    optimizer: str, recipe: Recipe, command: Command, work: Path, model_dir: Path
) -> None:
    distill = {**DISTILL, "optimizer": optimizer, "weight_decay": 0.5}
    path = recipe(stages=[CALIBRATE, {"kind": "prune", "ffn": {"keep": 0.5}}, distill, QUANTIZE, EXPORT])
    code, _, err = command("run", path, "--run-dir", work / "run", "--json")
    assert code == 0, err
    before = open_checkpoint(model_dir)
    after = open_checkpoint(open_artifact(work / "run" / "artifacts" / "export").path)
    for idx in range(NUM_LAYERS):
        own = before.layer(idx)
        names = [name for name in own if ".indexer." in name]
        assert len(names) == 5
        for name in names:
            assert torch.equal(dense(own[name]), dense(after.layer(idx)[name]))


def test_heads_of_indexers_of_blocks_go_with_kv_heads_and_nothing_else_of_them_changes(
    recipe: Recipe, command: Command, work: Path
) -> None:
    model = write_tiny_model(work / "blocks", **OF_BLOCKS)
    prune = {"kind": "prune", "heads": {"keep": 0.5, "unit": "kv_group"}}
    stages = [CALIBRATE, prune, DISTILL, QUANTIZE, EXPORT]
    code, _, err = command(
        "run", recipe(model=str(model), stages=stages), "--run-dir", work / "run", "--json"
    )
    assert code == 0, err
    before = open_checkpoint(model)
    after = open_checkpoint(open_artifact(work / "run" / "artifacts" / "export").path)
    assert after.arch.config["index_n_heads"] == 1
    for idx in range(NUM_LAYERS):
        own = before.layer(idx)
        left = {name: dense(each) for name, each in after.layer(idx).items() if ".indexer." in name}
        assert len(left) == 4
        q = left.pop("attn.indexer.q.weight")
        assert any(torch.equal(q, half) for half in dense(own["attn.indexer.q.weight"]).chunk(2))
        assert all(torch.equal(each, dense(own[name])) for name, each in left.items())


def test_a_pruned_draft_of_a_model_with_indexers_is_trained(
    recipe: Recipe, command: Command, work: Path
) -> None:
    draft = {
        "kind": "draft",
        "init": {"kind": "pruned", "keep_layers": 1},
        "tokens": 1024,
        "seq_len": 32,
        "batch_size": 4,
        "eval_samples": 2,
    }
    code, _, err = command("run", recipe(stages=[CALIBRATE, QUANTIZE, draft, EXPORT]), "--json")
    assert code == 0, err

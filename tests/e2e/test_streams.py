"""Whole runs of models with several residual streams: one that is pruned by heads, distilled, quantized,
exported and scored, whose numbers by which streams are mixed stay float32; and a Gemma 3n."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact.manifest import open_artifact
from compress.export import open_checkpoint
from compress.models.hyper_connection import HYPER_PARAMETERS
from tests.e2e.test_distill import DISTILL
from tests.e2e.test_recover import RECOVER
from tests.support.slow import slow
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, QUANTIZE, EXPORT, VALIDATE = RECIPE["stages"]
STATED: dict[str, Any] = {
    "model_type": "hy_v4",
    "architectures": ["HYV4ForCausalLM"],
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "mlp_layer_types": ["dense", "sparse", "dense"],
    "index_topk": 128,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "hc_mult": 3,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("streams"), **STATED)


@pytest.mark.parametrize("true_sequential", [False, slow(True)])
def test_several_streams_go_through_every_stage(
    recipe: Recipe, command: Command, work: Path, model_dir: Path, true_sequential: bool
) -> None:
    prune = {"kind": "prune", "heads": {"keep": 0.5}, "multiple": 32}
    quantize = {**QUANTIZE, "scheme": "W4A16_G32", "round": {"kind": "gptq"}}
    if true_sequential:
        quantize = {**quantize, "smooth": None, "true_sequential": True}
    path = recipe(stages=[CALIBRATE, prune, DISTILL, quantize, EXPORT, VALIDATE])
    code, _, err = command("run", path, "--run-dir", work / "run", "--json")
    assert code == 0, err
    before = open_checkpoint(model_dir)
    after = open_checkpoint(open_artifact(work / "run" / "artifacts" / "export").path)
    assert [layer.num_heads for layer in after.arch.layers] == [2, 2, 2]
    assert after.arch.hyper == before.arch.hyper
    for idx in range(3):
        assert {f"layers.{idx}.attn.gate", f"layers.{idx}.attn.kv_up"} <= after.schemes.keys()
        weights = after.layer(idx)
        assert weights["attn.sinks"].shape == (2,)
        own = {name: each for name, each in weights.items() if name.endswith(HYPER_PARAMETERS)}
        assert len(own) == 6
        assert {each.dtype for each in own.values()} == {torch.float32}
    assert after.outer()["norm.hyper.weight"].dtype == torch.float32


STATED_GEMMA3N: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "architectures": ["Gemma3nForCausalLM"],
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "intermediate_size": [128, 96, 128, 64],
    "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
    "altup_num_inputs": 3,
    "laurel_rank": 8,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 8,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": None,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("scheme", ["W4A16_G32", slow("INT8_DYNAMIC")])
def test_streams_of_which_layers_compute_one_go_through_every_stage(
    recipe: Recipe, command: Command, work: Path, tmp_path: Path, scheme: str
) -> None:
    source = write_tiny_model(tmp_path / "source", **STATED_GEMMA3N)
    smooth = {"kind": "awq"} if scheme == "W4A16_G32" else {"kind": "smoothquant"}
    quantize = {**QUANTIZE, "scheme": scheme, "smooth": smooth, "round": {"kind": "gptq"}}
    path = recipe(model=str(source), stages=[CALIBRATE, quantize, RECOVER, EXPORT, VALIDATE])
    for arguments in (("plan", path, "--offline"), ("run", path, "--run-dir", work / "run", "--json")):
        code, _, err = command(*arguments)
        assert code == 0, err
    after = open_checkpoint(open_artifact(work / "run" / "artifacts" / "export").path)
    before = open_checkpoint(source)
    assert after.arch.layers == before.arch.layers
    assert (after.arch.altup_streams, after.arch.laurel_rank) == (3, 8)
    linears = {
        f"layers.{idx}.{name}" for idx, layer in enumerate(after.arch.layers) for name in layer.linears
    }
    assert after.schemes.keys() == linears
    for idx in range(4):
        weights = after.layer(idx)
        assert isinstance(weights["laurel.left.weight"], torch.Tensor)
        assert isinstance(weights["altup.router.weight"], torch.Tensor)


STATED_QWEN4: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "architectures": ["Qwen4ExpForCausalLM"],
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "hc_count": 3,
    "hc_lowrank": 16,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 128,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1, 3],
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 300,
    "split_ngram_parts": 4,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("scheme", ["W4A16_G32", slow("FP8_DYNAMIC")])
def test_streams_that_are_read_through_gates_and_n_grams_go_through_every_stage(
    recipe: Recipe, command: Command, work: Path, tmp_path: Path, scheme: str
) -> None:
    source = write_tiny_model(tmp_path / "source", **STATED_QWEN4)
    smooth = {"kind": "awq"} if scheme == "W4A16_G32" else None
    quantize = {**QUANTIZE, "scheme": scheme, "smooth": smooth, "round": {"kind": "gptq"}}
    prune = {"kind": "prune", "experts": {"keep": 0.75}}
    path = recipe(model=str(source), stages=[CALIBRATE, prune, quantize, RECOVER, EXPORT, VALIDATE])
    for arguments in (("plan", path, "--offline"), ("run", path, "--run-dir", work / "run", "--json")):
        code, _, err = command(*arguments)
        assert code == 0, err
    after = open_checkpoint(open_artifact(work / "run" / "artifacts" / "export").path)
    before = open_checkpoint(source)
    assert after.arch.hyper == before.arch.hyper
    assert [layer.ngrams for layer in after.arch.layers] == [layer.ngrams for layer in before.arch.layers]
    assert [layer.experts.num_experts for layer in after.arch.layers if layer.experts] == [3, 3, 3]
    linears = {
        f"layers.{idx}.{name}" for idx, layer in enumerate(after.arch.layers) for name in layer.linears
    }
    assert after.schemes.keys() == linears
    for idx in (0, 2):
        stored, written = before.layer(idx), after.layer(idx)
        for name in stored:
            if name.startswith("ngrams.") and ".hyper" not in name:
                assert torch.equal(stored[name], written[name]), name  # type: ignore[arg-type]

"""Whole runs of a model with compressed attention, from a plan to a served export, in contexts of which its
indexer chooses some entries: its compressors, its indexer, the tables of experts and what hyper-connections
read stay as they are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact.manifest import open_artifact
from compress.export import open_checkpoint
from compress.models.compressed import COMPRESSOR
from compress.quant.scheme import QuantizedWeight
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from tests.support.slow import slow
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, QUANTIZE, EXPORT, VALIDATE = RECIPE["stages"]
STATED: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "sliding_window": 16,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "swiglu_limit": 4.0,
    "rope_parameters": None,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("compressed"), **STATED)


@pytest.mark.parametrize("true_sequential", [slow(False), True])
def test_compressed_attention_goes_through_every_stage(
    recipe: Recipe, command: Command, work: Path, model_dir: Path, true_sequential: bool
) -> None:
    quantize = {**QUANTIZE, "scheme": "W4A16_G32", "round": {"kind": "gptq"}}
    if true_sequential:
        quantize = {**quantize, "smooth": None, "true_sequential": True}
    path = recipe(model=str(model_dir), stages=[CALIBRATE, quantize, EXPORT, VALIDATE])
    code, out, err = command("plan", path, "--offline")
    assert code == 0, err
    assert "compressed attention: the runtime caches" in out
    assert "indexers: 128 numbers a token more for contexts of more than 32 tokens" in out
    code, _, err = command("run", path, "--run-dir", work / "run", "--json")
    assert code == 0, err
    before = open_checkpoint(model_dir)
    after = open_checkpoint(open_artifact(work / "run" / "artifacts" / "export").path)
    assert after.arch.layers == before.arch.layers
    linears = {
        f"layers.{idx}.{name}" for idx, layer in enumerate(after.arch.layers) for name in layer.linears
    }
    assert after.schemes.keys() == linears
    for idx in range(3):
        ours, theirs = after.layer(idx), before.layer(idx)
        assert isinstance(ours["attn.o_down.1.weight"], QuantizedWeight)
        kept = {name for name in theirs if name.startswith(("attn.indexer", *COMPRESSOR, "moe.experts_of"))}
        assert len(kept) == (1, 8, 2)[idx]
        for name in kept:
            assert isinstance(ours[name], torch.Tensor)
            assert torch.equal(ours[name], theirs[name])
    prompts = [tuple(range(idx, idx + 35 * idx)) for idx in (1, 2, 3)]
    requests = [Request(str(each[0]), each, SamplingParams(8, ignore_eos=True)) for each in prompts]
    engine = Engine(
        after, device=torch.device("cpu"), config=EngineConfig(max_step_tokens=64, prefix_cache=True)
    )
    served = [each.tokens for each in engine.generate(requests)]
    again = [each.tokens for each in engine.generate(requests)]
    assert engine.counts.prefix_hits > 0
    assert served == again
    config = json.loads((after.path / "config.json").read_text())
    assert config["layer_types"] == STATED["layer_types"]


def test_what_a_model_with_tables_refuses_is_a_sentence(
    recipe: Recipe, command: Command, model_dir: Path
) -> None:
    for stage, named in (
        ({"kind": "prune", "heads": {"keep": 0.5}}, "in groups"),
        ({"kind": "prune", "experts": {"keep": 0.5}}, "tables choose"),
        ({**QUANTIZE, "scheme": "W4A16_G32", "kv_cache": "fp8"}, "compressed attention"),
    ):
        code, _, err = command("plan", recipe(model=str(model_dir), stages=[CALIBRATE, stage]), "--offline")
        assert code != 0
        assert named in err

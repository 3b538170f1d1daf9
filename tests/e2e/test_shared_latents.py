"""A whole run of a model whose layers share latents: pruned by heads, distilled, quantized, exported and
scored; what is no part of the language model stays as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact.manifest import open_artifact
from compress.export import open_checkpoint
from compress.models.weights import UNTOUCHED
from tests.e2e.test_distill import DISTILL
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_run import CONFIG, RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, QUANTIZE, EXPORT, VALIDATE = RECIPE["stages"]
SOURCES = [0, 0, 2, 0, 2]
TEXT: dict[str, Any] = {
    **{name: each for name, each in CONFIG.items() if name not in ("head_dim", "architectures", "dtype")},
    "model_type": "mistral_large4_text",
    "num_hidden_layers": len(SOURCES),
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 4,
    "index_topk": 128,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "no_rope_layers": [1, 1, 0, 1, 0],
    "kv_source_layers": SOURCES,
    "tie_word_embeddings": False,
}
ALPHA = torch.linspace(-0.5, 0.5, 8)
TOWER = torch.arange(6.0).view(2, 3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    untouched = {"lerope.alpha": ALPHA, "vision_encoder.ln_pre.weight": TOWER}
    return write_tiny_model(
        tmp_path_factory.mktemp("shared"),
        untouched={f"{UNTOUCHED}{name}": each for name, each in untouched.items()},
        model_type="mistral_large4",
        architectures=["MistralLarge4ForConditionalGeneration"],
        text_config=TEXT,
        tie_word_embeddings=False,
    )


def test_layers_that_share_latents_go_through_every_stage(
    recipe: Recipe, command: Command, work: Path, model_dir: Path
) -> None:
    prune = {"kind": "prune", "heads": {"keep": 0.5}, "multiple": 32}
    quantize = {**QUANTIZE, "scheme": "W4A16_G32", "round": {"kind": "gptq"}}
    path = recipe(stages=[CALIBRATE, prune, DISTILL, quantize, EXPORT, VALIDATE])
    code, _, err = command("run", path, "--run-dir", work / "run", "--json")
    assert code == 0, err
    before = open_checkpoint(model_dir)
    after = open_checkpoint(open_artifact(work / "run" / "artifacts" / "export").path)
    assert [layer.num_heads for layer in after.arch.layers] == [2] * len(SOURCES)
    assert [layer.kv_source for layer in after.arch.layers] == [None, 0, None, 0, 2]
    for idx, layer in enumerate(after.arch.layers):
        assert layer.rope == before.arch.layers[idx].rope
        assert (layer.rope is None) == (idx in (2, 4))
        assert layer.rope is None or layer.rope.exponents == tuple(ALPHA.tolist())
        assert f"layers.{idx}.attn.kv_up" in after.schemes
    outer = after.outer()
    assert torch.equal(outer[f"{UNTOUCHED}lerope.alpha"], ALPHA)
    assert torch.equal(outer[f"{UNTOUCHED}vision_encoder.ln_pre.weight"], TOWER)

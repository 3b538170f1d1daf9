"""DBRX, GPT of 2018 and GPT-NeoX Japanese, whose checkpoints have a part where others have none, or have it
in another tensor, go all the way: planned, calibrated, quantized, exported, validated and served."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.export import open_checkpoint, open_weights
from compress.models.weights import build_decoder, dense
from compress.quant.scheme import QuantizedWeight
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from tests.golden.test_families import tolerance
from tests.support.slow import slow
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_run import CONFIG, RECIPE

CPU = torch.device("cpu")
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
WITHOUT = dict.fromkeys(("intermediate_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters"))


def named(*names: str) -> dict[str, Any]:
    """Return the sizes of the tiny model by other names, without those that they replace."""
    return {
        **WITHOUT,
        **dict.fromkeys(SIZES),
        **{name: CONFIG[standard] for name, standard in zip(names, SIZES, strict=True)},
    }


MODELS: dict[str, dict[str, Any]] = {
    "dbrx": {
        "architectures": ["DbrxForCausalLM"],
        **named("d_model", "n_layers", "n_heads", "max_seq_len"),
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 500.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
        "tie_word_embeddings": False,
    },
    "openai-gpt": {
        "architectures": ["OpenAIGPTLMHeadModel"],
        **named("n_embd", "n_layer", "n_head", "n_positions"),
    },
    "gpt_neox_japanese": {
        "architectures": ["GPTNeoXJapaneseForCausalLM"],
        "hidden_act": "gelu",
        "intermediate_multiple_size": 2,
        **WITHOUT,
    },
}
PRUNED = {"dbrx": [{"kind": "prune", "experts": {"keep": 3}}]}
"""Stages before the weights are quantized."""


@pytest.mark.parametrize("family", [slow("dbrx"), "openai-gpt", slow("gpt_neox_japanese")])
def test_a_model_goes_all_the_way(
    family: str,
    recipe: Callable[..., Path],
    command: Callable[..., tuple[int, str, str]],
    work: Path,
) -> None:
    model = write_tiny_model(work / "model", model_type=family, **MODELS[family])
    calibrate, quantize, export, validate = RECIPE["stages"]
    stages = [calibrate, *PRUNED.get(family, []), quantize, export, {**validate, "gates": {}}]
    path = recipe(model=str(model), stages=stages)
    code, _, err = command("plan", path)
    assert code == 0, err
    code, out, err = command("run", path, "--workspace", "alone", "--json")
    assert code == 0, err
    source = open_checkpoint(Path(json.loads(out)["artifact"]["path"]))
    first, last = source.layer(0), source.layer(source.arch.num_layers - 1)
    assert isinstance(last["attn.q.weight"], QuantizedWeight)
    assert ("attn_norm.weight" in first) is (family != "openai-gpt")
    assert [f"{name}.bias" in last for name in ("attn.o", "attn.q")] == {
        "dbrx": [False, False],
        "openai-gpt": [True, True],
        "gpt_neox_japanese": [True, False],
    }[family]
    if family == "dbrx":
        assert isinstance(last["moe.experts.2.down.weight"], QuantizedWeight)
        assert last["moe.router.weight"].shape == (3, 128)
    tokens_BS = torch.randint(384, (2, 40), generator=torch.Generator().manual_seed(1))
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    engine = Engine(source, device=CPU, config=EngineConfig(dtype=torch.float32))
    expected = decoder(tokens_BS)
    assert (engine.runner.score(tokens_BS) - expected).abs().max() <= tolerance(expected)
    plain = open_weights(model)
    assert torch.equal(dense(source.outer()["norm.weight"]), dense(plain.outer()["norm.weight"]))

"""OPT, BioGPT, GPT-2 and GPT-Neo, and XGLM, whose positions are sinusoidal, go all the way: planned,
calibrated, pruned, quantized, drafted, exported, validated and served with their draft."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.artifact.manifest import open_artifact
from compress.export import open_checkpoint, open_weights
from compress.models.weights import POSITIONS, WeightSource, dense
from compress.quant.scheme import QuantizedWeight
from tests.e2e.test_draft import DRAFT, by_role, plain_and_speculative
from tests.e2e.test_draft_proven import SERVED
from tests.support.slow import slow
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_run import CONFIG, RECIPE

LLAMA_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
MODELS: dict[str, dict[str, Any]] = {
    "opt": {"architectures": ["OPTForCausalLM"], "ffn_dim": 256},
    "biogpt": {"architectures": ["BioGptForCausalLM"], "intermediate_size": 256, "hidden_act": "gelu"},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_inner": 256,
        **dict.fromkeys(LLAMA_SIZES),
        **{
            own: CONFIG[name]
            for own, name in zip(("n_embd", "n_layer", "n_head", "n_positions"), LLAMA_SIZES, strict=True)
        },
    },
}
MODELS["gpt_neo"] = {
    "architectures": ["GPTNeoForCausalLM"],
    "intermediate_size": 256,
    "attention_types": [[["global", "local"], 1], [["local"], CONFIG["num_hidden_layers"] - 2]],
    "window_size": 24,
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads")),
    "num_layers": CONFIG["num_hidden_layers"],
    "num_heads": CONFIG["num_attention_heads"],
}
MODELS["xglm"] = {
    "architectures": ["XGLMForCausalLM"],
    "ffn_dim": 256,
    "pad_token_id": 1,
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads")),
    "d_model": CONFIG["hidden_size"],
    "num_layers": CONFIG["num_hidden_layers"],
    "attention_heads": CONFIG["num_attention_heads"],
}
WIDTHS = {
    "opt": "ffn_dim",
    "xglm": "ffn_dim",
    "biogpt": "intermediate_size",
    "gpt2": "n_inner",
    "gpt_neo": "intermediate_size",
}
"""The field of the width of an FFN."""
ROWS = {"opt": 130, "biogpt": 130, "xglm": 0}
"""The rows of the tables that are stored, where they are not one for each of 128 positions."""
OF_LLAMA = dict.fromkeys(("intermediate_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters"))


def table_of(source: WeightSource) -> Tensor:
    """Return the learned table of positions, without rows where a model has none."""
    outer = source.outer()
    return dense(outer[POSITIONS]) if POSITIONS in outer else torch.empty(0, source.arch.hidden_size)


@pytest.mark.parametrize("family", [slow("opt"), slow("biogpt"), slow("xglm"), slow("gpt_neo"), "gpt2"])
def test_a_model_goes_all_the_way(
    family: str,
    recipe: Callable[..., Path],
    command: Callable[..., tuple[int, str, str]],
    work: Path,
) -> None:
    model = write_tiny_model(work / "model", model_type=family, **{**OF_LLAMA, **MODELS[family]})
    calibrate, quantize, export, validate = RECIPE["stages"]
    stages = [
        calibrate,
        {"kind": "prune", "ffn": {"keep": 0.5}, "multiple": 64},
        {**quantize, "round": {"kind": "gptq"}},
        {**DRAFT, "tokens": 1024, "init": {"keep_layers": 2}},
        export,
        {**validate, "speculative": SERVED, "gates": {}},
    ]
    path = recipe(model=str(model), stages=stages)
    code, out, err = command("plan", path)
    assert code == 0, err
    code, out, err = command("run", path, "--workspace", "alone", "--json")
    assert code == 0, err
    exported = Path(json.loads(out)["artifact"]["path"])
    stated = json.loads((exported / "config.json").read_text())
    assert stated[WIDTHS[family]] == 128
    source = open_checkpoint(exported)
    table_PD = table_of(open_weights(model))
    assert source.arch.num_position_rows == len(table_PD) == ROWS.get(family, 128)
    assert torch.equal(table_of(source), table_PD)
    assert isinstance(source.layer(0)["attn.q.weight"], QuantizedWeight)
    draft = by_role(work / "alone", "draft")
    assert open_artifact(draft.path).manifest.facts["draft"]["kind"] == "model"
    small = open_weights(draft.path)
    assert torch.equal(table_of(small), table_PD)
    plain, speculative, _ = plain_and_speculative(open_weights(exported), small)
    assert speculative == plain

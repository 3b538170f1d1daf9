"""ONNX through the commands: a recipe exports a decoder that ONNX Runtime runs and `validate` measures."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.export import open_checkpoint
from compress.models.weights import build_decoder
from tests.e2e.test_formats import stages
from tests.support.onnx_session import logits_of
from tests.support.tiny_run import RECIPE

pytest.importorskip("onnx")
Command = Callable[..., tuple[int, str, str]]


def test_a_recipe_exports_a_decoder_that_onnx_runtime_runs_and_validate_measures(
    recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    asked = [*stages("onnx", scheme="W4A16_G128"), RECIPE["stages"][-1]]
    code, out, err = command("plan", recipe(stages=asked), "--json")
    assert code == 0, err
    (export,) = [stage for stage in json.loads(out)["stages"] if stage["kind"] == "export"]
    assert any(note.startswith("ONNX Runtime GenAI: loads") for note in export["notes"])
    code, out, err = command("run", recipe(stages=asked), "--run-dir", work / "run", "--json")
    assert code == 0, err
    exported = work / "run" / "artifacts" / "export"
    assert {"genai_config.json", "model.onnx", "tokenizer.json"} <= {each.name for each in exported.iterdir()}
    assert command("verify", exported)[0] == 0
    card = (work / "run" / "evidence" / "README.md").read_text()
    assert "compress serve" in card
    assert "vllm" not in card
    tokens_BS = torch.randint(2, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    decoder = build_decoder(open_checkpoint(exported), dtype=torch.float32, device=torch.device("cpu"))
    expected = decoder(tokens_BS)
    found = logits_of(exported, tokens_BS, [(0, 7), *((idx, idx + 1) for idx in range(7, 12))])
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)

    code, _, err = command(
        "convert", work / "run" / "artifacts" / "quantize", "--to", "onnx", "--out", work / "again"
    )
    assert code == 0, err
    for name in ("model.safetensors", "model.onnx", "config.json", "genai_config.json"):
        assert (work / "again" / name).read_bytes() == (exported / name).read_bytes()


def test_what_onnx_cannot_express_is_refused_when_planning(
    recipe: Callable[..., Path], command: Command
) -> None:
    code, _, err = command("plan", recipe(stages=stages("onnx", scheme="FP8_DYNAMIC")))
    assert code == 2
    assert "[float-codes]" in err

"""Recipes over chat-shaped data: answers reach every stage that counts them, and a report that judges chat by
plain text says so."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.data.tokens import load_token_set
from tests.support.chat_templates import CHATML
from tests.support.tiny_run import RECIPE

Command = Callable[..., tuple[int, str, str]]
CARDS = Path(__file__).resolve().parents[2] / "calib_data"
CHAT = str(CARDS / "chat-jsonl.yaml")
JUDGED = {"num_samples": 4, "seq_len": 32, "latency": None, "gates": {}}


@pytest.fixture
def chat_recipe(model_dir: Path, work: Path) -> Callable[[list[dict[str, Any]]], Path]:
    """Writes a recipe over the tiny model with a chat template."""
    place = work / "chat-model"
    shutil.copytree(model_dir, place)
    (place / "chat_template.jinja").write_text(CHATML)

    def write(stages: list[dict[str, Any]]) -> Path:
        path = work / "recipe.yaml"
        path.write_text(json.dumps({**RECIPE, "model": str(place), "stages": stages}))
        return path

    return write


def run(command: Command, path: Path) -> dict[str, Any]:
    code, out, err = command("run", path, "--run-dir", "run", "--device", "cpu", "--workspace", "workspace")
    assert code == 0, err
    return {"report": json.loads(Path("run", "evidence", "report.json").read_text()), "out": out + err}


def test_calibrated_on_chat_and_judged_by_plain_text_is_warned_of(
    chat_recipe: Callable[..., Path], command: Command
) -> None:
    _, quantize, export, _ = RECIPE["stages"]
    calibrate = {"kind": "calibrate", "data": CHAT, "num_samples": 8, "seq_len": 32}
    path = chat_recipe([calibrate, quantize, export, {"kind": "validate", **JUDGED}])
    code, out, _ = command("plan", path, "--offline")
    assert code == 0
    assert "calibrate reads chat and the evaluation text is plain text" in " ".join(out.split())
    found = run(command, path)
    (warning,) = found["report"]["warnings"]
    assert warning.startswith("The model was calibrated on chat and is judged by plain text")
    assert "calibrated on chat" in " ".join(found["out"].split())
    tokens = [load_token_set(each) for each in Path("workspace", "store").glob("*/tokens.safetensors")]
    assert any(each.counted_NS is not None for each in tokens)
    judged = {"kind": "validate", **JUDGED, "data": str(CARDS / "chat-parquet.yaml")}
    assert "warnings" not in run(command, chat_recipe([calibrate, quantize, export, judged]))["report"]


@pytest.mark.slow
def test_answers_alone_change_the_codes_and_training(
    chat_recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    _, quantize, export, _ = RECIPE["stages"]
    shutil.copytree(CARDS / "data", work / "data")
    text = (CARDS / "chat-jsonl.yaml").read_text()
    assert "count: answers" in text
    digests = []
    for count in ("answers", "all"):
        card = work / f"{count}.yaml"
        card.write_text(text.replace("count: answers", f"count: {count}"))
        calibrate = {"kind": "calibrate", "data": str(card), "num_samples": 8, "seq_len": 32}
        distill = {
            "kind": "distill", "data": str(card), "tokens": 256, "seq_len": 32, "batch_size": 2,
            "eval_samples": 2, "loss": {"top_k": 16}, "student": {"layers": 2},
        }  # fmt: skip
        judged = {"kind": "validate", **JUDGED, "data": str(CARDS / "chat-csv.yaml")}
        report = run(command, chat_recipe([calibrate, distill, quantize, export, judged]))["report"]
        digests.append((report["distillation"]["after"], report["layers"][0]["error_after"]))
    assert digests[0] != digests[1]
    assert digests[0][0] != digests[1][0]


def test_pruning_by_answers_is_refused_before_any_work(
    chat_recipe: Callable[..., Path], command: Command
) -> None:
    _, quantize, export, _ = RECIPE["stages"]
    calibrate = {"kind": "calibrate", "data": CHAT, "num_samples": 8, "seq_len": 32}
    prune = {"kind": "prune", "ffn": {"keep": 0.5}, "multiple": 32}
    code, _, err = command("plan", chat_recipe([calibrate, prune, quantize, export]), "--offline")
    assert code == 2
    assert "prune scores what goes by all tokens" in " ".join(err.split())

"""A draft behind its stage: it travels in the checkpoint, is served with it, and report, gates and card say
what it is worth.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact.manifest import open_artifact
from compress.export import open_weights
from compress.export.speculators import is_eagle3, open_eagle3
from compress.models.eagle3 import draft_head
from compress.models.weights import build_decoder
from tests.e2e.test_distill import model_dir  # noqa: F401
from tests.e2e.test_draft import CODES, DRAFT
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, QUANTIZE, EXPORT, VALIDATE = RECIPE["stages"]
PRUNE = {"kind": "prune", "ffn": {"keep": 0.5}, "multiple": 32}
SERVED = {"batch_sizes": [1, 2], "num_prompts": 2, "prompt_tokens": 8, "output_tokens": 16, "k": 2}
GATES = {"acceptance_length": 1.0, "quantize.kl_mean": 5.0, "ppl_ratio": 50.0}
PUSH = {"to": "layout://registry", "name": "tiny"}


def stages(**changes: Any) -> list[dict[str, Any]]:
    draft = {**DRAFT, "tokens": 512, "quantize": CODES}
    return [
        CALIBRATE,
        PRUNE,
        QUANTIZE,
        draft,
        EXPORT,
        {**VALIDATE, "speculative": SERVED, "gates": GATES, **changes},
    ]


@pytest.mark.slow
def test_a_draft_is_exported_served_judged_and_pushed_with_its_model(
    recipe: Recipe, command: Command, work: Path
) -> None:
    code, out, err = command("run", recipe(stages=stages(), push=PUSH), "--run-dir", "run", "--json")
    assert code == 0, err
    checkpoint, draft = (open_artifact(work / "run" / "artifacts" / kind) for kind in ("export", "draft"))
    alone = open_weights(checkpoint.path / "draft")
    assert alone.arch.vocab_size == open_weights(checkpoint.path).arch.vocab_size
    exported, trained = (
        build_decoder(each, dtype=torch.float32, device=torch.device("cpu"))
        for each in (alone, open_weights(draft.path))
    )
    assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), trained.parameters(), strict=True))
    assert (checkpoint.path / "draft" / "tokenizer.json").read_bytes() == (
        checkpoint.path / "tokenizer.json"
    ).read_bytes()
    assert checkpoint.manifest.facts["draft"]["kind"] == "model"

    report = json.loads((work / "run" / "evidence" / "report.json").read_text())
    speculation = report["speculation"]
    assert {row["category"] for row in speculation["acceptance"]} == {"all", "code", "prose"}
    assert [row["proposer"] for row in speculation["speed"]] == ["draft"] * 4 + ["ngram"] * 4
    assert speculation["num_equal"] == speculation["num_compared"] == 2 * (4 + 4)
    assert {gate["name"]: gate["passed"] for gate in report["gates"]} == dict.fromkeys(GATES, True)
    names = [row["stage"] for row in report["stages"]]
    assert names == ["source", "pruned", "quantized", "with draft"]
    sizes = [row["size_bytes"] for row in report["stages"]]
    assert sizes[3] - sizes[2] == report["artifact"]["draft_bytes"] > 0
    assert sizes[2] == sum(row["candidate_bytes"] for row in report["artifact"]["sizes"])
    (gate,) = [each for each in report["gates"] if each["name"] == "quantize.kl_mean"]
    assert gate["value"] == report["stages"][2]["kl_before"] != report["accuracy"]["kl_mean"]["value"]
    card = (work / "run" / "evidence" / "README.md").read_text()
    assert '"num_speculative_tokens": 2, "method": "draft_model"' in card
    page = (work / "run" / "evidence" / "report.html").read_text()
    assert all(
        words in page for words in ("Speculative decoding", "What each stage did", "How the draft was made")
    )

    code, _, err = command("verify", "layout://registry/tiny")
    assert code == 0, err
    code, _, err = command("pull", "layout://registry/tiny", "pulled")
    assert code == 0, err
    assert open_artifact(work / "pulled").digest == checkpoint.digest
    assert command("verify", "pulled")[0] == 0
    (work / "pulled" / "draft" / "config.json").write_text("{}")
    code, _, err = command("verify", "pulled")
    assert (code, "draft/config.json" in err) == (5, True)
    code, out, err = command("run", recipe(stages=stages(), push=PUSH), "--run-dir", "run", "--json")
    assert (code, {each["cached"] for each in json.loads(out)["stages"]}) == (0, {True})


@pytest.mark.slow
def test_a_checkpoint_is_proven_with_its_draft_from_the_command_line(
    recipe: Recipe,
    command: Command,
    work: Path,
    model_dir: Path,  # noqa: F811
) -> None:
    assert command("run", recipe(stages=stages()[:-1]), "--run-dir", "run")[0] == 0
    checkpoint = work / "checkpoint"
    shutil.copytree(work / "run" / "artifacts" / "export", checkpoint)
    small = ["--against", model_dir, "--num-samples", 2, "--seq-len", 32, "--no-latency"]
    gates = ["--gate", "acceptance_length=1.0", "--gate", "speedup@cpu=1000"]
    code, _, err = command("validate", checkpoint, *small, *gates, "--out", "with")
    assert (code, "a gate failed" in err) == (3, True)
    report = json.loads((work / "with" / "report.json").read_text())
    assert {gate["name"]: gate["passed"] for gate in report["gates"]} == {
        "acceptance_length": True,
        "speedup": False,
    }
    code, _, err = command("validate", checkpoint, *small, "--no-speculative", "--out", "without")
    assert code == 0, err
    assert "speculation" not in json.loads((work / "without" / "report.json").read_text())


@pytest.mark.slow
def test_a_head_is_proven_like_a_model(recipe: Recipe, command: Command, work: Path) -> None:
    head = {**DRAFT, "tokens": 512, "init": {"kind": "eagle3", "layers": [1, 2, 3], "vocab": 128, "steps": 2}}
    served = {**VALIDATE, "speculative": SERVED, "gates": {"acceptance_length": 1.0}}
    code, _, err = command(
        "run", recipe(stages=[CALIBRATE, QUANTIZE, head, EXPORT, served]), "--run-dir", "run"
    )
    assert code == 0, err
    exported = work / "run" / "artifacts" / "export" / "draft"
    trained = draft_head(open_artifact(work / "run" / "artifacts" / "draft"))
    assert is_eagle3(exported)
    assert open_eagle3(exported).facts == trained.facts
    report = json.loads((work / "run" / "evidence" / "report.json").read_text())
    assert [row["proposer"] for row in report["speculation"]["speed"]] == ["eagle3"] * 4 + ["ngram"] * 4
    assert report["speculation"]["num_equal"] == report["speculation"]["num_compared"] == 16
    assert (
        '"num_speculative_tokens": 2, "method": "eagle3"'
        in (work / "run" / "evidence" / "README.md").read_text()
    )


@pytest.mark.slow
def test_lookup_is_measured_where_it_is_asked_for(recipe: Recipe, command: Command, work: Path) -> None:
    lookup = {**SERVED, "kind": "ngram", "rule": "coupled", "temperatures": [0.7]}
    steps = [
        CALIBRATE,
        QUANTIZE,
        EXPORT,
        {**VALIDATE, "speculative": lookup, "gates": {"acceptance_length": 1.0}},
    ]
    code, _, err = command("run", recipe(stages=steps), "--run-dir", "run")
    assert code == 0, err
    report = json.loads((work / "run" / "evidence" / "report.json").read_text())
    assert {row["proposer"] for row in report["speculation"]["speed"]} == {"ngram"}
    assert (
        report["speculation"]["num_equal"] == report["speculation"]["num_compared"] == 8
    )  # drawn ones too: the rule is coupled
    assert "draft_model" not in (work / "run" / "evidence" / "README.md").read_text()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [CALIBRATE, QUANTIZE, EXPORT, {**VALIDATE, "gates": {"acceptance_length": 1.5}}],
            "needs speculation to be measured",
        ),
        ([CALIBRATE, QUANTIZE, EXPORT, DRAFT, VALIDATE], "comes after export"),
        (stages(gates={"speedup": 1.5}), "depends on the device"),
        (stages(gates={"quantize.tpot_ms_p50": {"cpu": 5}}), "of quantize alone accuracy is measured"),
        (
            stages(speculative={"prompt_tokens": 100, "output_tokens": 64}),
            "speculative.prompt_tokens 100 and speculative.output_tokens 64 are 164 tokens together",
        ),
        (stages(speculative={"k": 9}), "k"),
        (stages(speculative={"data": {"prompts": "mine.yaml"}}), "mine.yaml"),
        (stages(speculative={"data": {"prompts": "builtin://python"}}), "judges on the same text"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    recipe: Recipe, command: Command, steps: list[dict[str, Any]], message: str
) -> None:
    code, _, err = command("plan", recipe(stages=steps))
    assert code == 2
    assert message in err

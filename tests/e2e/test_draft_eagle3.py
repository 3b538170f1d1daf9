"""An EAGLE-3 head as a draft in whole runs: it learns to be accepted, is killed and resumed, rounded, served;
and what it refuses.
"""

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.export import DRAFT_FOLDER, open_weights
from compress.models.eagle3 import draft_head
from compress.quant.scheme import QuantizedWeight
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.speculation import Speculative
from tests.e2e.test_distill import KILLED, model_dir  # noqa: F401
from tests.e2e.test_draft import EXPORT, by_role, drafted, facts_of, stages
from tests.support.processes import run_alone

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CPU = torch.device("cpu")
HEAD: dict[str, Any] = {"init": {"kind": "eagle3", "vocab": 150, "steps": 3}}
CODES = {"scheme": "W4A16_G32", "round": {"kind": "gptq"}, "refine": {"kind": "descent", "sweeps": 1}}


@pytest.mark.slow
def test_a_head_learns_to_be_accepted_is_rounded_and_served(
    recipe: Recipe, command: Command, work: Path
) -> None:
    artifact = drafted(command, recipe(stages=stages(**HEAD, tokens=8192, passes=2, quantize=CODES)))
    facts = facts_of(artifact)
    head = draft_head(artifact)
    assert facts["kind"] == "eagle3"
    assert facts["target"] == by_role(work / "alone", "quantized").digest
    assert facts["after"]["acceptance"] > facts["before"]["acceptance"]
    assert facts["after"]["acceptance_length"] > facts["before"]["acceptance_length"] > 1
    assert facts["after"]["kl"] < facts["before"]["kl"]
    assert head.facts.layer_ids == (1, 2, 3)
    assert len(head.vocabulary_W) == 150
    weight = head.weights["layers.0.attn.q.weight"]
    assert isinstance(weight, QuantizedWeight)
    assert weight.scheme.name == "W4A16_G32"

    target = open_weights(by_role(work / "alone", "quantized").path)
    config = EngineConfig(max_batch_size=4, max_model_len=64)
    requests = [
        Request(
            str(idx),
            tuple(range(7 * idx, 7 * idx + 9)),
            SamplingParams(24, temperature=idx % 2, seed=idx, ignore_eos=True),
        )
        for idx in range(8)
    ]
    plain = Engine(target, device=CPU, config=config).generate(requests)
    engine = Engine(target, device=CPU, config=replace(config, speculative=Speculative(Eagle3(head))))
    assert [each.tokens for each in engine.generate(requests)] == [each.tokens for each in plain]
    assert engine.acceptance is not None
    assert engine.acceptance.acceptance_length > 1


@pytest.mark.slow
def test_killed_and_resumed_the_head_has_the_same_bits(recipe: Recipe, command: Command, work: Path) -> None:
    path = recipe(stages=stages(**HEAD))
    undisturbed = drafted(command, path)
    killed = run_alone("run", path, "--workspace", "killed", code=KILLED)
    assert killed.returncode == -signal.SIGKILL
    assert list((work / "killed").glob("scratch/*/state.safetensors"))
    assert drafted(command, path, "killed").digest == undisturbed.digest


@pytest.mark.slow
def test_the_exported_head_names_its_verifier_without_its_place(
    recipe: Recipe,
    command: Command,
    work: Path,
    model_dir: Path,  # noqa: F811
) -> None:
    (work / "here").symlink_to(model_dir.parent, target_is_directory=True)
    shutil.copytree(model_dir, work / "there" / model_dir.name)
    models = (model_dir, f"./here/{model_dir.name}", work / "there" / model_dir.name)
    digests = set()
    for idx, model in enumerate(models):
        path = recipe(model=str(model), stages=[*stages(**HEAD, tokens=256), EXPORT])
        code, _, err = command("run", path, "--workspace", f"workspace{idx}", "--json")
        assert code == 0, err
        checkpoint = by_role(work / f"workspace{idx}", "checkpoint")
        config = json.loads((checkpoint.path / DRAFT_FOLDER / "config.json").read_text())
        assert config["speculators_config"]["verifier"]["name_or_path"] == model_dir.name
        digests.add(checkpoint.digest)
    assert len(digests) == 1


REFUSALS = [
    ({"init": {"kind": "eagle3", "layers": [1, 4]}}, "layers [1, 4] of a model that has 3"),
    ({"init": {"kind": "eagle3", "layers": [2, 1]}}, "rising"),
    ({"init": {"kind": "eagle3", "steps": 8}}, "less than or equal to 7"),
    ({**HEAD, "loss": {"top_k": 8}}, "leave out loss.top_k"),
    ({**HEAD, "loss": {"hard_frac": 0.5}}, "loss.hard_frac"),
    ({**HEAD, "recompute": True}, "recompute"),
    ({**HEAD, "quantize": {"preset": "best"}}, "guide is for whole models"),
    ({**HEAD, "quantize": {"scheme": "FP8_STATIC"}}, "take one whose rows have their own scales"),
    ({**HEAD, "quantize": {"overrides": {"*.ffn.down": "dense"}}}, "leave out mixed precision and overrides"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSALS)
def test_what_cannot_work_is_refused_before_any_work(
    recipe: Recipe, command: Command, work: Path, changes: dict[str, Any], sentence: str
) -> None:
    code, _, err = command("run", recipe(stages=stages(**changes)))
    assert code == 2
    assert sentence in err
    assert not list(work.glob("**/store/*"))


def test_the_plan_says_what_the_head_will_be(recipe: Recipe, command: Command) -> None:
    code, out, err = command("plan", recipe(stages=stages(**HEAD)))
    assert code == 0, err
    assert "hidden states after layers 1, 2, 3 of 3" in out

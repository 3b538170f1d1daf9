"""The draft stage in whole runs: behind quantize, and behind prune and distill; killed and resumed, by two
ranks, in codes; and what it refuses. What it leaves is served as a draft.
"""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact.manifest import Artifact, open_artifact
from compress.data.tokens import load_token_set
from compress.distill.objective import Teacher, measure
from compress.export import open_weights
from compress.models.weights import Dense, WeightSource, build_decoder
from compress.quant.scheme import QuantizedWeight
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.speculation import Speculative
from tests.e2e.test_distill import KILLED, model_dir  # noqa: F401
from tests.e2e.test_ranks import launch
from tests.support.processes import run_alone
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CPU = torch.device("cpu")
CALIBRATE, QUANTIZE, EXPORT, VALIDATE = RECIPE["stages"]
DRAFT: dict[str, Any] = {
    "kind": "draft",
    "init": {
        "keep_layers": 2,
        "ffn": {"keep": 0.5},
        "heads": {"keep": 0.5},
        "multiple": 64,
        "num_samples": 8,
    },
    "tokens": 3072,
    "seq_len": 32,
    "micro_batch_size": 2,
    "lr": 5e-3,
    "eval_samples": 4,
    "eval_every": 4,
    "compute_dtype": "float32",
}
CODES = {"scheme": "W4A16_G32", "round": {"kind": "rtn", "scale": "hessian"}}


def stages(**changes: Any) -> list[dict[str, Any]]:
    return [CALIBRATE, QUANTIZE, {**DRAFT, **changes}]


def by_role(workspace: Path, role: str) -> Artifact:
    (found,) = [each for each in map(open_artifact, workspace.glob("store/*")) if each.manifest.role == role]
    return found


def drafted(command: Command, path: Path, workspace: str = "alone") -> Artifact:
    code, _, err = command("run", path, "--workspace", workspace, "--json")
    assert code == 0, err
    return by_role(Path(workspace), "draft")


def facts_of(artifact: Artifact) -> dict[str, Any]:
    found: dict[str, Any] = artifact.manifest.facts["draft"]
    return found


@pytest.mark.slow
def test_a_draft_learns_to_be_accepted_and_says_how(recipe: Recipe, command: Command, work: Path) -> None:
    artifact = drafted(command, recipe(stages=stages(passes=2, tokens=8192)))
    facts = facts_of(artifact)
    assert facts["kind"] == "model"
    assert facts["target"] == by_role(work / "alone", "quantized").digest
    assert facts["after"]["acceptance"] > 1.1 * facts["before"]["acceptance"]
    assert facts["after"]["acceptance_length"] > facts["before"]["acceptance_length"] > 1
    assert facts["after"]["kl"] < facts["before"]["kl"]
    assert facts["tokens"] == 8192 == facts["curve"][-1]["tokens"]
    assert facts["start"]["layers"] == [0, 2]
    arch = open_weights(artifact.path).arch
    assert (arch.num_layers, arch.layers[0].intermediate_size, arch.layers[0].num_heads) == (2, 128, 2)
    assert facts["params"] == arch.num_params
    target = open_weights(by_role(work / "alone", "quantized").path)
    assert torch.equal(open_weights(artifact.path).outer()["embed.weight"], target.outer()["embed.weight"])
    trained = load_token_set(artifact.path / "tokens.safetensors")
    assert trained.digest() == facts["data"]["digest"]
    assert len(trained.tokens_NS) == 128


@pytest.mark.slow
def test_a_draft_for_pruned_weights_that_are_not_quantized(
    recipe: Recipe, command: Command, work: Path
) -> None:
    prune = {"kind": "prune", "ffn": {"keep": 0.5}, "multiple": 32}
    changes = {
        "init": {"keep_layers": [0, 1], "train_embeddings": True},
        "loss": {"kind": "lk"},
        "optimizer": "adamw",
        "lr": 3e-4,
    }
    artifact = drafted(command, recipe(stages=[CALIBRATE, prune, {**DRAFT, **changes}]))
    assert facts_of(artifact)["target"] == by_role(work / "alone", "dense").digest
    assert facts_of(artifact)["after"]["acceptance"] > facts_of(artifact)["before"]["acceptance"]
    pruned = open_weights(by_role(work / "alone", "dense").path)
    draft = open_weights(artifact.path)
    assert draft.arch.layers == pruned.arch.layers[:2]
    assert not torch.equal(draft.outer()["embed.weight"], pruned.outer()["embed.weight"])


def plain_and_speculative(target: WeightSource, draft: WeightSource) -> tuple[list[Any], list[Any], float]:
    requests = [
        Request(
            str(idx),
            tuple(range(7 * idx, 7 * idx + 9)),
            SamplingParams(24, temperature=idx % 2, seed=idx, ignore_eos=True),
        )
        for idx in range(8)
    ]
    config = EngineConfig(max_batch_size=4, max_model_len=64)
    plain = Engine(target, device=CPU, config=config).generate(requests)
    engine = Engine(target, device=CPU, config=replace(config, speculative=Speculative(DraftModel(draft))))
    speculative = engine.generate(requests)
    assert engine.acceptance is not None
    return (
        [each.tokens for each in plain],
        [each.tokens for each in speculative],
        engine.acceptance.acceptance_length,
    )


@pytest.mark.slow
def test_a_draft_in_codes_is_served_and_changes_no_token(
    recipe: Recipe, command: Command, work: Path
) -> None:
    artifact = drafted(command, recipe(stages=stages(quantize=CODES)))
    draft = open_weights(artifact.path)
    target = open_weights(by_role(work / "alone", "quantized").path)
    weight = draft.layer(1)["ffn.down.weight"]
    assert isinstance(weight, QuantizedWeight)
    assert weight.scheme.name == "W4A16_G32"
    assert facts_of(artifact)["quantized"].startswith("round: rtn")
    teacher = Teacher(build_decoder(target, dtype=torch.float32, device=CPU), device=CPU)
    last = facts_of(artifact)["curve"][-1]
    assert (
        facts_of(artifact)["after"]["kl"] != last["kl"]
    )  # what is said is of the codes, not of what was trained
    assert facts_of(artifact)["after"]["kl"] == pytest.approx(last["kl"], rel=0.2)
    windows = load_token_set(artifact.path / "tokens.safetensors").tokens_NS[:4]
    alike = measure(
        build_decoder(Dense(target), dtype=torch.float32, device=CPU),
        teacher,
        windows,
        CPU,
        compute_dtype=torch.float32,
    )
    assert alike.acceptance == pytest.approx(
        1, abs=1e-5
    )  # all of the target, as a draft begins, is the target
    assert alike.acceptance_length == pytest.approx(5, abs=1e-4)
    plain, speculative, length = plain_and_speculative(target, draft)
    assert speculative == plain
    assert length > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"quantize": CODES, "sample": {"prompt_tokens": 8}, "loss": {"top_k": 16}}]
)
def test_killed_and_resumed_the_draft_has_the_same_bits(
    recipe: Recipe, command: Command, work: Path, changes: dict[str, Any]
) -> None:
    path = recipe(stages=stages(**changes))
    undisturbed = drafted(command, path)
    killed = run_alone("run", path, "--workspace", "killed", code=KILLED)
    assert killed.returncode == -signal.SIGKILL
    assert list((work / "killed").glob("scratch/*/state.safetensors"))
    assert drafted(command, path, "killed").digest == undisturbed.digest
    code, out, err = command("run", path, "--workspace", "killed", "--json")
    assert code == 0, err
    assert {each["cached"] for each in json.loads(out)["stages"]} == {True}


@pytest.mark.slow
def test_two_ranks_make_the_draft_of_one(recipe: Recipe, command: Command, work: Path) -> None:
    path = recipe(stages=stages(quantize=CODES))
    alone = facts_of(drafted(command, path))
    results = launch(2, "run", path, "--workspace", "many", "--json")
    assert [each.returncode for each in results] == [0, 0], results[0].stderr
    many = facts_of(by_role(work / "many", "draft"))
    assert many["start"] == alone["start"]
    for one, other in zip(alone["curve"], many["curve"], strict=True):
        assert other == pytest.approx(one, rel=2e-4)
    assert many["after"] == pytest.approx(alone["after"], rel=0.02)


REFUSALS = [
    ([DRAFT], "'draft' needs quantized or dense"),
    (stages(init={"keep_layers": 3}), "it would be the model itself"),
    (stages(init={"keep_layers": 4}), "4 layers are to stay and the model has 3"),
    (stages(init={"keep_layers": [0, 3]}), "different layers of 0..2"),
    (stages(init={"keep_layers": [1, 1]}), "different layers of 0..2"),
    (stages(init={"kind": "prund"}), "unknown kind 'prund'"),
    (stages(init={"kep_layers": 2}), "Did you mean 'keep_layers'?"),
    (stages(init={"keep_layers": 2, "ffn": {"keep": 1.5}}), "ffn"),
    (stages(init={"keep_layers": 2, "ffn": {"keep": 0.9}}), "nothing would go"),
    (
        stages(
            init={"keep_layers": 2, "ffn": {"keep": 96}, "multiple": 32}, quantize={"scheme": "W4A16_G64"}
        ),
        "multiple of 64",
    ),
    (stages(quantize={"kv_cache": "fp8"}), "stay in 16 bits"),
    (stages(quantize={"scheme": "W4A16_G64", "head": "FP8_DYNAMIC"}), "tied to its embedding"),
    (stages(tokens=64), "fewer than a batch"),
    (stages(seq_len=256, tokens=8192), "has 128 positions"),
    ([*stages(data="builtin://python-eval"), EXPORT, VALIDATE], "judges on the same text"),
    ([*stages(), QUANTIZE], "a second 'quantize'"),
]


@pytest.mark.parametrize(("refused", "sentence"), REFUSALS)
def test_what_cannot_work_is_refused_before_any_work(
    recipe: Recipe, command: Command, work: Path, refused: list[dict[str, Any]], sentence: str
) -> None:
    code, _, err = command("run", recipe(stages=refused))
    assert code == 2
    assert sentence in err
    assert not list(work.glob("**/store/*"))


def test_the_plan_says_what_the_draft_will_be(recipe: Recipe, command: Command) -> None:
    code, out, err = command("plan", recipe(stages=stages(quantize=CODES)), "--json")
    assert code == 0, err
    (row,) = [each for each in json.loads(out)["stages"] if each["kind"] == "draft"]
    assert any("2 of 3 layers (0, 2)" in note for note in row["notes"])
    assert any("W4A16_G32" in note for note in row["notes"])
    assert row["peak_bytes"] > 0

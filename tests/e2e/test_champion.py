"""Champion and challenger: an alias moves to a better artifact only, once, with the reason kept, and back."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.errors import LockHeld
from compress.registry import promotion
from compress.registry.promotion import last_move, promote
from compress.registry.protocol import GuardedRegistry, open_registry
from compress.registry.stored import list_tags
from compress.registry.transfer import push, verify
from tests.support.evidence_files import MACHINE, report, write_evidence
from tests.support.tiny_run import RECIPE

Command = Callable[..., tuple[int, str, str]]
URL = "layout://registry"
REF = f"{URL}/model:production"


class Unguarded:
    """A registry that has no `write_tag_if`."""

    def repository(self, name: str) -> "Unguarded":
        return self


@pytest.fixture
def made(work: Path) -> Callable[..., tuple[Artifact, Path]]:
    """Makes an artifact of a name, and evidence about it."""

    def make(name: str, **facts: Any) -> tuple[Artifact, Path]:
        def build(writer: ArtifactWriter) -> None:
            (writer.path / "weights.bin").write_bytes(name.encode() * 100)
            writer.describe(role="checkpoint", facts={"name": name})

        key = Workspace.key("test", 1, {"name": name}, {}, 0)
        artifact = Workspace(work / "workspace").commit(key, "test", {}, build)
        document = report(name, digest=artifact.digest, **facts)
        return artifact, write_evidence(work / f"evidence-{name}", document)

    return make


@pytest.fixture
def challenges(command: Command, made: Callable[..., tuple[Artifact, Path]]) -> Callable[..., Any]:
    """Pushes a model of a name against `production`: (exit code, document)."""

    def call(name: str, *more: object, **facts: Any) -> tuple[int, dict[str, Any]]:
        artifact, evidence = made(name, **facts)
        words = (artifact.path, REF, "--evidence", evidence, "--against-alias", "production", *more, "--json")
        code, out, _ = command("push", *words)
        return code, json.loads(out)

    return call


def production() -> str:
    return verify(REF).artifact_digest


def test_a_worse_model_does_not_move_the_alias_and_a_better_one_does(
    challenges: Callable[..., Any], command: Command
) -> None:
    code, first = challenges("first", noise=0.3)
    assert (code, first["champion"], first["gates"]) == (0, None, [])
    code, refused = challenges("worse", noise=0.4)
    assert (code, refused["status"]) == (3, "gate_failed")
    assert refused["gates"][0]["bound"] > 0
    assert production() == first["artifact_digest"]
    assert {tag.tag for tag in list_tags(URL)} == {"latest", "production"}
    assert verify(f"{URL}/model:latest").artifact_digest == first["artifact_digest"]  # nothing was pushed
    code, better = challenges("better", noise=0.2)
    assert code == 0
    (gate,) = better["gates"]
    assert (gate["name"], gate["passed"]) == ("production.kl_increase", True)
    assert gate["value"] < gate["bound"] < 0
    assert production() == better["artifact_digest"]
    move = last_move(open_registry(URL), "model", "production")
    assert move is not None
    assert (move.before, move.after) == (first["manifest_digest"], better["manifest_digest"])
    assert "production.kl_increase" in move.reason
    assert verify(REF).evidence_digests == (better["evidence_digest"],)  # a record is no evidence


def test_a_tie_by_the_point_is_refused_and_a_stated_margin_lets_it_pass(
    challenges: Callable[..., Any],
) -> None:
    assert challenges("first", noise=0.3)[0] == 0
    code, refused = challenges("tie", noise=0.3001)
    assert code == 3
    limits = ("--gate", "kl_increase=0.005", "--gate", "ppl_ratio=1.05", "--gate", "size_ratio=1")
    code, passed = challenges("near", *limits, noise=0.301)
    assert code == 0, passed
    assert [gate["passed"] for gate in passed["gates"]] == [True] * 3
    assert refused["gates"][0]["bound"] > 0


@pytest.mark.parametrize(
    ("limit", "facts", "reason"),
    [
        ("kl_increase=1", {"text": "other words"}, "other evaluation tokens"),
        ("tpot_ratio=9", {"machine": {**MACHINE, "device": "another"}}, "another machine"),
        ("tpot_ratio=9", {"tpot_ms": None}, "not measured"),
        ("tasks.mine.accuracy_drop=1", {"task": None}, "not measured"),
        ("tasks.mine.accuracy_drop=1", {"task": (0.8, 0.01, 7)}, "other items"),
        ("tpot_ratio=9", {"instability": "repeats disagree"}, "unstable"),
    ],
)
def test_no_evidence_under_the_same_conditions_is_no_permission(
    challenges: Callable[..., Any], limit: str, facts: dict[str, Any], reason: str
) -> None:
    first = challenges("first", noise=0.3, task=(0.8, 0.01, 500))[1]
    code, refused = challenges("other", "--gate", limit, **{"noise": 0.1, **facts})
    assert code == 3
    assert reason in refused["gates"][0]["note"]
    assert production() == first["artifact_digest"]


def test_rolling_back_goes_the_way_of_the_promotions(
    challenges: Callable[..., Any], command: Command
) -> None:
    pushed = [challenges(name, noise=noise)[1] for name, noise in (("a", 0.4), ("b", 0.3), ("c", 0.2))]
    digests = [each["artifact_digest"] for each in pushed]
    assert production() == digests[2]
    code, out, err = command("rollback", REF, "--dry-run", "--json")
    assert code == 0, err
    assert (json.loads(out)["moved"], production()) == (False, digests[2])
    for expected in (digests[1], digests[0]):
        code, out, err = command("rollback", REF, "--reason", "users complain")
        assert code == 0, err
        assert "users complain" in out
        assert production() == expected
    code, _, err = command("rollback", REF)
    assert code == 2
    assert "--to sha256:" in err
    code, _, err = command("rollback", REF, "--to", pushed[2]["manifest_digest"])
    assert code == 0, err
    assert production() == digests[2]
    assert command("rollback", f"{URL}/model:nobody")[0] == 2
    assert command("rollback", pushed[0]["ref"])[0] == 2


def test_of_jobs_that_race_one_promotes(
    challenges: Callable[..., Any],
    made: Callable[..., tuple[Artifact, Path]],
) -> None:
    first = challenges("first", noise=0.4)[1]
    registry = open_registry(URL)
    assert isinstance(registry, GuardedRegistry)
    rival, rival_evidence = made("rival", noise=0.2)
    inner = promotion._store
    stored: list[str] = []

    def late(*args: Any) -> None:
        """Another job promotes after this one compared and before it moves."""
        if not stored:
            stored.append("rival")
            other = push(registry, rival, name="other", evidence=rival_evidence)
            found = registry.find(other.manifest_digest)
            assert found is not None
            promote(
                registry, "model", ("production",), found, alias="production",
                expected=first["manifest_digest"], reason="faster",
            )  # fmt: skip
        inner(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(promotion, "_store", late)
        code, lost = challenges("loser", noise=0.3)
    assert code == LockHeld.exit_code
    assert "meanwhile" in lost["error"]["message"]
    assert production() == rival.digest
    move = last_move(registry, "model", "production")
    assert move is not None
    assert move.reason == "faster"
    assert challenges("loser again", noise=0.3)[0] == 3  # compared with the rival now
    assert production() == rival.digest


def test_of_processes_that_promote_at_once_exactly_one_wins(
    challenges: Callable[..., Any], made: Callable[..., tuple[Artifact, Path]], work: Path
) -> None:
    first = challenges("first", noise=0.4)[1]
    registry = open_registry(URL)
    manifests = [
        push(registry, made(f"m{idx}", noise=0.2)[0], name="other").manifest_digest for idx in range(4)
    ]
    code = (
        "import sys; from compress.registry.protocol import open_registry as o; "
        "from compress.registry.promotion import promote; r = o(sys.argv[1]); sys.stdin.readline(); "
        "promote(r, 'model', ('production',), r.find(sys.argv[2]), alias='production', "
        "expected=sys.argv[3], reason=sys.argv[2])"
    )
    words = [sys.executable, "-c", code, URL]
    jobs = [
        subprocess.Popen(
            [*words, each, first["manifest_digest"]], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for each in manifests
    ]
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write(b"go\n")
        job.stdin.flush()
    outcomes = [job.communicate()[1].decode() for job in jobs]
    won = [idx for idx, job in enumerate(jobs) if job.returncode == 0]
    assert len(won) == 1, outcomes
    assert all("LockHeld" in each for idx, each in enumerate(outcomes) if idx not in won)
    move = last_move(registry, "model", "production")
    assert move is not None
    assert (move.after, move.reason) == (manifests[won[0]],) * 2


def test_wrong_challenges_get_a_sentence(
    made: Callable[..., tuple[Artifact, Path]], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, evidence = made("one", noise=0.3)
    other = made("two", noise=0.2)[1]
    against = ("--against-alias", "production")
    for words, reason in (
        ((*against,), "no evidence of the candidate"),
        (("--evidence", other, *against), "is about the artifact"),
        (("--evidence", evidence, *against, "--gate", "kl_mean=1"), "no limit 'kl_mean'"),
        (("--evidence", evidence, *against, "--gate", "kl_increase=low"), "name=number"),
        (("--evidence", evidence, *against, "--gate", "kl_increase=nan"), "must be a number"),
        (("--evidence", evidence, "--gate", "kl_increase=1"), "--against-alias"),
    ):
        code, _, err = command("push", artifact.path, REF, *words)
        assert code == 2, (words, err)
        assert reason in err
    monkeypatch.setattr("compress.pipeline.promote.open_registry", lambda url: Unguarded())
    code, _, err = command("push", artifact.path, REF, "--evidence", evidence, *against)
    assert code == 2
    assert "two jobs could both promote" in err


@pytest.mark.slow
def test_evidence_that_was_missing_is_attached_by_a_validation(
    recipe: Callable[..., Path], command: Command, model_dir: Path, work: Path
) -> None:
    calibrate, quantize, export, validate = RECIPE["stages"]
    plain = [calibrate, {**quantize, "round": {"kind": "rtn"}}, export]
    own = {**validate, "latency": None, "gates": {}}
    gates = {"against_alias": "production", "kl_increase": 0.0}
    place = {"to": URL, "name": "model", "aliases": ["production"]}
    assert command("run", recipe(stages=plain, push=place), "--run-dir", "a")[0] == 0
    better = {**quantize, "scheme": "W8A16", "round": {"kind": "rtn"}}
    challenger = recipe(stages=[calibrate, better, export, own], push={**place, "gates": gates})
    code, _, err = command("run", challenger, "--run-dir", "b")
    assert code == 2
    assert "--attach" in err
    same = ("--against", model_dir, "--num-samples", 4, "--seq-len", 32, "--no-latency")
    code, _, err = command("validate", REF, *same, "--attach", "--out", "proof")
    assert code == 0, err
    before = production()
    code, out, err = command("run", challenger, "--run-dir", "b", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert production() == document["artifact"]["digest"] != before
    assert [gate["name"] for gate in document["gates"]] == ["production.kl_increase"]
    worse = recipe(stages=[*plain, own], push={**place, "gates": gates})
    code, out, err = command("run", worse, "--run-dir", "c", "--json")
    assert code == 3
    assert json.loads(out)["status"] == "gate_failed"
    assert production() == document["artifact"]["digest"]
    code, _, err = command("run", recipe(stages=plain, push={**place, "gates": gates}))
    assert code == 2
    assert "nothing is measured" in err

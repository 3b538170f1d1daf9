"""Kills commands with SIGKILL at random moments, again and again until each has ended, and compares what they
made with what an undisturbed one made.

    python -m scripts.check_kills --kills 50 --seed 0 --out benchmarks/kills.json

Of the kills, three quarters fall on runs of the recipes, shared equally, and the rest on `push` and `pull`.
After each kill every artifact and every tag that can be seen must be whole. Exit code 1 if anything differs.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from compress.artifact.manifest import open_artifact, verify_artifact
from compress.registry.stored import list_tags
from compress.registry.transfer import verify
from scripts.bench_setup import markdown, write_results

RECIPES = ("recipes/quickstart.yaml", "recipes/prune-distill.yaml")
WINDOW_S = 20.0
"""Seconds in which a kill comes: a run of minutes goes on from its resume points until it is over."""
MEASURED = "validate"
"""The stage whose result holds times, so that its digest is another one in every run."""


@dataclass(frozen=True)
class Scenario:
    """A command, and what is compared of its result: its current directory, and what it printed."""

    name: str
    arguments: tuple[str, ...]
    facts: Callable[[Path, str], Any]
    result: str = ""
    """A name in the current directory that appears in the last step, after which the command is not run
    again."""


@dataclass
class Tally:
    """What became of one scenario."""

    name: str
    undisturbed_s: float
    kills: int = 0
    ends: int = 0
    wrong: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", type=Path, action="append", help="instead of the two that ship")
    parser.add_argument("--commit", default=None, help="of the code that is tried")
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    args = parser.parse_args(argv)

    recipes = args.recipe or [Path(each) for each in RECIPES]
    tallies: list[Tally] = []
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        num_kills = 3 * args.kills // 4
        for idx, recipe in enumerate(recipes):
            share = len(range(idx, num_kills, len(recipes)))
            tallies.append(disturb(run_of(recipe.resolve()), share, rng, root / f"recipe-{idx}"))
        made = root / "recipe-0" / "undisturbed"
        rest = args.kills - num_kills
        for idx, scenario in enumerate((push_of(made), pull_of(made))):
            tallies.append(disturb(scenario, len(range(idx, rest, 2)), rng, root / scenario.name))
    rows = [
        {
            "command": each.name,
            "undisturbed_s": round(each.undisturbed_s, 1),
            "kills": each.kills,
            "ends": each.ends,
            "wrong": each.wrong,
        }
        for each in tallies
    ]
    print(
        markdown(
            ["command", "undisturbed s", "kills", "ended", "wrong"],
            [[each.name, f"{each.undisturbed_s:.1f}", str(each.kills), str(each.ends), str(len(each.wrong))]
             for each in tallies],
        )
    )  # fmt: skip
    for each in tallies:
        for sentence in each.wrong:
            print(f"{each.name}: {sentence}")
    if args.out is not None:
        facts = {"seed": args.seed, "kills": sum(each.kills for each in tallies)}
        write_results(args.out, rows, device=torch.device("cpu"), commit=args.commit, facts=facts)
    return 1 if any(each.wrong for each in tallies) else 0


def run_of(recipe: Path) -> Scenario:
    """A run of a recipe: the digests of its stages, and what it pushed."""

    def facts(directory: Path, out: str) -> Any:
        document = json.loads(out)
        digests = {each["kind"]: each["digest"] for each in document["stages"] if each["kind"] != MEASURED}
        return document["status"], digests, (document.get("pushed") or {}).get("manifest")

    arguments = ("run", str(recipe), "--workspace", "workspace", "--run-dir", "made", "--device", "cpu")
    return Scenario(recipe.stem, arguments, facts)


def push_of(made: Path) -> Scenario:
    """A push of a run's artifact with its evidence: the digests of the tag."""

    def facts(directory: Path, out: str) -> Any:
        registry = f"layout://{directory / 'registry'}"
        report = verify(f"{registry}/pushed:again")
        tags = [(each.name, each.tag, each.manifest.digest) for each in list_tags(registry)]
        return tags, report.artifact_digest, report.evidence_digests

    artifact, evidence = (str(made / "made" / each) for each in ("artifacts/export", "evidence"))
    arguments = ("push", artifact, "layout://registry/pushed:again", "--evidence", evidence)
    return Scenario("push", arguments, facts)


def pull_of(made: Path) -> Scenario:
    """A pull of what a run pushed: the digest of the artifact, every byte compared."""

    def facts(directory: Path, out: str) -> Any:
        artifact = open_artifact(directory / "pulled")
        verify_artifact(artifact)
        return artifact.digest

    registry = f"layout://{made / 'registry'}"
    tag = list_tags(registry)[0]
    return Scenario("pull", ("pull", f"{registry}/{tag.name}:{tag.tag}", "pulled"), facts, "pulled")


def disturb(scenario: Scenario, num_kills: int, rng: random.Random, directory: Path) -> Tally:
    """Run a command undisturbed in `directory`/undisturbed, then kill it so often, each time it begins or
    goes on, at a moment drawn evenly from the first `WINDOW_S` of the time that it takes undisturbed."""
    undisturbed = directory / "undisturbed"
    undisturbed.mkdir(parents=True)
    began = time.monotonic()
    out = ended(start(scenario, undisturbed), None)
    assert out is not None, "without a kill there is an outcome"
    tally = Tally(scenario.name, time.monotonic() - began)
    expected = scenario.facts(undisturbed, out)
    while True:
        place = directory / f"{tally.ends}"
        place.mkdir(exist_ok=True)
        last = tally.kills >= num_kills
        process = start(scenario, place)
        out = ended(process, None if last else rng.uniform(0, min(tally.undisturbed_s, WINDOW_S)))
        tally.wrong += broken(place)
        if out is None:
            tally.kills += 1
            if not scenario.result or not (place / scenario.result).exists():
                continue
        tally.ends += 1
        if scenario.facts(place, out or "") != expected:
            tally.wrong.append(f"other digests: {scenario.facts(place, out or '')} for {expected}")
        if last:
            print(tally, file=sys.stderr, flush=True)
            return tally


def start(scenario: Scenario, directory: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "compress", *scenario.arguments, "--json"],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def ended(process: "subprocess.Popen[str]", kill_after_s: float | None) -> str | None:
    """Return what a command printed; None if it was killed.

    Raises:
        RuntimeError: it failed by itself.
    """
    try:
        out, _ = process.communicate(timeout=kill_after_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    if process.returncode != 0:
        raise RuntimeError(f"{process.args} ended with exit code {process.returncode}: {out}")
    return out


def broken(directory: Path) -> list[str]:
    """Return a sentence for everything that can be seen in a directory and is not whole."""
    found = []
    places = [*directory.glob("workspace/store/*"), *directory.glob("pulled")]
    for place in places:
        try:
            verify_artifact(open_artifact(place))
        except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
            found.append(f"{place.name}: {error}")
    if (directory / "registry" / "index.json").exists():
        registry = f"layout://{directory / 'registry'}"
        for tag in list_tags(registry):
            try:
                verify(f"{registry}/{tag.name}:{tag.tag}")
            except Exception as error:  # noqa: BLE001
                found.append(f"{tag.name}:{tag.tag}: {error}")
    return found


if __name__ == "__main__":
    sys.exit(main())

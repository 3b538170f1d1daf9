"""A disk that fails at any call of any command: the right exit code, nothing lost, nothing half there, and
the same command afterwards gives what it would have given.

The matrix is fault (errno) x system call x place among its calls x command.
"""

import errno
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.manifest import MANIFEST_NAME, open_artifact, verify_artifact
from compress.registry.transfer import list_tags, verify
from tests.support.slow import slow
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE = RECIPE["stages"][0]
QUANTIZE = {"kind": "quantize", "round": {"kind": "rtn"}}
PUSH = {"to": "layout://registry", "name": "tiny", "aliases": ["candidate"]}
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)
CALLS = ("fsync", "rename", "replace", "mkdir", "open", "link")
PLACES = (0.0, 0.35, 0.7, 0.99)
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "recipe.json", "--workspace", "cache", "--run-dir", "runs/it"),
    "push": ("push", "artifact", "layout://registry/tiny:again"),
    "pull": ("pull", "layout://source/tiny:latest", "pulled"),
    "convert": ("convert", "artifact", "--to", "gptq", "--out", "converted"),
}
OFTEN = {
    ("run", "rename", 0.7),
    ("push", "replace", 0.99),
    ("pull", "fsync", 0.35),
    ("convert", "rename", 0.0),
}
MATRIX = list(itertools.product(COMMANDS, CALLS, PLACES))


class Faults:
    """Counts the calls of one function of `os`, and makes one of them fail."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.fail_at = -1
        self.error = 0
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls - 1 == self.fail_at:
                raise OSError(self.error, os.strerror(self.error), args[0] if args else None)
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)


@pytest.fixture(scope="module")
def prepared(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an artifact, a registry that has it, and a recipe."""
    from compress.cli.app import main

    home = tmp_path_factory.mktemp("prepared")
    stages = [CALIBRATE, QUANTIZE, {"kind": "export"}]
    document = {**RECIPE, "model": str(model_dir), "stages": stages}
    before = Path.cwd()
    os.chdir(home)
    try:
        (home / "first.json").write_text(json.dumps({**document, "push": {**PUSH, "to": "layout://source"}}))
        assert main(["run", "first.json"]) == 0
        assert main(["pull", "layout://source/tiny:latest", "artifact"]) == 0
    finally:
        os.chdir(before)
    (home / "recipe.json").write_text(json.dumps({**document, "push": PUSH}))
    return home


@pytest.fixture
def scene(prepared: Path, work: Path) -> Path:
    """The current directory of one case: it has what the commands read, and none of what they write."""
    for name in ("artifact", "source", "recipe.json"):
        (work / name).symlink_to(prepared / name)
    return work


def whole(scene: Path, expected: str) -> None:
    """Assert that everything a command left is whole: artifacts, registries, and no temporary file is named
    like a result."""
    for place in [*(scene / "cache" / "store").glob("*"), scene / "pulled", scene / "converted"]:
        if place.exists():
            verify_artifact(open_artifact(place))
    if (scene / "registry" / "index.json").exists():
        for tag in list_tags("layout://registry"):
            assert verify(f"layout://registry/{tag.name}:{tag.tag}").artifact_digest == expected


@pytest.mark.parametrize(
    ("name", "call", "place"), [each if each in OFTEN else slow(*each) for each in MATRIX]
)
def test_a_fault_loses_nothing(
    name: str,
    call: str,
    place: float,
    scene: Path,
    prepared: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = COMMANDS[name]
    expected = open_artifact(prepared / "artifact").digest
    with monkeypatch.context() as patch:
        counted = Faults(call, patch)
        assert command(*arguments)[0] == 0
    num_calls = counted.calls
    if num_calls == 0:
        pytest.skip(f"`{name}` never calls os.{call}")
    for error in ERRORS:
        for left in (*scene.glob("cache"), *scene.glob("registry"), *scene.glob("runs")):
            os.rename(left, scene / f"old-{error}-{left.name}")
        for made in ("pulled", "converted"):
            if (scene / made).exists():
                os.rename(scene / made, scene / f"old-{error}-{made}")
        with monkeypatch.context() as patch:
            faults = Faults(call, patch)
            faults.fail_at = int(place * (num_calls - 1))
            faults.error = error
            code, out, err = command(*arguments, "--json")
        case = (name, call, place, errno.errorcode[error], err)
        assert code in (0, 5), case  # 0 where another way was found, such as a copy for a link
        assert json.loads(out)["exit_code"] == code, case
        assert code == 0 or len(err.strip().splitlines()[-1]) > 20, case
        whole(scene, expected)
        there = (scene / "pulled").exists() or (scene / "converted").exists()
        if code and not there:  # whole where only the flush of its directory failed
            assert command(*arguments)[0] == 0, case
        whole(scene, expected)
        for made in ("pulled", "converted"):
            assert not (scene / made).exists() or (scene / made / MANIFEST_NAME).exists()
        if call != "open":  # with it the removal of a temporary directory fails; a later process does it
            assert not list(scene.glob(".*.pulling")), case
            assert not list(scene.glob(".*.converting")), case

"""A disk that fails, or a signal, at any call of any command: the right exit code, nothing lost, nothing half
there, and the same command afterwards gives what it would have given.

The matrix is command x call x place among its calls x fault.
"""

import errno
import io
import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.manifest import MANIFEST_NAME, open_artifact, verify_artifact
from compress.registry.stored import list_tags
from compress.registry.transfer import verify
from tests.support.slow import slow
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE = RECIPE["stages"][0]
QUANTIZE = {"kind": "quantize", "round": {"kind": "rtn"}}
PUSH = {"to": "layout://registry", "name": "tiny", "aliases": ["candidate"]}
FAULTS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE, signal.SIGTERM)
"""A full disk, a broken one, one that became read-only, a network file system that vanished, and a signal."""
CALLS = ("write", "fsync", "rename", "replace", "mkdir", "link", "open", "read")
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
    """Counts the calls of one kind, and lets something happen at one of them."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.at = -1
        self.fault: int | signal.Signals = 0
        if kind == "write":  # Path.open opens every file that is written
            real_open = io.open
            monkeypatch.setattr(
                io, "open", lambda *args, **options: Watched(real_open(*args, **options), {"write"}, self)
            )
        elif kind == "read":  # open_plain makes its streams so
            real_fdopen = os.fdopen
            monkeypatch.setattr(
                os,
                "fdopen",
                lambda *args: Watched(real_fdopen(*args), {"read", "read1", "readinto", "readline"}, self),
            )
        else:
            real = getattr(os, kind)

            def call(*args: Any, **options: Any) -> Any:
                self.happen(args[0] if args else None)
                return real(*args, **options)

            monkeypatch.setattr(os, kind, call)

    def happen(self, file: Any = None) -> None:
        """Count a call; at the chosen one raise the error or send the signal."""
        self.calls += 1
        if self.calls - 1 != self.at:
            return
        if isinstance(self.fault, signal.Signals):
            os.kill(os.getpid(), self.fault)
        else:
            raise OSError(self.fault, os.strerror(self.fault), file)


class Watched:
    """A stream some of whose methods are counted; the file of an error is not named, as in real life."""

    def __init__(self, stream: Any, methods: set[str], faults: Faults) -> None:
        self._stream = stream
        self._methods = methods
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stream, name)
        if name not in self._methods:
            return method

        def call(*args: Any) -> Any:
            self._faults.happen()
            return method(*args)

        return call

    def __enter__(self) -> "Watched":
        self._stream.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._stream.__exit__(*error)

    def __iter__(self) -> Any:
        return iter(self._stream)


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
@pytest.mark.one_in(3)
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
    for fault in FAULTS:
        for left in (*scene.glob("cache"), *scene.glob("registry"), *scene.glob("runs")):
            os.rename(left, scene / f"old-{fault}-{left.name}")
        for made in ("pulled", "converted"):
            if (scene / made).exists():
                os.rename(scene / made, scene / f"old-{fault}-{made}")
        with monkeypatch.context() as patch:
            faults = Faults(call, patch)
            faults.at = int(place * (num_calls - 1))
            faults.fault = fault
            code, out, err = command(*arguments, "--json")
        case = (name, call, place, fault, err)
        assert code in exit_codes(name, call, fault), case
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


def exit_codes(name: str, call: str, fault: int | signal.Signals) -> set[int]:
    """Return the exit codes that a fault may lead to: 0 where it came too late or another way was found, such
    as a copy for a link."""
    if isinstance(fault, signal.Signals):
        return {0, 128 + fault}
    if name == "run" and call in ("open", "read"):
        return {0, 2, 5}  # a recipe that cannot be read is bad input
    return {0, 5}

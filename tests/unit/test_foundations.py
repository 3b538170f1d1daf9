"""Digests, plug-in sets and the context: small things that everything else leans on."""

import hashlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compress.context import Context
from compress.digest import canonical_json, digest_bytes, digest_file, digest_files, digest_json
from compress.errors import Interrupted, UsageError
from compress.plugins import PluginSet


def test_digests_are_sha256_of_bytes_files_and_canonical_json(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000  # more than one chunk of the file reader
    expected = "sha256:" + hashlib.sha256(data).hexdigest()
    (tmp_path / "file").write_bytes(data)
    assert digest_bytes(data) == digest_file(tmp_path / "file") == expected
    assert digest_json({"b": 1, "a": [None, "ü"]}) == digest_bytes('{"a":[null,"ü"],"b":1}'.encode())


def test_many_files_are_digested_in_their_order(tmp_path: Path) -> None:
    contents = [bytes([idx]) * (40 - idx) * 4096 for idx in range(40)]
    paths = [tmp_path / f"{idx:02}" for idx in range(40)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    assert digest_files(reversed(paths)) == [digest_bytes(each) for each in reversed(contents)]
    assert digest_files([]) == []
    with pytest.raises(FileNotFoundError, match="absent"):
        digest_files([*paths, tmp_path / "absent"])


def test_a_number_that_json_does_not_have_gets_no_digest() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"loss": float("nan")})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginSet[int]]:
    """A package of two plug-in files, as `methods/` is."""
    folder = tmp_path / "plugged_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from compress.plugins import PluginSet\nNUMBERS = PluginSet('number', 'plugged_package')\n"
    )
    (folder / "one.py").write_text("from plugged_package import NUMBERS\nNUMBERS.add('one', 1)\n")
    (folder / "two.py").write_text(
        "from plugged_package import NUMBERS\n@NUMBERS.register('two')\nclass Two: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import plugged_package  # type: ignore[import-not-found]

    yield plugged_package.NUMBERS
    for name in [each for each in sys.modules if each.startswith("plugged_package")]:
        del sys.modules[name]


def test_a_file_in_the_package_is_a_member(package: PluginSet[int]) -> None:
    assert "plugged_package.one" not in sys.modules  # found on first use, not on import
    assert package.names() == ["one", "two"]
    assert package.get("one") == 1
    assert [name for name, _ in package.items()] == package.names()


def test_an_unknown_name_is_told_the_near_one(package: PluginSet[int]) -> None:
    with pytest.raises(UsageError, match=r"unknown number 'onne'\. Did you mean 'one'"):
        package.get("onne")


def test_two_members_of_one_name_are_a_defect(package: PluginSet[int]) -> None:
    package.names()
    with pytest.raises(ValueError, match="'one' is registered twice"):
        package.add("one", 2)


def test_random_streams_are_named_and_do_not_disturb_one_another(tmp_path: Path) -> None:
    ctx = Context("cpu", 7, tmp_path)
    first = torch.rand(5, generator=ctx.rng("a", "b"))
    torch.rand(5, generator=ctx.rng("c"))
    assert torch.equal(torch.rand(5, generator=ctx.rng("a", "b")), first)
    others = [ctx.rng("a"), ctx.rng("b", "a"), Context("cpu", 8, tmp_path).rng("a", "b")]
    assert not any(torch.equal(torch.rand(5, generator=other), first) for other in others)


def test_a_boundary_stops_only_when_asked_and_says_how_the_process_ends(tmp_path: Path) -> None:
    shown: list[tuple[int, int, str]] = []

    class Shown:
        def update(self, done: int, total: int, note: str) -> None:
            shown.append((done, total, note))

        def log(self, text: str) -> None: ...

    Context("cpu", 0, tmp_path, progress=Shown()).boundary(1, 3, "layer 1")
    with pytest.raises(Interrupted, match="layer 2") as stopped:
        Context("cpu", 0, tmp_path, progress=Shown(), stop_signal=lambda: signal.SIGINT).boundary(
            2, 3, "layer 2"
        )
    assert stopped.value.exit_code == 130
    assert shown == [(1, 3, "layer 1"), (2, 3, "layer 2")]

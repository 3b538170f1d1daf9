"""Full, read-only and forbidden disks: one sentence with the path and what to do, and nothing half done."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress.artifact import atomic
from compress.artifact.atomic import write_atomic
from compress.artifact.disk import explained, write_error
from compress.artifact.tensors import ShardWriter, save_tensors
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.cli import app as app_module
from compress.cli.app import main
from compress.data.tokens import TokenSet, save_token_set
from compress.errors import StorageError
from compress.registry.image import Descriptor
from compress.registry.layout import Layout

SIZE = 1 << 20
BIG = torch.zeros(SIZE, dtype=torch.uint8)


@pytest.fixture
def small_files() -> Callable[[], None]:
    """Make the kernel refuse files above 64 KiB (EFBIG) until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))

    yield limit  # type: ignore[misc]
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write has it: without a file


def save_tokens(path: Path) -> None:
    save_token_set(TokenSet(BIG.to(torch.int32).view(8, -1), 1, 1, {}), path)


def save_shards(path: Path) -> None:
    writer = ShardWriter(path.parent)
    writer.add("a", BIG)
    writer.finish()


@pytest.mark.parametrize(
    "save",
    [lambda path: save_tensors(path, {"a": BIG}), save_tokens, save_shards],
    ids=["one", "tokens", "shards"],
)
def test_a_writer_of_tensors_names_the_file_and_leaves_none(
    save: Callable[[Path], None], tmp_path: Path, small_files: Callable[[], None]
) -> None:
    small_files()
    with pytest.raises(StorageError, match=r"File too large \([\d,]+ bytes free .*Free space") as caught:
        save(tmp_path / "x.safetensors")
    assert str(caught.value.where).startswith(str(tmp_path))
    assert "--workspace" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_bytes_of_a_token_set_are_those_of_safetensors(tmp_path: Path) -> None:
    tokens = torch.arange(15, dtype=torch.int32).view(3, 5)
    source = {"title": 'a "b" \\ \n\t\x01\x7f é 😀 \u2028'}
    save_token_set(TokenSet(tokens, 4, 3, source), tmp_path / "ours")
    from safetensors import safe_open

    with safe_open(tmp_path / "ours", framework="pt") as file:
        metadata = file.metadata()
    save_file({"tokens": tokens}, tmp_path / "theirs", metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_full_disk_names_the_file_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomic(tmp_path / "a.json", b"{}")
    assert caught.value.filename == str(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_a_stage_on_a_full_disk_names_the_workspace_and_the_flag(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "w")

    def build(out: ArtifactWriter) -> None:
        full()

    with pytest.raises(StorageError, match=r"No space left on device \(.*give another --workspace") as caught:
        workspace.commit("k" * 8, "quantize", {}, build)
    assert str(tmp_path / "w") in str(caught.value)
    assert list((tmp_path / "w" / "tmp").iterdir()) == []


def test_a_workspace_that_cannot_be_made_says_which_flag_names_another(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("a file")
    for place in (tmp_path / "w", tmp_path / "w" / "below"):
        with pytest.raises(StorageError, match=rf"{tmp_path}/w is a file\. Name another place"):
            Workspace(place).scratch("k" * 8)
        with pytest.raises(StorageError, match="cannot be a directory"), Workspace(place).share():
            pass
    read_only = OSError(errno.EROFS, "Read-only file system", str(tmp_path / "w"))
    with (
        pytest.raises(StorageError, match=r"Read-only file system\. Use --workspace"),
        explained(tmp_path, hint="Use --workspace."),
    ):
        raise read_only


def test_a_push_to_a_full_disk_names_the_registry_and_stores_nothing(
    tmp_path: Path, small_files: Callable[[], None]
) -> None:
    from compress.digest import digest_bytes

    layout = Layout(tmp_path / "r")
    data = bytes(SIZE)
    small_files()
    with pytest.raises(StorageError, match=rf"{tmp_path}/r.*File too large.*Free space"):
        layout.put(Descriptor("text/plain", digest_bytes(data), len(data)), data)
    assert list((tmp_path / "r" / "blobs" / "sha256").iterdir()) == []
    assert list((tmp_path / "r" / ".tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "x", "/nowhere/a"), "/nowhere/a cannot be written: No space left on device ("),
        (OSError(errno.ENOSPC, "x"), "a file cannot be written: No space left on device. Free"),
        (OSError(errno.EDQUOT, "x", "/a"), "/a cannot be written: Disk quota exceeded ("),
        (OSError(errno.EROFS, "x", "/a"), "/a cannot be written: Read-only file system. Give this user"),
        (OSError(errno.EACCES, "x", "/a"), "/a cannot be used: Permission denied. Give this user access"),
        (OSError(errno.ENOSPC, "x", "/from", None, "/to"), "/to cannot be written"),
        (OSError(errno.ENOSPC, "x", 7), "a file cannot be written"),
        (OSError(errno.ENOENT, "x", "/a"), None),
    ],
)
def test_what_is_told_of_an_error(error: OSError, words: str | None) -> None:
    told = write_error(error)
    assert (told is None) if words is None else str(told).startswith(words)


def test_a_command_on_a_full_disk_is_one_sentence_and_5(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "a"))

    monkeypatch.setitem(app_module.COMMANDS, "fail", fail)
    assert main(["fail"]) == 5
    err = capsys.readouterr().err
    assert err.startswith(f"compress: {tmp_path}/a cannot be written: No space left on device (")
    assert len(err.splitlines()) == 1

"""The manifest and the safetensors header against safetensors itself, hashlib, and every truncation of a
file.
"""

import hashlib
import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress.artifact.header import read_header
from compress.artifact.manifest import (
    MANIFEST_NAME,
    Artifact,
    Manifest,
    describe_files,
    open_artifact,
    verify_artifact,
)
from compress.errors import CompressError, StorageError, UnsupportedFormat, UsageError


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    root = tmp_path / "artifact"
    (root / "draft").mkdir(parents=True)
    tensors = {
        "w": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "b": torch.ones(5),
        "none": torch.empty(0, 2),
    }
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    save_file({"w": torch.ones(3, dtype=torch.int64)}, root / "draft" / "model.safetensors")
    (root / "config.json").write_text('{"name": "größe"}')
    files, records = describe_files(root)
    manifest = Manifest(
        "dense", {"hidden_size": 4}, ({"i": 0},), None, {"loss": 0.1}, {"stage": "import"}, records, files
    )
    (root / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    return open_artifact(root)


def test_records_agree_with_hashlib_and_with_the_bytes_of_the_tensors(artifact: Artifact) -> None:
    for record in artifact.manifest.files:
        data = (artifact.path / record.path).read_bytes()
        assert (record.size_bytes, record.digest) == (len(data), "sha256:" + hashlib.sha256(data).hexdigest())
    assert [record.path for record in artifact.manifest.files] == [
        "config.json",
        "draft/model.safetensors",
        "model.safetensors",
    ]
    weight = torch.arange(12, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    by_name = {(record.file, record.name): record for record in artifact.manifest.tensors}
    assert by_name["model.safetensors", "w"].digest == "sha256:" + hashlib.sha256(weight).hexdigest()
    assert by_name["model.safetensors", "w"].shape == (3, 4)
    assert by_name["model.safetensors", "none"].digest == "sha256:" + hashlib.sha256(b"").hexdigest()
    assert ("draft/model.safetensors", "w") in by_name


def test_manifest_survives_its_bytes(artifact: Artifact) -> None:
    manifest = artifact.manifest
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert (
        manifest.digest
        == "sha256:" + hashlib.sha256((artifact.path / MANIFEST_NAME).read_bytes()).hexdigest()
    )
    assert replace(manifest, facts={"loss": 0.2}).digest != manifest.digest
    shuffled = replace(manifest, arch={"b": 1, "a": 2})
    assert shuffled.digest == replace(manifest, arch={"a": 2, "b": 1}).digest


def test_every_kind_of_change_is_named(artifact: Artifact) -> None:
    verify_artifact(artifact)
    config = artifact.path / "config.json"
    original = config.read_bytes()
    config.write_bytes(original.replace(b"n", b"m", 1))
    with pytest.raises(StorageError, match=r"config\.json has changed"):
        verify_artifact(artifact)
    config.unlink()
    with pytest.raises(StorageError, match=r"lacks the file 'config\.json'"):
        verify_artifact(artifact)
    config.symlink_to(artifact.path / "model.safetensors")
    with pytest.raises(StorageError, match="link"):
        verify_artifact(artifact)
    config.unlink()
    config.write_bytes(original)
    (artifact.path / "draft" / "extra.txt").write_text("x")
    with pytest.raises(StorageError, match=r"draft/extra\.txt"):
        verify_artifact(artifact)


def test_a_directory_without_a_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path)):
        open_artifact(tmp_path)
    with pytest.raises(UsageError, match="absent is not an artifact: it does not exist"):
        open_artifact(tmp_path / "absent")


def test_a_manifest_that_was_reformatted_is_not_taken_for_the_same(artifact: Artifact) -> None:
    for data in (
        json.dumps(json.loads(artifact.manifest.to_bytes())).encode(),
        artifact.manifest.to_bytes() + b"\n",
    ):
        with pytest.raises(StorageError, match="edited"):
            Manifest.from_bytes(data)


def test_a_newer_schema_is_refused_as_such(artifact: Artifact) -> None:
    newer = {**json.loads(artifact.manifest.to_bytes()), "schema_version": 2, "new": []}
    with pytest.raises(UsageError, match="schema version 2"):
        Manifest.from_bytes(json.dumps(newer).encode())


@pytest.mark.parametrize(
    "edit",
    [
        lambda value: value.pop("facts"),
        lambda value: value.update(extra=1),
        lambda value: value.update(files=[{"path": "x"}]),
        lambda value: value.update(files=3),
        lambda value: value["files"][0].update(path="../outside"),
        lambda value: value["files"][0].update(path="/etc/passwd"),
        lambda value: value["files"][0].update(path=MANIFEST_NAME),
        lambda value: value["files"][0].update(digest="sha256:../../x"),
        lambda value: value.update(schema_version="1"),
    ],
)
def test_a_malformed_or_unsafe_manifest_is_refused(artifact: Artifact, edit) -> None:
    value = json.loads(artifact.manifest.to_bytes())
    edit(value)
    with pytest.raises(StorageError):
        Manifest.from_bytes(json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False).encode() + b"\n")


def test_every_truncation_and_an_appended_byte_are_refused(artifact: Artifact, tmp_path: Path) -> None:
    whole = (artifact.path / "model.safetensors").read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(StorageError):
            read_header(cut)
    cut.write_bytes(whole + b"\0")
    with pytest.raises(StorageError, match="1 bytes after"):
        read_header(cut)


def test_ranges_point_at_the_bytes(artifact: Artifact) -> None:
    path = artifact.path / "model.safetensors"
    header = next(header for header in read_header(path) if header.name == "b")
    assert path.read_bytes()[header.begin : header.end] == struct.pack("<5f", *[1.0] * 5)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        },
        {"a": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"a": None},
    ],
)
def test_a_header_that_breaks_the_layout_is_refused(tmp_path: Path, entries) -> None:
    raw = json.dumps(entries).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    with pytest.raises(UnsupportedFormat):
        read_header(path)


def test_what_is_not_safetensors_at_all_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x80\x04pickle or anything else, long enough")
    with pytest.raises(CompressError, match="not a safetensors file"):
        read_header(path)


def test_manifests_workspace_and_registry_need_no_torch() -> None:
    code = (
        "import sys, compress.artifact.workspace, compress.registry.transfer as t;"
        "from compress.registry.protocol import REGISTRIES; REGISTRIES.names();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic', 'safetensors')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

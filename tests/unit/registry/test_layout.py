"""The OCI layout on disk: references, damage in every kind of blob, hostile content, concurrent pushes."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from compress.artifact.manifest import MANIFEST_NAME, Artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.digest import canonical_json, digest_bytes
from compress.errors import StorageError, UnsupportedFormat, UsageError
from compress.registry.image import IMAGE_MANIFEST
from compress.registry.layout import Layout
from compress.registry.ref import Ref, compose_ref, parse_ref
from compress.registry.stored import list_tags
from compress.registry.transfer import pull, pull_evidence, push, verify


def _artifact(root: Path, seed: int = 0) -> Artifact:
    def build(writer: ArtifactWriter) -> None:
        (writer.path / "config.json").write_text(f'{{"seed": {seed}}}')
        (writer.path / "weights.bin").write_bytes(bytes([seed]) * 5000)
        writer.describe(role="quantized")

    return Workspace(root / "workspace").commit(Workspace.key("test", 1, {}, {}, seed), "test", {}, build)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """`model` with evidence, pushed."""
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    (evidence / "report.json").write_text('{"kl": 0.1}')
    layout = Layout(tmp_path / "registry")
    push(layout, _artifact(tmp_path), name="model", evidence=evidence)
    return layout


def _blob(layout: Layout, digest: str) -> Path:
    return layout.root / "blobs" / "sha256" / digest.removeprefix("sha256:")


def _json(path: Path):
    return json.loads(path.read_bytes())


def _image(layout: Layout):
    return _json(_blob(layout, layout.read_tag("model", "latest").digest))


def _point_latest_at(layout: Layout, image: dict) -> None:
    """Publish a hand-made image manifest whose own digest is right."""
    data = canonical_json(image)
    _blob(layout, digest_bytes(data)).write_bytes(data)
    index = _json(layout.root / "index.json")
    entry = {"mediaType": IMAGE_MANIFEST, "digest": digest_bytes(data), "size": len(data)}
    index["manifests"] = [{**entry, "annotations": {"org.opencontainers.image.ref.name": "model:latest"}}]
    (layout.root / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layout://path/to/registry/name:tag", Ref("layout", "path/to/registry", "name", "tag")),
        ("layout://registry/name", Ref("layout", "registry", "name")),
        ("layout:///abs/registry/Name-1.2", Ref("layout", "/abs/registry", "Name-1.2")),
        ("oci://host:5000/org/name:v1", Ref("oci", "host:5000/org", "name", "v1")),
        (f"layout://r/n@sha256:{'a' * 64}", Ref("layout", "r", "n", digest=f"sha256:{'a' * 64}")),
    ],
)
def test_a_reference_and_its_text_are_inverse(text: str, expected: Ref) -> None:
    assert parse_ref(text) == expected
    assert parse_ref(str(expected)) == expected
    assert parse_ref(str(expected.pinned(f"sha256:{'b' * 64}"))) == expected.pinned(f"sha256:{'b' * 64}")


def test_a_recipe_composes_the_same_reference() -> None:
    assert compose_ref("layout://registry/", "name") == parse_ref("layout://registry/name:latest")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        "registry/name",
        "layout://name",
        "layout://r/",
        "layout://r/n:",
        "layout://r/n@sha256:ab",
        "://r/n",
        "layout://r/..:x",
    ],
)
def test_what_is_not_a_reference_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_ref(text)


def test_the_directory_is_an_oci_image_layout(layout: Layout) -> None:
    assert _json(layout.root / "oci-layout") == {"imageLayoutVersion": "1.0.0"}
    index = _json(layout.root / "index.json")
    assert (index["schemaVersion"], index["mediaType"]) == (2, "application/vnd.oci.image.index.v1+json")
    image = _image(layout)
    assert (image["schemaVersion"], image["mediaType"]) == (2, IMAGE_MANIFEST)
    assert [layer["annotations"]["org.opencontainers.image.title"] for layer in image["layers"]] == [
        "config.json",
        "weights.bin",
    ]
    evidence = next(
        entry
        for entry in index["manifests"]
        if entry["artifactType"] == "application/vnd.compress.evidence.v1"
    )
    assert (
        _json(_blob(layout, evidence["digest"]))["subject"]["digest"]
        == layout.read_tag("model", "latest").digest
    )
    for blob in (layout.root / "blobs" / "sha256").iterdir():
        assert blob.name == hashlib.sha256(blob.read_bytes()).hexdigest()


def test_the_config_blob_is_the_manifest_of_the_artifact(layout: Layout, tmp_path: Path) -> None:
    artifact = _artifact(tmp_path)
    assert _image(layout)["config"]["digest"] == artifact.digest
    assert _blob(layout, artifact.digest).read_bytes() == (artifact.path / MANIFEST_NAME).read_bytes()


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove", "link"])
@pytest.mark.parametrize("which", ["manifest", "config", "small layer", "big layer"])
def test_damage_in_any_blob_is_named_and_leaves_nothing(
    layout: Layout, tmp_path: Path, which: str, damage: str
) -> None:
    image = _image(layout)
    digest, title = {
        "manifest": (layout.read_tag("model", "latest").digest, ""),
        "config": (image["config"]["digest"], "compress.json"),
        "small layer": (image["layers"][0]["digest"], "config.json"),
        "big layer": (image["layers"][1]["digest"], "weights.bin"),
    }[which]
    _damage(_blob(layout, digest), damage, tmp_path / "elsewhere")
    ref = f"layout://{layout.root}/model"
    for act in (lambda: pull(ref, tmp_path / "out"), lambda: verify(ref)):
        with pytest.raises(StorageError, match=digest) as caught:
            act()
        assert title in str(caught.value)
        assert {"cut": "bytes instead of", "grow": "longer than"}.get(damage, "") in str(caught.value)
        assert caught.value.exit_code == 5
    assert not [entry for entry in tmp_path.iterdir() if "out" in entry.name]
    push(layout, _artifact(tmp_path), name="model")
    assert pull(ref, tmp_path / "out").digest == _artifact(tmp_path).digest  # pushing again repairs


def _damage(blob: Path, damage: str, elsewhere: Path) -> None:
    data = bytearray(blob.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        blob.write_bytes(data)
    elif damage == "cut":
        blob.write_bytes(data[:-1])
    elif damage == "grow":
        blob.write_bytes(data + b"\0")
    elif damage == "remove":
        blob.unlink()
    else:
        blob.rename(elsewhere)
        blob.symlink_to(elsewhere)


@pytest.mark.parametrize("which", ["manifest", "layer"])
def test_damage_in_the_evidence_is_found(layout: Layout, tmp_path: Path, which: str) -> None:
    (attached,) = layout.attached(layout.read_tag("model", "latest"))
    digest = (
        attached.digest
        if which == "manifest"
        else _json(_blob(layout, attached.digest))["layers"][0]["digest"]
    )
    _damage(_blob(layout, digest), "flip", tmp_path / "elsewhere")
    ref = f"layout://{layout.root}/model"
    for act in (lambda: pull_evidence(ref, tmp_path / "out"), lambda: verify(ref)):
        with pytest.raises(StorageError, match=digest):
            act()
    assert not (tmp_path / "out").exists()
    pull(ref, tmp_path / "out")  # the artifact itself is whole


@pytest.mark.parametrize(
    "title", ["../escaped", "/tmp/escaped", "a/../../escaped", "a\\b", "", ".", "a//b", MANIFEST_NAME, None]
)
def test_titles_that_leave_the_destination_are_refused(
    layout: Layout, tmp_path: Path, title: str | None
) -> None:
    image = _image(layout)
    image["layers"][0]["annotations"] = {} if title is None else {"org.opencontainers.image.title": title}
    _point_latest_at(layout, image)
    before = {entry.name for entry in tmp_path.iterdir()}
    with pytest.raises(StorageError):
        pull(f"layout://{layout.root}/model", tmp_path / "out")
    assert {entry.name for entry in tmp_path.iterdir()} == before


def _attach(layout: Layout, change: dict) -> None:
    """Attach a hand-made variant of the evidence, whose own digest is right, as the newest."""
    subject = layout.read_tag("model", "latest")
    (attached,) = layout.attached(subject)
    data = canonical_json({**_json(_blob(layout, attached.digest)), **change})
    forged = replace(attached, digest=digest_bytes(data), size_bytes=len(data))
    layout.put(forged, data)
    layout.attach(forged, subject)


@pytest.mark.parametrize("title", ["../escaped", "/tmp/escaped", "a/../../escaped", MANIFEST_NAME])
def test_evidence_cannot_leave_the_destination_or_pose_as_an_artifact(
    layout: Layout, tmp_path: Path, title: str
) -> None:
    report = layout.attached(layout.read_tag("model", "latest"))[0]
    (layer,) = _json(_blob(layout, report.digest))["layers"]
    _attach(layout, {"layers": [{**layer, "annotations": {"org.opencontainers.image.title": title}}]})
    with pytest.raises(StorageError):
        pull_evidence(f"layout://{layout.root}/model", tmp_path / "out")
    assert not [entry for entry in tmp_path.iterdir() if "out" in entry.name or "escaped" in entry.name]


def test_two_evidence_files_of_one_title_are_refused(layout: Layout, tmp_path: Path) -> None:
    report = layout.attached(layout.read_tag("model", "latest"))[0]
    _attach(layout, {"layers": _json(_blob(layout, report.digest))["layers"] * 2})
    with pytest.raises(StorageError, match="one title"):
        pull_evidence(f"layout://{layout.root}/model", tmp_path / "out")


def test_evidence_of_another_artifact_is_refused(layout: Layout, tmp_path: Path) -> None:
    other = push(layout, _artifact(tmp_path, 1), name="other")
    subject = layout.find(other.manifest_digest)
    assert subject is not None
    _attach(layout, {"subject": subject.to_json()})
    with pytest.raises(StorageError, match="another artifact"):
        pull_evidence(f"layout://{layout.root}/model", tmp_path / "out")


def test_a_manifest_that_disagrees_with_its_config_is_refused(layout: Layout, tmp_path: Path) -> None:
    image = _image(layout)
    _point_latest_at(layout, {**image, "layers": image["layers"][:1]})
    with pytest.raises(StorageError, match="other files"):
        pull(f"layout://{layout.root}/model", tmp_path / "out")


@pytest.mark.parametrize(
    "entry",
    [
        {"digest": "sha256:../../../etc/passwd"},
        {"digest": "md5:00"},
        {"size": -1},
        {"size": "9"},
        {"size": 1 << 40},
    ],
)
def test_a_hostile_descriptor_is_refused(layout: Layout, tmp_path: Path, entry: dict) -> None:
    image = _image(layout)
    image["config"] |= entry
    _point_latest_at(layout, image)
    with pytest.raises(StorageError):
        verify(f"layout://{layout.root}/model")


def test_links_are_not_followed_out_of_artifacts_and_evidence(layout: Layout, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "evidence" / "link").symlink_to(secret)
    with pytest.raises(StorageError, match="link"):
        push(layout, _artifact(tmp_path), name="model", evidence=tmp_path / "evidence")
    artifact = _artifact(tmp_path)
    config = artifact.path / "config.json"
    config.rename(tmp_path / "moved.json")
    config.symlink_to(tmp_path / "moved.json")
    with pytest.raises(StorageError, match=r"config\.json"):
        push(Layout(tmp_path / "second"), artifact, name="model")


def test_a_destination_in_use_is_left_alone(layout: Layout, tmp_path: Path) -> None:
    ref = f"layout://{layout.root}/model"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("full", "file", "link"):
        with pytest.raises(UsageError, match="empty directory"):
            pull(ref, tmp_path / name)
    pull(ref, tmp_path / "empty")
    assert [entry.name for entry in (tmp_path / "full").iterdir()] == ["mine"]


def test_a_directory_of_other_things_does_not_become_a_registry(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="not an OCI image layout"):
        push(Layout(tmp_path), _artifact(tmp_path / "elsewhere"), name="model")
    assert not (tmp_path / "blobs").exists()


def test_entries_of_other_tools_and_their_fields_stay(layout: Layout, tmp_path: Path) -> None:
    path = layout.root / "index.json"
    foreign = {
        "mediaType": IMAGE_MANIFEST,
        "digest": "sha256:" + "0" * 64,
        "size": 2,
        "platform": {"os": "linux"},
    }
    index = _json(path)
    index["annotations"] = {"owner": "somebody"}
    index["manifests"].insert(0, {**foreign, "annotations": {"org.opencontainers.image.ref.name": "v1"}})
    path.write_text(json.dumps(index))
    push(layout, _artifact(tmp_path, 1), name="model")
    assert _json(path)["annotations"] == {"owner": "somebody"}
    assert _json(path)["manifests"][0] == index["manifests"][0]
    assert [item.tag for item in list_tags(layout)] == ["latest"]


def test_a_damaged_or_newer_layout_is_refused(layout: Layout) -> None:
    (layout.root / "index.json").write_text("{")
    with pytest.raises(StorageError, match="damaged"):
        list_tags(layout)
    (layout.root / "index.json").write_text('{"manifests": 1}')
    with pytest.raises(StorageError, match="damaged"):
        list_tags(layout)
    (layout.root / "index.json").write_text('{"manifests": []}')
    (layout.root / "oci-layout").write_text('{"imageLayoutVersion": "2.0.0"}')
    with pytest.raises(UnsupportedFormat, match=r"2\.0\.0"):
        list_tags(layout)


def test_concurrent_pushes_lose_no_tag(tmp_path: Path) -> None:
    artifact = _artifact(tmp_path)
    code = (
        "import sys; from pathlib import Path; from compress.artifact.manifest import open_artifact;"
        "from compress.registry.layout import Layout; from compress.registry.transfer import push;"
        "[push(Layout(Path(sys.argv[1])), open_artifact(Path(sys.argv[2])), "
        "name=f'model-{sys.argv[3]}-{i}') for i in range(8)]"
    )
    root = tmp_path / "registry"
    workers = [
        subprocess.Popen([sys.executable, "-c", code, str(root), str(artifact.path), str(number)])
        for number in range(3)
    ]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert {item.name for item in list_tags(Layout(root))} == {
        f"model-{worker}-{i}" for worker in range(3) for i in range(8)
    }


def test_only_files_of_dead_pushes_are_collected(layout: Layout, tmp_path: Path) -> None:
    stale = layout.root / ".tmp" / "stale"
    fresh = layout.root / ".tmp" / "fresh"
    stale.touch()
    fresh.touch()
    os.utime(stale, (0, 0))
    push(layout, _artifact(tmp_path, 1), name="model")
    assert not stale.exists()
    assert fresh.exists()

"""Registries that other tools, or nobody sane, wrote to: one odd entry costs nothing but itself, and every
file may be of any kind.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.cli.push import _check_evidence
from compress.digest import canonical_json, digest_bytes
from compress.errors import StorageError, UsageError
from compress.registry.evidence import seal_evidence
from compress.registry.image import IMAGE_MANIFEST, REF_NAME, SUBJECT, TITLE, ImageManifest
from compress.registry.layout import Layout
from compress.registry.protocol import open_registry
from compress.registry.ref import parse_ref, parse_registry
from compress.registry.stored import list_tags, resolve
from compress.registry.transfer import pull, push, verify
from tests.support.hostile import make_fifo, refusal

DIGEST = f"sha256:{'a' * 64}"
WRONG: tuple[Any, ...] = (None, "x", 3, True, 0.5, [], [3], {}, {"a": 3})
BLOB = {"mediaType": IMAGE_MANIFEST, "digest": DIGEST, "size": 3}
FOREIGN: list[Any] = [
    *WRONG,
    *({**BLOB, "annotations": value} for value in WRONG),
    *({**BLOB, "annotations": {REF_NAME: value}} for value in WRONG),
    *({**BLOB, "annotations": {SUBJECT: value}} for value in WRONG),
    *({**BLOB, name: value, "annotations": {REF_NAME: "other:v1"}} for name in BLOB for value in WRONG),
    {**BLOB, "size": 2**70, "annotations": {REF_NAME: "other:v1"}},
    {**BLOB, "annotations": {REF_NAME: "\x1b[2J:v1"}},
    {**BLOB, "annotations": {REF_NAME: "other:\u202e"}},
    {**BLOB, "annotations": {REF_NAME: "latest"}},
]


def _artifact(root: Path) -> Artifact:
    def build(writer: ArtifactWriter) -> None:
        (writer.path / "weights.bin").write_bytes(bytes(5000))
        writer.describe(role="quantized")

    return Workspace(root / "workspace").commit(Workspace.key("test", 1, {}, {}, 0), "test", {}, build)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "registry")
    push(layout, _artifact(tmp_path), name="model")
    return layout


def _add(layout: Layout, entry: Any) -> None:
    path = layout.root / "index.json"
    index = json.loads(path.read_bytes())
    path.write_text(json.dumps({**index, "manifests": [entry, *index["manifests"], entry]}))


@pytest.mark.parametrize("entry", FOREIGN, ids=lambda value: repr(value)[:90])
def test_an_odd_entry_costs_nothing_but_itself(entry: Any, layout: Layout, tmp_path: Path) -> None:
    _add(layout, entry)
    url = f"layout://{layout.root}"
    assert "model" in {tag.name for tag in list_tags(url)}
    verify(f"{url}/model")
    assert pull(f"{url}/model", tmp_path / "pulled").manifest.role == "quantized"
    push(layout, _artifact(tmp_path), name="again")
    verify(f"{url}/again")
    assert entry in json.loads((layout.root / "index.json").read_bytes())["manifests"]


@pytest.mark.parametrize("name", ["mediaType", "digest", "size"])
def test_the_odd_entry_itself_is_refused(name: str, layout: Layout) -> None:
    _add(layout, {**BLOB, name: ["x"], "annotations": {REF_NAME: "other:v1"}})
    assert "index.json" in refusal(lambda: resolve(f"layout://{layout.root}/other:v1"), exit_codes=(5,))


@pytest.mark.parametrize("value", [*WRONG, {"manifests": {}}, {"manifests": "x"}], ids=repr)
def test_an_index_that_is_none_is_refused(value: Any, layout: Layout) -> None:
    (layout.root / "index.json").write_text(json.dumps(value))
    assert str(layout.root) in refusal(lambda: list_tags(f"layout://{layout.root}"), exit_codes=(5,))


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_version_that_is_none_is_refused(value: Any, layout: Layout) -> None:
    for document in (value, {"imageLayoutVersion": value}):
        (layout.root / "oci-layout").write_text(json.dumps(document))
        refusal(lambda: list_tags(f"layout://{layout.root}"))


@pytest.mark.parametrize("name", ["oci-layout", "index.json"])
def test_a_nested_or_special_file_is_refused(name: str, layout: Layout) -> None:
    (layout.root / name).write_bytes(b"[" * 300_000)
    assert "nested" in refusal(lambda: list_tags(f"layout://{layout.root}"), exit_codes=(5,))
    make_fifo(layout.root / name)
    assert "is a FIFO" in refusal(lambda: list_tags(f"layout://{layout.root}"), exit_codes=(5,))


def test_a_fifo_in_the_place_of_a_blob_is_refused(layout: Layout, tmp_path: Path) -> None:
    for blob in (layout.root / "blobs" / "sha256").iterdir():
        make_fifo(blob)
    ref = f"layout://{layout.root}/model"
    assert "is a FIFO" in refusal(lambda: verify(ref), exit_codes=(5,))
    assert "is a FIFO" in refusal(lambda: pull(ref, tmp_path / "pulled"), exit_codes=(5,))


@pytest.mark.parametrize(
    "place",
    [
        "r\0",
        "r\n",
        "a\x1b[2J",
        "a\u202eb",
        " ",
        "",
        "\t",
        "~nobody-has-this-name/r",
        "a" * 300,
        "a/" * 4000,
        "\ud800",
    ],
    ids=ascii,
)
def test_a_place_that_is_no_path_is_refused(place: str) -> None:
    refusal(lambda: open_registry(f"layout://{place}").tags(), exit_codes=(2,))
    refusal(lambda: list_tags(f"layout://{place}"), exit_codes=(2,))
    refusal(lambda: open_registry(parse_ref(f"layout://{place}/name:tag").registry), exit_codes=(2,))


def test_a_place_below_a_file_holds_no_registry(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="there is no registry"):
        list_tags(f"layout://{tmp_path / 'file'}")
    assert parse_registry("layout://größe ist gut/x")[1] == "größe ist gut/x"


@pytest.mark.parametrize("destination", [".", "..", "/", "a/.."])
def test_a_pull_to_what_has_no_new_name_is_refused(
    destination: str, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ref = f"layout://{layout.root}/model"
    assert "./model" in refusal(lambda: pull(ref, Path(destination)), exit_codes=(2,))


@pytest.mark.parametrize("taken", ["directory", "file", "fifo"])
def test_a_pull_to_what_exists_is_refused(taken: str, layout: Layout, tmp_path: Path) -> None:
    place = tmp_path / "taken"
    if taken == "directory":
        place.mkdir()
        (place / "file").touch()
    elif taken == "file":
        place.touch()
    else:
        make_fifo(place)
    message = refusal(lambda: pull(f"layout://{layout.root}/model", place), exit_codes=(2,))
    assert "name a new one" in message
    below = refusal(lambda: pull(f"layout://{layout.root}/model", place / "file" / "below"))
    assert str(place) in below


IMAGE: dict[str, Any] = {
    "artifactType": "x",
    "config": BLOB,
    "layers": [{**BLOB, "annotations": {TITLE: "file"}}],
    "subject": BLOB,
}
IMAGES: list[Any] = [
    *WRONG,
    *(
        IMAGE | {name: value}
        for name in IMAGE
        for value in WRONG
        if (name, value) not in (("subject", None), ("artifactType", "x"), ("layers", []))
    ),
    *(IMAGE | {"layers": [value]} for value in WRONG),
    *(
        IMAGE | {"layers": [{**BLOB, "annotations": {TITLE: title}}]}
        for title in (
            *(each for each in WRONG if each != "x"),
            "",
            "a\x1b",
            "a\u202e",
            "../a",
            "/a",
            "a//b",
            "a\\b",
            "\u009b",
        )
    ),
    *(
        IMAGE | {"layers": [{**BLOB, "size": size, "annotations": {TITLE: "x"}}]}
        for size in (-1, 2**70, True, 1.0)
    ),
]


@pytest.mark.parametrize("value", IMAGES, ids=lambda value: ascii(value)[:90])
def test_an_image_manifest_with_a_wrong_type_is_refused(value: Any) -> None:
    ImageManifest.from_bytes(canonical_json(IMAGE), "here")
    refusal(lambda: ImageManifest.from_bytes(json.dumps(value).encode(), "here"), exit_codes=(5,))


def test_a_descriptor_of_an_impossible_size_is_refused_before_it_is_read(
    layout: Layout, tmp_path: Path
) -> None:
    index = json.loads((layout.root / "index.json").read_bytes())
    index["manifests"] = [{**each, "size": 2**50} for each in index["manifests"]]
    (layout.root / "index.json").write_text(json.dumps(index))
    with pytest.raises(StorageError, match="too many for a manifest"):
        pull(f"layout://{layout.root}/model", tmp_path / "pulled")


@pytest.mark.parametrize(
    "report",
    [
        *(value for value in WRONG if value != {} and value != {"a": 3}),
        *({"artifact": value} for value in WRONG if value not in (None, {}, {"a": 3})),
        *({"verdict": value} for value in WRONG if value not in (None, {}, {"a": 3})),
        {"artifact": {"digest": 3}},
        {"verdict": {"passed": "no"}},
        {"verdict": {"passed": False, "reasons": [3]}},
        {"artifact": {"digest": digest_bytes(b"")}},
    ],
    ids=repr,
)
def test_a_report_with_a_wrong_type_is_refused(report: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    assert str(file) in refusal(lambda: _check_evidence(file, DIGEST), exit_codes=(2,))
    make_fifo(file)
    assert "is a FIFO" in refusal(lambda: _check_evidence(file, DIGEST))


def _evidence(root: Path) -> Path:
    root.mkdir()
    (root / "report.html").write_text("<html></html>")
    seal_evidence(root)
    return root


def test_evidence_that_has_lost_its_seal_is_not_pushed(layout: Layout, tmp_path: Path) -> None:
    evidence = _evidence(tmp_path / "evidence")
    (evidence / "evidence.json").unlink()
    with pytest.raises(StorageError, match=r"lacks evidence\.json"):
        push(layout, _artifact(tmp_path), name="model", evidence=evidence)


def test_a_pull_gives_the_artifact_and_its_evidence_or_neither(layout: Layout, tmp_path: Path) -> None:
    push(layout, _artifact(tmp_path), name="model", evidence=_evidence(tmp_path / "evidence"))
    ref = f"layout://{layout.root}/model:latest"
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    for beside in (full, tmp_path / "to", tmp_path / "to" / "inside"):
        with pytest.raises(UsageError):
            pull(ref, tmp_path / "to", evidence=beside)
        assert not (tmp_path / "to").exists()
    pull(ref, tmp_path / "to", evidence=tmp_path / "proof")
    assert (tmp_path / "proof" / "report.html").is_file()
    (report,) = (each for each in layout.root.glob("blobs/sha256/*") if each.read_bytes() == b"<html></html>")
    report.chmod(0o644)
    report.write_bytes(b"<html></html!")
    with pytest.raises(StorageError, match="damaged"):
        pull(ref, tmp_path / "again", evidence=tmp_path / "proof-again")
    assert not (tmp_path / "again").exists()
    assert not (tmp_path / "proof-again").exists()


def test_a_place_that_can_be_no_registry_is_known_without_making_anything(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(UsageError):
            Layout(place).check_place()
    Layout(tmp_path / "new" / "registry").check_place()
    assert not (tmp_path / "new").exists()

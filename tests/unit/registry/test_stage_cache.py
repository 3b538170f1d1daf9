"""Results of stages in registries: what comes back is what went in, or nothing."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compress.artifact.key_parts import KeyParts
from compress.artifact.manifest import MANIFEST_NAME, Artifact, verify_artifact
from compress.artifact.workspace import Workspace
from compress.context import SilentProgress
from compress.digest import canonical_json, digest_bytes
from compress.errors import StorageError, UsageError
from compress.pipeline.cache import adopt
from compress.registry.image import FILE_LAYER, IMAGE_MANIFEST, Descriptor
from compress.registry.protocol import open_registry
from compress.registry.stage_cache import StageCache, parse_cache_ref
from compress.registry.transfer import pull, push
from tests.support import oci_server
from tests.support.registries import place_of
from tests.support.stored_run import recipe_of, store_run

SILENT = SilentProgress()
SCHEMES = ("layout", "s3", "oci+http")


@pytest.fixture
def oci() -> oci_server.Oci:
    return oci_server.Oci()


@pytest.fixture(params=SCHEMES)
def url(request: pytest.FixtureRequest, oci: oci_server.Oci, tmp_path: Path, monkeypatch) -> str:
    """The place of a cache in a registry of each kind that can be one."""
    if request.param == "oci+http":
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        return f"oci+http://{oci_server.start(oci)}/org/stages"
    return f"{place_of(request.param, tmp_path, monkeypatch)}/stages"


@pytest.fixture
def stored(tmp_path: Path) -> list[tuple[KeyParts, Artifact]]:
    return store_run(Workspace(tmp_path / "first"), *recipe_of())


def taken(cache: StageCache, parts: KeyParts, workspace: Workspace) -> Artifact:
    """Bring an entry into a workspace."""
    found = cache.look_up(parts.key)
    assert found is not None
    return adopt(cache, cache.entry(parts, found), workspace, SILENT)


def test_an_entry_comes_back_as_it_went(
    url: str, stored: list[tuple[KeyParts, Artifact]], tmp_path: Path
) -> None:
    second = Workspace(tmp_path / "second")
    cache = StageCache(url)
    for parts, artifact in stored:
        assert cache.store(parts, artifact, progress=SILENT) > 0
        again = taken(StageCache(url), parts, second)
        verify_artifact(again)
        assert again.digest == artifact.digest
        assert second.get(parts.key) == again
        assert second.parts_of(parts.key) == parts
        assert cache.store(parts, artifact, progress=SILENT) == 0
    assert set(StageCache(url).entry_keys()) == {parts.key for parts, _ in stored}
    found = cache.look_up(stored[0][0].key)
    assert cache.entry_of_key(stored[0][0].key, found).parts == stored[0][0]


def test_a_miss_is_one_request(
    oci: oci_server.Oci, stored: list[tuple[KeyParts, Artifact]], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    cache = StageCache(f"oci+http://{oci_server.start(oci)}/org/stages")
    assert cache.look_up(stored[0][0].key) is None
    assert len(oci.requests) == 1


def test_a_cache_shares_its_blobs_with_pushed_artifacts_and_is_no_artifact(
    stored: list[tuple[KeyParts, Artifact]], tmp_path: Path
) -> None:
    parts, artifact = stored[-1]
    registry = f"layout://{tmp_path}/registry"
    push(open_registry(registry), artifact, name="model")
    cache = StageCache(f"{registry}/stages")
    assert cache.store(parts, artifact, progress=SILENT) == 2  # the parts of the key, and the manifest
    with pytest.raises(UsageError, match="not an artifact"):
        pull(f"{registry}/stages:{parts.key}", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_entry_under_a_key_is_refused(
    url: str, stored: list[tuple[KeyParts, Artifact]], tmp_path: Path
) -> None:
    """A tag that was moved to the result of another stage, to a pushed artifact, or to an older version."""
    cache = StageCache(url)
    registry = open_registry(url.rpartition("/")[0]).repository("stages")
    (parts, _), (other, artifact) = stored[:2]
    cache.store(other, artifact, progress=SILENT)
    registry.write_tag("stages", [parts.key], cache.look_up(other.key))
    assert refused(cache, parts, tmp_path, "another digest than the key")
    pushed = push(registry, artifact, name="stages")
    registry.write_tag("stages", [other.key], registry.find(pushed.manifest_digest))
    assert refused(cache, other, tmp_path, "no result of a stage")
    newer = replace(other, version=other.version + 1)
    assert StageCache(url).look_up(newer.key) is None


def refused(cache: StageCache, parts: KeyParts, root: Path, match: str) -> bool:
    """Return whether an entry is refused, with those words, and nothing of it stored."""
    workspace = Workspace(root / "refusing")
    with pytest.raises(StorageError, match=match):
        taken(cache, parts, workspace)
    left = [*(workspace.root / "store").glob("*"), *(workspace.root / "tmp").glob("*")]
    return left == []


def rewritten(
    root: Path, parts: KeyParts, change: Callable[[dict], object], *, files: dict[str, bytes] | None = None
) -> StageCache:
    """Return the cache of a layout in which an entry's image manifest was changed by hand."""
    url = f"layout://{root}/cache"
    registry = open_registry(url)
    for data in (files or {}).values():
        registry.put(Descriptor(FILE_LAYER, digest_bytes(data), len(data)), data)
    with registry.get(registry.read_tag("stages", parts.key)) as stream:
        image = json.loads(stream.read())
    change(image)
    data = canonical_json(image)
    described = Descriptor(IMAGE_MANIFEST, digest_bytes(data), len(data))
    registry.put(described, data)
    registry.write_tag("stages", [parts.key], described)
    return StageCache(f"{url}/stages")


def layer(title: str, data: bytes) -> dict:
    described = {"mediaType": FILE_LAYER, "digest": digest_bytes(data), "size": len(data)}
    return {**described, "annotations": {"org.opencontainers.image.title": title}}


@pytest.mark.parametrize("what", ["layer changed", "layer missing", "layer added", "escapes", "manifest"])
def test_an_entry_that_was_tampered_with_is_refused(
    what: str, stored: list[tuple[KeyParts, Artifact]], tmp_path: Path
) -> None:
    parts, artifact = stored[1]
    StageCache(f"layout://{tmp_path}/cache/stages").store(parts, artifact, progress=SILENT)
    other = b"other bytes"
    described = json.loads((artifact.path / MANIFEST_NAME).read_text())
    described["facts"] = {"scheme": "forged"}
    changes: dict[str, tuple[Callable[[dict], object], bytes, str]] = {
        "layer changed": (
            lambda image: image["layers"].__setitem__(0, layer("config.json", other)),
            other,
            "not those of its manifest",
        ),
        "layer missing": (lambda image: image["layers"].pop(0), other, "not those of its manifest"),
        "layer added": (
            lambda image: image["layers"].append(layer("more", other)),
            other,
            "not those of its manifest",
        ),
        "escapes": (
            lambda image: image["layers"].append(layer("../../evil", other)),
            other,
            "refused as unsafe",
        ),
        "manifest": (
            lambda image: image["layers"].__setitem__(
                -1, layer("manifest/compress.json", json.dumps(described).encode())
            ),
            json.dumps(described).encode(),
            "was edited",
        ),
    }
    change, data, words = changes[what]
    assert refused(rewritten(tmp_path, parts, change, files={"x": data}), parts, tmp_path, words)
    assert not (tmp_path / "evil").exists()


def test_a_result_of_other_inputs_is_refused(stored: list[tuple[KeyParts, Artifact]], tmp_path: Path) -> None:
    parts, artifact = stored[1]
    cache = StageCache(f"layout://{tmp_path}/cache/stages")
    with pytest.raises(StorageError, match="another key"):
        cache.store(replace(parts, seed=9), artifact, progress=SILENT)
    with pytest.raises(StorageError, match="another key"):
        cache.store(parts, stored[0][1], progress=SILENT)


@pytest.mark.parametrize("size", [1.0, 0.5])
def test_a_damaged_blob_is_refused(
    size: float, stored: list[tuple[KeyParts, Artifact]], tmp_path: Path
) -> None:
    parts, artifact = stored[1]
    cache = StageCache(f"layout://{tmp_path}/cache/stages")
    cache.store(parts, artifact, progress=SILENT)
    record = next(each for each in artifact.manifest.files if each.path == "part/weights.bin")
    blob = tmp_path / "cache" / "blobs" / "sha256" / record.digest.removeprefix("sha256:")
    data = bytearray(blob.read_bytes()[: int(size * record.size_bytes)])
    data[0] ^= 1
    blob.write_bytes(data)
    assert refused(cache, parts, tmp_path, "is damaged")


@pytest.mark.parametrize("scheme", ["hf", "mlflow+http"])
def test_a_place_for_models_is_no_cache(scheme: str) -> None:
    with pytest.raises(UsageError, match="cannot be a cache"):
        StageCache(f"{scheme}://owner/stages")


@pytest.mark.parametrize(
    "text", ["", "stages", "layout://", "layout://stages", "layout://a/b c", "x://a/b:t"]
)
def test_what_names_no_cache_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_cache_ref(text)


def test_tags_that_are_no_keys_are_passed_over(
    stored: list[tuple[KeyParts, Artifact]], tmp_path: Path
) -> None:
    registry = open_registry(f"layout://{tmp_path}/cache")
    push(registry, stored[0][1], name="stages", aliases=["a.b.c"])
    cache = StageCache(f"layout://{tmp_path}/cache/stages")
    assert cache.entry_keys() == ()

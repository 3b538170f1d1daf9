"""What every registry promises, over all registered ones, through push, pull, verify and the tags."""

import hashlib
from pathlib import Path

import pytest

from compress.artifact.manifest import Artifact, verify_artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.digest import digest_bytes
from compress.errors import SignatureRefused, StorageError, UsageError
from compress.registry.image import FILE_LAYER, Descriptor
from compress.registry.promotion import last_move, promote, rollback
from compress.registry.protocol import REGISTRIES, GuardedRegistry, Registry, Tag, open_registry
from compress.registry.ref import parse_ref
from compress.registry.signatures import store_signature
from compress.registry.stored import list_tags, resolve
from compress.registry.transfer import (
    attach_evidence,
    check_pushed_signature,
    pull,
    pull_evidence,
    push,
    sign_pushed,
    verify,
)
from compress.sign.key import KeySigner, KeyVerifier
from compress.sign.signature import check_directory, sign_directory, signature_path
from tests.support.registries import SAME_BACKEND, place_of
from tests.support.signing_keys import new_key


@pytest.fixture(params=[name for name in REGISTRIES.names() if name not in SAME_BACKEND])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return place_of(request.param, tmp_path, monkeypatch)


def make_artifact(root: Path, seed: int = 0) -> Artifact:
    def build(writer: ArtifactWriter) -> None:
        (writer.path / "draft").mkdir()
        (writer.path / "config.json").write_text(f'{{"seed": {seed}}}')
        (writer.path / "draft" / "weights.bin").write_bytes(hashlib.sha256(bytes([seed])).digest() * 1000)
        (writer.path / "same.bin").write_bytes(hashlib.sha256(bytes([seed])).digest() * 1000)
        (writer.path / "empty.txt").touch()
        writer.describe(role="quantized", facts={"seed": seed})

    return Workspace(root / "workspace").commit(Workspace.key("test", 1, {}, {}, seed), "test", {}, build)


def make_evidence(root: Path, text: str = '{"kl": 1}') -> Path:
    path = root / f"evidence-{len(text)}"
    (path / "plots").mkdir(parents=True)
    (path / "report.json").write_text(text)
    (path / "plots" / "kl.svg").write_text("<svg/>")
    return path


def _content(path: Path) -> dict[str, bytes]:
    return {
        entry.relative_to(path).as_posix(): entry.read_bytes() for entry in path.rglob("*") if entry.is_file()
    }


def test_a_blob_is_stored_once_and_read_back(url: str) -> None:
    registry = open_registry(url).repository("model")
    data = b"some bytes"
    blob = Descriptor(FILE_LAYER, digest_bytes(data), len(data), "file")
    registry.put(blob, data)
    registry.put(blob, data)
    assert registry.has(blob)
    with registry.get(blob) as stream:
        assert stream.read() == data


def test_a_blob_that_is_not_what_it_claims_is_refused(url: str) -> None:
    registry = open_registry(url).repository("model")
    blob = Descriptor(FILE_LAYER, digest_bytes(b"right"), 5, "file")
    for wrong in (b"wrong", b"right and more", b"rig"):
        with pytest.raises(StorageError):
            registry.put(blob, wrong)
    assert not registry.has(blob)
    with pytest.raises(StorageError), registry.get(blob):
        pytest.fail("a blob that was never stored")


@pytest.mark.one_in(8)
def test_what_is_pulled_is_what_was_pushed(url: str, tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path)
    result = push(open_registry(url), artifact, name="model")
    pulled = pull(f"{url}/model", tmp_path / "out")
    verify_artifact(pulled)
    assert _content(pulled.path) == _content(artifact.path)
    assert pulled.digest == artifact.digest == result.artifact_digest
    assert result.size_bytes == artifact.size_bytes
    report = verify(f"{url}/model:latest")
    assert (report.artifact_digest, report.manifest_digest) == (artifact.digest, result.manifest_digest)


@pytest.mark.one_in(8)
def test_pushing_again_adds_nothing(url: str, tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path)
    evidence = make_evidence(tmp_path)
    registry = open_registry(url)
    first = push(registry, artifact, name="model", aliases=["a"], evidence=evidence)
    tags = list_tags(url)
    second = push(registry, artifact, name="model", aliases=["a"], evidence=evidence)
    assert (
        first.num_new_blobs == 3 + 2 + 2 + 2
    )  # three distinct files, two evidence files, two configs, two manifests
    assert second.num_new_blobs == 0
    assert list_tags(registry) == tags
    assert verify(f"{url}/model").evidence_digests == (first.evidence_digest,)


@pytest.mark.one_in(8)
def test_tags_move_and_the_digest_stays(url: str, tmp_path: Path) -> None:
    registry = open_registry(url)
    old = make_artifact(tmp_path, 1)
    new = make_artifact(tmp_path, 2)
    first = push(registry, old, name="model", aliases=["candidate", "stable"])
    pinned = resolve(f"{url}/model:stable")
    push(registry, new, name="model", aliases=["candidate"])
    push(registry, old, name="other")
    assert [(item.name, item.tag) for item in list_tags(url)] == [
        ("model", "candidate"), ("model", "latest"), ("model", "stable"), ("other", "latest"),
    ]  # fmt: skip
    assert pinned.digest == first.manifest_digest
    digests = {tag: verify(f"{url}/model:{tag}").artifact_digest for tag in ("candidate", "latest", "stable")}
    assert digests == {"candidate": new.digest, "latest": new.digest, "stable": old.digest}
    push(registry, new, name="model", aliases=["stable"])
    push(registry, new, name="other")
    assert pull(str(pinned), tmp_path / "out").digest == old.digest  # untagged now, still there


@pytest.mark.one_in(8)
def test_guarded_tags_move_only_while_the_guard_points_where_it_did(url: str, tmp_path: Path) -> None:
    registry = open_registry(url).repository("model")
    if not isinstance(registry, GuardedRegistry):
        pytest.skip("makes no promise about two writers")
    old = push(registry, make_artifact(tmp_path, 1), name="model", aliases=["stable"])
    new = push(registry, make_artifact(tmp_path, 2), name="model")
    found = {each: registry.find(each.manifest_digest) for each in (old, new)}
    assert found[old] is not None
    assert found[new] is not None

    def moves(tags: list[str], guard: str, expected: str | None) -> bool:
        before = list_tags(url)
        moved = registry.write_tag_if("model", tags, found[new], guard=guard, expected=expected)
        assert moved or list_tags(url) == before
        return moved

    assert not moves(["stable", "extra"], "stable", new.manifest_digest)
    assert not moves(["stable"], "stable", None)
    assert not moves(["stable"], "absent", old.manifest_digest)
    assert moves(["extra"], "stable", old.manifest_digest)  # the guard itself need not move
    assert moves(["stable", "next"], "stable", old.manifest_digest)
    assert not moves(["stable"], "stable", old.manifest_digest)
    assert moves(["fresh"], "fresh", None)
    for tag in ("stable", "next", "extra", "fresh"):
        assert resolve(f"{url}/model:{tag}").digest == new.manifest_digest
    assert registry.find(old.manifest_digest) == found[old]


@pytest.mark.one_in(8)
def test_an_alias_goes_back_the_way_it_came(url: str, tmp_path: Path) -> None:
    registry = open_registry(url).repository("model")
    if not isinstance(registry, GuardedRegistry):
        pytest.skip("makes no promise about two writers")
    ref = parse_ref(f"{url}/model:stable")
    held: str | None = None
    digests = []
    for seed in (1, 2, 3):
        found = registry.find(push(registry, make_artifact(tmp_path, seed), name="model").manifest_digest)
        assert found is not None
        promote(registry, "model", ("stable",), found, alias="stable", expected=held, reason=f"step {seed}")
        held = found.digest
        digests.append(held)
    last = last_move(registry, "model", "stable")
    assert last is not None
    assert (last.kind, last.before, last.after, last.reason) == ("promotion", *digests[1:], "step 3")
    for target in (digests[1], digests[0]):
        assert rollback(ref, reason="slower").after == target
        assert resolve(ref).digest == target
    with pytest.raises(UsageError, match="--to"):
        rollback(ref)
    assert rollback(ref, to=digests[2]).before == digests[0]
    with pytest.raises(UsageError, match="no evidence"):
        pull_evidence(ref, tmp_path / "none")  # records are none


@pytest.mark.one_in(8)
def test_evidence_travels_beside_the_artifact(url: str, tmp_path: Path) -> None:
    registry = open_registry(url)
    artifact = make_artifact(tmp_path)
    push(registry, artifact, name="model")
    with pytest.raises(UsageError, match="no evidence"):
        pull_evidence(f"{url}/model", tmp_path / "none")
    before = resolve(f"{url}/model")
    older = make_evidence(tmp_path)
    newer = make_evidence(tmp_path, '{"kl": 0.1}')
    push(registry, artifact, name="model", evidence=older)
    push(registry, artifact, name="model", evidence=newer)
    assert resolve(f"{url}/model") == before
    assert _content(pull_evidence(f"{url}/model", tmp_path / "out")) == _content(newer)
    assert len(verify(f"{url}/model").evidence_digests) == 2


class _Dying:
    """A registry that raises at the n-th call that writes."""

    def __init__(self, inner: Registry, allowed: int) -> None:
        self._inner = inner
        self._allowed = allowed

    def repository(self, name: str):
        self._inner = self._inner.repository(name)
        return self

    def __getattr__(self, name: str):
        if name in ("put", "attach", "write_tag"):
            self._allowed -= 1
            if self._allowed < 0:
                raise KeyboardInterrupt
        return getattr(self._inner, name)


@pytest.mark.one_in(8)
def test_a_push_killed_at_any_step_leaves_the_tags_on_the_old_good_artifact(url: str, tmp_path: Path) -> None:
    registry = open_registry(url)
    old = make_artifact(tmp_path, 1)
    new = make_artifact(tmp_path, 2)
    evidence = make_evidence(tmp_path)
    push(registry, old, name="model", aliases=["stable"])
    tags = list_tags(url)
    num_killed = 0
    for allowed in range(100):
        try:
            push(_Dying(registry, allowed), new, name="model", aliases=["stable"], evidence=evidence)
            break
        except KeyboardInterrupt:
            num_killed += 1
            assert list_tags(url) == tags
            assert verify(f"{url}/model:stable").artifact_digest == old.digest
    # every attempt keeps the blobs it was allowed, needed no more: attempts 0, 1, 2, ... store 0, 1, 2, ...
    assert num_killed >= 4
    assert {item.manifest.digest for item in list_tags(url)} == {resolve(f"{url}/model").digest}
    assert verify(f"{url}/model").artifact_digest == new.digest


def test_a_file_changed_after_the_commit_is_not_pushed(url: str, tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path)
    (artifact.path / "config.json").write_text('{"seed": 9}')
    with pytest.raises(StorageError, match=r"config\.json has changed"):
        push(open_registry(url), artifact, name="model")


def test_unknown_names_tags_and_digests_get_a_suggestion(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        resolve(f"{url}/model")
    push(open_registry(url), make_artifact(tmp_path), name="model", aliases=["candidate"])
    with pytest.raises(UsageError, match="Did you mean 'candidate'"):
        pull(f"{url}/model:candidat", tmp_path / "out")
    with pytest.raises(UsageError, match="Did you mean 'model'"):
        resolve(f"{url}/modell")
    with pytest.raises(UsageError, match="holds no manifest"):
        resolve(f"{url}/model@sha256:{'0' * 64}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", ["a b", "", "-x", "a:b", "a/b"])
def test_bad_names_and_aliases_are_refused_before_anything_is_stored(
    url: str, tmp_path: Path, bad: str
) -> None:
    artifact = make_artifact(tmp_path)
    with pytest.raises(UsageError):
        push(open_registry(url), artifact, name=bad)
    with pytest.raises(UsageError):
        push(open_registry(url), artifact, name="model", aliases=[bad])
    with pytest.raises(UsageError):
        list_tags(url)


@pytest.mark.one_in(8)
def test_a_signature_travels_with_the_artifact_and_its_evidence(url: str, tmp_path: Path) -> None:
    key = new_key(tmp_path)
    verifier = KeyVerifier(key.public)
    artifact = make_artifact(tmp_path)
    evidence = make_evidence(tmp_path)
    registry = open_registry(url)
    push(registry, artifact, name="model", evidence=evidence)
    with pytest.raises(SignatureRefused, match="is not signed"):
        verify(f"{url}/model", verifier=verifier)
    for directory in (artifact.path, evidence):
        sign_directory(directory, KeySigner(key.private))
    pushed = push(registry, artifact, name="model", evidence=evidence)
    report = verify(f"{url}/model", verifier=verifier)
    assert len(report.signature_digests) == 2
    assert pushed.signature_digest in report.signature_digests
    assert report.evidence_digests == (pushed.evidence_digest,)  # a signature is no evidence
    pull(f"{url}/model", tmp_path / "out", evidence=tmp_path / "proof", verifier=verifier)
    assert (tmp_path / "out.sig").read_bytes() == signature_path(artifact.path).read_bytes()
    for directory in (tmp_path / "out", tmp_path / "proof"):
        check_directory(directory, verifier)
    assert push(registry, artifact, name="model", evidence=evidence).num_new_blobs == 0


@pytest.mark.one_in(8)
def test_of_several_signatures_that_of_the_right_key_counts(url: str, tmp_path: Path) -> None:
    first, second, stranger = (new_key(tmp_path, name) for name in ("first", "second", "stranger"))
    push(open_registry(url), make_artifact(tmp_path), name="model")
    newer = make_evidence(tmp_path, '{"kl": 0.1}')
    attach_evidence(f"{url}/model", make_evidence(tmp_path))
    attach_evidence(f"{url}/model", newer)
    for key in (first, second):
        sign_pushed(f"{url}/model", KeySigner(key.private))
    for key in (first, second):
        check_pushed_signature(f"{url}/model", KeyVerifier(key.public))
        pull(f"{url}/model", tmp_path / key.public.stem, verifier=KeyVerifier(key.public))
        check_directory(tmp_path / key.public.stem, KeyVerifier(key.public))
    with pytest.raises(SignatureRefused, match="another key"):
        pull(f"{url}/model", tmp_path / "out", verifier=KeyVerifier(stranger.public))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.sig").exists()
    assert _content(pull_evidence(f"{url}/model", tmp_path / "proof")) == _content(newer)


@pytest.mark.one_in(8)
def test_a_signature_of_other_files_is_refused_at_both_ends(url: str, tmp_path: Path) -> None:
    key = new_key(tmp_path)
    verifier = KeyVerifier(key.public)
    registry = open_registry(url)
    old, new = make_artifact(tmp_path, 1), make_artifact(tmp_path, 2)
    bundle = sign_directory(old.path, KeySigner(key.private))
    signature_path(new.path).write_bytes(bundle.data)
    with pytest.raises(SignatureRefused, match="is not the signature of"):
        push(registry, new, name="model")
    assert list_tags_or_none(url) == ()
    signature_path(new.path).unlink()
    push(registry, new, name="model")
    repository = registry.repository("model")
    subject = repository.read_tag("model", "latest")
    assert subject is not None
    store_signature(repository, bundle, subject)  # as somebody who can write there may
    for call in (
        lambda: verify(f"{url}/model", verifier=verifier),
        lambda: pull(f"{url}/model", tmp_path / "out", verifier=verifier),
        lambda: pull(f"{url}/model", tmp_path / "out"),
        lambda: check_pushed_signature(f"{url}/model", verifier),
    ):
        with pytest.raises(SignatureRefused, match="has changed since it was signed"):
            call()
    assert not (tmp_path / "out").exists()


def list_tags_or_none(url: str) -> tuple[Tag, ...]:
    """Return the tags of a registry; none where no push has made one."""
    try:
        return list_tags(url)
    except UsageError:
        return ()


@pytest.mark.one_in(8)
def test_evidence_that_is_not_signed_is_not_pulled_as_signed(url: str, tmp_path: Path) -> None:
    key = new_key(tmp_path)
    verifier = KeyVerifier(key.public)
    artifact = make_artifact(tmp_path)
    sign_directory(artifact.path, KeySigner(key.private))
    push(open_registry(url), artifact, name="model", evidence=make_evidence(tmp_path))
    verify(f"{url}/model", verifier=verifier)
    with pytest.raises(SignatureRefused, match=r"the evidence of .* is not signed"):
        pull(f"{url}/model", tmp_path / "out", evidence=tmp_path / "proof", verifier=verifier)
    assert not any((tmp_path / name).exists() for name in ("out", "out.sig", "proof", "proof.sig"))

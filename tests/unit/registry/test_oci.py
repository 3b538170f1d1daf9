"""OCI registries over the network: credentials, redirects, dropped connections, hostile answers, referrers,
and what another program reads of a push.
"""

import base64
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from compress.artifact.leftovers import owned_name
from compress.artifact.manifest import Artifact, open_artifact, verify_artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.cli.app import main
from compress.digest import digest_bytes
from compress.errors import StorageError, UsageError
from compress.registry import upload
from compress.registry.image import FILE_LAYER, TITLE, Descriptor
from compress.registry.modelpack import FILEPATH, MODELPACK
from compress.registry.protocol import open_registry
from compress.registry.stored import list_tags
from compress.registry.transfer import pull, pull_evidence, push, verify
from tests.support import oci_server
from tests.support.registries import docker_registry, new_oci

BIG = bytes(range(256)) * 1200


def _artifact(root: Path) -> Artifact:
    def build(writer: ArtifactWriter) -> None:
        (writer.path / "weights.bin").write_bytes(BIG)
        (writer.path / "config.json").write_text("{}")
        writer.describe(role="checkpoint")

    return Workspace(root / "workspace").commit(Workspace.key("test", 1, {}, {}, 0), "test", {}, build)


def _evidence(root: Path, text: str) -> Path:
    path = root / text
    path.mkdir()
    (path / "report.json").write_text(json.dumps({"text": text}))
    return path


@pytest.fixture
def oci() -> oci_server.Oci:
    return oci_server.Oci()


@pytest.fixture
def url(oci: oci_server.Oci, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    for module in ("resuming", "upload"):
        monkeypatch.setattr(f"compress.registry.{module}.PAUSES_S", (0.0, 0.0, 0.0))
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return f"oci://{oci_server.start(oci)}/org"


def _log_in(host: str, tmp_path: Path, user: str = "me:secret") -> None:
    (tmp_path / "docker").mkdir(exist_ok=True)
    auth = base64.b64encode(user.encode()).decode()
    (tmp_path / "docker" / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


def _host(url: str) -> str:
    return url.removeprefix("oci://").partition("/")[0]


@pytest.mark.parametrize("with_tokens", [False, True])
def test_credentials_come_from_the_file_of_docker_login(
    with_tokens: bool, oci: oci_server.Oci, url: str, tmp_path: Path
) -> None:
    oci.user, oci.with_tokens = "me:secret", with_tokens
    with pytest.raises(StorageError, match="docker login"):
        push(open_registry(url), _artifact(tmp_path), name="model")
    _log_in(_host(url), tmp_path)
    push(open_registry(url), _artifact(tmp_path), name="model")
    assert pull(f"{url}/model", tmp_path / "out").digest == _artifact(tmp_path).digest
    _log_in(_host(url), tmp_path, "me:wrong")
    with pytest.raises(StorageError) as caught:
        verify(f"{url}/model")
    assert "wrong" not in str(caught.value)
    assert caught.value.exit_code == 5


def test_credentials_do_not_follow_a_redirect_to_another_host(
    oci: oci_server.Oci, url: str, tmp_path: Path
) -> None:
    oci.user = "me:secret"
    _log_in(_host(url), tmp_path)
    push(open_registry(url), _artifact(tmp_path), name="model")
    other = oci_server.Oci(blobs=oci.blobs)
    oci.redirect = f"http://localhost:{oci_server.start(other).rpartition(':')[2]}"
    assert pull(f"{url}/model", tmp_path / "out").digest == _artifact(tmp_path).digest
    assert other.requests
    assert not any("Authorization" in headers for _, _, headers in other.requests)
    assert any("Authorization" in headers for _, _, headers in oci.requests)


@pytest.mark.parametrize(
    "target", ["http://registry.example", "http://me:secret@localhost:1", "ftp://localhost", "file:///etc"]
)
def test_a_redirect_that_is_not_safe_is_refused(
    target: str, oci: oci_server.Oci, url: str, tmp_path: Path
) -> None:
    push(open_registry(url), _artifact(tmp_path), name="model")
    oci.redirect = target
    assert main(["pull", f"{url}/model", str(tmp_path / "out")]) == 5
    assert not (tmp_path / "out").exists()


def test_an_upload_is_not_sent_to_another_host(oci: oci_server.Oci, url: str, tmp_path: Path) -> None:
    oci.upload_host = "http://registry.example"
    with pytest.raises(StorageError, match="nothing is sent to another host"):
        push(open_registry(url), _artifact(tmp_path), name="model")
    assert not oci.blobs
    assert not oci.manifests


def test_transfers_go_on_where_connections_drop(
    oci: oci_server.Oci, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "CHUNK_BYTES", 50_000)
    oci.drop_after, oci.num_drops = 30_000, 4
    artifact = _artifact(tmp_path)
    push(open_registry(url), artifact, name="model")
    assert oci.num_drops == 0
    oci.num_drops = 4
    assert pull(f"{url}/model", tmp_path / "out").digest == artifact.digest
    starts = [
        headers["Range"] for method, _, headers in oci.requests if method == "GET" and "Range" in headers
    ]
    assert starts[:4] == ["bytes=30000-", "bytes=60000-", "bytes=90000-", "bytes=120000-"]


def test_a_host_that_drops_every_connection_is_given_up(
    oci: oci_server.Oci, url: str, tmp_path: Path
) -> None:
    push(open_registry(url), _artifact(tmp_path), name="model")
    oci.drop_after, oci.num_drops = 0, 1000
    assert main(["pull", f"{url}/model", str(tmp_path / "out")]) == 5
    assert not list(tmp_path.glob("*out*"))


def test_a_host_that_is_not_there_is_told_in_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("compress.registry.resuming.PAUSES_S", ())
    with socket.socket() as held:
        held.bind(("localhost", 0))  # nobody listens there
        host = f"localhost:{held.getsockname()[1]}"
        assert main(["pull", f"oci+http://{host}/org/model:tag", str(tmp_path / "out")]) == 5
    assert (
        capsys.readouterr()
        .err.rstrip()
        .endswith(f"{host} cannot be reached: [Errno 111] Connection refused.")
    )


@pytest.mark.parametrize("host", ["localhost:0", "localhost:65536", "localhost:99999", "localhost:", "a:b@c"])
def test_a_host_without_a_port_of_its_own_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="is not a host of an OCI registry"):
        open_registry(f"oci://{host}/org")


def _tampered_byte(path: str, data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if "/blobs/" in path and len(data) == len(BIG) else data


def _oversized(path: str, data: bytes) -> bytes:
    return data * 9 if "/blobs/" in path and len(data) == len(BIG) else data


def _swapped_manifest(path: str, data: bytes) -> bytes:
    return data.replace(b"config.json", b"confix.json") if "/manifests/" in path else data


@pytest.mark.parametrize("tamper", [_tampered_byte, _oversized, _swapped_manifest])
def test_bytes_that_were_not_pushed_are_refused_and_nothing_is_written(
    tamper, oci: oci_server.Oci, url: str, tmp_path: Path
) -> None:
    push(open_registry(url), _artifact(tmp_path), name="model")
    before = sorted(tmp_path.iterdir())
    oci.tamper = tamper
    assert main(["pull", f"{url}/model", str(tmp_path / "out")]) == 5
    assert main(["verify", f"{url}/model"]) == 5
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("title", ["../outside", "/tmp/outside", "a/../../outside"])
def test_a_title_that_leads_out_of_the_destination_is_refused(
    title: str, oci: oci_server.Oci, url: str, tmp_path: Path
) -> None:
    push(open_registry(url), _artifact(tmp_path), name="model")
    media_type, data = oci.manifests["latest"]
    document = json.loads(data)
    document["layers"][0]["annotations"][TITLE] = title
    bad = json.dumps(document).encode()
    oci.manifests["latest"] = oci.manifests[digest_bytes(bad)] = (media_type, bad)
    before = sorted(tmp_path.rglob("*"))
    assert main(["pull", f"{url}/model", str(tmp_path / "into" / "out")]) == 5
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name == "outside"] == []
    assert before == [path for path in sorted(tmp_path.rglob("*")) if path.name != "into"]


@pytest.mark.parametrize("has_referrers", [True, False])
def test_the_newest_evidence_is_last_with_and_without_the_referrers_api(
    has_referrers: bool, oci: oci_server.Oci, url: str, tmp_path: Path
) -> None:
    oci.has_referrers = has_referrers
    for text in ("first", "second", "third"):
        push(open_registry(url), _artifact(tmp_path), name="model", evidence=_evidence(tmp_path, text))
    newest = pull_evidence(f"{url}/model", tmp_path / "out")
    assert json.loads((newest / "report.json").read_text()) == {"text": "third"}
    assert len(verify(f"{url}/model").evidence_digests) == 3
    fallback = [name for name in oci.manifests if name.startswith("sha256-")]
    assert bool(fallback) is not has_referrers


def test_tags_of_the_service_are_not_aliases(url: str, tmp_path: Path) -> None:
    for tag in ("v1.modelpack", "sha256-" + "0" * 64):
        with pytest.raises(UsageError, match="meaning of its own"):
            push(open_registry(url), _artifact(tmp_path), name="model", aliases=[tag])
    with pytest.raises(UsageError, match="lower-case"):
        push(open_registry(url), _artifact(tmp_path), name="Model")


def test_the_modelpack_manifest_has_the_same_files(oci: oci_server.Oci, url: str, tmp_path: Path) -> None:
    artifact = _artifact(tmp_path)
    push(open_registry(url), artifact, name="model", aliases=["candidate"])
    pack = json.loads(oci.manifests["candidate.modelpack"][1])
    assert pack["artifactType"] == MODELPACK
    files = {layer["annotations"][FILEPATH]: layer["digest"] for layer in pack["layers"]}
    expected = {record.path: record.digest for record in artifact.manifest.files}
    assert files == {**expected, "compress.json": artifact.digest}
    config = json.loads(oci.blobs[pack["config"]["digest"]])
    assert config["modelfs"]["diffIds"] == [layer["digest"] for layer in pack["layers"]]
    assert {tag.tag for tag in open_registry(url).repository("model").tags()} == {"latest", "candidate"}


def test_a_blob_of_a_neighbour_is_mounted_and_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_oci(tmp_path, monkeypatch)
    push(open_registry(url), _artifact(tmp_path), name="model")

    def no_chunks(self: upload.Upload) -> None:
        if self._blob.size_bytes == len(BIG):
            pytest.fail("a chunk of what could be mounted")

    original = upload.Upload._send_chunks
    monkeypatch.setattr(upload.Upload, "_send_chunks", lambda self: (no_chunks(self), original(self))[1])
    push(open_registry(url), _artifact(tmp_path), name="neighbour")
    assert verify(f"{url}/neighbour").artifact_digest == _artifact(tmp_path).digest
    assert {item.name for item in list_tags(url)} == {"model", "neighbour"}


def test_skopeo_reads_and_copies_what_was_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skopeo = shutil.which("skopeo")
    if skopeo is None:
        pytest.skip("needs skopeo: apt-get install skopeo")
    url = new_oci(tmp_path, monkeypatch)
    artifact = _artifact(tmp_path)
    result = push(open_registry(url), artifact, name="model", aliases=["candidate"])
    for tag, digest in (("candidate", result.manifest_digest), ("candidate.modelpack", None)):
        source = f"docker://{url.removeprefix('oci://')}/model:{tag}"
        raw = subprocess.run(
            [skopeo, "inspect", "--raw", "--tls-verify=false", source], capture_output=True, check=True
        ).stdout
        assert digest in (None, digest_bytes(raw))
        target = f"oci:{tmp_path / 'copy'}:model:{tag}"
        command = [skopeo, "copy", "-q", "--insecure-policy", "--src-tls-verify=false", source, target]
        subprocess.run(command, check=True)
    assert verify(f"layout://{tmp_path / 'copy'}/model:candidate").manifest_digest == result.manifest_digest
    assert pull(f"layout://{tmp_path / 'copy'}/model:candidate", tmp_path / "out").digest == artifact.digest


def test_a_source_that_changes_while_it_is_sent_is_not_stored(url: str, tmp_path: Path) -> None:
    registry = open_registry(url).repository("model")
    blob = Descriptor(FILE_LAYER, digest_bytes(BIG), len(BIG), "file")
    (tmp_path / "file").write_bytes(BIG[:-1])
    with pytest.raises(StorageError, match="has changed"):
        registry.put(blob, tmp_path / "file")
    assert not registry.has(blob)


def test_plain_http_needs_the_loopback_or_its_own_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = []

    class Session:
        def request(self, method: str, url: str, **options: object) -> None:
            from requests.exceptions import SSLError

            urls.append(url)
            raise SSLError("no TLS here")

    monkeypatch.setattr("compress.registry.distribution.new_session", Session)
    for scheme in ("oci", "oci+http"):
        with pytest.raises(StorageError, match="TLS"):
            open_registry(f"{scheme}://registry.example/org").check_place()
    assert urls == ["https://registry.example/v2/", "http://registry.example/v2/"]
    assert docker_registry  # the loopback itself is what every other test uses


def test_a_pull_goes_on_where_a_killed_one_ended(oci: oci_server.Oci, url: str, tmp_path: Path) -> None:
    artifact = _artifact(tmp_path)
    push(open_registry(url), artifact, name="model")
    process = subprocess.Popen(["true"])
    process.wait()
    dead = owned_name().replace(f"-{os.getpid()}-", f"-{process.pid}-")
    for begun, starts in ((BIG[:70_000], {"bytes=70000-"}), (b"?" * 70_000, {"bytes=70000-"}), (BIG, set())):
        left = tmp_path / f".out.{dead}.pulling"
        left.mkdir()
        (left / "weights.bin").write_bytes(begun)
        (left / "stray").touch()
        oci.requests.clear()
        assert pull(f"{url}/model", tmp_path / "out").digest == artifact.digest
        verify_artifact(open_artifact(tmp_path / "out"))
        assert not (tmp_path / "out" / "stray").exists()
        assert not left.exists()
        assert {headers["Range"] for _, _, headers in oci.requests if "Range" in headers} == starts
        shutil.rmtree(tmp_path / "out")

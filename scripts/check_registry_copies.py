"""Pushes one artifact to every kind of registry, pulls it from each as a new machine would, and has another
program read and copy it.

    python -m scripts.check_registry_copies --out benchmarks/registry-copies.json \\
        --moto .venv-registries/bin/moto_server --mlflow .venv-registries/bin/mlflow

A pull is a process with an environment, home and caches of its own, which has nothing but the reference. The
other program is skopeo where the files are those of OCI: it copies from the directory of a layout, from the
OCI registry, from the store that a version of MLflow's model names, and from an S3 prefix that boto3 brought
to a disk. A repository on the hub has files and no images: its own client takes a snapshot of the commit, and
each file is compared with the artifact's. Exit code 1 if any digest differs.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from compress.artifact.manifest import Artifact, open_artifact, verify_artifact
from compress.digest import digest_bytes, digest_file
from compress.registry.ref import parse_ref
from compress.registry.transfer import verify
from scripts.bench_setup import markdown, write_results
from scripts.check_registry_faults import NAME, TAG, make_artifact, push_to
from scripts.registry_servers import FORK, Backend, backends, import_clients, run

SEED = 21


@dataclass(frozen=True)
class Row:
    """What came back from one kind of registry; `other` is what the other program found, by manifest digest
    where it has one."""

    backend: str
    server: str
    manifest_digest: str
    artifact_digest: str
    other: str
    other_command: str
    equal: bool


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moto", help="the program moto_server")
    parser.add_argument("--mlflow", help="the program mlflow, with its server")
    parser.add_argument("--commit", default=None, help="of the code that is tried")
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    args = parser.parse_args(argv)

    import_clients()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as servers:
        root = Path(name)
        artifact = open_artifact(make_artifact(root, SEED))
        manifests: set[str] = set()
        rows = []
        for backend in backends(root, servers, moto=args.moto, mlflow=args.mlflow, weights="oci"):
            row = there_and_back(backend, artifact, root / f"place-{backend.name}")
            manifests.add(row.manifest_digest)
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    print_table(rows)
    facts = {
        "artifact_digest": artifact.digest,
        "size_bytes": artifact.size_bytes,
        "num_manifest_digests": len(manifests),
    }
    write_results(
        args.out, [asdict(row) for row in rows], device=torch.device("cpu"), commit=args.commit, facts=facts
    )
    return 0 if len(manifests) == 1 and all(row.equal for row in rows) else 1


def there_and_back(backend: Backend, artifact: Artifact, place: Path) -> Row:
    """Return what a new machine and another program get of a push."""
    place.mkdir()
    code = run(partial(push_to, backend, artifact.path))
    assert code == 0, f"the push to {backend.name} ended with {code}"
    pulled = pull_as_new(backend, place)
    manifest = answer_of(lambda: manifest_of(backend))
    copied, command = OTHERS[backend.name](backend, place, manifest)
    same = (pulled.digest, copied) == (artifact.digest, artifact.digest)
    return Row(backend.name, backend.server, manifest, pulled.digest, copied, command, same)


def pull_as_new(backend: Backend, place: Path) -> Artifact:
    """Return the artifact that a process with nothing but the reference pulls."""
    home = place / "home"
    home.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": os.getcwd()}
    target = place / "pulled"
    subprocess.run(
        [sys.executable, "-m", "compress", "pull", f"{backend.url}/{NAME}:{TAG}", str(target)],
        env={**environment, **backend.environment},
        cwd=home,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    artifact = open_artifact(target)
    verify_artifact(artifact)
    return artifact


def manifest_of(backend: Backend) -> str:
    backend.begin()
    return verify(f"{backend.url}/{NAME}:{TAG}").manifest_digest


def answer_of(question: Callable[[], str]) -> str:
    """Return what a function returns in a process of its own."""
    ours, theirs = FORK.Pipe()
    code = run(lambda: theirs.send(question()))
    assert code == 0, f"exit code {code}"
    return str(ours.recv())


def skopeo(source: str, place: Path, manifest: str) -> tuple[str, str]:
    """Copy an image with skopeo into a layout, and return the digest of the artifact in it."""
    command = ["skopeo", "copy", "-q", "--insecure-policy", "--src-tls-verify=false", source]
    subprocess.run([*command, f"oci:{place / 'copy'}:{NAME}:{TAG}"], check=True)
    raw = subprocess.run(
        ["skopeo", "inspect", "--raw", "--tls-verify=false", source], check=True, capture_output=True
    ).stdout
    found = verify(f"layout://{place / 'copy'}/{NAME}:{TAG}")
    assert found.manifest_digest == digest_bytes(raw) == manifest, (found, raw[:300])
    return found.artifact_digest, f"skopeo inspect and copy {source.partition(':')[0]}:"


def other_layout(backend: Backend, place: Path, manifest: str) -> tuple[str, str]:
    return skopeo(f"oci:{parse_ref(f'{backend.url}/{NAME}').registry[9:]}:{NAME}:{TAG}", place, manifest)


def other_oci(backend: Backend, place: Path, manifest: str) -> tuple[str, str]:
    return skopeo(f"docker://{backend.url.removeprefix('oci://')}/{NAME}:{TAG}", place, manifest)


def other_s3(backend: Backend, place: Path, manifest: str) -> tuple[str, str]:
    """Bring the objects below the prefix to a disk, where they are a layout."""
    layout = place / "objects"
    assert run(lambda: download(backend, layout)) == 0
    digest, command = skopeo(f"oci:{layout}:{NAME}:{TAG}", place, manifest)
    return digest, f"boto3 download_file of the prefix, {command}"


def download(backend: Backend, target: Path) -> None:
    import boto3

    backend.begin()
    bucket, _, prefix = backend.url.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/"):
        for each in page["Contents"]:
            file = target / each["Key"].removeprefix(f"{prefix}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(bucket, each["Key"], str(file))


def other_mlflow(backend: Backend, place: Path, manifest: str) -> tuple[str, str]:
    """Ask MLflow's own client where the version has its weights, and copy from there."""

    def source() -> str:
        from mlflow import MlflowClient

        backend.begin()
        server = backend.url.removeprefix("mlflow+").partition("/oci://")[0]
        return str(MlflowClient(server, server).get_model_version_by_alias(NAME, TAG).source)

    digest, command = skopeo(answer_of(source).replace("oci://", "docker://"), place, manifest)
    return digest, f"MlflowClient.get_model_version_by_alias, {command}"


def other_hub(backend: Backend, place: Path, manifest: str) -> tuple[str, str]:
    """Have the hub's client take a snapshot of main, and compare each of its files with the artifact."""
    del manifest

    def snapshot() -> str:
        from huggingface_hub import snapshot_download

        backend.begin()
        return str(snapshot_download(f"{backend.url.removeprefix('hf://')}/{NAME}"))

    found = place / "snapshot"
    shutil.copytree(answer_of(snapshot), found, ignore=shutil.ignore_patterns(".*"))
    artifact = open_artifact(found)
    for record in artifact.manifest.files:
        assert digest_file(found / record.path) == record.digest, record.path
    return artifact.digest, "huggingface_hub.snapshot_download"


OTHERS = {"layout": other_layout, "oci": other_oci, "s3": other_s3, "mlflow": other_mlflow, "hf": other_hub}


def print_table(rows: Sequence[Row]) -> None:
    names = ["registry", "server", "pulled", "other program", "its copy", "equal"]
    cells = [
        [
            each.backend,
            each.server,
            each.artifact_digest[:19],
            each.other_command,
            each.other[:19],
            str(each.equal),
        ]
        for each in rows
    ]
    print(markdown(names, cells))


if __name__ == "__main__":
    sys.exit(main())

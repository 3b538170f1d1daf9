"""A signed run, from a signed source to a signed artifact in a registry, and the documents of a supply chain
that it leaves.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2

from compress.artifact.manifest import file_names
from compress.errors import SignatureRefused
from compress.pipeline import resolve_source
from compress.recipe import SignedBy
from compress.registry.evidence import check_evidence
from compress.sign.key import KeySigner, KeyVerifier
from compress.sign.signature import check_directory, sign_directory
from tests.support.signing_keys import KeyPair, new_key

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
QUICK = [
    {"kind": "calibrate", "num_samples": 4, "seq_len": 32},
    {"kind": "quantize", "preset": "fast"},
    {"kind": "export"},
    {"kind": "validate", "num_samples": 2, "seq_len": 32, "latency": None, "speculative": None},
]


@pytest.fixture
def key(work: Path) -> KeyPair:
    return new_key(work)


@pytest.fixture
def source(model_dir: Path, work: Path, key: KeyPair) -> Path:
    """A model, signed."""
    shutil.copytree(model_dir, work / "source")
    sign_directory(work / "source", KeySigner(key.private))
    return work / "source"


def signed_model(source: Path, key: KeyPair) -> dict[str, Any]:
    return {"ref": str(source), "signed_by": {"key": str(key.public)}}


def documents(evidence: Path) -> dict[str, Any]:
    names = ("provenance.json", "provenance.slsa.json", "bom.cdx.json")
    return {name: json.loads((evidence / name).read_text()) for name in names}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_run_from_a_signed_source_is_signed_and_says_what_it_was_made_from(
    recipe: Recipe, command: Command, work: Path, source: Path, key: KeyPair
) -> None:
    push = {"to": "layout://registry", "name": "tiny", "sign": {"key": str(key.private)}}
    path = recipe(model=signed_model(source, key), stages=QUICK, push=push)
    code, out, err = command("run", path, "--json")
    assert code == 0, err
    directory = work / "runs" / "recipe"
    verifier = KeyVerifier(key.public)
    artifact = directory / "artifacts" / "export"
    for signed in (artifact, directory / "evidence"):
        check_directory(signed, verifier)
    code, out, err = command("verify", "layout://registry/tiny", "--key", key.public, "--json")
    assert code == 0, err
    assert json.loads(out)["signed_by"] == f"the key {key.public}"
    assert len(json.loads(out)["signature_digests"]) == 2

    check_evidence(directory / "evidence")
    found = documents(directory / "evidence")
    statement = found["provenance.slsa.json"]
    json_format.ParseDict(statement, statement_pb2.Statement())
    json_format.ParseDict(statement["predicate"], provenance_pb2.Provenance())
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    files = {name: sha256(artifact / name) for name in [*file_names(artifact), "compress.json"]}
    assert {each["name"]: each["digest"]["sha256"] for each in statement["subject"]} == files
    built = statement["predicate"]["buildDefinition"]
    assert built["externalParameters"]["recipe"]["digest"]["sha256"] == sha256(path)
    assert str(work) not in json.dumps(built["externalParameters"]["stages"])
    model, *texts = built["resolvedDependencies"]
    assert model["digest"]["compressModelV1"] == found["provenance.json"]["source"]["digest"][7:]
    assert [each["name"] for each in texts] == ["builtin://python", "builtin://python-eval"]
    facts = json.loads((directory / "artifacts" / "calibrate" / "compress.json").read_text())["facts"]
    assert texts[0]["digest"]["compressTextV1"] == facts["text_digest"][7:]

    bom = found["bom.cdx.json"]
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bom)) is None
    component = bom["metadata"]["component"]
    assert {each["name"]: each["hashes"][0]["content"] for each in component["components"]} == files
    known = {component["bom-ref"], *(each["bom-ref"] for each in bom["components"])}
    (edges,) = bom["dependencies"]
    assert {edges["ref"], *edges["dependsOn"]} == known
    assert {each["ref"] for each in component["modelCard"]["modelParameters"]["datasets"]} < known

    before = {
        each.name: each.read_bytes() for each in directory.rglob("*") if each.name.endswith((".sig", ".json"))
    }
    code, out, err = command("resume", directory, "--json")  # nothing is built, nor signed again
    assert code == 0, err
    assert json.loads(out)["pushed"] is not None
    for name in ("export.sig", "evidence.sig", "bom.cdx.json", "provenance.slsa.json", "provenance.json"):
        assert next(directory.rglob(name)).read_bytes() == before[name]
    code, out, err = command("run", path, "--if-changed", "--json")
    assert json.loads(out)["status"] == "unchanged", err


def test_a_run_that_signs_finds_a_push_without_signature_changed(
    recipe: Recipe, command: Command, work: Path, key: KeyPair
) -> None:
    push = {"to": "layout://registry", "name": "tiny"}
    stages = [
        {"kind": "quantize", "preset": "fast", "smooth": None, "round": {"kind": "rtn"}},
        {"kind": "export"},
    ]
    assert command("run", recipe(stages=stages, push=push))[0] == 0
    signing = recipe(stages=stages, push={**push, "sign": {"key": str(key.private)}})
    code, out, err = command("run", signing, "--if-changed", "--json")
    assert (code, json.loads(out)["status"]) == (0, "done"), err
    assert command("verify", "layout://registry/tiny", "--key", key.public)[0] == 0
    code, out, err = command("run", signing, "--if-changed", "--json")
    assert json.loads(out)["status"] == "unchanged"


def _tamper(source: Path) -> None:
    data = bytearray((source / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (source / "model.safetensors").write_bytes(bytes(data))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "unsigned": (lambda source: source.with_name("source.sig").unlink(), "is not signed"),
    "tampered": (_tamper, "has changed since it was signed"),
    "an extra file": (lambda source: (source / "modeling.py").write_text("x"), "not among those"),
    "a file less": (lambda source: (source / "tokenizer.json").unlink(), "lacks the file 'tokenizer.json'"),
    "another key": (lambda source: new_key(source.parent), "made with another key"),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_a_source_that_is_not_what_was_signed_is_refused_before_anything_runs(
    recipe: Recipe,
    command: Command,
    work: Path,
    source: Path,
    key: KeyPair,
    change: Callable[[Path], object],
    reason: str,
) -> None:
    path = recipe(model=signed_model(source, key), stages=QUICK)
    change(source)
    there = sorted(work.rglob("*"))
    code, out, _ = command("run", path, "--json")
    error = json.loads(out)["error"]
    assert (code, error["kind"]) == (5, "SignatureRefused")
    assert reason in error["message"]
    assert sorted(work.rglob("*")) == there


def test_a_source_of_a_registry_must_be_signed_there(
    recipe: Recipe, command: Command, work: Path, key: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(work / "home"))
    stages = [
        {"kind": "quantize", "preset": "fast", "smooth": None, "round": {"kind": "rtn"}},
        {"kind": "export"},
    ]
    push = {"to": "layout://registry", "name": "tiny"}
    assert command("run", recipe(stages=stages, push=push))[0] == 0
    model = {"ref": "layout://registry/tiny", "signed_by": {"key": str(key.public)}}
    code, out, _ = command("run", recipe("second.yaml", model=model, stages=QUICK), "--json")
    assert (code, json.loads(out)["error"]["kind"]) == (5, "SignatureRefused")
    assert not (work / "home").exists()  # nothing was pulled
    assert command("sign", "layout://registry/tiny", "--key", key.private)[0] == 0
    signed_by = SignedBy(key=str(key.public))
    source = resolve_source("layout://registry/tiny", signed_by=signed_by)
    check_directory(source.path, signed_by.verifier())
    pinned = f"oci://registry.invalid/tiny@{source.revision}"  # offline, the copy and its signature are asked
    assert resolve_source(pinned, offline=True, signed_by=signed_by) == replace(source, name=pinned)
    other = SignedBy(key=str(new_key(work, "other").public))
    with pytest.raises(SignatureRefused, match="another key"):
        resolve_source(pinned, offline=True, signed_by=other)


def test_each_way_to_sign_and_ask_has_its_exit_code(
    command: Command, work: Path, source: Path, key: KeyPair
) -> None:
    other = new_key(work, "other")
    for argv, expected in (
        (["sign", source, "--key", key.private], 0),
        (["sign", source], 2),
        (["sign", source, "--key", key.private, "--keyless"], 2),
        (["sign", source, "--key", work / "absent"], 2),
        (["sign", work / "absent", "--key", key.private], 2),
        (["verify", source, "--key", key.public], 0),
        (["verify", source, "--key", other.public], 5),
        (["verify", source, "--key", key.private], 2),
        (["verify", source, "--identity", "me"], 2),
        (["verify", source, "--key", key.public, "--signature", work / "absent.sig"], 5),
        (["verify", source, "--signature", work / "source.sig"], 2),
    ):
        code, out, _ = command(*argv, "--json")
        document = json.loads(out)
        assert (code, document["exit_code"]) == (expected, expected), (argv, document)
        assert (document["status"] == "error") == (expected != 0)
    code, out, _ = command("verify", source, "--key", key.public)
    assert out.startswith(f"{source}: ")
    assert f"signed by the key {key.public}" in out

"""A signature holds for the files that were signed and the key that signed them, and for nothing else. The
package's own verifier, which reads the files itself, is the independent implementation.
"""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_signing import signing, verifying

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.errors import EnvironmentUnfit, SignatureRefused, StorageError, UsageError
from compress.sign.bundle import parse_bundle, read_bundle
from compress.sign.choice import signer_of, verifier_of
from compress.sign.key import PASSWORD_VARIABLE, KeySigner, KeyVerifier
from compress.sign.signature import check_directory, check_made_by, sign_directory, signature_path
from tests.contract.test_registry_contract import make_artifact
from tests.support.signing_keys import KeyPair, new_key

FILES = [MANIFEST_NAME, "config.json", "draft/weights.bin", "empty.txt", "same.bin"]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return new_key(tmp_path_factory.mktemp("key"))


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory, key: KeyPair) -> Path:
    """An artifact in a directory, signed; tests work on copies."""
    root = tmp_path_factory.mktemp("signed")
    shutil.copytree(make_artifact(root).path, root / "model")
    sign_directory(root / "model", KeySigner(key.private))
    return root / "model"


@pytest.fixture
def model(signed: Path, tmp_path: Path) -> Path:
    shutil.copytree(signed, tmp_path / "model")
    shutil.copy(signature_path(signed), tmp_path / "model.sig")
    return tmp_path / "model"


def test_what_was_signed_is_accepted_here_and_by_the_package_itself(model: Path, key: KeyPair) -> None:
    bundle = check_directory(model, KeyVerifier(key.public))
    assert sorted(bundle.files) == FILES
    assert bundle.files[MANIFEST_NAME] == open_artifact(model).digest
    verifying.Config().use_elliptic_key_verifier(public_key=key.public).verify(model, signature_path(model))


def test_what_the_package_signed_is_accepted_here(model: Path, key: KeyPair) -> None:
    place = model.parent / "other.sig"
    signing.Config().use_elliptic_key_signer(private_key=key.private).sign(model, place)
    assert (
        check_directory(model, KeyVerifier(key.public), signature=place).files
        == read_bundle(signature_path(model)).files
    )


def test_a_directory_of_another_tool_is_signed_whole(tmp_path: Path, key: KeyPair) -> None:
    place = tmp_path / "theirs"
    (place / "sub").mkdir(parents=True)
    (place / "weights.safetensors").write_bytes(b"weights")
    (place / "sub" / "a.txt").write_text("a")
    sign_directory(place, KeySigner(key.private), signature=place / "model.sig")
    bundle = check_directory(place, KeyVerifier(key.public), signature=place / "model.sig")
    assert sorted(bundle.files) == ["sub/a.txt", "weights.safetensors"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 1
    else:
        data += b"x"
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [_flip, Path.unlink], ids=["a flipped bit", "removed"])
def test_any_file_that_changed_or_is_missing_is_refused(
    model: Path, key: KeyPair, name: str, change: Callable[[Path], None]
) -> None:
    change(model / name)
    with pytest.raises(StorageError) as refused:
        check_directory(model, KeyVerifier(key.public))
    assert refused.value.exit_code == 5


@pytest.mark.parametrize("name", ["extra.bin", "draft/extra.bin", ".gitignore", ".git/config", "model.sig"])
def test_any_file_more_is_refused(model: Path, key: KeyPair, name: str) -> None:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("x")
    with pytest.raises(StorageError, match=name):
        check_directory(model, KeyVerifier(key.public))


def test_a_link_is_refused(model: Path, key: KeyPair) -> None:
    (model / "linked").symlink_to(model / "config.json")
    with pytest.raises(StorageError, match="a link"):
        check_directory(model, KeyVerifier(key.public))


def test_a_rewritten_manifest_does_not_hide_a_change(model: Path, key: KeyPair, tmp_path: Path) -> None:
    other = make_artifact(tmp_path, seed=7)
    shutil.rmtree(model)
    shutil.copytree(other.path, model)  # a whole artifact, and not the one that was signed
    with pytest.raises(SignatureRefused, match=r"'compress\.json' of .* has changed since it was signed"):
        check_directory(model, KeyVerifier(key.public))


def test_another_key_and_no_signature_are_refused(model: Path, key: KeyPair, tmp_path: Path) -> None:
    other = new_key(tmp_path, "other")
    with pytest.raises(SignatureRefused, match=r"was made with another key than .*other\.pub"):
        check_directory(model, KeyVerifier(other.public))
    signature_path(model).unlink()
    with pytest.raises(SignatureRefused, match="is not signed: there is no"):
        check_directory(model, KeyVerifier(key.public))
    with pytest.raises(UsageError, match="there is no directory"):
        check_directory(tmp_path / "nowhere", KeyVerifier(key.public))


def test_a_signature_of_another_key_under_the_hint_of_this_one_is_refused(
    model: Path, key: KeyPair, tmp_path: Path
) -> None:
    other = new_key(tmp_path, "other")
    ours = json.loads(read_bundle(signature_path(model)).data)
    theirs = json.loads(sign_directory(model, KeySigner(other.private)).data)
    theirs["verificationMaterial"] = ours["verificationMaterial"]
    bundle = parse_bundle(json.dumps(theirs).encode(), "model.sig")
    with pytest.raises(SignatureRefused, match="was not made by the key"):
        check_made_by(bundle, KeyVerifier(key.public))


def _restated(document: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> None:
    payload = json.loads(base64.b64decode(document["dsseEnvelope"]["payload"]))
    change(payload)
    document["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file less": lambda payload: payload["predicate"]["resources"].pop(),
    "another digest": lambda payload: payload["predicate"]["resources"][0].update(digest="0" * 64),
    "a path outside": lambda payload: payload["predicate"]["resources"][0].update(name="../config.json"),
    "another hash": lambda payload: payload["predicate"]["resources"][0].update(algorithm="md5"),
    "shards": lambda payload: payload["predicate"]["serialization"].update(method="shards"),
    "another predicate": lambda payload: payload.update(predicateType="https://slsa.dev/provenance/v1"),
    "no files": lambda payload: payload["predicate"].update(resources=[]),
    "a file twice": lambda payload: payload["predicate"]["resources"].append(
        payload["predicate"]["resources"][0]
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_a_statement_that_was_changed_after_signing_is_refused(
    model: Path, key: KeyPair, forgery: Callable[[dict[str, Any]], object]
) -> None:
    document = json.loads(signature_path(model).read_bytes())
    _restated(document, forgery)
    signature_path(model).write_text(json.dumps(document))
    with pytest.raises(StorageError):
        check_directory(model, KeyVerifier(key.public))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_a_bundle_is_accepted_for_other_files(
    signed: Path, key: KeyPair, data: st.DataObject
) -> None:
    """Any byte of a bundle may change: it is refused, or states exactly what was signed."""
    original = signature_path(signed).read_bytes()
    position = data.draw(st.integers(0, len(original) - 1))
    value = data.draw(st.integers(0, 255))
    changed = original[:position] + bytes([value]) + original[position + 1 :]
    try:
        bundle = parse_bundle(changed, "model.sig")
        check_made_by(bundle, KeyVerifier(key.public))
    except StorageError:
        return
    assert bundle.files == parse_bundle(original, "model.sig").files


def test_a_bundle_without_the_hint_of_its_key_prints_nothing(
    model: Path, key: KeyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package warns about one on stdout, where `--json` has its document."""
    document = json.loads(signature_path(model).read_bytes())
    del document["verificationMaterial"]["publicKey"]["hint"]
    signature_path(model).write_text(json.dumps(document))
    with pytest.raises(SignatureRefused, match="which key made it"):
        check_directory(model, KeyVerifier(key.public))
    assert capsys.readouterr().out == ""


def test_the_password_of_a_key_comes_from_a_file_or_the_environment(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    pair = new_key(tmp_path, "closed", password="opens it")
    with pytest.raises(UsageError, match=f"encrypted: set {PASSWORD_VARIABLE}"):
        KeySigner(pair.private).check()
    monkeypatch.setenv(PASSWORD_VARIABLE, "does not")
    with pytest.raises(UsageError, match="of this password"):
        KeySigner(pair.private).check()
    monkeypatch.setenv(PASSWORD_VARIABLE, "opens it")
    sign_directory(model, KeySigner(pair.private))
    monkeypatch.delenv(PASSWORD_VARIABLE)
    (tmp_path / "password").write_text("opens it\n")
    signer = KeySigner(pair.private, tmp_path / "password")
    assert signer.made(sign_directory(model, signer))
    check_directory(model, KeyVerifier(pair.public))
    assert "opens it" not in repr(signer)


def test_a_key_of_the_wrong_kind_or_place_is_explained(tmp_path: Path, key: KeyPair) -> None:
    plain = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for name, made in (
        ("rsa.pem", rsa.generate_private_key(65537, 2048).private_bytes(*plain)),
        ("k1.pem", ec.generate_private_key(ec.SECP256K1()).private_bytes(*plain)),
    ):
        (tmp_path / name).write_bytes(made)
        with pytest.raises(UsageError, match="no elliptic curve key on P-256"):
            KeySigner(tmp_path / name).check()
    for signer, reason in (
        (KeySigner(key.public), "no private key in PEM form"),
        (KeySigner(tmp_path / "absent"), "cannot be read"),
        (KeySigner(tmp_path), "a directory where a plain file belongs"),
    ):
        with pytest.raises((UsageError, StorageError), match=reason):
            signer.check()


def test_half_a_way_of_signing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    nothing: dict[str, Any] = {"key": None, "password_file": None, "keyless": False, "trust_config": None}
    for given_ in (
        {},
        {"key": path, "keyless": True},
        {"keyless": True, "password_file": path},
        {"key": path, "trust_config": path},
    ):
        with pytest.raises(UsageError):
            signer_of(**{**nothing, **given_})
    nobody: dict[str, Any] = {"key": None, "identity": None, "issuer": None, "trust_config": None}
    assert verifier_of(**nobody) is None
    for given_ in (
        {"identity": "a"},
        {"issuer": "b"},
        {"trust_config": path},
        {"key": path, "identity": "a"},
    ):
        with pytest.raises(UsageError):
            verifier_of(**{**nobody, **given_})


def test_a_missing_package_names_the_extra(
    model: Path, key: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for call in (
        lambda: sign_directory(model, KeySigner(key.private)),
        lambda: check_directory(model, KeyVerifier(key.public)),
    ):
        with pytest.raises(EnvironmentUnfit, match=r"pip install 'compress\[sign\]'"):
            call()

"""Keyless signing, as far as it goes without Sigstore's servers: what the package is asked for, and what is
said when there is no identity or no network.
"""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import sigstore.oidc
from model_signing import signing, verifying
from sigstore.errors import TUFError
from sigstore.models import ClientTrustConfig

from compress.errors import EnvironmentUnfit, SignatureRefused, StorageError, UsageError
from compress.sign.key import KeySigner, KeyVerifier
from compress.sign.keyless import KeylessSigner, KeylessVerifier
from compress.sign.signature import check_made_by, make_bundle
from tests.support.signing_keys import KeyPair, new_key

FILES = {"a.txt": "sha256:" + "1" * 64}


@pytest.fixture
def key(tmp_path: Path) -> KeyPair:
    return new_key(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the package was asked for; it then signs and verifies with nothing."""
    calls: list[dict[str, Any]] = []

    def note(self: object, **options: Any) -> object:
        calls.append(options)
        return self

    monkeypatch.setattr(signing.Config, "use_sigstore_signer", note)
    monkeypatch.setattr(verifying.Config, "use_sigstore_verifier", note)
    return calls


def test_a_workload_signs_with_its_own_token(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sigstore.oidc, "detect_credential", lambda *names: "a token")
    KeylessSigner().configure(signing.Config())
    assert asked == [{"identity_token": "a token", "trust_config": None}]


def test_without_an_identity_and_a_terminal_nobody_is_waited_for(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sigstore.oidc, "detect_credential", lambda *names: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(EnvironmentUnfit, match="no identity to sign with"):
        KeylessSigner().check()
    assert asked == []


def test_a_verifier_asks_for_the_identity_and_its_issuer(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "trust.json").write_text("{}")
    verifier = KeylessVerifier("me@example.com", "https://issuer.example", tmp_path / "trust.json")
    verifier.configure(verifying.Config())
    assert asked == [
        {
            "identity": "me@example.com",
            "oidc_issuer": "https://issuer.example",
            "trust_config": tmp_path / "trust.json",
        }
    ]
    with pytest.raises(UsageError, match="roots of trust"):
        KeylessVerifier("a", "b", tmp_path / "absent").configure(verifying.Config())


def test_a_signature_of_the_other_kind_is_refused_before_anything_is_asked(
    asked: list[dict[str, Any]], key: KeyPair
) -> None:
    bundle = make_bundle(FILES, "model", KeySigner(key.private))
    with pytest.raises(SignatureRefused, match="was made with a key"):
        check_made_by(bundle, KeylessVerifier("a", "b"))
    without = type(bundle)(bundle.data, bundle.files, None, bundle.where)
    with pytest.raises(SignatureRefused, match="was not made with a key"):
        check_made_by(without, KeyVerifier(key.public))
    assert asked == []


def test_a_network_that_is_down_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*names: object, **options: object) -> ClientTrustConfig:
        raise TUFError("Failed to refresh TUF metadata")

    monkeypatch.setattr(ClientTrustConfig, "production", down)
    monkeypatch.setattr(sigstore.oidc, "detect_credential", lambda *names: "a token")
    for call in (
        lambda: KeylessSigner().configure(signing.Config()),
        lambda: KeylessVerifier("a", "b").configure(verifying.Config()),
    ):
        with pytest.raises(StorageError, match="Sigstore cannot be used: Failed to refresh TUF metadata"):
            call()

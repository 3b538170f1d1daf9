"""Signing with a key: an elliptic curve key (P-256, P-384, P-521) in a PEM file, without a network.

`openssl ecparam -name prime256v1 -genkey -noout -out signing.pem` makes one, and
`openssl ec -in signing.pem -pubout -out signing.pub` writes its public half.
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import SignatureRefused, UsageError
from compress.sign.bundle import Bundle
from compress.sign.signature import check_installed, check_made_by
from compress.untrusted.files import read_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from model_signing import signing, verifying

PASSWORD_VARIABLE = "COMPRESS_KEY_PASSWORD"
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_MAX_KEY_BYTES = 64 << 10


@dataclass(frozen=True)
class KeySigner:
    """The owner of a private key. Its password is in a file, or in the environment variable
    COMPRESS_KEY_PASSWORD; it is read when it is needed, and is no argument, which other users could see.
    """

    private_key: Path
    password_file: Path | None = None

    def check(self) -> None:
        self._key()

    def made(self, bundle: Bundle) -> bool:
        with tempfile.TemporaryDirectory() as scratch:
            public = Path(scratch) / "key.pub"
            public.write_bytes(_public_pem(self._key().public_key()))
            try:
                check_made_by(bundle, KeyVerifier(public))
            except SignatureRefused:
                return False
        return True

    def configure(self, config: "signing.Config") -> None:
        self.check()
        config.use_elliptic_key_signer(private_key=self.private_key, password=_password(self.password_file))

    def sign(self, config: "signing.Config", model: Path, signature: Path) -> None:
        config.sign(model, signature)

    def _key(self) -> "EllipticCurvePrivateKey":
        return _private_key(self.private_key, _password(self.password_file))


@dataclass(frozen=True)
class KeyVerifier:
    """The owner of the private half of a public key."""

    public_key: Path

    def __str__(self) -> str:
        return f"the key {self.public_key}"

    def check_hint(self, bundle: Bundle) -> None:
        if bundle.key_hint is None:
            raise SignatureRefused(
                f"{bundle.where} was not made with a key, and {self} is asked for; give an identity.",
                where=bundle.where,
            )
        if bundle.key_hint != hashlib.sha256(_public_pem(_public_key(self.public_key))).hexdigest():
            raise SignatureRefused(f"{bundle.where} was made with another key than {self.public_key}.")

    def configure(self, config: "verifying.Config") -> None:
        config.use_elliptic_key_verifier(public_key=self.public_key)


def _password(file: Path | None) -> bytes | None:
    """Return the password of a private key: the first line of the file, or what COMPRESS_KEY_PASSWORD has;
    None where there is neither.

    Raises:
        UsageError: the file cannot be read.
    """
    if file is None:
        password = os.environ.get(PASSWORD_VARIABLE)
        return None if password is None else os.fsencode(password)
    return _read(file, "password file").split(b"\n", 1)[0].rstrip(b"\r")


def _private_key(path: Path, password: bytes | None) -> "EllipticCurvePrivateKey":
    check_installed()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path, "private key")
    try:
        key = load_pem_private_key(data, password)
    except TypeError as error:  # with a password for a plain key, or without one for an encrypted key
        if password is None:
            advice = f"set {PASSWORD_VARIABLE}, or name a file that has it with --password-file"
            raise UsageError(f"the private key {path} is encrypted: {advice}.", where=path) from None
        raise UsageError(f"the private key {path} has no password; give none.", where=path) from error
    except (ValueError, UnsupportedAlgorithm):
        what = "no private key in PEM form" if password is None else "no private key of this password"
        raise UsageError(f"{path} is {what}.", where=path) from None
    if not isinstance(key, EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        raise _wrong_kind(path)
    return key


def _public_key(path: Path) -> "EllipticCurvePublicKey":
    check_installed()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_read(path, "public key"))
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(
            f"{path} is no public key in PEM form; `openssl ec -in KEY -pubout` writes one.",
            where=path,
        ) from None
    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise _wrong_kind(path)
    return key


def _public_pem(key: "EllipticCurvePublicKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _read(path: Path, what: str) -> bytes:
    try:
        return read_bytes(path, max_bytes=_MAX_KEY_BYTES)
    except OSError as error:
        raise UsageError(f"the {what} {path} cannot be read: {error.strerror}.", where=path) from None


def _wrong_kind(path: Path) -> UsageError:
    return UsageError(
        f"{path} is no elliptic curve key on P-256, P-384 or P-521; "
        "`openssl ecparam -name prime256v1 -genkey -noout` makes one.",
        where=path,
    )

"""The signer and the verifier that the options of a command or the keys of a recipe ask for: a key or an
identity, never both.
"""

from pathlib import Path

from compress.errors import UsageError
from compress.sign.key import KeySigner, KeyVerifier
from compress.sign.keyless import KeylessSigner, KeylessVerifier
from compress.sign.signature import Signer, Verifier


def signer_of(
    *, key: Path | None, password_file: Path | None, keyless: bool, trust_config: Path | None
) -> Signer:
    """Return who signs.

    Raises:
        UsageError: neither or both ways are given, or an option of the other way.
    """
    if (key is not None) == keyless:
        raise UsageError(
            "give either a private key (key) or keyless signing (keyless), and one of them only."
        )
    if key is None:
        if password_file is not None:
            raise UsageError("a password belongs to a private key (key).")
        return KeylessSigner(trust_config)
    if trust_config is not None:
        raise UsageError("roots of trust (trust_config) belong to keyless signing.")
    return KeySigner(key, password_file)


def verifier_of(
    *, key: Path | None, identity: str | None, issuer: str | None, trust_config: Path | None
) -> Verifier | None:
    """Return by whom a model must be signed; None where nothing is given.

    Raises:
        UsageError: both ways are given, or half of one.
    """
    if key is not None and not (identity or issuer or trust_config):
        return KeyVerifier(key)
    if key is not None:
        raise UsageError("give either a public key (key), or an identity with its issuer.")
    if identity and issuer:
        return KeylessVerifier(identity, issuer, trust_config)
    if identity or issuer or trust_config:
        raise UsageError("an identity and its issuer (identity, issuer) belong together; give both.")
    return None

"""Elliptic curve keys for tests, as openssl writes them."""

from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


@dataclass(frozen=True)
class KeyPair:
    private: Path
    public: Path


def new_key(directory: Path, name: str = "key", *, password: str | None = None) -> KeyPair:
    """Write a new key on P-256 and its public half."""
    key = ec.generate_private_key(ec.SECP256R1())
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password.encode())
    pair = KeyPair(directory / f"{name}.pem", directory / f"{name}.pub")
    pair.private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, encryption))
    pair.public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return pair

"""Signing without a key (https://docs.sigstore.dev): Sigstore gives a certificate of ten minutes for an
identity that an OpenID Connect issuer vouches for, and lists the signature in a public log.

The identity is that of the machine where there is one (a workload of GitHub Actions, GitLab, Google Cloud,
...), else that of a person at a terminal, by the browser. Both signing and checking need a network: the roots
of trust of the public instance are fetched from it. A file with those of a private instance
(`--trust-config`) takes their place.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import EnvironmentUnfit, SignatureRefused, StorageError, UsageError
from compress.sign.bundle import Bundle
from compress.sign.signature import check_installed
from compress.untrusted.text import one_line

if TYPE_CHECKING:
    from model_signing import signing, verifying


@dataclass(frozen=True)
class KeylessSigner:
    """The identity of this machine, or of the person at the terminal."""

    trust_config: Path | None = None

    def check(self) -> None:
        _check_file(self.trust_config)
        self._token()

    def made(self, bundle: Bundle) -> bool:
        """Return whether a bundle was made without a key. Whose identity it has is not known before signing;
        who reads it checks that.
        """
        return bundle.key_hint is None

    def configure(self, config: "signing.Config") -> None:
        self.check()
        with _explained():
            config.use_sigstore_signer(identity_token=self._token(), trust_config=self.trust_config)

    def sign(self, config: "signing.Config", model: Path, signature: Path) -> None:
        with _explained():
            config.sign(model, signature)

    def _token(self) -> str | None:
        """Return the token of this workload; None at a terminal, where a person signs in."""
        check_installed()
        from sigstore.oidc import detect_credential

        with _explained():
            token = detect_credential()
        if token is None and not sys.stdin.isatty():
            raise EnvironmentUnfit(
                "there is no identity to sign with: this is neither a workload that has one (GitHub Actions, "
                "GitLab, Google Cloud, ...) nor a terminal where a person can sign in.",
                hint="Sign with --key.",
            )
        return token


@dataclass(frozen=True)
class KeylessVerifier:
    """An identity, and the issuer that vouches for it."""

    identity: str
    issuer: str
    trust_config: Path | None = None

    def __str__(self) -> str:
        return f"{self.identity} (by {self.issuer})"

    def check_hint(self, bundle: Bundle) -> None:
        if bundle.key_hint is not None:
            raise SignatureRefused(
                f"{bundle.where} was made with a key, and {self} is asked for; give the key with --key.",
                where=bundle.where,
            )

    def configure(self, config: "verifying.Config") -> None:
        _check_file(self.trust_config)
        with _explained():
            config.use_sigstore_verifier(
                identity=self.identity, oidc_issuer=self.issuer, trust_config=self.trust_config
            )


def _check_file(trust_config: Path | None) -> None:
    if trust_config is not None and not trust_config.is_file():
        raise UsageError(f"there is no file {trust_config} with roots of trust.", where=trust_config)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn errors of Sigstore and of the network into one sentence."""
    from sigstore.errors import Error

    try:
        yield
    except (Error, OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise StorageError(
            f"Sigstore cannot be used: {one_line(lines[0])[:200].rstrip('. ')}.",
            hint="It needs a network, or the roots of a private instance with --trust-config.",
        ) from None

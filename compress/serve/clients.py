"""Clients: who sent a request, by its API key or else by the address it came from."""

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence

from compress.serve.refusal import Refusal

_IPV6_NETWORK_BITS = 64
"""An IPv6 host has a network of this size to itself, so addresses within it are one client."""


class Clients:
    """Separates clients by key or address, and refuses those without a key where keys are asked for.

    Only digests of the keys are kept, and all of them are compared, each in constant time.
    """

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._digests = [_digest(each) for each in api_keys]

    def identify(self, headers: Mapping[str, str], address: str | None) -> str:
        """Return the name of the client of a request: `key-1` or `address-127.0.0.1`.

        Raises:
            Refusal: keys are asked for, and the request has none of them.
        """
        if not self._digests:
            return f"address-{network_of(address)}"
        scheme, _, key = headers.get("authorization", "").partition(" ")
        presented = _digest(key.strip() if scheme.lower() == "bearer" else "")
        matches = [hmac.compare_digest(presented, each) for each in self._digests]
        if not any(matches):
            raise Refusal(
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                status=401,
                code="invalid_api_key",
            )
        return f"key-{matches.index(True) + 1}"


def network_of(address: str | None) -> str:
    """Return the address that represents a client: an IPv4 address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return address or "unknown"
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, _IPV6_NETWORK_BITS), strict=False))
    return str(parsed)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

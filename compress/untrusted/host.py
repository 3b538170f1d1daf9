"""Hosts of URLs: which of them are this machine, so that text without TLS does not leave it."""

import ipaddress


def is_loopback(host: str | None) -> bool:
    """Return whether a host is this machine: `localhost`, or an address of the loopback range."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False

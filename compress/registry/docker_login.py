"""Credentials for registries, where `docker login`, `podman login` and `skopeo login` keep them.

The first of these files that names the host counts, in the order of skopeo (containers-auth.json(5)):

    $REGISTRY_AUTH_FILE
    $XDG_RUNTIME_DIR/containers/auth.json
    $DOCKER_CONFIG/config.json, without that variable ~/.docker/config.json

    {"auths": {"host:port": {"auth": "base64 of user:password"}},
     "credHelpers": {"host:port": "name"}, "credsStore": "name"}     the program docker-credential-<name>

Nothing is written, and no secret is part of an error.
"""

import base64
import binascii
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.errors import StorageError
from compress.untrusted.parse import Malformed, parse_json, read_json

_MAX_BYTES = 1 << 20
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HELPER_TIMEOUT_S = 30.0
_TOKEN_USER = "<token>"
"""The user name under which a helper gives an identity token instead of a password."""


@dataclass(frozen=True)
class Login:
    """A user and a password, or an identity token that is exchanged for an access token."""

    user: str
    password: str = field(repr=False)
    identity_token: str | None = field(default=None, repr=False)


def find_login(host: str, environ: Mapping[str, str]) -> Login | None:
    """Return the credentials for a host (`host` or `host:port`); None where nobody has logged in.

    Raises:
        StorageError: a file of credentials is damaged, or its helper program fails.
    """
    for path in _files(environ):
        if not path.is_file():
            continue
        try:
            config = read_json(path, max_bytes=_MAX_BYTES)
        except (Malformed, OSError) as error:
            raise StorageError(f"the credentials in {path} cannot be read: {error}.", where=path) from None
        login = _login_in(config if isinstance(config, dict) else {}, host, path)
        if login is not None:
            return login
    return None


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    if named := environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers" / "auth.json"
    if docker := environ.get("DOCKER_CONFIG"):
        yield Path(docker) / "config.json"
    elif home := environ.get("HOME"):
        yield Path(home) / ".docker" / "config.json"


def _login_in(config: Mapping[str, Any], host: str, path: Path) -> Login | None:
    helpers = config.get("credHelpers")
    helper = helpers.get(host) if isinstance(helpers, dict) else None
    auths = config.get("auths")
    entry = _entry_of(auths if isinstance(auths, dict) else {}, host)
    if helper is None and entry is not None and entry.get("auth"):
        return _decoded(entry, path, host)
    if helper is None and entry is not None:
        helper = config.get("credsStore")
    return None if helper is None else _from_helper(helper, host)


def _entry_of(auths: Mapping[str, Any], host: str) -> Mapping[str, Any] | None:
    """Return the entry of a host; older programs wrote it as a URL."""
    for key, entry in auths.items():
        if key.removeprefix("https://").removeprefix("http://").partition("/")[0] == host:
            return entry if isinstance(entry, dict) else None
    return None


def _decoded(entry: Mapping[str, Any], path: Path, host: str) -> Login:
    try:
        text = base64.b64decode(str(entry["auth"]), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        text = ""
    user, colon, password = text.partition(":")
    if not colon:
        raise StorageError(f"the credentials for {host} in {path} are damaged; log in again.", where=path)
    token = entry.get("identitytoken")
    return Login(user, password.rstrip("\0"), token if isinstance(token, str) and token else None)


def _from_helper(helper: Any, host: str) -> Login | None:
    if not isinstance(helper, str) or not _HELPER.fullmatch(helper):
        raise StorageError(f"the credential helper for {host} has a name that no program has; log in again.")
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"], input=host.encode(), capture_output=True, timeout=_HELPER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StorageError(f"{program}, which has the credentials for {host}, failed: {error}.") from None
    if done.returncode != 0:  # it knows no such host, and says so in words of its own
        return None
    try:
        answer = parse_json(done.stdout[:_MAX_BYTES])
    except Malformed:
        answer = None
    user, secret = (answer.get(key) if isinstance(answer, dict) else None for key in ("Username", "Secret"))
    if not isinstance(user, str) or not isinstance(secret, str):
        raise StorageError(f"{program} gives no user and secret for {host}; log in again.")
    return Login("", "", secret) if user == _TOKEN_USER else Login(user, secret)


def environment() -> Mapping[str, str]:
    """Return the variables that name the files of credentials."""
    return os.environ

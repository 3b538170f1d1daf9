"""A reference to something pushed: `scheme://place/of/registry/name:tag`, or `...name@sha256:<hex>` for one
exact object.

The last path component is the name, everything before it is the registry; without a tag the reference means
`latest`.
"""

import os
import re
from dataclasses import dataclass, replace

from compress.errors import UsageError
from compress.untrusted.text import one_line

DEFAULT_TAG = "latest"
_MAX_NAME_BYTES = 255
_MAX_PLACE = 2048
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")  # the grammar of OCI distribution 1.1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MODELS_URI = "models:/"
_SHAPE = (
    "scheme://registry/name:tag or scheme://registry/name@sha256:<64 hex digits>, for example "
    "layout://registry/my-model:latest"
)


@dataclass(frozen=True)
class Ref:
    """A reference to an object in a registry. `tag` moves, `digest` (of the OCI manifest) does not; exactly
    one of them decides, the digest if there is one.
    """

    scheme: str
    place: str
    name: str
    tag: str = DEFAULT_TAG
    digest: str | None = None

    @property
    def registry(self) -> str:
        """The URL of the registry."""
        return f"{self.scheme}://{self.place}"

    def pinned(self, digest: str) -> "Ref":
        """Return the same object by digest, so that `parse_ref(str(ref)) == ref` holds for it too."""
        return replace(self, tag=DEFAULT_TAG, digest=digest)

    def __str__(self) -> str:
        return f"{self.registry}/{self.name}" + (f"@{self.digest}" if self.digest else f":{self.tag}")


def parse_registry(url: str) -> tuple[str, str]:
    """Return `scheme://place` as (scheme, place).

    Raises:
        UsageError: it is not of that shape.
    """
    scheme, separator, place = url.partition("://")
    place = place.rstrip("/") or place[:1]  # the root directory is a place too
    if not separator or not place or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise UsageError(
            f"'{url}' is not a registry; write scheme://place, for example layout://registry for "
            "the local directory 'registry'."
        )
    if one_line(place) != place or not place.strip():
        raise UsageError(
            f"'{one_line(url)}' is not a registry: its place has a character that no path should have; write "
            "the path without it."
        )
    if any(len(part.encode()) > _MAX_NAME_BYTES for part in place.split("/")) or len(place) > _MAX_PLACE:
        raise UsageError(f"'{url[:60]}...' is not a registry: its place is longer than a path can be.")
    return scheme, place


def compose_ref(registry: str, name: str, tag: str = DEFAULT_TAG) -> Ref:
    """Return the reference of a name in a registry, as a recipe gives them.

    Raises:
        UsageError: the registry, the name or the tag is malformed.
    """
    scheme, place = parse_registry(registry)
    return Ref(scheme, place, check_name(name), check_tag(tag))


def is_ref(text: str) -> bool:
    """Return whether a text is meant as a reference to something pushed, and not as a path."""
    return "://" in text or text.startswith(_MODELS_URI)


def parse_ref(text: str) -> Ref:
    """Parse a reference, or a URI of MLflow: `models:/name@alias` or `models:/name/version`, at the server
    that MLFLOW_TRACKING_URI names.

    Raises:
        UsageError: it is malformed; the message shows the right shape.
    """
    if text.startswith(_MODELS_URI):
        return _parse_models_uri(text.removeprefix(_MODELS_URI), os.environ.get("MLFLOW_TRACKING_URI", ""))
    registry, _, last = text.rpartition("/")
    if not registry.partition("://")[2]:
        raise UsageError(f"'{text}' is not a reference; write {_SHAPE}.")
    name, at, digest = last.partition("@")
    if at:
        if not _DIGEST.fullmatch(digest):
            raise UsageError(f"'{digest}' in '{text}' is not a digest; write {_SHAPE}.")
        return compose_ref(registry, name).pinned(digest)
    name, colon, tag = last.partition(":")
    return compose_ref(registry, name, tag if colon else DEFAULT_TAG)


def _parse_models_uri(rest: str, server: str) -> Ref:
    name, at, alias = rest.partition("@")
    if not at:
        name, _, alias = rest.partition("/")
    if not alias or "/" in alias:
        raise UsageError(
            f"'{_MODELS_URI}{rest}' names no version; write models:/name@alias or models:/name/3."
        )
    if server.partition("://")[0] not in ("http", "https"):
        raise UsageError(
            f"'{_MODELS_URI}{rest}' names no server: set MLFLOW_TRACKING_URI to its http:// or https:// "
            f"address, or write mlflow+https://host/{name}:{alias}."
        )
    return compose_ref(f"mlflow+{server.rstrip('/')}", name, alias)


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' is not a name for a registry; use letters, digits, '.', '_' and '-', and start "
            "with a letter or digit."
        )
    return name


def check_tag(tag: str) -> str:
    if not _TAG.fullmatch(tag):
        raise UsageError(
            f"'{tag}' is not a tag; use up to 128 letters, digits, '.', '_' and '-', and start with a "
            "letter, digit or '_'."
        )
    return tag

"""The key `notify` of a recipe: webhooks that get the JSON document of a run, sent by `compress/outcome`."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from compress.errors import EnvironmentUnfit, UsageError
from compress.recipe.spec import Spec, checked_by
from compress.untrusted.host import is_loopback

Ending = Literal["done", "unchanged", "stopped", "gate_failed", "error"]
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OURS = {"host", "content-length", "content-type", "transfer-encoding", "connection", "user-agent"}
_SECRET = {"authorization", "proxy-authorization", "cookie", "x-api-key"}


def check_webhook(url: str) -> None:
    """Check the URL of a webhook; one with a variable is checked when it is filled in.

    Raises:
        UsageError: it has no TLS and is not on this machine, holds a password, or is no URL.
    """
    if _VARIABLE.search(url):
        return
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port
    except ValueError as error:
        raise UsageError(f"the webhook is no URL: {error}.") from None
    if parts.scheme not in ("https", "http") or not host or not url.isascii() or not url.isprintable():
        raise UsageError("a webhook is a URL such as https://example.org/hook.")
    if parts.username is not None:
        raise UsageError("the URL of a webhook has no password; write a header with ${NAME} instead.")
    if parts.scheme == "http" and not is_loopback(host):
        raise UsageError(f"the webhook at {host} has no TLS; only one on this machine may do without.")


def check_headers(headers: Mapping[str, str]) -> None:
    """Check the headers of a webhook.

    Raises:
        UsageError: a name or value that no header can have, or a secret that is written into the recipe.
    """
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name) or name.lower() in _OURS:
            raise UsageError(f"'{name}' is not a header that a webhook can be given.")
        if not value.isprintable() or not value.isascii():
            raise UsageError(f"the header {name} has characters that no header can have.")
        if name.lower() in _SECRET and not _VARIABLE.search(value):
            raise UsageError(
                f"the header {name} is a secret: name the environment variable that has it, such as "
                "Bearer ${NOTIFY_TOKEN}."
            )


class Notify(Spec):
    """A webhook that gets the JSON document of a run by POST when it has ended. `${NAME}` in its URL and
    headers is an environment variable, the only place for a secret.
    """

    webhook: Annotated[str, checked_by(check_webhook)] = Field(
        min_length=1, description="URL; https, or http on this machine"
    )
    on: tuple[Ending, ...] = Field(
        ("done", "gate_failed", "error"), min_length=1, description="the `status` of documents that are sent"
    )
    headers: Annotated[dict[str, str], checked_by(check_headers)] = Field(
        default_factory=dict, description="header -> value, such as `Bearer ${NOTIFY_TOKEN}`"
    )
    sign_with: str | None = Field(
        None,
        pattern="^[A-Za-z_][A-Za-z0-9_]*$",
        description="environment variable with the key of `X-Compress-Signature`, HMAC-SHA256 of the body",
    )
    timeout_s: float = Field(
        20.0, gt=0, le=300, description="seconds that the end of the run waits at most, all tries included"
    )


def filled_in(text: str, environ: Mapping[str, str]) -> str:
    """Return text with the environment's value for each `${NAME}`.

    Raises:
        EnvironmentUnfit: a variable is not set.
    """

    def value(found: re.Match[str]) -> str:
        if not environ.get(found[1]):
            raise EnvironmentUnfit(f"the environment variable {found[1]} is not set.")
        return environ[found[1]]

    return _VARIABLE.sub(value, text)

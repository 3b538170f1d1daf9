"""Sends the JSON document of a run to the webhooks of its recipe.

    POST <webhook>
    Content-Type: application/json
    X-Compress-Recipe: <name of the recipe>
    X-Compress-Delivery: <one random name for all tries>
    X-Compress-Signature: sha256=<HMAC-SHA256 of the body, in hex>        where the hook has `sign_with`

An answer of 2xx ends it. A lost connection, 408, 429 and 5xx are tried again after 0.5 s, 1 s, 2 s, ...; a
redirect is never followed, so the document and its headers reach the host that the recipe names and no other.
Each hook works in a thread of its own, which nobody waits for after its time limit, because a look-up of a
name can outlast every timeout of a socket. Nothing here raises: what fails is one sentence of warning.
"""

import hashlib
import hmac
import http.client
import json
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import compress
from compress.errors import EnvironmentUnfit, UsageError
from compress.recipe import Notify, filled_in
from compress.recipe.notify import check_webhook
from compress.untrusted.text import one_line

_FIRST_PAUSE_S = 0.5
_TRANSIENT = (408, 429)


def notify(
    hooks: Sequence[Notify],
    document: Mapping[str, Any],
    *,
    recipe: str,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
) -> None:
    """Send a document to the hooks that want its `status`, all at once, and return when each has it or its
    time is over; `warn` gets a sentence for each that has not.
    """
    body = (json.dumps(document, ensure_ascii=True, indent=2) + "\n").encode()
    deliveries = []
    for hook in hooks:
        if document["status"] not in hook.on:
            continue
        try:
            request = _request(hook, body, recipe, environ)
        except (EnvironmentUnfit, UsageError) as error:
            warn(f"the webhook {_shown(hook.webhook)} was not notified: {error}")
            continue
        deliveries.append(_Delivery(request, time.monotonic() + hook.timeout_s))
    for delivery in deliveries:
        threading.Thread(target=delivery.work, daemon=True).start()
    for delivery in deliveries:
        delivery.ended.wait(max(0.0, delivery.end_s - time.monotonic()))
        if not delivery.ended.is_set() or delivery.problem is not None:
            problem = delivery.problem or "it did not answer in time"
            warn(f"the webhook {_shown(delivery.request.full_url)} was not notified: {problem}.")


@dataclass
class _Delivery:
    """A request, and the time at which its tries end. `problem` is why the last one failed."""

    request: urllib.request.Request
    end_s: float
    problem: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        """Send the request until it is answered, or until there is no time for another try."""
        pause_s = _FIRST_PAUSE_S
        while True:
            self.problem, transient = self._once()
            if self.problem is None or not transient or time.monotonic() + pause_s >= self.end_s:
                self.ended.set()
                return
            time.sleep(pause_s)
            pause_s *= 2

    def _once(self) -> tuple[str | None, bool]:
        """Return why a try failed, None where it did not, and whether another one may help."""
        here = urlsplit(self.request.full_url).scheme == "http"  # on this machine, where no proxy is between
        proxies = urllib.request.ProxyHandler({} if here else None)
        opener = urllib.request.build_opener(_NoRedirect, proxies)
        try:
            with opener.open(self.request, timeout=max(0.1, self.end_s - time.monotonic())):
                return None, False
        except urllib.error.HTTPError as error:
            with error:
                if 300 <= error.code < 400:
                    target = str(urlsplit(error.headers.get("Location", "")).hostname)
                    return f"it redirects (to {one_line(target)}), which is not followed", False
                return f"it answered {error.code}", error.code in _TRANSIENT or error.code >= 500
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            return one_line(str(getattr(reason, "strerror", None) or reason or type(reason).__name__)), True
        except ValueError:  # a value of a variable that no header can have
            return "its URL or headers cannot be sent", False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect; each then ends as an error of its status."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        """Return None: there is no request that goes on elsewhere."""


def _request(hook: Notify, body: bytes, recipe: str, environ: Mapping[str, str]) -> urllib.request.Request:
    """Return the request, with the secrets of the environment in their places.

    Raises:
        EnvironmentUnfit: a variable is not set.
        UsageError: what it holds is no URL, or no header.
    """
    url = filled_in(hook.webhook, environ)
    check_webhook(url)
    headers = {name: filled_in(value, environ) for name, value in hook.headers.items()}
    if not all(value.isascii() and value.isprintable() for value in headers.values()):
        raise UsageError("a variable has characters that no header can have.")
    headers |= {
        "Content-Type": "application/json",
        "User-Agent": f"compress/{compress.__version__}",
        "X-Compress-Recipe": quote(recipe),
        "X-Compress-Delivery": secrets.token_hex(16),
    }
    if hook.sign_with is not None:
        key = filled_in(f"${{{hook.sign_with}}}", environ).encode()
        headers["X-Compress-Signature"] = f"sha256={hmac.new(key, body, hashlib.sha256).hexdigest()}"
    return urllib.request.Request(url, data=body, headers=headers, method="POST")


def _shown(url: str) -> str:
    """Return a webhook without path and query, which may be secret."""
    if "${" in url:
        return one_line(url)
    parts = urlsplit(url)
    return one_line(f"{parts.scheme}://{parts.hostname}")

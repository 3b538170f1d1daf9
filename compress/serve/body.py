"""Reading a request body, within limits of bytes and of time."""

import asyncio
import contextlib

from starlette.requests import ClientDisconnect, Request

from compress.serve.refusal import Refusal
from compress.serve.settings import ServerSettings
from compress.serve.shares import Shares

_DISCARD_S = 2.0
_DISCARD_FACTOR = 4
"""How long, and up to how many times the limit, the rest of a body that is too long is read and thrown away:
most clients read the answer only after they have sent everything."""


async def read_body(request: Request, settings: ServerSettings, held: Shares, client: str) -> bytes:
    """Return the body of a request. What is read counts as held by the client until the caller gives it back.

    Raises:
        Refusal: it is no JSON by its type, too long, too slow, or all bodies in sum are too long.
        ClientDisconnect: the client has gone.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal("the body must be JSON; send the header `Content-Type: application/json`.", status=415)
    parts: list[bytes] = []
    num_held = 0
    stated = _stated(request)
    more = True
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while more:
                part, more = await _next_part(request)
                if max(stated, num_held + len(part)) > settings.max_body_bytes:
                    if more:
                        await _discard(request, settings.max_body_bytes * _DISCARD_FACTOR)
                    raise Refusal(
                        f"the body is longer than {settings.max_body_bytes} bytes.",
                        status=413,
                        code="body_too_large",
                    )
                if part and not held.take(client, len(part)):
                    raise Refusal(
                        "too many bodies are being read; try again later.",
                        status=429,
                        code="bodies_too_large",
                        retry_after_s=1,
                    )
                parts.append(part)
                num_held += len(part)
    except TimeoutError:
        held.give_back(client, num_held)
        raise Refusal(
            f"the body did not arrive within {settings.body_timeout_s:g} seconds.", status=408
        ) from None
    except BaseException:
        held.give_back(client, num_held)
        raise
    return b"".join(parts)


def _stated(request: Request) -> int:
    digits = request.headers.get("content-length", "")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else 0


async def _next_part(request: Request) -> tuple[bytes, bool]:
    """Return the next part of a body, and whether more will come."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


async def _discard(request: Request, max_bytes: int) -> None:
    """Read more of a body, and throw it away."""
    more = True
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_DISCARD_S):
            while more and max_bytes > 0:
                part, more = await _next_part(request)
                max_bytes -= len(part)

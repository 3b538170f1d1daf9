"""Bodies that arrive in many parts."""

import asyncio
from typing import Any

from starlette.requests import Request

from compress.serve.body import read_body
from compress.serve.settings import ServerSettings
from compress.serve.shares import Shares

NUM_PARTS = 2000


class Part(bytes):
    """Bytes that count how often their length is asked for."""

    num_asked = 0

    def __len__(self) -> int:
        Part.num_asked += 1
        return super().__len__()


def test_the_work_of_a_body_grows_with_its_parts_and_no_faster() -> None:
    left = [Part(b"ab") for _ in range(NUM_PARTS)]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    held = Shares(1 << 20)
    body = asyncio.run(read_body(request, ServerSettings("m"), held, "client"))
    assert body == b"ab" * NUM_PARTS
    assert held.total == 2 * NUM_PARTS
    assert Part.num_asked < 10 * NUM_PARTS

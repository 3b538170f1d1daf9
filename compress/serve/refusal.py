"""Refusals of a server, in the form of OpenAI's interface."""

from collections.abc import Mapping
from typing import Any

from compress.errors import CompressError

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""The `type` of an error by its status; any other status is "invalid_request_error"."""


class Refusal(CompressError):
    """A request that is not served: one sentence for the client, the HTTP status, and the field (`param`)
    and the machine-readable `code` where there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> Mapping[str, str]:
        """The HTTP headers that belong to the refusal."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 413):
            headers["connection"] = "close"  # the rest of the body is not read
        return headers

    def as_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def shutting_down() -> Refusal:
    """Return the refusal of a server that is about to end."""
    return Refusal("the server is shutting down.", status=503, code="shutting_down", retry_after_s=5)


def queue_full(message: str) -> Refusal:
    """Return the refusal of a request for which there is no place; trying again soon is right."""
    return Refusal(message, status=429, code="queue_full", retry_after_s=1)

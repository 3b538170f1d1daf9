"""Webhooks: what is sent, what is tried again, and what never happens: a redirect, a secret in a message, a
delay beyond the limit, an exception.
"""

import hashlib
import hmac
import json
import threading
from typing import Any

import pytest

from compress.outcome import webhook
from compress.outcome.webhook import notify
from compress.recipe import Notify
from tests.support.hook_server import hook_server

DOCUMENT = {"schema": 1, "status": "done", "artifact": {"path": "/models/ü"}, "exit_code": 0}
SECRET = "s3cret-value"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_FIRST_PAUSE_S", 0.01)


def send(*hooks: dict[str, Any], document: dict[str, Any] = DOCUMENT, **environ: str) -> list[str]:
    """Notify, and return the warnings."""
    warnings: list[str] = []
    notify(
        [Notify.model_validate({"timeout_s": 30.0, **hook}) for hook in hooks],
        document,
        recipe="my recipe",
        environ=environ,
        warn=warnings.append,
    )
    return warnings


def test_the_document_arrives_signed_and_with_the_secrets_of_the_environment() -> None:
    with hook_server() as server:
        hook = {
            "webhook": server.url + "/hooks/${ROOM}",
            "headers": {"Authorization": "Bearer ${NOTIFY_TOKEN}", "X-Team": "models"},
            "sign_with": "NOTIFY_KEY",
        }
        assert send(hook, NOTIFY_TOKEN=SECRET, NOTIFY_KEY="key", ROOM="a1") == []
    ((path, headers, body),) = server.requests
    assert path == "/hooks/a1"
    assert json.loads(body) == DOCUMENT
    assert headers["authorization"] == f"Bearer {SECRET}"
    assert headers["x-team"] == "models"
    assert headers["content-type"] == "application/json"
    assert headers["x-compress-recipe"] == "my%20recipe"
    expected = hmac.new(b"key", body, hashlib.sha256).hexdigest()
    assert headers["x-compress-signature"] == f"sha256={expected}"


def test_without_a_key_there_is_no_signature() -> None:
    with hook_server() as server:
        assert send({"webhook": server.url}) == []
    assert "x-compress-signature" not in server.requests[0][1]


@pytest.mark.parametrize(
    ("on", "sent"),
    [
        (None, {"done", "gate_failed", "error"}),
        (["error"], {"error"}),
        (["unchanged", "stopped"], {"unchanged", "stopped"}),
    ],
)
def test_only_documents_with_a_wanted_status_are_sent(on: list[str] | None, sent: set[str]) -> None:
    with hook_server() as server:
        hook = {"webhook": server.url} | ({} if on is None else {"on": tuple(on)})
        for status in ("done", "unchanged", "stopped", "gate_failed", "error"):
            assert send(hook, document={"status": status, "exit_code": 0}) == []
    assert {json.loads(body)["status"] for _, _, body in server.requests} == sent


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_hook_is_tried_again_under_the_same_name(status: int) -> None:
    with hook_server(lambda number: (status, {}) if number < 3 else (200, {})) as server:
        assert send({"webhook": server.url}) == []
    assert len(server.requests) == 4
    assert len({headers["x-compress-delivery"] for _, headers, _ in server.requests}) == 1
    assert len({body for _, _, body in server.requests}) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 410])
def test_a_refusal_is_one_warning_and_no_second_try(status: int) -> None:
    with hook_server(lambda number: (status, {})) as server:
        (warning,) = send({"webhook": server.url + "/" + SECRET})
    assert len(server.requests) == 1
    assert f"it answered {status}" in warning
    assert SECRET not in warning


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_anywhere(status: int) -> None:
    with hook_server() as other:
        target = f"{other.url}/{SECRET}"
        with hook_server(lambda number: (status, {"Location": target})) as server:
            hook = {"webhook": server.url, "headers": {"Authorization": "Bearer ${TOKEN}"}}
            (warning,) = send(hook, TOKEN=SECRET)
    assert other.requests == []
    assert len(server.requests) == 1
    assert "redirects" in warning
    assert SECRET not in warning


def test_a_hook_that_never_answers_is_left_at_its_limit() -> None:
    over = threading.Event()

    def hang(number: int) -> tuple[int, dict[str, str]]:
        over.wait()
        return 200, {}

    with hook_server(hang) as server:
        (warning,) = send({"webhook": server.url, "timeout_s": 0.2})
        over.set()
    assert "was not notified" in warning
    assert len(warning.splitlines()) == 1


def test_a_hook_that_nobody_serves_is_tried_until_its_limit_and_is_one_warning() -> None:
    with hook_server() as server:
        pass
    (warning,) = send({"webhook": f"{server.url}/{SECRET}", "timeout_s": 0.1})
    assert "Connection refused" in warning
    assert SECRET not in warning


def test_several_hooks_are_served_at_once() -> None:
    meeting = threading.Barrier(3)

    def meet(number: int) -> tuple[int, dict[str, str]]:
        meeting.wait(30)
        return 200, {}

    with hook_server(meet) as server:
        assert send(*[{"webhook": server.url}] * 3) == []
    assert len(server.requests) == 3


def test_one_failing_hook_does_not_keep_the_others_from_the_document() -> None:
    with hook_server() as server:
        warnings = send({"webhook": "https://${NOWHERE}/x"}, {"webhook": server.url})
    assert len(server.requests) == 1
    (warning,) = warnings
    assert "NOWHERE is not set" in warning


@pytest.mark.parametrize(
    "environ",
    [
        {"WHERE": "http://hooks.example/" + SECRET},
        {"WHERE": f"https://user:{SECRET}@hooks.example/"},
        {"WHERE": "file:///etc/" + SECRET},
        {"WHERE": ""},
        {},
    ],
)
def test_a_variable_that_holds_no_safe_url_is_one_warning_without_it(environ: dict[str, str]) -> None:
    (warning,) = send({"webhook": "${WHERE}"}, **environ)
    assert SECRET not in warning
    assert "${WHERE}" in warning


def test_a_variable_cannot_add_a_header() -> None:
    with hook_server() as server:
        hook = {"webhook": server.url, "headers": {"Authorization": "${TOKEN}"}}
        (warning,) = send(hook, TOKEN=f"{SECRET}\r\nX-More: 1")
    assert server.requests == []
    assert SECRET not in warning


def test_a_proxy_of_the_environment_is_not_between_this_machine_and_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with hook_server() as server:
        assert send({"webhook": server.url}) == []
    assert len(server.requests) == 1

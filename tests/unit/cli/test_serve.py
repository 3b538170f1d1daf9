"""`compress serve`: it starts, tells where, logs each request as JSON, and ends by a signal as it should."""

import signal
import threading
from pathlib import Path

import httpx
import pytest

from compress.cli.app import main
from tests.support.http_server import wait_until
from tests.support.served_process import served
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_sigterm_lets_a_running_request_finish(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret-of-ours\n")
    options = ("--api-key-file", keys, "--served-model-name", "tiny", "--max-batch-size", 2)
    with served("builtin://reference", tmp_path / "log", *options) as server:
        assert httpx.get(server.url + "/v1/models").status_code == 401
        headers = {"authorization": "Bearer secret-of-ours"}
        body = {"model": "tiny", "prompt": "a", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(
                httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60)
            )
        )
        thread.start()
        running = 'vllm:num_requests_running{engine="0",model_name="tiny"} 1.0'
        with httpx.Client(base_url=server.url) as client:
            wait_until(lambda: running in client.get("/metrics").text)
        assert server.end(signal.SIGTERM) == 143
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 300
        text = server.log.read_text()
        assert "stopped by SIGTERM; every running request finished" in text
        assert "secret-of-ours" not in text
        (record,) = [each for each in server.records() if each.get("status") == 200]
        assert record["completion_tokens"] == 300
        assert record["client"] == "key-1"


def test_sigint_ends_an_idle_server_and_the_key_may_come_from_the_environment(
    model_dir: Path, tmp_path: Path
) -> None:
    environ = {"COMPRESS_API_KEY": "from-the-environment"}
    with served(model_dir, tmp_path / "log", environ=environ) as server:
        assert httpx.get(server.url + "/v1/models").status_code == 401
        headers = {"authorization": "Bearer from-the-environment"}
        (model,) = httpx.get(server.url + "/v1/models", headers=headers).json()["data"]
        assert model["id"] == str(model_dir)
        assert server.end(signal.SIGINT) == 130


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--host", "203.0.113.7"], 4, "cannot listen on 203.0.113.7"),
        (["--api-key-file", "/nowhere"], 2, "cannot be read"),
        (["--port", "70000"], 2, "--port"),
        (["--speculative", "nothing"], 2, "speculative"),
    ],
)
def test_what_cannot_be_served_is_refused(
    model_dir: Path, options: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model_dir), "--device", "cpu", "--port", "0", *options]) == code
    assert word in capsys.readouterr().err


def test_an_empty_key_file_is_refused(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("\n# none\n")
    assert main(["serve", str(model_dir), "--api-key-file", str(tmp_path / "keys")]) == 2
    assert "holds no key" in capsys.readouterr().err

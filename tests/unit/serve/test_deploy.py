"""`deploy/`: dashboard and alerts name metrics that the server exports, and the image starts the command."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from ruamel.yaml import YAML

from compress.cli.app import build_app
from tests.support.http_server import Running

DEPLOY = Path(__file__).parents[3] / "deploy"
NAME = re.compile(r"\b(?:vllm|compress):\w+|\bhttp_\w+")


def expressions_of(document: Any) -> list[str]:
    """The PromQL expressions and variable queries in a document."""
    if isinstance(document, dict):
        own = [document[key] for key in ("expr", "query") if isinstance(document.get(key), str)]
        return own + [each for value in document.values() for each in expressions_of(value)]
    return (
        [each for value in document for each in expressions_of(value)] if isinstance(document, list) else []
    )


@pytest.fixture(scope="module")
def exported(server: Running) -> set[str]:
    server.post(prompt="a", max_tokens=2)
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if line and not line.startswith("#")}


def used(text: str) -> set[str]:
    return set(NAME.findall(text))


def test_the_dashboard_shows_metrics_that_exist(exported: set[str]) -> None:
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    expressions = expressions_of(board)
    names = {name for each in expressions for name in used(each)}
    assert len(names) > 12
    assert names <= exported
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(panel["title"] and panel["targets"] for panel in board["panels"])


def test_the_alerts_watch_metrics_that_exist(exported: set[str]) -> None:
    (group,) = YAML(typ="safe").load(DEPLOY / "alerts.yaml")["groups"]
    names = {name for rule in group["rules"] for name in used(rule["expr"])}
    assert {"vllm:time_to_first_token_seconds_bucket", "vllm:num_requests_waiting"} <= names <= exported
    for rule in group["rules"]:
        assert rule["for"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_promtool_accepts_the_alerts() -> None:
    checked = subprocess.run(
        ["promtool", "check", "rules", str(DEPLOY / "alerts.yaml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_page_reads_metrics_that_exist(exported: set[str]) -> None:
    page = (DEPLOY.parent / "compress" / "serve" / "page.html").read_text()
    names = used(page)
    assert len(names) > 6
    assert {name if name in exported else f"{name}_bucket" for name in names} <= exported
    assert not re.search(r"(?:src|href)=\"|https?://|@import|url\(", page)


def test_the_image_starts_the_server_without_root() -> None:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    stages = {}
    for line in lines:
        if line.startswith("FROM "):
            assert " AS " in line
            stages[line.partition(" AS ")[2]] = current = list[str]()
        else:
            current.append(line)
    assert list(stages) == ["base", "cpu", "cuda"]
    commands: Any = typer.main.get_command(build_app())
    for name in ("cpu", "cuda"):
        by_word = {line.partition(" ")[0]: line.partition(" ")[2] for line in stages[name]}
        assert by_word["USER"] == "serve"
        words = [*json.loads(by_word["ENTRYPOINT"]), *json.loads(by_word["CMD"])]
        assert words[0] == "compress"
        commands.commands[words[1]].make_context(words[1], words[2:])
        assert "[serve]" in " ".join(shlex.split(by_word["RUN"]))
    copied = [word for line in stages["base"] if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((DEPLOY.parent / each).exists() for each in copied)

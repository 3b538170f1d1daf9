"""`compress bench` from the command line: a model in this process beside a server, on the same requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.cli.app import main
from compress.cli.load_targets import target_names
from compress.errors import UsageError
from tests.support.completion_server import Answer, completion_server
from tests.support.tiny_model import write_tiny_model

SMALL = (
    "--num-prompts",
    "4",
    "--input-len",
    "8",
    "--output-len",
    "3",
    "--num-warmups",
    "1",
    "--device",
    "cpu",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "tiny"
    path.mkdir()
    return write_tiny_model(path)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["bench", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_model_and_a_server_get_the_same_requests(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "load.html"
    with completion_server() as server:
        code, found = run(
            capsys, model, server.url, *SMALL, "--goodput", "ttft:60000", "tpot:60000", "--out", page
        )
    assert code == 0
    own, other = found["rows"]
    assert (own["backend"], other["backend"]) == ("compress", "openai")
    assert other["model_id"] == "scripted"
    for row in (own, other):
        assert (row["completed"], row["failed"], row["total_input_tokens"], row["total_output_tokens"]) == (
            4,
            0,
            32,
            12,
        )
        assert row["goodput_frac"] == 1.0
    assert own["input_tokens_digest"] == other["input_tokens_digest"]
    assert own["kv_utilization"] is not None
    assert {"date", "request_rate", "burstiness", "max_concurrency", "num_prompts"} <= own.keys()
    assert "<html" in page.read_text()
    assert found["page"] == str(page)


def test_policies_and_rates_are_compared(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = ("--policy", "continuous", "--policy", "static")
    code, found = run(capsys, model, *SMALL, *policies, "--request-rate", "500,1000", "--max-batch-size", 3)
    assert code == 0
    loads = [(row["target"], row["request_rate"]) for row in found["rows"]]
    assert loads == [
        (f"tiny {policy}", rate) for rate in (500.0, 1000.0) for policy in ("continuous", "static")
    ]
    assert len({row["input_tokens_digest"] for row in found["rows"]}) == 1


def test_a_trace_is_replayed(model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n5,9,2\n5.5,7,3\n")
    code, found = run(capsys, model, "--trace", trace, "--rate-scale", "50,100", "--device", "cpu")
    assert code == 0
    assert [row["mode"] for row in found["rows"]] == ["trace", "trace"]
    assert found["rows"][1]["request_rate"] == pytest.approx(200)
    assert found["rows"][0]["total_input_tokens"] == 16


def test_a_server_that_answers_nothing_is_a_failure_with_the_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with completion_server(lambda num, body: Answer((1,), status=503)) as server:
        code, found = run(capsys, server.url, "--model", "any", *SMALL)
    assert code == 5
    assert found["rows"][0]["failed"] == 4
    assert "503" in found["error"]["message"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ttft:5"], "name what serves"),
        (["x", "--goodput", "itl:5"], "unknown objective"),
        (["x", "--request-rate", "fast"], "write numbers"),
        (["x", "--request-rate", "0"], "above zero"),
        (["x", "--max-concurrency", "1.5"], "must be whole"),
        (["x", "--rate-scale", "2"], "without one"),
        (["x", "--trace", "t.csv", "--request-rate", "2"], "leave --workload and --request-rate out"),
        (["x", "--request-rate", "2", "--max-concurrency", "1,2"], "takes one --max-concurrency"),
    ],
)
def test_options_that_contradict_one_another_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(capsys, *words)
    assert code == 2
    assert message in found["error"]["message"]


def test_a_request_that_is_longer_than_the_model_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(capsys, model, "--input-len", 200)
    assert code == 2
    assert "longest request has 264 tokens" in found["error"]["message"]


def test_targets_have_names_of_their_own() -> None:
    assert [each.name for each in target_names(["a/x", "b/x", "http://h:1/v1"], [])] == [
        "a/x",
        "b/x",
        "http://h:1/v1",
    ]
    assert [each.name for each in target_names(["a/x"], ["static"])] == ["x"]
    with pytest.raises(UsageError, match="name what serves"):
        target_names([], [])


def test_a_profile_names_what_bounds_each_phase(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.machine.measure_bandwidth", lambda device: 1e10)
    monkeypatch.setattr("compress.machine.measure_matmul_rate", lambda device, dtype: 1e11)
    small = (*SMALL[:4], "--output-len", "24", *SMALL[6:])
    code, found = run(capsys, model, *small, "--profile", tmp_path / "traces")
    assert code == 0
    assert [(each["target"], each["phase"]) for each in found["profiles"]] == [
        ("tiny", "prefill"),
        ("tiny", "decode"),
    ]
    assert {each["verdict"] for each in found["profiles"]} <= {"memory", "compute", "host"}
    assert {each.name for each in (tmp_path / "traces").iterdir()} == {
        "tiny.prefill.json.gz",
        "tiny.decode.json.gz",
    }
    assert main(["bench", str(model), *small, "--profile", str(tmp_path / "more")]) == 0
    printed = capsys.readouterr().out
    assert "products" in printed
    assert "ms of it without a kernel" in printed
    for words, reason in (
        ((model, *SMALL, "--profile", tmp_path / "traces"), "exists; name a new directory"),
        (("http://127.0.0.1:9/v1", *SMALL, "--profile", tmp_path / "other"), "leave URLs out"),
    ):
        code, found = run(capsys, *words)
        assert code == 2
        assert reason in json.dumps(found)

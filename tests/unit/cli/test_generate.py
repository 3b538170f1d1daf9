"""`compress generate`: data on stdout, the speed on stderr, the texts of the Python interface."""

import io
import json
from collections.abc import Callable

import pytest

import compress
from compress.cli.app import main

Command = Callable[..., tuple[int, str, str]]
MODEL = "builtin://reference"


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command on the CPU: (exit code, stdout, stderr)."""

    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["generate", *argv, "--device", "cpu"])
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def expected() -> str:
    llm = compress.load(MODEL, device="cpu")
    return llm.generate("def add(a, b):", compress.SamplingParams(max_tokens=12))[0].text


def test_the_text_goes_to_stdout_and_its_speed_to_stderr(generate: Command, expected: str) -> None:
    code, out, err = generate(MODEL, "def add(a, b):", "--max-tokens", "12")
    assert (code, out) == (0, expected + "\n")
    assert "12 tokens, all of --max-tokens" in err
    assert "tokens/s, first token after" in err
    assert len(err.splitlines()) == 1


def test_a_prompt_comes_from_stdin(generate: Command, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("def add(a, b):\n"))
    code, out, _ = generate(MODEL, "-", "--max-tokens", "12", "--speculative", "ngram")
    assert (code, out) == (0, expected + "\n")


def test_json_is_one_document_with_the_times(generate: Command, expected: str) -> None:
    stop = expected[4:7]
    code, out, _ = generate(
        MODEL,
        "def add(a, b):",
        "--max-tokens",
        "12",
        "--stop",
        stop,
        "--stop",
        "zz",
        "--json",
        "--speculative",
        "ngram",
    )
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == 1
    assert document["text"] == expected[: expected.find(stop)]
    assert document["finish_reason"] == "stop"
    assert document["num_prompt_tokens"] == 7
    assert document["acceptance_length"] >= 1
    assert document["ttft_ms"] > 0


def test_drawn_text_depends_on_the_seed_alone(generate: Command) -> None:
    drawn = [
        generate(
            MODEL,
            "import ",
            "--max-tokens",
            "8",
            "--temperature",
            "1",
            "--top-p",
            "0.9",
            "--top-k",
            "40",
            "--seed",
            seed,
        )[1]
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_cannot_be_is_a_usage_error(generate: Command) -> None:
    for wrong in (
        ["nowhere", "x"],
        [MODEL, "x", "--chat"],
        [MODEL, ""],
        [MODEL, "x", "--speculative", "draft"],
    ):
        code, out, err = generate(*wrong)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1

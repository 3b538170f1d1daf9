"""The interop matrix asks programs about every format and scheme, and holds a format to what it states."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from compress.export import FORMATS
from compress.export.experts import NOT_GATHERED
from compress.export.own_code import PLAIN_ALONE
from compress.quant.scheme import DENSE, SCHEMES
from scripts import consumer_logprobs
from scripts.check_interop import Answer, Reply
from scripts.interop_cases import EVERY_SCHEME, Case, cases_of, every_scheme
from scripts.interop_families import FAMILIES, MIXTURES
from scripts.interop_matrix import MAX_MEAN, MAX_SINGLE, PROGRAMS, Machine, Result, sorted_out

ABLE = Machine(has_amx=True, has_vnni=True, has_avx512=True)
PLAIN = Machine(has_amx=False, has_vnni=False, has_avx512=False)
REFUSED = Reply([], "1.0", "ValueError: no kernel")
ANSWERED = Reply([Answer([-1.0], [3], [-2.0], [0.5])], "1.0")


def case(family: str = "llama", form: str = "compressed-tensors", scheme: str = "W4A16_G128") -> Case:
    return Case(family, form, scheme, Path("model"))


def test_a_dense_family_and_a_mixture_are_written_in_every_scheme() -> None:
    assert set(EVERY_SCHEME) <= set(FAMILIES)
    assert [family in MIXTURES for family in EVERY_SCHEME] == [False, True]
    assert {scheme for _, scheme in every_scheme("llama")} == {*SCHEMES, DENSE}
    assert {form for form, _ in every_scheme("llama")} == set(FORMATS.names())
    assert {scheme for _, scheme in every_scheme("qwen3_moe")} == set(SCHEMES)


@pytest.mark.parametrize("family", FAMILIES)
def test_formats_state_of_every_program_whether_it_loads_a_family(family: str, tmp_path: Path) -> None:
    cases = list(cases_of(family, tmp_path))
    assert len({each.path for each in cases}) == len(cases)
    for program in PROGRAMS:
        asked, left_out = sorted_out(program, cases, ABLE)
        assert len(asked) + len(left_out) == sum(each.is_for(program) for each in cases)
    asked, _ = sorted_out("transformers", cases, ABLE)
    gathers = family not in MIXTURES or cases[0].arch.family not in NOT_GATHERED
    gathers = gathers and cases[0].arch.family not in PLAIN_ALONE
    assert any(each.claim("transformers").loads for each in asked) == gathers


def test_a_cpu_is_not_asked_for_kernels_that_it_lacks() -> None:
    kernels = {"FP8_BLOCK": "AMX", "INT8_DYNAMIC": "VNNI", "W4A16_G32": "four bits"}
    for scheme, reason in kernels.items():
        assert sorted_out("vllm", [case(scheme=scheme)], ABLE)[0]
        asked, (line,) = sorted_out("vllm", [case(scheme=scheme)], PLAIN)
        assert not asked
        assert reason in line
        assert sorted_out("transformers", [case(scheme=scheme)], PLAIN)[0]
    assert sorted_out("vllm", [case("qwen3_moe")], ABLE)[0]
    _, (line,) = sorted_out("vllm", [case("qwen3_moe")], replace(ABLE, has_amx=False))
    assert "codes of experts need AMX" in line


def test_a_program_that_is_stated_not_to_load_is_asked_of_one_family_and_listed_for_others() -> None:
    assert sorted_out("vllm", [case(scheme="W8A16")], ABLE) == ([case(scheme="W8A16")], [])
    asked, (line,) = sorted_out("vllm", [case("mistral", scheme="W8A16")], ABLE)
    assert not asked
    assert "8-bit weights" in line


@pytest.mark.parametrize(
    ("reply", "loads", "mean", "worst", "well"),
    [
        (ANSWERED, True, MAX_MEAN, MAX_SINGLE, True),
        (ANSWERED, True, 1.1 * MAX_MEAN, 0.0, False),
        (ANSWERED, True, 0.0, 1.1 * MAX_SINGLE, False),
        (REFUSED, True, math.nan, math.nan, False),
        (REFUSED, False, math.nan, math.nan, True),
        (ANSWERED, False, 1.2, 3.0, True),
        (ANSWERED, False, 0.0, 0.0, False),
    ],
)
def test_what_a_program_does_is_held_to_what_the_format_states(
    reply: Reply, loads: bool, mean: float, worst: float, well: bool
) -> None:
    result = Result(case(), "vllm", reply, loads, "a note", mean, worst)
    assert result.well == well
    assert ("WRONG" in result.line()) == (not well)
    assert (REFUSED.error in result.line()) == (reply is REFUSED)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("said", "quoted"),
    [
        ("Traceback\n  line\nValueError: first\n\nKeyError: x\nextra line", "KeyError: x extra line"),
        (
            "vllm.errors.UnsupportedScheme: none\n  in layer 0",
            "vllm.errors.UnsupportedScheme: none in layer 0",
        ),
        ("a.b.ValidationError: 1 error\n  Value error, no", "a.b.ValidationError: 1 error Value error, no"),
        ("oneDNN\nterminate called", "exit code -6 terminate called"),
        ("", "exit code -6"),
    ],
)
def test_a_refusal_is_quoted_in_the_words_of_the_program(said: str, quoted: str) -> None:
    assert consumer_logprobs.quoted(said, -6) == quoted


def test_a_question_that_fails_is_answered_with_the_exception_and_spoils_no_other(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    questions = [
        {"model": str(tmp_path / name), "dtype": "float32", "max_tokens": 1, "prompts": [[1, 2]]}
        for name in ("missing", "absent")
    ]
    (tmp_path / "questions.json").write_text(json.dumps(questions))
    script = str(Path(consumer_logprobs.__file__))
    done = subprocess.run(
        [sys.executable, script, "onnxruntime", tmp_path / "questions.json", tmp_path / "answers.json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert len(answers) == 2
    assert all(name in each["error"] for name, each in zip(("missing", "absent"), answers, strict=True))

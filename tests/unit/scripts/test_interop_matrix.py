"""The interop matrix asks programs about every format and scheme, and holds a format to what it states."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import scripts.interop_matrix as matrix
from compress.export import FORMATS
from compress.export.experts import NOT_GATHERED
from compress.export.own_code import PLAIN_ALONE
from compress.quant.scheme import DENSE, SCHEMES
from scripts import consumer_logprobs
from scripts.check_interop import Consumer, Question, Reply, ask_runtime
from scripts.interop_cases import EVERY_SCHEME, Case, cases_of, every_scheme, in_turns, write
from scripts.interop_families import FAMILIES, MIXTURES
from scripts.interop_matrix import PROGRAMS, Machine, result_of, why_not
from scripts.interop_results import (
    AGREES,
    BY_RULE,
    DIFFERS,
    MAX_MEAN,
    MAX_SINGLE,
    NO_ANSWER,
    NO_KERNEL,
    REFUSES,
    Numbers,
    Result,
    Results,
    digest_of,
    key_in,
    planned,
)

ABLE = Machine(has_amx=True, has_vnni=True, has_avx512=True)
PLAIN = Machine(has_amx=False, has_vnni=False, has_avx512=False)
SAID = "ValueError: no kernel"
QUESTION = Question("model", "float32", 1, [(1, 2)])


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
    assert any(each.is_for(program) for each in cases for program in PROGRAMS)
    left_out = {
        (each, program): why_not(program, each, ABLE)
        for each in cases
        for program in PROGRAMS
        if each.is_for(program)
    }
    assert all(each is None or each.reason for each in left_out.values())
    asked = [each for each in cases if left_out.get((each, "transformers"), "for another program") is None]
    gathers = family not in MIXTURES or cases[0].arch.family not in NOT_GATHERED
    gathers = gathers and cases[0].arch.family not in PLAIN_ALONE
    assert any(each.claim("transformers").loads for each in asked) == gathers


def test_the_first_case_of_every_family_comes_before_the_second_of_any(tmp_path: Path) -> None:
    families = ("mistral", "gpt_oss", "gemma")
    cases = list(in_turns(families, tmp_path))
    of_each = {family: list(cases_of(family, tmp_path)) for family in families}
    assert [each.family for each in cases[:3]] == list(families)
    assert {len(each) for each in of_each.values()} != {len(cases) // 3}  # some end before others
    assert sorted(each.path for each in cases) == sorted(
        each.path for several in of_each.values() for each in several
    )
    for family, own in of_each.items():
        assert [each for each in cases if each.family == family] == own


def test_a_cpu_is_not_asked_for_kernels_that_it_lacks() -> None:
    kernels = {"FP8_BLOCK": "AMX", "INT8_DYNAMIC": "VNNI", "W4A16_G32": "four bits"}
    for scheme, reason in kernels.items():
        assert why_not("vllm", case(scheme=scheme), ABLE) is None
        left_out = why_not("vllm", case(scheme=scheme), PLAIN)
        assert left_out is not None
        assert left_out.verdict == NO_KERNEL
        assert reason in left_out.line()
        assert why_not("transformers", case(scheme=scheme), PLAIN) is None
    assert why_not("vllm", case("qwen3_moe"), ABLE) is None
    left_out = why_not("vllm", case("qwen3_moe"), replace(ABLE, has_amx=False))
    assert left_out is not None
    assert "codes of experts need AMX" in left_out.line()


def test_a_program_that_is_stated_not_to_load_is_asked_of_one_family_and_listed_for_others() -> None:
    assert why_not("vllm", case(scheme="W8A16"), ABLE) is None
    left_out = why_not("vllm", case("mistral", scheme="W8A16"), ABLE)
    assert left_out is not None
    assert left_out.verdict == BY_RULE
    assert left_out.well
    assert "8-bit weights" in left_out.line()


def numbers(mean: float, worst: float) -> Numbers:
    return Numbers(252, 64, 60, mean, worst)


@pytest.mark.parametrize(
    ("verdict", "loads", "well"),
    [
        (AGREES, True, True),
        (DIFFERS, True, False),
        (REFUSES, True, False),
        (REFUSES, False, True),
        (DIFFERS, False, True),
        (AGREES, False, False),
        (NO_ANSWER, True, False),
        (NO_ANSWER, False, False),
    ],
)
def test_what_a_program_does_is_held_to_what_the_format_states(verdict: str, loads: bool, well: bool) -> None:
    reason = SAID if verdict == REFUSES else None
    result = Result(case(), "vllm", verdict, loads, "a note", reason=reason)
    assert result.well == well
    assert ("WRONG" in result.line()) == (not well)
    assert (SAID in result.line()) == (verdict == REFUSES)


@pytest.mark.parametrize(
    ("mean", "worst", "agree"),
    [
        (MAX_MEAN, MAX_SINGLE, True),
        (1.1 * MAX_MEAN, 0.0, False),
        (0.0, 1.1 * MAX_SINGLE, False),
        (float("inf"), float("inf"), False),
    ],
)
def test_both_limits_hold_and_no_number_is_a_difference(mean: float, worst: float, agree: bool) -> None:
    assert numbers(mean, worst).agree == agree


def test_a_refusal_names_no_place_of_this_machine(tmp_path: Path) -> None:
    given = replace(case(), path=tmp_path / "llama")
    said = f"OSError: {given.path}/config.json and {matrix.ROOT}/scripts/x.py"
    result = result_of(given, "vllm", QUESTION, Reply([], "1.0", said), [], "d")
    assert result.verdict == REFUSES
    assert result.reason == "OSError: MODEL/config.json and scripts/x.py"
    late = result_of(given, "vllm", QUESTION, Reply([], "1.0", "no answer", timed_out=True), [], "d")
    assert late.verdict == NO_ANSWER
    assert late.digest is None  # so that it is asked again


@pytest.mark.parametrize("mean", [0.0012345678, float("inf")])
def test_a_row_of_the_file_holds_all_of_a_result(mean: float) -> None:
    given = replace(case("qwen3_moe", scheme="FP8_DYNAMIC"), dense_experts=True)
    claim = given.claim("vllm")
    stated = Result(given, "vllm", DIFFERS, claim.loads, claim.note, "float16", "1.0")
    result = replace(stated, numbers=numbers(mean, 0.5), apart=0.25, digest="d")
    row = json.loads(json.dumps(result.row(), allow_nan=False))
    assert key_in(row) in planned(cases_of("qwen3_moe", Path()), ["vllm"])
    restored = Result.of(row, given)
    assert restored.numbers is not None
    assert restored.numbers.mean == pytest.approx(mean, rel=1e-5)
    assert restored.numbers.worst == 0.5
    assert replace(restored, numbers=result.numbers) == result


def test_a_digest_is_that_of_the_files_the_question_and_the_versions(tmp_path: Path) -> None:
    digests = set()
    for name in ("first", "second"):
        given = replace(case("gemma"), path=tmp_path / name)
        write(given)
        digests.add(digest_of(given, replace(QUESTION, model=name), {"vllm": "1"}))
    (digest,) = digests  # the same files in another place
    others = {
        digest_of(given, replace(QUESTION, dtype="float16"), {"vllm": "1"}),
        digest_of(given, replace(QUESTION, prompts=[(1, 3)]), {"vllm": "1"}),
        digest_of(given, QUESTION, {"vllm": "2"}),
    }
    config = given.path / "config.json"
    config.write_text(config.read_text() + " ")
    others.add(digest_of(given, QUESTION, {"vllm": "1"}))
    config.rename(config.with_name("other.json"))
    others.add(digest_of(given, QUESTION, {"vllm": "1"}))
    assert len(others - {digest}) == 5


class Told:
    """A program that answers as this runtime does, with all log probabilities moved by `shift`."""

    asked: ClassVar[list[str]] = []
    shift: ClassVar[float] = 0.0
    ends_at: ClassVar[int | None] = None

    def __init__(self, program: str, python: Path) -> None:
        del program, python

    def __enter__(self) -> "Told":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, question: Question) -> Reply:
        if len(self.asked) == self.ends_at:
            raise KeyboardInterrupt
        self.asked.append(Path(question.model).name)
        ours = ask_runtime(Path(question.model), question.prompts, question.max_tokens)
        moved = [replace(each, logprobs=[one + self.shift for one in each.logprobs]) for each in ours]
        return Reply([replace(each, margins=[1.0] * len(each.tokens)) for each in moved], "9.9")


COMMAND = ("--families", "gemma", "mistral", "--programs", "transformers", "--schemes", "W4A16_G128")
NAMES = ["gemma-compressed-tensors-W4A16_G128", "mistral-compressed-tensors-W4A16_G128", "mistral-pruned"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> type[Told]:
    monkeypatch.setattr(matrix, "Consumer", Told)
    monkeypatch.setattr(matrix, "versions_of", lambda program, python: {program: "9.9"})
    for name, value in {"asked": [], "shift": 0.0, "ends_at": None}.items():
        monkeypatch.setattr(Told, name, value)
    return Told


def rows_of(path: Path, *, asked: bool = True) -> list[Mapping[str, Any]]:
    rows = json.loads(path.read_text())["rows"]
    return [row for row in rows if ("digest" in row) == asked]


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, told: type[Told]) -> None:
    out = tmp_path / "interop.json"
    told.ends_at = 1
    with pytest.raises(KeyboardInterrupt):
        matrix.main([*COMMAND, "--out", str(out), "--commit", "first"])
    assert [row["family"] for row in rows_of(out)] == ["gemma"]
    told.ends_at = None
    assert matrix.main([*COMMAND, "--out", str(out), "--commit", "second"]) == 0
    assert told.asked == NAMES
    rows = rows_of(out)
    assert [(row["family"], row["commit"]) for row in rows] == [
        ("mistral", "second"),
        ("gemma", "first"),
        ("mistral", "second"),
    ]
    assert all(row["verdict"] == AGREES and row["num_logprobs"] == 4 * (47 + 16) for row in rows)
    assert all(0 < row["num_equal"] <= row["num_tokens"] == 64 for row in rows)
    by_rule = rows_of(out, asked=False)
    assert {row["format"] for row in by_rule} == {"gptq"}
    assert {row["verdict"] for row in by_rule} == {BY_RULE}
    assert [each.name for each in tmp_path.iterdir()] == ["interop.json"]


def test_what_is_in_the_file_is_asked_again_on_demand_and_of_other_versions(
    tmp_path: Path, told: type[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "interop.json"
    command = [*COMMAND, "--out", str(out)]
    assert matrix.main([*command, "--commit", "a"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert matrix.main([*command, "--commit", "b"]) == 0
    assert told.asked == NAMES
    assert json.loads(out.read_text())["rows"] == rows
    told.shift = 0.3
    assert matrix.main([*command, "--again"]) == 1
    assert told.asked == 2 * NAMES
    assert {row["verdict"] for row in rows_of(out)} == {DIFFERS}
    assert not any(row["as_stated"] for row in rows_of(out))
    assert matrix.main(command) == 1  # a kept disagreement is one
    assert told.asked == 2 * NAMES
    told.shift = 0.0
    monkeypatch.setattr(matrix, "versions_of", lambda program, python: {program: "10"})
    assert matrix.main(command) == 0
    assert told.asked == 3 * NAMES
    assert json.loads(out.read_text())["programs"] == {"transformers": {"transformers": "10"}}


def test_an_answer_stays_where_this_cpu_could_not_be_asked(tmp_path: Path) -> None:
    results = Results(None, commit="c", date="d")
    given = case("qwen3_moe")
    claim = given.claim("vllm")
    assert not results.answered(given, "vllm")
    left_out = why_not("vllm", given, PLAIN)
    assert left_out is not None
    results.put(left_out, asked=False)
    assert not results.answered(given, "vllm")
    results.put(Result(given, "vllm", AGREES, claim.loads, claim.note, digest="d"), asked=True)
    assert results.answered(given, "vllm")
    assert results.kept(given, "vllm", "d") is not None
    assert results.kept(given, "vllm", "other") is None


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
    with Consumer("onnxruntime", Path(sys.executable)) as consumer:
        for name in ("missing", "absent"):
            reply = consumer.ask(replace(QUESTION, model=str(tmp_path / name)))
            assert reply.error is not None
            assert name in reply.error
            assert not reply.timed_out
        late = consumer.ask(replace(QUESTION, timeout_s=0.0))
    assert late.timed_out
    assert late.error == "no answer in 0 s"


def test_a_program_that_is_not_installed_ends_the_run() -> None:
    found = pytest.raises(SystemExit, match="no_such_program in the environment of")
    with Consumer("no_such_program", Path(sys.executable)) as consumer, found:
        consumer.ask(QUESTION)

"""The page of other programs counts what is in the file, and shows what is missing and what is wrong."""

from typing import Any

import pytest

from scripts.docs.tables import interop
from scripts.interop_results import AGREES, BY_RULE, DIFFERS, Key

FORM = "compressed-tensors"


def row(family: str, scheme: str, program: str, verdict: str = AGREES, **more: Any) -> dict[str, Any]:
    own = {"family": family, "format": FORM, "scheme": scheme, "program": program, "verdict": verdict}
    found = {"loads": True, "as_stated": True, "note": "with ease", "mean": 0.01, "worst": 0.1}
    return {**own, **found, "num_tokens": 4, "num_equal": 3, **more}


HELD = (
    row("gemma", "A", "vllm"),
    row("gemma", "B", "vllm", DIFFERS, as_stated=False),
    row("llama", "A", "vllm", BY_RULE, loads=False, note="it knows no model_type llama"),
    row("llama", "A", "transformers", worst=0.12),
)
PLANNED: tuple[Key, ...] = (
    *((each["family"], False, FORM, each["scheme"], False, each["program"]) for each in HELD),
    ("gemma", False, FORM, "A", False, "transformers"),
    ("llama", False, FORM, "B", False, "transformers"),
)


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "FAMILIES", {"llama": {}, "gemma": {}})
    monkeypatch.setattr(interop, "rows", lambda: HELD)
    monkeypatch.setattr(interop, "rows_planned", lambda: PLANNED)


def cells(text: str, first: str) -> list[str]:
    (line,) = [each for each in text.splitlines() if each.startswith(f"| {first} |")]
    return [each.strip() for each in line.strip("|").split("|")][1:]


def test_what_is_not_in_the_file_is_shown_as_missing() -> None:
    assert interop.num_rows() == (4, 6)
    assert interop.num_cases() == (3, 4)
    assert interop.num_families() == (2, 2)
    table = interop.families()
    assert cells(table, "`gemma`") == ["–", "1 / 2", "…", "–", "–"]
    assert cells(table, "`llama`") == ["–", "0 / 1", "1 / 1 …", "–", "–"]


def test_programs_are_counted_by_verdict() -> None:
    found = cells(interop.programs(), "vLLM")[1:]
    assert found == ["3", "3", "1", "1", "0", "**1**", "0.0100", "0.100", "75.0 %"]
    assert cells(interop.programs(), "transformers")[1:4] == ["3", "1", "1"]


def test_a_disagreement_is_listed_and_a_refusal_has_its_reason() -> None:
    assert cells(interop.wrong(), "`gemma`") == [FORM, "`B`", "vLLM", DIFFERS, "loads"]
    assert cells(interop.reasons(), "vLLM") == ["it knows no such `model_type`", "`llama`", "1"]

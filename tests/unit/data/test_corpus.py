"""The embedded text: two disjoint parts, a fixed mixed order, nothing generated."""

import hashlib
import json.decoder
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compress.data import corpus
from compress.data.corpus import is_evaluation, python_documents
from compress.errors import EnvironmentUnfit


def test_the_two_parts_are_disjoint_and_make_up_the_whole():
    calibration, evaluation, whole = (
        [d.id for d in python_documents(part)] for part in ("calibration", "evaluation", "all")
    )
    assert not set(calibration) & set(evaluation)
    assert sorted(calibration + evaluation) == sorted(whole)
    assert len(set(whole)) == len(whole)
    assert all(map(is_evaluation, evaluation))
    assert not any(map(is_evaluation, calibration))


def test_a_document_is_the_file_itself():
    by_id = {d.id: d.text for d in python_documents("all")}
    assert by_id["json.decoder"] == Path(json.decoder.__file__).read_text(encoding="utf-8")
    assert by_id["json"] == Path(json.__file__).read_text(encoding="utf-8")


def test_about_one_name_in_sixteen_is_for_evaluation_and_the_choice_is_the_hash_alone():
    names = [f"module_{idx}" for idx in range(16_000)]
    num = sum(map(is_evaluation, names))
    assert abs(num - 1000) < 5 * (16_000 / 16 * 15 / 16) ** 0.5  # five standard deviations of the binomial
    assert all(
        is_evaluation(name) == hashlib.sha256(name.encode()).hexdigest().endswith("0") for name in names[:500]
    )


def test_tests_tables_and_what_the_build_wrote_are_left_out():
    ids = [d.id for d in python_documents("all")]
    assert not [
        i
        for i in ids
        if re.search(r"(^|\.)tests?(\.|$)|^encodings|_sysconfigdata|site-packages|^idlelib|sitecustomize", i)
    ]
    assert len(ids) > 400


def test_prose_is_spread_through_the_order_and_the_order_is_not_the_alphabet():
    ids = [d.id for d in python_documents("calibration")]
    assert ids == [d.id for d in python_documents("calibration")]
    places = [place for place, i in enumerate(ids) if i.startswith("topics/")]
    assert len(places) > 30
    expected = [(i + 0.5) / len(places) * len(ids) for i in range(len(places))]
    assert max(abs(a - b) for a, b in zip(places, expected, strict=True)) < 2 * len(ids) / len(
        places
    )  # empty sources leave their place
    sources = [i for i in ids if not i.startswith("topics/")]
    assert sources != sorted(sources)


def test_hardly_any_evaluation_prose_stands_in_the_calibration_part():
    def ngrams(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 13]) for i in range(len(words) - 12)}

    seen = set().union(
        *(ngrams(d.text) for d in python_documents("calibration") if d.id.startswith("topics/"))
    )
    held_out = set().union(
        *(ngrams(d.text) for d in python_documents("evaluation") if d.id.startswith("topics/"))
    )
    assert len(held_out) > 2000
    assert len(held_out & seen) < 0.02 * len(held_out)


def test_order_does_not_depend_on_the_hash_seed_of_the_process():
    script = "from compress.data.corpus import python_documents as p; print([d.id for d in p('evaluation')])"
    runs = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": s}, capture_output=True, check=True
        ).stdout
        for s in "12"
    }
    assert len(runs) == 1


def test_a_library_without_sources_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path / "python311.zip"))
    with pytest.raises(EnvironmentUnfit, match=r"python311\.zip"):
        next(python_documents("all"))


def test_an_undecodable_module_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "decoder.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    assert [d.id for d in python_documents("all") if not d.id.startswith("topics/")] == ["json.decoder"]

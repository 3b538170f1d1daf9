"""Several runs of one command: which runs there are, their exit code, their summary."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from compress.cli import run_many as module
from compress.cli.app import main
from compress.cli.children import Ended, Order
from compress.cli.run_many import EndedRun, PlannedRun, exit_code, planned_runs
from compress.errors import UsageError

MATRIX = """\
version: 1
model: builtin://reference
matrix: {scheme: [W4A16_G128, FP8_DYNAMIC], round: [rtn, gptq]}
stages:
  - {kind: quantize, scheme: $(matrix.scheme), round: {kind: $(matrix.round)}}
"""
PLAIN = "version: 1\nmodel: builtin://reference\nstages: [{kind: export}]\n"
STATUS = {0: "done", 3: "gate_failed"}


def ended(code: int | None, status: str | None = None, **document: Any) -> EndedRun:
    status = status or STATUS.get(code or 0, "error")
    printed = None if code in (None, 137) else {"status": status, **document}
    return EndedRun(PlannedRun(Path("a.yaml"), None, Path("runs/a")), Ended(code), printed)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("m.yaml").write_text(MATRIX)
    Path("p.yaml").write_text(PLAIN)
    return tmp_path


def test_the_worst_exit_code_counts_in_the_order_of_the_documents() -> None:
    worst_first = [1, 2, 4, 5, 3, 75, 143, 130, 0]
    for worse, better in itertools.combinations(worst_first, 2):
        assert exit_code([ended(better), ended(worse), ended(None)], None) == worse
    assert exit_code([ended(137), ended(2)], None) == 137
    assert exit_code([ended(2)], 15) == 143


def test_unchanged_counts_where_all_are_unchanged() -> None:
    unchanged = ended(99, "unchanged")
    assert exit_code([unchanged, unchanged], None) == 99
    assert exit_code([unchanged, ended(0)], None) == 0
    assert exit_code([unchanged, ended(3)], None) == 3


def test_each_case_is_a_run_with_a_directory_of_its_own(folder: Path) -> None:
    found = planned_runs([Path("m.yaml"), Path("p.yaml")])
    assert [each.name for each in found] == [
        "m-W4A16_G128-rtn",
        "m-W4A16_G128-gptq",
        "m-FP8_DYNAMIC-rtn",
        "m-FP8_DYNAMIC-gptq",
        "p",
    ]
    assert {each.directory.parent for each in planned_runs([Path("m.yaml")], Path("x"))} == {Path("x")}


def test_two_runs_in_one_directory_are_refused(folder: Path) -> None:
    (folder / "other").mkdir()
    Path("other/p.yaml").write_text(PLAIN)
    for second in ("p.yaml", "other/p.yaml"):
        with pytest.raises(UsageError, match="both run in runs/p"):
            planned_runs([Path("p.yaml"), Path(second)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["p.yaml", "m.yaml", "--case", "x"], "--case names a case of one recipe"),
        (["m.yaml", "--from", "quantize"], "--from builds again what other runs may read"),
        (["m.yaml", "--case", "W4A16"], "the matrix has no case 'W4A16'"),
        (["p.yaml", "--case", "W4A16"], "the recipe has no matrix"),
        (["p.yaml", "m.yaml", "--if-changed", "--until", "export"], "--if-changed is about the whole recipe"),
    ],
)
def test_words_that_make_no_sense_are_refused_before_any_run(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["run", *words, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_every_run_gets_the_words_of_the_command_and_one_document_has_them_all(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Order] = []

    def answered(orders: list[Order], **options: Any) -> list[Ended]:
        given.extend(orders)
        assert list(options["places"]) == [{}, {}, {}]
        assert not options["goes_on"](3)
        assert options["goes_on"](0)
        assert options["goes_on"](9)
        good = {"status": "done", "artifact": {"digest": "sha256:" + "ab" * 32, "size_bytes": 4096}}
        good["gates"] = [{"name": "kl_mean", "passed": True}, {"name": "ppl_ratio", "passed": None}]
        bad = {**good, "status": "gate_failed", "gates": [{"name": "kl_mean", "passed": False}]}
        error = {"kind": "RecipeError", "message": "r.yaml:1:1: wrong.", "where": None, "hint": "Mend it."}
        texts = [json.dumps(each) for each in (good, bad, {"status": "error", "error": error})]
        return [*map(Ended, (0, 3, 2), texts, (1.0, 65.0, 0.0)), Ended(137, ""), Ended(None)]

    monkeypatch.setattr(module, "run_children", answered)
    words = [
        "m.yaml",
        "p.yaml",
        "--device",
        "cpu",
        "--jobs",
        "3",
        "--fail-fast",
        "--offline",
        "--workspace",
        "w",
    ]
    words += ["--if-changed", "--unchanged-exit-code", "9", "--run-dir", "d"]
    assert main(["run", *words]) == 137
    out, err = capsys.readouterr()
    tables = [line.split() for line in out.splitlines()]
    assert tables[0] == ["run", "status", "exit", "time", "size", "KL", "gates", "artifact"]
    assert " ".join(tables[1]) == "m-W4A16_G128-rtn done 0 1s 4.00 KiB - 1 of 2 pass sha256:abababababab"
    assert tables[2][2:] == ["3", "1m05s", "4.00", "KiB", "-", "FAIL", "kl_mean", "sha256:abababababab"]
    assert [row[1:3] for row in tables[3:6]] == [["error", "2"], ["killed", "137"], ["not_started", "-"]]
    assert "m-FP8_DYNAMIC-rtn: r.yaml:1:1: wrong. Mend it." in out
    assert "4 of 5 runs failed: m-W4A16_G128-gptq (3), m-FP8_DYNAMIC-rtn (2)" in err
    assert [each.name for each in given][-1] == "p"
    assert "--case=W4A16_G128-rtn" in given[0].command
    assert not any(word.startswith("--case") for word in given[4].command)
    text = " ".join(given[4].command)
    assert text.endswith(
        "-m compress run --json --device cpu --workspace w --run-dir d/p --if-changed "
        "--unchanged-exit-code=9 --offline -- p.yaml"
    )

    assert main(["run", *words, "--json"]) == 137
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert (document["status"], document["exit_code"]) == ("failed", 137)
    assert document["error"]["kind"] == "RunsFailed"
    assert [each["exit_code"] for each in document["runs"]] == [0, 3, 2, 137, None]
    assert document["runs"][1]["document"]["status"] == "gate_failed"
    assert document["runs"][3]["document"] is None
    assert document["runs"][0]["case"] == "W4A16_G128-rtn"


@pytest.mark.parametrize(
    ("ends", "code", "kind"),
    [((0, 143), 143, "Interrupted"), ((0, None), 143, "Interrupted"), ((0, 0), 0, None)],
)
def test_a_signal_counts_where_it_kept_a_run_from_its_end(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ends: tuple[int | None, ...],
    code: int,
    kind: str | None,
) -> None:
    def answered(orders: list[Order], **options: Any) -> list[Ended]:
        options["stop"].remember(15, None)
        printed = {0: {"status": "done"}, 143: {"status": "error", "error": {"message": "m.", "hint": None}}}
        return [Ended(end, "" if end is None else json.dumps(printed[end])) for end in ends]

    monkeypatch.setattr(module, "run_children", answered)
    Path("q.yaml").write_text(PLAIN)
    assert main(["run", "p.yaml", "q.yaml", "--device", "cpu", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document.get("error", {}).get("kind") == kind
    assert document["exit_code"] == code

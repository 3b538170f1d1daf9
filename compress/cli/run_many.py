"""Several runs of `compress run`: each in a process of its own, with one summary and one document at the end.

Threads are those of a single run, however many runs there are: on a CPU the digests depend on their number.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.cli.children import Ended, Order, run_children, stop_on_signals
from compress.cli.output import count_text, duration_text, emit, note, size_text, table
from compress.errors import CompressError, Interrupted, RunsFailed, UsageError

_ORDER = (2, 4, 5, 3, 75, 143, 130, 0)
"""Exit codes from worst to best. A defect (1) is worse, and so is what is not listed, such as 137."""
_SHOWN_DIGEST = len("sha256:") + 12


@dataclass(frozen=True)
class ManyRuns:
    """The words of the command; `run_dir` is the directory of the runs' directories."""

    recipes: Sequence[Path]
    workspace: Path
    run_dir: Path | None
    device: str | None
    jobs: int
    fail_fast: bool
    unchanged_exit_code: int
    metrics_file: Path | None
    options: Mapping[str, Any]


@dataclass(frozen=True)
class PlannedRun:
    """One of the runs: a recipe, a case of it where it has a matrix, and its directory."""

    recipe: Path
    case: str | None
    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name


@dataclass(frozen=True)
class EndedRun:
    """How a run ended; `document` is what it printed, None where it printed none."""

    planned: PlannedRun
    ended: Ended
    document: Mapping[str, Any] | None

    @property
    def report(self) -> Path | None:
        """The numbers of the validation of this run; None where there was none."""
        html = (self.document or {}).get("report")
        return None if html is None else Path(html).with_suffix(".json")

    @property
    def status(self) -> str:
        if self.ended.exit_code is None:
            return "not_started"
        return "killed" if self.document is None else str(self.document.get("status"))

    @property
    def failed(self) -> bool:
        """Whether it ended before its work was done, or with a gate that failed."""
        return self.status not in ("done", "unchanged", "stopped")

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.planned.name,
            "recipe": str(self.planned.recipe),
            "case": self.planned.case,
            "run_dir": str(self.planned.directory),
            "status": self.status,
            "exit_code": self.ended.exit_code,
            "seconds": round(self.ended.seconds, 3),
            "document": self.document,
        }


def run_many(chosen: ManyRuns, *, as_json: bool) -> int:
    """Run all, show the summary, and return the exit code: that of the signal that stopped them, else the
    worst.

    Raises:
        UsageError: what is of one run only, or two runs in one directory.
        EnvironmentUnfit: no such device.
    """
    if chosen.options["rebuild_from"] is not None:
        raise UsageError(
            "--from builds again what other runs may read; give one recipe, or one --case of it."
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("torchrun starts the ranks of one run; give one recipe, or one --case of it.")
    planned = planned_runs(chosen.recipes, chosen.run_dir)
    if chosen.metrics_file is not None:
        from compress.outcome.metrics_file import check_metrics_file

        check_metrics_file(chosen.metrics_file)
    device, places = _places(chosen.device, chosen.jobs)
    started_s = time.perf_counter()
    note(f"{count_text(len(planned), 'run')}, {min(len(places), len(planned))} at a time, on {device}")
    with stop_on_signals() as stop:
        ended = run_children(
            [Order(each.name, _command(chosen, each, device)) for each in planned],
            places=places,
            show=note,
            stop=stop,
            goes_on=lambda code: not chosen.fail_fast or code in (0, chosen.unchanged_exit_code),
        )
        runs = [EndedRun(*each, _document(each[1])) for each in zip(planned, ended, strict=True)]
        received = stop.received[0] if stop.requested and any(each.failed for each in runs) else None
        comparisons = [] if received is not None else _comparisons(chosen, runs)
        code = exit_code(runs, received)
        document = {
            "status": _status(runs),
            "runs": [each.as_json() for each in runs],
            "comparisons": comparisons,
            "seconds": round(time.perf_counter() - started_s, 3),
        }
        failure = _failure(runs, code, received)
        emit(document, _summary(document, runs), as_json=as_json, failure=failure)
    return code


def planned_runs(recipes: Sequence[Path], run_dir: Path | None = None) -> list[PlannedRun]:
    """Return the runs of the recipes, in order; a recipe that cannot be read is one, so that its error is in
    the summary.

    Raises:
        UsageError: two of them have one directory.
    """
    from compress.pipeline import RunDir
    from compress.recipe import load_cases

    found: dict[Path, PlannedRun] = {}
    for recipe in recipes:
        try:
            cases = [None if each.case is None else each.case.name for each in load_cases(recipe)]
        except CompressError:
            cases = [None]
        for case in cases:
            directory = RunDir.for_recipe(recipe, case, parent=run_dir or Path("runs")).path
            if (other := found.get(directory)) is not None:
                raise UsageError(
                    f"{other.recipe} and {recipe} would both run in {directory}; name each recipe once, and "
                    "give files of one name other names."
                )
            found[directory] = PlannedRun(recipe, case, directory)
    return list(found.values())


def exit_code(runs: Sequence[EndedRun], received: int | None) -> int:
    """Return the exit code of all: that of the signal that came, else the worst of the runs. That of an
    unchanged run counts where all are unchanged.
    """
    if received is not None:
        return 128 + received
    if all(each.status == "unchanged" for each in runs):
        return max(each.ended.exit_code or 0 for each in runs)
    codes = [
        0 if each.status == "unchanged" else each.ended.exit_code
        for each in runs
        if each.ended.exit_code is not None
    ]
    return min(codes, key=lambda code: _ORDER.index(code) if code in _ORDER else -1)


def _places(device: str | None, jobs: int) -> tuple[str, list[Mapping[str, str]]]:
    """Return the device of the runs, and the environment of each place: a GPU of its own, or nothing."""
    from compress.pipeline import device_kind, pick_device, visible_gpus

    chosen = "cpu" if device == "cpu" else pick_device(device)
    if device_kind(chosen) == "cpu":
        return "cpu", [{}] * jobs
    import torch

    gpus = visible_gpus(torch.cuda.device_count(), os.environ)
    index = torch.device(chosen).index
    if index is not None:
        gpus = [gpus[index]]
    if jobs > len(gpus):
        note(f"--jobs {jobs}: {count_text(len(gpus), 'GPU')} here, and each run has one of its own")
    return "cuda", [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:jobs]]


def _command(chosen: ManyRuns, run: PlannedRun, device: str) -> list[str]:
    """Return the command of one run: the same as a person would type."""
    options = chosen.options
    words = [sys.executable, "-m", "compress", "run", "--json", "--device", device]
    words += ["--workspace", str(chosen.workspace), "--run-dir", str(run.directory)]
    words += [] if run.case is None else [f"--case={run.case}"]
    words += [] if options["until"] is None else [f"--until={options['until']}"]
    words += ["--if-changed", f"--unchanged-exit-code={chosen.unchanged_exit_code}"] * options["if_changed"]
    words += ["--offline"] * options["offline"]
    words += (
        [] if chosen.metrics_file is None else [f"--metrics-file={_metrics_file(chosen.metrics_file, run)}"]
    )
    return [*words, "--", str(run.recipe)]


def _metrics_file(file: Path, run: PlannedRun) -> Path:
    return file.with_name(f"{file.stem}-{run.name}{file.suffix}")


def _document(ended: Ended) -> Mapping[str, Any] | None:
    try:
        document = json.loads(ended.stdout)
    except ValueError:  # killed before it printed
        return None
    return document if isinstance(document, dict) else None


def _status(runs: Sequence[EndedRun]) -> str:
    """Return the word that all runs share, or `done` where none failed and `failed` where one did."""
    statuses = {each.status for each in runs}
    if len(statuses) == 1 and statuses != {"error"}:
        return statuses.pop()
    return "failed" if any(each.failed for each in runs) else "done"


def _failure(runs: Sequence[EndedRun], code: int, received: int | None) -> CompressError | None:
    """Return the error of all runs: the signal, or those that failed; None where none did."""
    if received is not None:
        return Interrupted("the runs were stopped; the same command resumes them.", signal_number=received)
    failed = [each for each in runs if each.failed]
    if not failed:
        return None
    named = ", ".join(
        f"{each.planned.name} ({'not started' if each.ended.exit_code is None else each.ended.exit_code})"
        for each in failed
    )
    return RunsFailed(f"{len(failed)} of {count_text(len(runs), 'run')} failed: {named}.", exit_code=code)


def _comparisons(chosen: ManyRuns, runs: Sequence[EndedRun]) -> list[dict[str, Any]]:
    """Write the page of each recipe with a matrix whose cases have evidence, and return what it is about."""
    found = []
    for recipe in dict.fromkeys(each.planned.recipe for each in runs if each.planned.case is not None):
        own = [each for each in runs if each.planned.recipe == recipe]
        reports = {str(each.planned.case): each.report for each in own if each.report is not None}
        if len(reports) > 1:
            found.append(_compared(recipe, chosen.run_dir, reports))
    return found


def _compared(recipe: Path, run_dir: Path | None, reports: Mapping[str, Path]) -> dict[str, Any]:
    """Write the page of one recipe; an error is a fact of the summary, and takes nothing from the runs."""
    from compress.artifact.atomic import write_atomic
    from compress.cli.compare import read_models
    from compress.pipeline import RunDir
    from compress.pipeline.evidence import read_report
    from compress.validate.compare.document import compare_document
    from compress.validate.compare.page import claims, render_compare_page

    page = RunDir.for_recipe(recipe, parent=run_dir or Path("runs")).path / "compare.html"
    facts: dict[str, Any] = {"recipe": str(recipe), "cases": list(reports), "page": None, "claims": []}
    try:
        document = compare_document(*read_models({case: read_report(each) for case, each in reports.items()}))
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(page, render_compare_page(document).encode())
    except (CompressError, OSError) as error:
        return {**facts, "warnings": [f"The cases are not compared: {error}"]}
    return {**facts, "page": str(page), "claims": claims(document), "warnings": document["warnings"]}


def _summary(document: Mapping[str, Any], runs: Sequence[EndedRun]) -> str:
    """Return what the terminal prints: a row a run, why runs failed, and how the cases compare."""
    head = ("run", "status", "exit", "time", "size", "KL", "gates", "artifact")
    rows = [head, *(_row(each) for each in runs)]
    lines = [table(rows, right=(2, 3, 4, 5))]
    errors = [
        f"{each.planned.name}: {error['message']} {error['hint'] or ''}".rstrip()
        for each in runs
        if (error := (each.document or {}).get("error")) is not None
    ]
    lines += ["", *errors] if errors else []
    for each in document["comparisons"]:
        place = [] if each["page"] is None else [f"compare  {each['page']}"]
        lines += ["", *each["claims"], *(f"warning  {warning}" for warning in each["warnings"]), *place]
    return "\n".join(lines)


def _row(run: EndedRun) -> tuple[str, ...]:
    document = run.document or {}
    artifact = document.get("artifact")
    return (
        run.planned.name,
        run.status,
        "-" if run.ended.exit_code is None else str(run.ended.exit_code),
        duration_text(run.ended.seconds),
        "-" if artifact is None else size_text(artifact["size_bytes"]),
        _kl_text(run.report),
        _gates_text(document.get("gates", [])),
        "-" if artifact is None else artifact["digest"][:_SHOWN_DIGEST],
    )


def _kl_text(report: Path | None) -> str:
    """Return the mean KL of a report; a dash where there is none, or it cannot be read."""
    from compress.pipeline.evidence import read_report
    from compress.validate.compare.evidence import read_evidence

    if report is None:
        return "-"
    try:
        readings = read_evidence(read_report(report), "a run").readings
    except (CompressError, OSError):
        return "-"
    return f"{readings['kl_mean'].estimate.value:.4f}" if "kl_mean" in readings else "-"


def _gates_text(gates: Sequence[Mapping[str, Any]]) -> str:
    failed = [str(gate["name"]) for gate in gates if gate["passed"] is False]
    if failed:
        return f"FAIL {', '.join(failed)}"
    passed = sum(gate["passed"] is True for gate in gates)
    return f"{passed} of {len(gates)} pass" if gates else "-"

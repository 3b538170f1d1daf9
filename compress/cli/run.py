"""`compress run` and `compress resume`: the whole pipeline of a recipe, safe to repeat, safe to interrupt."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.output import (
    JsonFlag,
    duration_text,
    emit,
    note,
    peak_host_bytes,
    progress,
    size_text,
    table,
)
from compress.cli.recipes import CaseOption, RecipesArgument, one_recipe
from compress.cli.run_outcome import report_outcome
from compress.cli.verdict import gate_text
from compress.errors import EnvironmentUnfit, GateFailed, RankStopped, RecipeError, UsageError

if TYPE_CHECKING:
    from compress.context import Progress, Ranks
    from compress.pipeline import Result, RunDir, StepResult
    from compress.ranks.group import Launch

WorkspaceOption = Annotated[Path, typer.Option("--workspace", help="Cache of stage results.")]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", help="cuda, cuda:1 or cpu; the first GPU when there is one.", show_default=False
    ),
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Never use the network.")]
UntilOption = Annotated[
    str | None, typer.Option("--until", help="Stop after this stage.", show_default=False)
]
MetricsFileOption = Annotated[
    Path | None,
    typer.Option(
        "--metrics-file",
        help="Write metrics of the run for Prometheus' node_exporter, .prom. Of several runs, each writes "
        "FILE-<run>.prom.",
        show_default=False,
    ),
]
DEFAULT_WORKSPACE = Path(".compress")


def run(
    recipes: RecipesArgument,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            help="Where report and lock go; runs/<recipe> by default. Of several runs: instead of runs.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = None,
    case: CaseOption = None,
    jobs: Annotated[
        int,
        typer.Option("--jobs", min=1, help="Of several runs: so many at a time, each on a GPU of its own."),
    ] = 1,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Of several runs: when one fails, stop the others.")
    ] = False,
    until: UntilOption = None,
    rebuild_from: Annotated[
        str | None,
        typer.Option(
            "--from", help="Build this stage and all that follow it again, cached or not.", show_default=False
        ),
    ] = None,
    if_changed: Annotated[
        bool,
        typer.Option(
            "--if-changed", help="Do nothing when neither recipe, model, data nor registry changed."
        ),
    ] = False,
    unchanged_exit_code: Annotated[
        int, typer.Option("--unchanged-exit-code", help="Exit code of `--if-changed` when nothing changed.")
    ] = 0,
    metrics_file: MetricsFileOption = None,
    offline: OfflineOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a recipe: build what is missing, validate, let the gates decide, push. Several recipes, and the
    cases of a matrix, are several runs with one summary.
    """
    if if_changed and (until is not None or rebuild_from is not None):
        raise UsageError(
            "--if-changed is about the whole recipe; leave out --until and --from, or --if-changed."
        )
    options = {"until": until, "rebuild_from": rebuild_from, "if_changed": if_changed, "offline": offline}
    if not _is_one(recipes, case):
        from compress.cli.run_many import ManyRuns, run_many

        chosen = ManyRuns(
            recipes,
            workspace,
            run_dir,
            device,
            jobs,
            fail_fast,
            unchanged_exit_code,
            metrics_file,
            options,
        )
        code = run_many(chosen, as_json=as_json)
    else:
        from compress.pipeline import RunDir

        usual = RunDir.for_recipe(recipes[0], case)
        report_outcome(recipes[0], usual.path.name, case=case, metrics_file=metrics_file)
        directory = RunDir(run_dir) if run_dir is not None else usual
        code = _execute(
            recipes[0],
            directory,
            workspace,
            device,
            unchanged_exit_code=unchanged_exit_code,
            as_json=as_json,
            case=case,
            **options,
        )
    if code:
        raise typer.Exit(code)


def _is_one(recipes: Sequence[Path], case: str | None) -> bool:
    """Return whether one run is asked for; a recipe that cannot be read is one, and ends with an error."""
    try:
        return one_recipe(recipes, case) is not None
    except RecipeError:
        return True


def resume(
    run_dir: Annotated[Path, typer.Argument(help="Directory of an earlier run.", show_default=False)],
    workspace: Annotated[
        Path | None,
        typer.Option(
            "--workspace",
            help="Cache of stage results; that of the earlier run by default.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = None,
    metrics_file: MetricsFileOption = None,
    offline: OfflineOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Go on with a run that was interrupted, exactly as it was resolved then (recipe.lock.yaml)."""
    from compress.pipeline import LOCK_NAME, RunDir

    directory = RunDir(run_dir)
    if not directory.lock.is_file():
        raise UsageError(
            f"{run_dir} is not the directory of a run: it has no {LOCK_NAME}. `compress run` makes one."
        )
    directory.check_lock()
    report_outcome(directory.lock, directory.path.resolve().name, metrics_file=metrics_file)
    root = workspace or directory.workspace or DEFAULT_WORKSPACE
    code = _execute(directory.lock, directory, root, device, as_json=as_json, offline=offline)
    if code:
        raise typer.Exit(code)


def _execute(
    recipe_file: Path,
    directory: "RunDir",
    workspace: Path,
    device: str | None,
    *,
    as_json: bool,
    unchanged_exit_code: int = 0,
    **options: Any,
) -> int:
    """Run the job, show its outcome, and return the exit code; `options` are the other fields of `Job`. Of
    several ranks that torchrun started, rank 0 does this and the others help.
    """
    from compress.context import OneRank
    from compress.pipeline import Job, execute, pick_device

    def lead(chosen: str, ranks: "Ranks") -> int:
        with _stop_signal() as stopped:
            job = Job(
                recipe_file,
                directory,
                workspace,
                chosen,
                stop_signal=stopped,
                step_done=_note_step,
                warn=lambda sentence: note(f"warning: {sentence}"),
                note=note,
                ranks=ranks,
                **options,
            )
            result = execute(job, TerminalWatch(chosen))
        emit(result.as_json(), _summary(result), as_json=as_json, failure=_failed_gates(result))
        return unchanged_exit_code if result.status == "unchanged" else result.exit_code

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return lead(pick_device(device), OneRank())
    return _as_rank(device, lead)


def _failed_gates(result: "Result") -> GateFailed | None:
    if result.status != "gate_failed":
        return None
    failed = ", ".join(gate["name"] for gate in result.gates if gate["passed"] is False)
    return GateFailed(f"a gate failed ({failed}); the artifact is kept and not pushed.", where=result.report)


def _as_rank(device: str | None, lead: "Callable[[str, Ranks], int]") -> int:
    """Join the other ranks, and lead or follow. An error of one rank ends all; rank 0 reports it, with the
    exit code of the failing rank.
    """
    from compress.pipeline import follow
    from compress.ranks.group import Launch, joined

    launch = Launch.from_environ(os.environ)
    if launch is None:
        raise UsageError(
            "WORLD_SIZE is set to several ranks, and RANK, MASTER_ADDR or MASTER_PORT is missing. Start "
            "ranks with torchrun."
        )
    chosen = _device_of(launch, device)
    try:
        with joined(launch, chosen) as ranks:
            if ranks.rank == 0:
                return lead(chosen, ranks)
            with _stop_signal(silent=True):  # rank 0 alone decides whether to stop
                follow(ranks, chosen)
            return 0
    except RankStopped as stopped:
        if launch.rank == 0:
            raise
        return stopped.exit_code  # rank 0 reports the reason


def _device_of(launch: "Launch", device: str | None) -> str:
    """Return the device of a rank: each rank of a machine has its own GPU.

    Raises:
        UsageError: one GPU was asked for, for all of them.
        EnvironmentUnfit: more ranks than GPUs.
    """
    import torch

    from compress.pipeline import device_kind, pick_device

    chosen = pick_device(device)
    if device_kind(chosen) == "cpu":
        return chosen
    if torch.device(chosen).index is not None:
        raise UsageError(
            f"--device {chosen} is one GPU, and torchrun started {launch.size} ranks. Write --device cuda, "
            f"or leave it out."
        )
    if launch.local_rank >= torch.cuda.device_count():
        raise EnvironmentUnfit(
            f"rank {launch.rank} has no GPU: this machine has {torch.cuda.device_count()}, and more ranks "
            f"were started."
        )
    torch.cuda.set_device(launch.local_rank)
    return f"cuda:{launch.local_rank}"


@dataclass(frozen=True)
class TerminalWatch:
    """Shows each stage on stderr: a bar or log lines while it is built, nothing when it is cached."""

    device: str

    @contextmanager
    def stage(self, kind: str, *, cached: bool) -> Iterator["Progress"]:
        from compress.context import SilentProgress

        if cached:
            yield SilentProgress()
            return
        with progress(kind, peak_bytes=self._peak_bytes) as report:
            yield report

    def _peak_bytes(self) -> int:
        """Peak memory where the work is."""
        from compress.pipeline import device_kind

        if device_kind(self.device) == "cpu":
            return peak_host_bytes()
        import torch

        return int(torch.cuda.max_memory_allocated(self.device))


@contextmanager
def _stop_signal(*, silent: bool = False) -> "Iterator[Any]":
    """While the block runs, SIGTERM and the first SIGINT are remembered for the next boundary; a second
    SIGINT ends at once.
    """
    received: list[int] = []

    def remember(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        if not silent:
            note(
                f"{signal.Signals(number).name}: stopping at the next safe point (Ctrl-C again to stop at "
                f"once)"
            )

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _note_step(result: "StepResult") -> None:
    how = result.origin
    if how != "cached":
        how = f"{how} in {duration_text(result.seconds)}"
    note(f"{result.kind:<9} {how}  {result.artifact.digest[:19]}  {size_text(result.artifact.size_bytes)}")


def _summary(result: "Result") -> str:
    """Return what the terminal prints at the end of a run: one fact a line."""
    steps = result.run.steps
    cached = sum(each.cached for each in steps)
    pulled = sum(each.pulled for each in steps)
    stages = f"{cached} of {len(steps)} stages cached" + (f", {pulled} of them pulled" if pulled else "")
    rows = [("status", f"{result.status} in {result.seconds:.1f} s, {stages}")]
    if result.made is not None:
        rows.append(("artifact", f"{result.digest}  {size_text(result.size_bytes)}"))
        rows.append(("", str(result.path)))
    rows += [("gate", gate_text(gate)) for gate in result.gates]
    rows += [("warning", warning) for warning in result.warnings]
    if result.pushed is not None:
        rows.append(("pushed", f"{result.pushed.name}:{', '.join(result.pushed.tags)}"))
    elif result.status == "gate_failed":
        rows.append(("pushed", "no: a gate failed"))
    if result.report is not None:
        rows.append(("report", str(result.report)))
    return table(rows)

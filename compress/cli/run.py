"""`compress run` and `compress resume`: the whole pipeline of a recipe, safe to repeat, safe to interrupt."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.output import JsonFlag, duration_text, emit, note, peak_host_bytes, progress, size_text, table
from compress.cli.run_dir import LOCK_NAME, RunDir
from compress.errors import GateFailed, UsageError

if TYPE_CHECKING:
    from compress.artifact.context import Progress
    from compress.pipeline import RunResult, StepResult
    from compress.registry.transfer import PushResult

RecipeArgument = Annotated[Path, typer.Argument(help="Recipe (YAML).", show_default=False)]
WorkspaceOption = Annotated[Path, typer.Option("--workspace", help="Cache of stage results.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cuda, cuda:1 or cpu; the first GPU when there is one.", show_default=False)
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Never use the network.")]
UntilOption = Annotated[str | None, typer.Option("--until", help="Stop after this stage.", show_default=False)]
DEFAULT_WORKSPACE = Path(".compress")


def run(
    recipe: RecipeArgument,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Where report and lock go; runs/<recipe> by default.", show_default=False)
    ] = None,
    device: DeviceOption = None,
    until: UntilOption = None,
    rebuild_from: Annotated[
        str | None, typer.Option("--from", help="Build this stage and all behind it again, cached or not.", show_default=False)
    ] = None,
    if_changed: Annotated[
        bool, typer.Option("--if-changed", help="Do nothing when neither recipe, model, data nor registry changed.")
    ] = False,
    unchanged_exit_code: Annotated[
        int, typer.Option("--unchanged-exit-code", help="Exit code of `--if-changed` when nothing changed.")
    ] = 0,
    offline: OfflineOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a recipe: build what is missing, validate, let the gates decide, push."""
    if if_changed and (until is not None or rebuild_from is not None):
        raise UsageError("--if-changed asks about the whole recipe; leave out --until and --from, or --if-changed.")
    directory = RunDir(run_dir if run_dir is not None else Path("runs") / recipe.name.removesuffix(".yaml").removesuffix(".yml"))
    request = RunRequest(recipe, directory, workspace, device, until, rebuild_from, offline)
    code = _execute(request, unchanged_exit_code if if_changed else None, as_json=as_json)
    if code:
        raise typer.Exit(code)


def resume(
    run_dir: Annotated[Path, typer.Argument(help="Directory of an earlier run.", show_default=False)],
    workspace: Annotated[
        Path | None, typer.Option("--workspace", help="Cache of stage results; that of the earlier run by default.", show_default=False)
    ] = None,
    device: DeviceOption = None,
    offline: OfflineOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Go on with a run that was interrupted, exactly as it was resolved then (recipe.lock.yaml)."""
    directory = RunDir(run_dir)
    if not directory.lock.is_file():
        raise UsageError(f"{run_dir} is not the directory of a run: it has no {LOCK_NAME}. `compress run` makes one.")
    root = workspace or directory.workspace or DEFAULT_WORKSPACE
    code = _execute(RunRequest(directory.lock, directory, root, device, None, None, offline), None, as_json=as_json)
    if code:
        raise typer.Exit(code)


@dataclass(frozen=True)
class RunRequest:
    """What the command line asks for."""

    recipe_file: Path
    directory: RunDir
    workspace: Path
    device: str | None
    until: str | None
    rebuild_from: str | None
    offline: bool


def _execute(request: RunRequest, unchanged_exit_code: int | None, *, as_json: bool) -> int:
    """The exit code of a run; with `unchanged_exit_code` nothing is done when nothing changed."""
    from compress.artifact.workspace import Workspace
    from compress.export import open_weights
    from compress.pipeline import RunOptions, build_steps, check_selection, estimates, lock_of, publish, resolve_text, unchanged
    from compress.pipeline import run as pipeline_run
    from compress.recipe import load_recipe

    started_s, directory = time.perf_counter(), request.directory
    recipe = load_recipe(request.recipe_file)
    steps = build_steps(recipe)
    check_selection(steps, until=request.until, rebuild_from=request.rebuild_from)
    device = pick_device(request.device)
    source = resolve_text(recipe.model, offline=request.offline)
    estimates(steps, open_weights(source.path).arch, device)  # what cannot work ends here, before any work and before any lock
    workspace = Workspace(request.workspace)
    with workspace.lock(), _stop_signal() as stopped:
        if unchanged_exit_code is not None and (same := unchanged(recipe, steps, source, workspace, device)) is not None:
            _finish(same, directory, None, "gate_failed" if same.gates_failed else "unchanged", started_s, as_json=as_json)
            return GateFailed.exit_code if same.gates_failed else unchanged_exit_code
        directory.write_lock(lock_of(recipe, steps, source))
        directory.link_workspace(request.workspace)
        directory.log(f"start {request.recipe_file} seed {recipe.seed} model {source.name} on {device}")
        options = RunOptions(
            device, request.until, request.rebuild_from, request.offline, stopped, lambda result: _note_step(directory, result)
        )
        with _ends_in_log(directory):
            result = pipeline_run(recipe, steps, source, workspace, TerminalWatch(device), options)
            evidence = _write_evidence(directory, result, request.recipe_file)
            pushed = None
            if recipe.push is not None and result.complete and not result.gates_failed:
                pushed = publish(recipe.push, result, evidence)
                directory.log(f"pushed {pushed.artifact_digest} as {pushed.name}:{','.join(pushed.tags)} to {recipe.push.to}")
        status = "gate_failed" if result.gates_failed else "done" if result.complete else "stopped"
        _finish(result, directory, pushed, status, started_s, as_json=as_json)
    return GateFailed.exit_code if result.gates_failed else 0


def pick_device(asked: str | None) -> str:
    """The device of a run: what was asked for, else the first GPU, else the CPU.

    Raises:
        UsageError: it is not the name of a device.
        EnvironmentUnfit: CUDA was asked for and is not usable, or has no GPU of that index.
    """
    import torch

    from compress.errors import EnvironmentUnfit

    usable = torch.cuda.is_available()
    if asked is None:
        return "cuda" if usable else "cpu"
    if device_kind(asked) == "cuda":
        if not usable:
            raise EnvironmentUnfit("--device asks for CUDA, and torch finds no usable GPU here; `compress doctor` says why.")
        if (torch.device(asked).index or 0) >= torch.cuda.device_count():
            raise EnvironmentUnfit(f"--device asks for {asked}, and this machine has {torch.cuda.device_count()} GPUs, counted from 0.")
    return asked


def device_kind(asked: str) -> str:
    """`cpu` or `cuda`, whether it is here or not.

    Raises:
        UsageError: it is not the name of a device.
    """
    import torch

    try:
        kind = torch.device(asked).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"'{asked}' is not a device; write cpu, cuda or cuda:<index>.")
    return kind


@dataclass(frozen=True)
class TerminalWatch:
    """Shows each stage on stderr: a bar or log lines while it is built, nothing when it is cached."""

    device: str

    @contextmanager
    def stage(self, kind: str, *, cached: bool) -> Iterator["Progress"]:
        from compress.artifact.context import SilentProgress

        if cached:
            yield SilentProgress()
            return
        with progress(kind, peak_bytes=self._peak_bytes) as report:
            yield report

    def _peak_bytes(self) -> int:
        """Peak memory where the work is."""
        if device_kind(self.device) == "cpu":
            return peak_host_bytes()
        import torch

        return int(torch.cuda.max_memory_allocated(self.device))


@contextmanager
def _stop_signal() -> "Iterator[Any]":
    """While the block runs, SIGTERM and the first SIGINT are remembered for the next boundary; a second SIGINT ends at once."""
    received: list[int] = []

    def remember(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        note(f"{signal.Signals(number).name}: stopping at the next safe point (Ctrl-C again to stop at once)")

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ends_in_log(directory: RunDir) -> Iterator[None]:
    """Whatever ends the block early is noted in the run's log."""
    try:
        yield
    except BaseException as error:
        directory.log(f"ended: {type(error).__name__}: {error}")
        raise


def _note_step(directory: RunDir, result: "StepResult") -> None:
    how = "cached" if result.cached else f"built in {duration_text(result.seconds)}"
    directory.link(result.kind, result.artifact)
    directory.log(f"{result.kind} {how} {result.artifact.digest}")
    note(f"{result.kind:<9} {how}  {result.artifact.digest[:19]}  {size_text(result.artifact.size_bytes)}")


def _write_evidence(directory: RunDir, result: "RunResult", recipe_file: Path) -> Path | None:
    from compress.cli.provenance import provenance
    from compress.stages import Port

    artifact = result.latest(Port.EVIDENCE)
    if artifact is None:
        return None
    digests = {each.kind: each.artifact.digest for each in result.steps}
    built = any(not each.cached for each in result.steps)
    known = None if built else directory.provenance_of(digests)  # finding everything cached is not when and where it was made
    directory.write_evidence(artifact, known or provenance(recipe_file, result.source, digests))
    return directory.evidence


def _finish(result: "RunResult", directory: RunDir, pushed: "PushResult | None", status: str, started_s: float, *, as_json: bool) -> None:
    """The card at the end, or the document."""
    from compress.stages import Port

    checkpoint = result.latest(Port.CHECKPOINT) or result.latest(Port.QUANTIZED)
    has_report = result.latest(Port.EVIDENCE) is not None and directory.report.is_file()
    document = {
        "status": status,
        "artifact": {"digest": checkpoint.digest, "path": str(checkpoint.path), "size_bytes": checkpoint.size_bytes}
        if checkpoint
        else None,
        "source": {"name": result.source.name, "revision": result.source.revision, "digest": result.source.digest},
        "stages": [
            {"kind": each.kind, "cached": each.cached, "seconds": round(each.seconds, 3), "digest": each.artifact.digest}
            for each in result.steps
        ],
        "gates": result.gates,
        "report": str(directory.report) if has_report else None,
        "pushed": {"name": pushed.name, "tags": list(pushed.tags), "manifest": pushed.manifest_digest} if pushed else None,
        "seconds": round(time.perf_counter() - started_s, 3),
    }
    emit(document, _card(document, result), as_json=as_json)


def _card(document: dict[str, Any], result: "RunResult") -> str:
    cached = sum(each.cached for each in result.steps)
    rows: list[tuple[str, str]] = [
        ("status", f"{document['status']} in {document['seconds']:.1f} s, {cached} of {len(result.steps)} stages cached")
    ]
    if document["artifact"]:
        rows.append(("artifact", f"{document['artifact']['digest']}  {size_text(document['artifact']['size_bytes'])}"))
        rows.append(("", document["artifact"]["path"]))
    for gate in document["gates"]:
        verdict = {True: "pass", False: "FAIL", None: "n/a"}[gate["passed"]]
        measured = "" if gate["value"] is None else f"{gate['value']:.4g}, bound {gate['bound']:.4g}"
        reason = f"  {gate['note']}" if gate["note"] else ""
        rows.append(("gate", f"{verdict}  {gate['name']} {gate['relation']} {gate['limit']:g}  {measured}{reason}"))
    if document["pushed"]:
        rows.append(("pushed", f"{document['pushed']['name']}:{', '.join(document['pushed']['tags'])}"))
    elif result.gates_failed:
        rows.append(("pushed", "no: a gate failed"))
    if document["report"]:
        rows.append(("report", document["report"]))
    return table(rows)

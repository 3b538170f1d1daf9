"""The only loop over stages: a recipe becomes steps, steps become artifacts, artifacts are found again by key.

    recipe -> steps (kinds resolved, specs checked, defaults filled in, needs met)   before anything runs
    step   -> key = digest(stage, version, spec, input digests, seed, what else it depends on) -> cached or built
    end    -> gates decide, then `publish`

A run holds the workspace's lock. A signal ends it at the next boundary that a stage declares; the same command resumes there.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from compress.artifact.context import Context, Progress, never
from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.errors import GateFailed, RecipeError, UsageError, did_you_mean
from compress.models.arch import Arch
from compress.recipe import Push, Recipe, Spec, parse_model_ref, parse_spec, unknown_kind_error
from compress.registry import transfer
from compress.registry.model_source import ModelSource, resolve_model
from compress.registry.protocol import open_registry
from compress.registry.ref import DEFAULT_TAG, compose_ref
from compress.stages import STAGES, Estimate, Input, Inputs, Need, PlanFacts, Port, Stage


@dataclass(frozen=True)
class Step:
    """A stage of a recipe with its checked spec. `implied` steps stand for a default that the recipe left out."""

    stage: Stage
    spec: Spec
    implied: bool = False


@dataclass(frozen=True)
class StepResult:
    kind: str
    key: str
    artifact: Artifact
    cached: bool
    seconds: float


@dataclass(frozen=True)
class RunResult:
    """What every stage gave; `complete` is false when `until` ended the run early."""

    source: ModelSource
    steps: tuple[StepResult, ...]
    complete: bool = True

    def latest(self, port: Port) -> Artifact | None:
        """The last artifact given to a port."""
        found = [each.artifact for each in self.steps if STAGES.get(each.kind).gives == port]
        return found[-1] if found else None

    @property
    def gates(self) -> list[dict[str, Any]]:
        evidence = self.latest(Port.EVIDENCE)
        return evidence.manifest.facts["gates"] if evidence is not None else []

    @property
    def gates_failed(self) -> list[str]:
        return [gate["name"] for gate in self.gates if gate["passed"] is False]


class Watch(Protocol):
    """Who watches a run: gives each stage a place for its progress."""

    def stage(self, kind: str, *, cached: bool) -> AbstractContextManager[Progress]: ...


@dataclass(frozen=True)
class RunOptions:
    device: str
    until: str | None = None
    rebuild_from: str | None = None
    offline: bool = False
    stop_signal: Callable[[], int | None] = never
    step_done: Callable[[StepResult], None] = field(default=lambda result: None)


def build_steps(recipe: Recipe) -> list[Step]:
    """Check a whole recipe before anything runs.

    Raises:
        RecipeError: an unknown stage or key, a wrong value, or a stage whose need no earlier stage meets; with file, line and column.
            Also a push to what cannot be a registry, a name or a tag, or of what was exported after the last validation.
    """
    steps: list[Step] = []
    present = {Port.SOURCE, Port.DENSE}
    for entry in recipe.stages:
        if entry.kind not in STAGES.names():
            raise unknown_kind_error(entry, STAGES.names())
        stage = STAGES.get(entry.kind)
        spec = parse_spec(stage.spec, entry.raw, entry.where)
        for need in stage.takes:
            if _met_by(need, present) is None:
                implied = _default_for(need)
                if implied is None:
                    raise entry.where.error(
                        ("kind",),
                        f"'{entry.kind}' needs {_need_text(need)}, and no stage before it gives that. Known stages and what they "
                        f"give: {', '.join(f'{name} -> {each.gives.value}' for name, each in STAGES.items())}.",
                    )
                steps.append(implied)
                present.add(implied.stage.gives)
        steps.append(Step(stage, spec))
        present.add(stage.gives)
    if recipe.push is not None and Port.CHECKPOINT not in present:
        raise RecipeError(f"{recipe.file}: push needs an artifact that others can load; add a stage {{kind: export}} before it.")
    if recipe.push is not None:
        _check_push(recipe.push, recipe.file)
        _refuse_unproven_push(recipe, steps)
    return steps


def check_selection(steps: Sequence[Step], *, until: str | None, rebuild_from: str | None) -> None:
    """Check the stages that a run is to stop after and to rebuild from.

    Raises:
        UsageError: the recipe has no such stage, or the run would stop before it comes to what is to be rebuilt.
    """
    kinds = [step.stage.kind for step in steps]
    for flag, name in (("--until", until), ("--from", rebuild_from)):
        if name is not None and name not in kinds:
            raise UsageError(f"{flag} names the stage '{name}', which this recipe does not have.{did_you_mean(name, kinds)}")
    if until is not None and rebuild_from is not None and kinds.index(until) < kinds.index(rebuild_from):
        raise UsageError(f"--until {until} stops before --from {rebuild_from}: nothing would be built again.")


def _refuse_unproven_push(recipe: Recipe, steps: Sequence[Step]) -> None:
    """What is pushed is the last checkpoint, and its proof must be about it: no validation of something earlier beside it."""
    gives = [step.stage.gives for step in steps]
    if Port.EVIDENCE in gives and gives[::-1].index(Port.EVIDENCE) > gives[::-1].index(Port.CHECKPOINT):
        raise RecipeError(f"{recipe.file}: validate stands before the last export, so what is pushed would be unproven. Put validate last.")


def lock_of(recipe: Recipe, steps: Sequence[Step], source: ModelSource) -> dict[str, Any]:
    """The recipe with everything resolved: it runs the same again, whatever defaults or moving names become."""
    ref = parse_model_ref(recipe.model)
    if ref.scheme == "hf":
        model = f"hf://{ref.name}@{source.revision}"
    else:
        model = str(source.path.resolve()) if ref.scheme == "path" else recipe.model
    stages = [{"kind": step.stage.kind, **step.spec.model_dump(mode="json", exclude_none=True)} for step in steps]
    lock: dict[str, Any] = {"version": recipe.version, "model": model, "seed": recipe.seed, "stages": stages}
    if recipe.push is not None:
        lock["push"] = recipe.push.model_dump(mode="json")
    return lock


def resolve_text(model: str, *, offline: bool = False) -> ModelSource:
    """The directory that a model reference (`builtin://`, a path, `hf://`) stands for, fetched if it must be.

    Raises:
        UsageError: the reference means nothing.
        StorageError: the hub cannot be reached or does not have it.
    """
    ref = parse_model_ref(model)
    return resolve_model(ref.scheme, ref.name, ref.revision, offline=offline)


def estimates(steps: Sequence[Step], arch: Arch, device: str) -> list[Estimate]:
    """What each step will need; also the last check before any work, because a stage refuses here what this model cannot do.

    Raises:
        RecipeError: a data card that is wrong or not there.
        UsageError: the model is too short for a window, a width does not fit a group, a consumer's rule is broken, ...
    """
    facts = PlanFacts(arch, device.partition(":")[0], {step.stage.kind: step.spec for step in steps})
    return [step.stage.estimate(step.spec, facts) for step in steps]


def run(recipe: Recipe, steps: Sequence[Step], source: ModelSource, workspace: Workspace, watch: Watch, options: RunOptions) -> RunResult:
    """Build what is not there yet, let the gates decide, push. The caller holds the workspace's lock.

    Raises:
        CompressError: of the stage that failed; everything before it stays cached.
        Interrupted: at a boundary, after SIGINT or SIGTERM.
    """
    check_selection(steps, until=options.until, rebuild_from=options.rebuild_from)
    ports = _initial_ports(source)
    results: list[StepResult] = []
    rebuild = False
    for step in steps:
        rebuild = rebuild or step.stage.kind == options.rebuild_from
        key, inputs = _key(step, ports, recipe.seed, options.device), _inputs(step, ports, source)
        if rebuild and workspace.get(key) is not None:  # resume points alone come from a rebuild that was cut: it goes on
            workspace.discard(key)
        started_s = time.perf_counter()
        cached = workspace.get(key)
        with watch.stage(step.stage.kind, cached=cached is not None) as progress:
            artifact = cached or _build(step, key, inputs, workspace, recipe.seed, progress, options)
        ports[step.stage.gives] = Input(artifact.path, artifact.digest)
        results.append(StepResult(step.stage.kind, key, artifact, cached is not None, time.perf_counter() - started_s))
        options.step_done(results[-1])
        if step.stage.kind == options.until:
            return RunResult(source, tuple(results), complete=step is steps[-1])
    return RunResult(source, tuple(results))


def publish(push: Push, result: RunResult, evidence: Path | None) -> transfer.PushResult:
    """Push the checkpoint, and the directory of evidence that refers to it.

    Raises:
        GateFailed: a gate does not hold; nothing was pushed.
        StorageError: the registry cannot be written.
    """
    if result.gates_failed:
        raise GateFailed(f"not pushed: {', '.join(result.gates_failed)} out of limits. The artifact is kept; the report says by how much.")
    checkpoint = result.latest(Port.CHECKPOINT)
    assert checkpoint is not None, "build_steps checks that push has something to push"
    return transfer.push(open_registry(push.to), checkpoint, name=push.name, aliases=push.aliases, evidence=evidence)


def unchanged(recipe: Recipe, steps: Sequence[Step], source: ModelSource, workspace: Workspace, device: str) -> RunResult | None:
    """The result of an earlier run if nothing that decides it has changed and it is where the recipe pushes it; else None."""
    ports = _initial_ports(source)
    results: list[StepResult] = []
    for step in steps:
        key = _key(step, ports, recipe.seed, device)
        artifact = workspace.get(key)
        if artifact is None:
            return None
        ports[step.stage.gives] = Input(artifact.path, artifact.digest)
        results.append(StepResult(step.stage.kind, key, artifact, cached=True, seconds=0.0))
    result = RunResult(source, tuple(results))
    if recipe.push is not None and not result.gates_failed and not _is_pushed(recipe.push, result):
        return None
    return result


def cached_keys(recipe: Recipe, steps: Sequence[Step], source: ModelSource, workspace: Workspace, device: str) -> list[bool]:
    """For each step, whether a run would find it built; unknown counts as not, and everything behind a missing step is unknown."""
    ports = _initial_ports(source)
    found: list[bool] = []
    for step in steps:
        artifact = workspace.get(_key(step, ports, recipe.seed, device)) if all(found) else None
        found.append(artifact is not None)
        if artifact is not None:
            ports[step.stage.gives] = Input(artifact.path, artifact.digest)
    return found


def _build(step: Step, key: str, inputs: Inputs, workspace: Workspace, seed: int, progress: Progress, options: RunOptions) -> Artifact:
    context = Context(options.device, seed, workspace.scratch(key), progress, options.stop_signal, options.offline)
    parents = {port.value: each.digest for port, each in inputs.ports.items()}
    return workspace.commit(key, step.stage.kind, parents, lambda out: step.stage.run(step.spec, inputs, out, context))


def _initial_ports(source: ModelSource) -> dict[Port, Input]:
    model = Input(source.path, source.digest)
    return {Port.SOURCE: model, Port.DENSE: model}


def _inputs(step: Step, ports: Mapping[Port, Input], source: ModelSource) -> Inputs:
    taken = {port: ports[port] for port in _ports_read(step.stage, ports)}
    return Inputs(source, taken)


def _ports_read(stage: Stage, ports: Mapping[Port, Input]) -> list[Port]:
    met = [_met_by(need, ports.keys()) for need in stage.takes]
    assert all(port is not None for port in met), "build_steps checks needs"
    return sorted({port for port in met if port is not None} | {port for port in stage.uses if port in ports})


def _key(step: Step, ports: Mapping[Port, Input], seed: int, device: str) -> str:
    inputs = {port.value: ports[port].digest for port in _ports_read(step.stage, ports)} | {"source": ports[Port.SOURCE].digest}
    spec = step.spec.model_dump(mode="json", serialize_as_any=True)
    return Workspace.key(step.stage.kind, step.stage.version, spec, inputs, seed, step.stage.depends(step.spec, device))


def _met_by(need: Need, present: Any) -> Port | None:
    alternatives = need if isinstance(need, tuple) else (need,)
    return next((port for port in alternatives if port in present), None)


def _need_text(need: Need) -> str:
    return " or ".join(port.value for port in (need if isinstance(need, tuple) else (need,)))


def _default_for(need: Need) -> Step | None:
    """Calibration is the one need with a default that is right for everybody."""
    if need != Port.CALIB:
        return None
    stage = STAGES.get("calibrate")
    return Step(stage, stage.spec(), implied=True)


def _check_push(push: Push, file: str) -> None:
    """A wrong name must not come to light after hours of work."""
    try:
        open_registry(push.to)
        for tag in (DEFAULT_TAG, *push.aliases):
            compose_ref(push.to, push.name, tag)
    except UsageError as error:
        raise RecipeError(f"{file}: push: {error}") from None


def _is_pushed(push: Push, result: RunResult) -> bool:
    """Whether every tag of the push points at this very artifact."""
    checkpoint = result.latest(Port.CHECKPOINT)
    assert checkpoint is not None, "build_steps checks that push has something to push"
    registry = open_registry(push.to)
    return all(transfer.tagged_artifact(registry, push.name, tag) == checkpoint.digest for tag in (DEFAULT_TAG, *push.aliases))

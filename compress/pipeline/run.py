"""The only loop over stages: a recipe becomes steps, steps become artifacts, artifacts are found again by
key.

    recipe -> steps (kinds resolved, specs checked, defaults filled in, needs met)   before anything runs
    step   -> key = digest(stage, version, spec, input digests, seed, what else it depends on) -> cached or
    built end    -> gates decide, then `publish`

A run holds the workspace's lock. A signal ends it at the next boundary that a stage declares; the same
command resumes there.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.context import Context, OneRank, Progress, Ranks, never
from compress.errors import GateFailed
from compress.machine import arithmetic_class
from compress.pipeline.follow import share
from compress.pipeline.promote import Challenge, Place, challenge
from compress.pipeline.signing import is_signed
from compress.pipeline.steps import Step, check_selection, met_by
from compress.recipe import Push, Recipe
from compress.registry import transfer
from compress.registry.model_source import ModelSource
from compress.registry.protocol import open_registry
from compress.registry.ref import DEFAULT_TAG
from compress.registry.signatures import KEPT, Signatures
from compress.stages import STAGES, Input, Inputs, Port


@dataclass(frozen=True)
class StepResult:
    kind: str
    key: str
    artifact: Artifact
    cached: bool
    seconds: float


@dataclass(frozen=True)
class RunResult:
    """The artifact of every stage; `complete` is false when `until` ended the run early."""

    source: ModelSource
    steps: tuple[StepResult, ...]
    complete: bool = True

    def latest(self, port: Port) -> Artifact | None:
        """Return the last artifact given to a port, None where there is none."""
        found = [each.artifact for each in self.steps if STAGES.get(each.kind).gives == port]
        return found[-1] if found else None

    @property
    def gates(self) -> list[dict[str, Any]]:
        evidence = self.latest(Port.EVIDENCE)
        return evidence.manifest.facts["gates"] if evidence is not None else []

    @property
    def warnings(self) -> list[str]:
        """Sentences of the report, or of the checkpoint where nothing was measured."""
        artifact = self.latest(Port.EVIDENCE) or self.latest(Port.CHECKPOINT)
        return artifact.manifest.facts.get("warnings", []) if artifact is not None else []

    @property
    def gates_failed(self) -> list[str]:
        return [gate["name"] for gate in self.gates if gate["passed"] is False]


class Watch(Protocol):
    """An observer of a run: gives each stage an object for its progress."""

    def stage(self, kind: str, *, cached: bool) -> AbstractContextManager[Progress]: ...


@dataclass(frozen=True)
class RunOptions:
    device: str
    until: str | None = None
    rebuild_from: str | None = None
    offline: bool = False
    stop_signal: Callable[[], int | None] = never
    step_done: Callable[[StepResult], None] = field(default=lambda result: None)
    warn: Callable[[str], None] = field(default=lambda sentence: None)
    ranks: Ranks = field(default_factory=OneRank)


def run(
    recipe: Recipe,
    steps: Sequence[Step],
    source: ModelSource,
    workspace: Workspace,
    watch: Watch,
    options: RunOptions,
) -> RunResult:
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
        key = _key(step, ports, recipe.seed, options.device)
        inputs = _inputs(step, ports, source)
        started_s = time.perf_counter()
        if (damage := workspace.damage(key)) is not None:
            aside = workspace.set_aside(key)
            options.warn(f"{damage} It is set aside as {aside}, and '{step.stage.kind}' is built again.")
        cached = workspace.get(key)
        if rebuild and cached is not None:  # resume points of an unfinished result stay: a rebuild goes on
            workspace.discard(key)
            cached = None
        with watch.stage(step.stage.kind, cached=cached is not None) as progress:
            artifact = cached or _build(step, key, inputs, workspace, recipe.seed, progress, options)
        ports[step.stage.gives] = Input(artifact.path, artifact.digest)
        results.append(
            StepResult(step.stage.kind, key, artifact, cached is not None, time.perf_counter() - started_s)
        )
        options.step_done(results[-1])
        if step.stage.kind == options.until:
            return RunResult(source, tuple(results), complete=step is steps[-1])
    return RunResult(source, tuple(results))


def publish(
    push: Push,
    result: RunResult,
    evidence: Path | None,
    *,
    sign: Signatures = KEPT,
) -> tuple[transfer.PushResult | None, Challenge | None]:
    """Push the checkpoint, the directory of evidence that refers to it and the signature that `sign` returns,
    and return what was pushed and the outcome against a champion, where the recipe has one. Nothing was
    pushed where that failed.

    Raises:
        GateFailed: a gate does not hold; nothing was pushed.
        LockHeld: another job moved the champion's alias meanwhile.
        StorageError: the registry cannot be written.
    """
    if result.gates_failed:
        raise GateFailed(
            f"not pushed: {', '.join(result.gates_failed)} out of limits. The artifact is kept; the report "
            f"says by how much."
        )
    checkpoint = result.latest(Port.CHECKPOINT)
    assert checkpoint is not None, "build_steps checks that push has something to push"
    if push.gates is not None:
        place = Place(push.to, push.name, push.aliases)
        found = challenge(checkpoint, push.gates, place, evidence=evidence, sign=sign)
        return found.pushed, found
    registry = open_registry(push.to)
    pushed = transfer.push(
        registry, checkpoint, name=push.name, aliases=push.aliases, evidence=evidence, sign=sign
    )
    return pushed, None


def unchanged(
    recipe: Recipe, steps: Sequence[Step], source: ModelSource, workspace: Workspace, device: str
) -> RunResult | None:
    """Return the result of an earlier run if nothing that decides it has changed and it was pushed where the
    recipe pushes; else None.
    """
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


def cached_keys(
    recipe: Recipe, steps: Sequence[Step], source: ModelSource, workspace: Workspace, device: str
) -> list[bool]:
    """Return for each step whether a run would find it built; unknown counts as not built, and so does every
    step after a missing one.
    """
    ports = _initial_ports(source)
    found: list[bool] = []
    for step in steps:
        artifact = workspace.get(_key(step, ports, recipe.seed, device)) if all(found) else None
        found.append(artifact is not None)
        if artifact is not None:
            ports[step.stage.gives] = Input(artifact.path, artifact.digest)
    return found


def _build(
    step: Step,
    key: str,
    inputs: Inputs,
    workspace: Workspace,
    seed: int,
    progress: Progress,
    options: RunOptions,
) -> Artifact:
    scratch = workspace.scratch(key)
    context = Context(
        options.device,
        seed,
        scratch,
        progress,
        options.stop_signal,
        options.offline,
        options.ranks,
        workspace.kept,
    )
    parents = {port.value: each.digest for port, each in inputs.ports.items()}
    if step.stage.on_all_ranks is not None:
        options.ranks.dispatch(share(step.stage.kind, step.spec, inputs, context))
    return workspace.commit(
        key, step.stage.kind, parents, lambda out: step.stage.run(step.spec, inputs, out, context)
    )


def _initial_ports(source: ModelSource) -> dict[Port, Input]:
    model = Input(source.path, source.digest)
    return {Port.SOURCE: model, Port.DENSE: model}


def _inputs(step: Step, ports: Mapping[Port, Input], source: ModelSource) -> Inputs:
    taken = {port: ports[port] for port in _ports_read(step, ports)}
    return Inputs(source, taken)


def _ports_read(step: Step, ports: Mapping[Port, Input]) -> list[Port]:
    stage = step.stage
    met = [met_by(need, ports.keys()) for need in stage.needs(step.spec)]
    assert all(port is not None for port in met), "build_steps checks needs"
    return sorted({port for port in met if port is not None} | {port for port in stage.uses if port in ports})


def _key(step: Step, ports: Mapping[Port, Input], seed: int, device: str) -> str:
    inputs = {port.value: ports[port].digest for port in _ports_read(step, ports)} | {
        "source": ports[Port.SOURCE].digest
    }
    spec = step.spec.model_dump(mode="json", serialize_as_any=True)
    key = Workspace.key(
        step.stage.kind, step.stage.version, spec, inputs, seed, step.stage.depends(step.spec, device)
    )
    return f"{key}.{arithmetic_class(device)}"


def _is_pushed(push: Push, result: RunResult) -> bool:
    """Return whether every tag of the push points at this very artifact, signed where the recipe signs."""
    checkpoint = result.latest(Port.CHECKPOINT)
    assert checkpoint is not None, "build_steps checks that push has something to push"
    registry = open_registry(push.to)
    return all(
        transfer.tagged_artifact(registry, push.name, tag) == checkpoint.digest
        and is_signed(push, registry, tag)
        for tag in (DEFAULT_TAG, *push.aliases)
    )

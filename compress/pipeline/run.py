"""The only loop over stages: a recipe becomes steps, steps become artifacts, artifacts are found again by
key.

    recipe -> steps (kinds resolved, specs checked, defaults filled in, needs met)   before anything runs
    step   -> key (keys.py) -> found in the workspace, pulled from a cache (cache.py), or built
    end    -> gates decide, then `publish`

A run shares the workspace with other runs, and holds the lock of the result that it builds: a run that needs
the same result waits, and finds it. A signal ends it at the next boundary that a stage declares; the same
command resumes there.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from compress.artifact.key_parts import KeyParts
from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.context import Context, OneRank, Progress, Ranks, never
from compress.errors import GateFailed, Interrupted
from compress.pipeline.cache import RunCache
from compress.pipeline.follow import share
from compress.pipeline.keys import key_parts, ports_read
from compress.pipeline.promote import Challenge, Place, challenge
from compress.pipeline.signing import is_signed
from compress.pipeline.steps import Step, check_selection
from compress.recipe import Push, Recipe
from compress.registry import stored, transfer
from compress.registry.model_source import ModelSource
from compress.registry.protocol import open_registry
from compress.registry.ref import DEFAULT_TAG
from compress.registry.signatures import KEPT, Signatures
from compress.stages import STAGES, Input, Inputs, Port

_LOOK_AGAIN_S = 0.2
"""Time between two looks at a result that another run builds."""


@dataclass(frozen=True)
class StepResult:
    """The result of one stage. `cached`: it was not built in this run; `pulled`: it came from a registry."""

    kind: str
    key: str
    artifact: Artifact
    cached: bool
    seconds: float
    pulled: bool = False

    @property
    def origin(self) -> str:
        """The word for where the result came from: cached, pulled or built."""
        return "pulled" if self.pulled else "cached" if self.cached else "built"

    @property
    def how(self) -> str:
        """The word for where the result came from, with the time that this took: `built in 3.1 s`."""
        return self.origin if self.origin == "cached" else f"{self.origin} in {self.seconds:.1f} s"


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
    note: Callable[[str], None] = field(default=lambda sentence: None)
    ranks: Ranks = field(default_factory=OneRank)
    cache: RunCache = field(default_factory=RunCache)


def run(
    recipe: Recipe,
    steps: Sequence[Step],
    source: ModelSource,
    workspace: Workspace,
    watch: Watch,
    options: RunOptions,
) -> RunResult:
    """Build what is not there yet. The caller shares the workspace, or with `rebuild_from` has it alone.

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
        parts = key_parts(step, _digests(ports), recipe.seed, options.device)
        workspace.describe_key(parts)
        results.append(
            _step(
                step,
                parts,
                _inputs(step, ports, source),
                workspace,
                recipe.seed,
                watch,
                options,
                rebuild=rebuild,
            )
        )
        workspace.mark_used(parts.key)
        artifact = results[-1].artifact
        ports[step.stage.gives] = Input(artifact.path, artifact.digest)
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
        key = key_parts(step, _digests(ports), recipe.seed, device).key
        artifact = workspace.get(key)
        if artifact is None:
            return None
        ports[step.stage.gives] = Input(artifact.path, artifact.digest)
        results.append(StepResult(step.stage.kind, key, artifact, cached=True, seconds=0.0))
    result = RunResult(source, tuple(results))
    if recipe.push is not None and not result.gates_failed and not _is_pushed(recipe.push, result):
        return None
    for each in results:
        workspace.mark_used(each.key)
    return result


def _step(
    step: Step,
    parts: KeyParts,
    inputs: Inputs,
    workspace: Workspace,
    seed: int,
    watch: Watch,
    options: RunOptions,
    *,
    rebuild: bool,
) -> StepResult:
    """Return the result of a step: the one in the workspace, one from a cache, or a new one. The lock of the
    result is held while it is made.
    """
    kind = step.stage.kind
    key = parts.key
    started_s = time.perf_counter()
    pulled: Artifact | None = None
    cached = None if rebuild else workspace.get(key)
    if cached is not None:
        with watch.stage(kind, cached=True) as progress:
            options.cache.push(parts, cached, progress)
        return StepResult(kind, key, cached, cached=True, seconds=time.perf_counter() - started_s)
    with workspace.building(key, wait=_Wait(kind, options)):
        cached = _found(kind, key, workspace, options, rebuild=rebuild)
        with watch.stage(kind, cached=cached is not None) as progress:
            if cached is None and not rebuild:
                pulled = options.cache.pull(parts, workspace, progress)
            artifact = cached or pulled or _build(step, key, inputs, workspace, seed, progress, options)
            options.cache.push(parts, artifact, progress)
    found = cached is not None or pulled is not None
    seconds = time.perf_counter() - started_s
    return StepResult(kind, key, artifact, found, seconds, pulled=pulled is not None)


@dataclass
class _Wait:
    """Waits a moment for the run that builds a result, and gives up when a signal asks this run to stop."""

    kind: str
    options: RunOptions
    told: bool = False

    def __call__(self) -> None:
        if not self.told:
            self.told = True
            self.options.note(f"{self.kind} is being built by another run; waiting for it")
        time.sleep(_LOOK_AGAIN_S)
        if (signal_number := self.options.stop_signal()) is not None:
            raise Interrupted(
                f"stopped while another run built {self.kind}; the same command resumes here.",
                signal_number=signal_number,
            )


def _found(
    kind: str, key: str, workspace: Workspace, options: RunOptions, *, rebuild: bool
) -> Artifact | None:
    """Return the finished result of that key, whose lock is held. A damaged one is set aside, and one that is
    to be built again is removed.
    """
    if (damage := workspace.damage(key)) is not None:
        aside = workspace.set_aside(key)
        options.warn(f"{damage} It is set aside as {aside}, and '{kind}' is built again.")
    found = workspace.get(key)
    if rebuild and found is not None:  # resume points of an unfinished result stay: a rebuild goes on
        workspace.discard(key)
        return None
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
    taken = {port: ports[port] for port in ports_read(step, ports)}
    return Inputs(source, taken)


def _digests(ports: Mapping[Port, Input]) -> dict[Port, str]:
    return {port: each.digest for port, each in ports.items()}


def _is_pushed(push: Push, result: RunResult) -> bool:
    """Return whether every tag of the push points at this very artifact, signed where the recipe signs."""
    checkpoint = result.latest(Port.CHECKPOINT)
    assert checkpoint is not None, "build_steps checks that push has something to push"
    registry = open_registry(push.to)
    return all(
        stored.tagged_artifact(registry, push.name, tag) == checkpoint.digest
        and is_signed(push, registry, tag)
        for tag in (DEFAULT_TAG, *push.aliases)
    )

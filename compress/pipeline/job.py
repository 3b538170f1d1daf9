"""One job: a recipe from its file to its registry, safe to repeat and to interrupt. The command line and a
scheduler run the same function.

check everything -> share the workspace, hold the run directory -> (nothing changed? done) -> lock file -> run
-> evidence -> gates -> push
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from compress.artifact.workspace import Workspace
from compress.context import OneRank, Ranks, never
from compress.export import open_weights
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.config_file import adapter_note
from compress.models.config_notes import unread_note
from compress.models.weights import WeightSource
from compress.pipeline.bom import bill_of_materials
from compress.pipeline.cache import RunCache, opened
from compress.pipeline.evidence import REPORT_NAME, read_report
from compress.pipeline.promote import Challenge
from compress.pipeline.provenance import Inputs, now, provenance
from compress.pipeline.result import Result, Status
from compress.pipeline.run import RunOptions, RunResult, StepResult, Watch, publish, run, unchanged
from compress.pipeline.run_dir import BOM_NAME, PROVENANCE_NAME, SLSA_NAME, RunDir
from compress.pipeline.signing import RunSignatures
from compress.pipeline.slsa import slsa_statement
from compress.pipeline.steps import (
    Step,
    build_steps,
    check_selection,
    estimates,
    lock_of,
    resolve_source,
    shapes_of,
    writes_source,
)
from compress.pipeline.texts import texts_of
from compress.recipe import Cache, Push, load_recipe
from compress.registry.protocol import open_registry
from compress.registry.ref import compose_ref
from compress.registry.transfer import PushResult
from compress.stages import Port


@dataclass(frozen=True)
class Job:
    """A recipe to run, and how. `case`: the name of one case, where the recipe has a matrix. `if_changed`: do
    nothing when neither recipe, model, data nor registry changed.
    """

    recipe_file: Path
    directory: RunDir
    workspace: Path
    device: str
    case: str | None = None
    until: str | None = None
    rebuild_from: str | None = None
    if_changed: bool = False
    offline: bool = False
    stop_signal: Callable[[], int | None] = never
    step_done: Callable[[StepResult], None] = field(default=lambda result: None)
    warn: Callable[[str], None] = field(default=lambda sentence: None)
    note: Callable[[str], None] = field(default=lambda sentence: None)
    ranks: Ranks = field(default_factory=OneRank)


def execute(job: Job, watch: Watch) -> Result:
    """Run a job to its end. A failed gate is a result (`gate_failed`: artifact kept, nothing pushed), not an
    error.

    Raises:
        RecipeError, UsageError, UnsupportedArch, UnsupportedFormat: what cannot work, before any work and
            before the lock.
        LockHeld: another run has the run directory, or a command has the workspace alone; or `rebuild_from`
            needs the workspace alone, because it removes results that other runs may read.
        Interrupted: at a boundary; the same job resumes there.
        StorageError: the registry, or a file.
    """
    started_s = time.perf_counter()
    directory = job.directory
    recipe = load_recipe(job.recipe_file, case=job.case)
    steps = build_steps(recipe)
    check_selection(steps, until=job.until, rebuild_from=job.rebuild_from)
    source = resolve_source(recipe.model, offline=job.offline, signed_by=recipe.signed_by)
    if job.recipe_file == directory.lock:  # resumed
        directory.check_model(source.digest)
    weights = cache(lambda: open_weights(source.path))
    shapes = shapes_of(lambda: weights().arch)
    estimates(steps, shapes, job.device, source=source.path)
    workspace = Workspace(job.workspace)
    directory.check()
    if recipe.push is not None:
        open_registry(recipe.push.to).check_place()
        if recipe.push.sign is not None:
            recipe.push.sign.signer().check()
    use = workspace.share() if job.rebuild_from is None else workspace.lock()
    with use, directory.held():
        if job.if_changed and (same := unchanged(recipe, steps, source, workspace, job.device)) is not None:
            status: Status = "gate_failed" if same.gates_failed else "unchanged"
            return Result(status, same, directory, None, time.perf_counter() - started_s)
        resolved = lock_of(recipe, steps, source)
        inputs = Inputs(job.recipe_file, resolved, texts_of(steps), now(), job.case)
        directory.write_lock(resolved, model_digest=source.digest)
        directory.link_workspace(job.workspace)
        started = f"{job.recipe_file}{'' if job.case is None else f' case {job.case}'}"
        directory.log(f"start {started} seed {recipe.seed} model {source.name} on {job.device}")
        for sentence in _model_notes(weights(), steps) if isinstance(shapes, Arch) else ():
            directory.log(f"note: {sentence}")
            job.note(sentence)
        options = RunOptions(
            job.device,
            job.until,
            job.rebuild_from,
            job.offline,
            job.stop_signal,
            lambda result: _step_done(job, result),
            lambda sentence: _warn(job, sentence),
            job.note,
            job.ranks,
            _cache(job, recipe.cache),
        )
        pushed = champion = None
        with _ends_in_log(directory):
            result = run(recipe, steps, source, workspace, watch, options)
            evidence = _write_evidence(directory, result, inputs)
            if recipe.push is not None and result.complete and not result.gates_failed:
                pushed, champion = publish(
                    recipe.push, result, evidence, sign=_signatures(recipe.push, directory)
                )
                _record_push(directory, recipe.push.to, pushed, champion)
    failed = result.gates_failed or (champion is not None and champion.failed)
    status = "gate_failed" if failed else "done" if result.complete else "stopped"
    seconds = time.perf_counter() - started_s
    return Result(status, result, directory, pushed, seconds, champion=champion)


def _model_notes(weights: WeightSource, steps: Sequence[Step]) -> list[str]:
    """Return the notes on a model: what of its config is not read, and what of its tensors is rounded, where
    no stage writes them as they are stored."""
    notes = [unread_note(weights.arch)]
    if isinstance(weights, Checkpoint):
        notes.append(adapter_note(weights.path))
    if isinstance(weights, Checkpoint) and not any(writes_source(step.stage) for step in steps):
        notes.append(weights.rounding_note())
    return [each for each in notes if each is not None]


def _signatures(push: Push, directory: RunDir) -> RunSignatures:
    return RunSignatures(None if push.sign is None else push.sign.signer(), directory)


def _record_push(directory: RunDir, to: str, pushed: PushResult | None, champion: Challenge | None) -> None:
    """Write to the log, and to `published.json`, what was published and what it was compared with."""
    if champion is not None:
        directory.log(f"against {champion.alias} ({champion.champion or 'nothing'}): {champion.reason}")
    if pushed is not None:
        ref = compose_ref(to, pushed.name).pinned(pushed.manifest_digest)
        directory.write_published({"ref": str(ref), **asdict(pushed)})
        directory.log(f"pushed {pushed.artifact_digest} as {pushed.name}:{','.join(pushed.tags)} to {to}")


def _step_done(job: Job, result: StepResult) -> None:
    job.directory.link(result.kind, result.artifact)
    job.directory.log(f"{result.kind} {result.how} {result.artifact.digest}")
    job.step_done(result)


def _cache(job: Job, cache: Cache) -> RunCache:
    """Return the caches of a recipe, as this job uses them."""

    def warn(sentence: str) -> None:
        _warn(job, sentence)

    return RunCache(
        opened(cache.source, offline=job.offline, warn=warn),
        opened(cache.target, offline=job.offline, warn=warn),
        warn=warn,
        stop_signal=job.stop_signal,
    )


def _warn(job: Job, sentence: str) -> None:
    job.directory.log(f"warning: {sentence}")
    job.warn(sentence)


def _write_evidence(directory: RunDir, result: RunResult, inputs: Inputs) -> Path | None:
    evidence = result.latest(Port.EVIDENCE)
    if evidence is None:
        return None
    made = {each.kind: each.artifact for each in result.steps}
    digests = {kind: each.digest for kind, each in made.items()}
    built = any(not each.cached for each in result.steps)
    known = (
        None if built else directory.provenance_of(digests)
    )  # finding everything cached is not when and where it was made
    pulled = [each.kind for each in result.steps if each.pulled]
    facts = known or provenance(inputs, result.source, made, pulled=pulled)
    documents = {PROVENANCE_NAME: facts}
    subject = result.latest(Port.CHECKPOINT) or result.latest(Port.QUANTIZED)
    if subject is not None:
        report = read_report(evidence.file(REPORT_NAME))
        documents |= {
            SLSA_NAME: slsa_statement(facts, subject),
            BOM_NAME: bill_of_materials(facts, subject, report),
        }
    directory.write_evidence(evidence, documents)
    return directory.evidence


@contextmanager
def _ends_in_log(directory: RunDir) -> Iterator[None]:
    """Note the error that ends the block early in the run's log."""
    try:
        yield
    except BaseException as error:
        directory.log(f"ended: {type(error).__name__}: {error}")
        raise

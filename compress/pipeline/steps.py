"""Steps of a recipe: kinds resolved, specs checked, defaults filled in, needs fulfilled; everything that can
be refused before any work.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compress.errors import RecipeError, UnsupportedArch, UsageError, did_you_mean
from compress.models.arch import Arch
from compress.models.unknown_family import BY_NAME
from compress.pipeline.cache import check_cache
from compress.recipe import (
    Push,
    Recipe,
    SignedBy,
    Spec,
    parse_model_ref,
    parse_spec,
    unknown_kind_error,
)
from compress.registry.model_source import ModelSource, Required, resolve_model
from compress.registry.promotion import check_guarded
from compress.registry.protocol import open_registry
from compress.registry.ref import DEFAULT_TAG, compose_ref, parse_ref
from compress.stages import STAGES, Estimate, Need, PlanFacts, Port, Stage

_OF_WEIGHTS = {Port.DENSE, Port.QUANTIZED, Port.DRAFT}
"""Ports of weights that stages make of the recipe's model."""


@dataclass(frozen=True)
class Step:
    """A stage of a recipe with its checked spec. An `implied` step is a default that the recipe left out."""

    stage: Stage
    spec: Spec
    implied: bool = False


def build_steps(recipe: Recipe) -> list[Step]:
    """Check a whole recipe before anything runs.

    Raises:
        RecipeError: an unknown stage or key, a wrong value, or a stage that needs what no earlier stage
            gives; with file, line and column. Also a push to what cannot be a registry, a name or a tag, or
            of what was exported after the last validation, and a cache that cannot be one.
    """
    steps: list[Step] = []
    present = {Port.SOURCE, Port.DENSE}
    given = set[Port]()
    for entry in recipe.stages:
        if entry.kind not in STAGES.names():
            raise unknown_kind_error(entry, STAGES.names())
        stage = STAGES.get(entry.kind)
        spec = parse_spec(stage.spec, entry.raw, entry.where)
        retrains = stage.gives in stage.takes
        if not retrains and stage.gives in given:
            first = next(step.stage.kind for step in steps if step.stage.gives == stage.gives)
            raise entry.where.error(
                ("kind",),
                f"a second '{entry.kind}' would replace what the first one made. Leave one of them out."
                if first == entry.kind
                else f"'{entry.kind}' would replace the {stage.gives.value} that '{first}' made. Leave out "
                "one of the two.",
            )
        if (by_source := _from_source(stage, given, steps)) is not None:
            raise entry.where.error(
                ("kind",),
                f"'{by_source}' reads the recipe's model itself, so what another stage makes of the weights "
                "would be lost. Leave out one of the two.",
            )
        for need in stage.needs(spec):
            if met_by(need, given if isinstance(need, tuple) else present) is None:
                implied = _default_for(need)
                if implied is None:
                    gives = ", ".join(f"{name} -> {each.gives.value}" for name, each in STAGES.items())
                    raise entry.where.error(
                        ("kind",),
                        f"'{entry.kind}' needs {_need_text(need)}, and no stage before it gives that. Known "
                        f"stages and what they give: {gives}.",
                    )
                steps.append(implied)
                present.add(implied.stage.gives)
        if stage.gives == Port.DENSE and Port.QUANTIZED in given:
            raise entry.where.error(
                ("kind",),
                f"'{entry.kind}' comes after quantize, whose codes it would not change. Put it before "
                f"that stage.",
            )
        if stage.gives == Port.DRAFT and Port.CHECKPOINT in given:
            raise entry.where.error(
                ("kind",),
                f"'{entry.kind}' comes after export, whose checkpoint would lack it. Put it before that "
                f"stage.",
            )
        if stage.gives == Port.QUANTIZED and retrains and given & {Port.DRAFT, Port.CHECKPOINT}:
            raise entry.where.error(
                ("kind",),
                f"'{entry.kind}' comes after a stage that read the codes it changes. Put it right after "
                "quantize.",
            )
        steps.append(Step(stage, spec))
        present.add(stage.gives)
        given.add(stage.gives)
    if recipe.push is not None and Port.CHECKPOINT not in present:
        raise RecipeError(
            f"{recipe.file}: push needs an artifact that others can load; add a stage {{kind: export}} "
            f"before it."
        )
    check_cache(recipe.cache, recipe.file)
    if recipe.push is not None:
        _check_push(recipe.push, recipe.file, proven=Port.EVIDENCE in present)
        _refuse_unproven_push(recipe, steps)
    return steps


def _from_source(stage: Stage, given: set[Port], steps: Sequence[Step]) -> str | None:
    """Return the kind of the stage that writes a checkpoint of the recipe's own model, where other stages
    make other weights of it; None where there are not both.
    """

    if writes_source(stage) and given & _OF_WEIGHTS:
        return stage.kind
    if stage.gives not in _OF_WEIGHTS:
        return None
    return next((step.stage.kind for step in steps if writes_source(step.stage)), None)


def writes_source(stage: Stage) -> bool:
    """Return whether a stage writes a checkpoint of the recipe's own model, tensor by tensor as it is
    stored."""
    return stage.gives == Port.CHECKPOINT and Port.SOURCE in stage.takes


def check_selection(steps: Sequence[Step], *, until: str | None, rebuild_from: str | None) -> None:
    """Check the stages that a run is to stop after and to rebuild from.

    Raises:
        UsageError: the recipe has no such stage, or the run would stop before it comes to what is to be
            rebuilt.
    """
    kinds = [step.stage.kind for step in steps]
    for flag, name in (("--until", until), ("--from", rebuild_from)):
        if name is not None and name not in kinds:
            raise UsageError(
                f"{flag} names the stage '{name}', which this recipe does not "
                f"have.{did_you_mean(name, kinds)}"
            )
    if until is not None and rebuild_from is not None and kinds.index(until) < kinds.index(rebuild_from):
        raise UsageError(f"--until {until} stops before --from {rebuild_from}: nothing would be built again.")


def shapes_of(read: Callable[[], Arch]) -> Arch | UnsupportedArch:
    """Return the shapes that `read` returns, or its refusal of a model that the decoder does not support,
    which names the way that is left.
    """
    try:
        return read()
    except UnsupportedArch as error:
        return UnsupportedArch(error.message, where=error.where, hint=BY_NAME)


def estimates(
    steps: Sequence[Step],
    shapes: Arch | UnsupportedArch,
    device: str,
    *,
    num_ranks: int = 1,
    source: Path | None = None,
) -> list[Estimate]:
    """Return what each step will need, for the model that the steps before it leave. This is also the last
    check before any work, because a stage refuses here what this model cannot do.

    Raises:
        RecipeError: a data card that is wrong or not there.
        UsageError: the model is too short for a window, a width does not fit a group, a consumer's rule is
            broken, ...
        UnsupportedArch: the decoder does not support the model, and a stage needs it to.
    """
    specs = {step.stage.kind: step.spec for step in steps}
    source_arch = None if isinstance(shapes, UnsupportedArch) else shapes
    kind = device.partition(":")[0]
    found = []
    for step in steps:
        facts = PlanFacts(shapes, kind, specs, num_ranks, source_arch, source)
        found.append(step.stage.estimate(step.spec, facts))
        if not isinstance(shapes, UnsupportedArch):
            shapes = step.stage.reshape(step.spec, shapes)
    return found


def resolve_source(model: str, *, offline: bool = False, signed_by: SignedBy | None = None) -> ModelSource:
    """Return the model of a reference (`builtin://`, a path, `hf://`), fetched if it is not here, and signed
    by whom a recipe asks.

    Raises:
        UsageError: the reference means nothing, or there is no such key.
        SignatureRefused: it is not signed, or not by whom it must be, or has changed since.
        StorageError: the hub cannot be reached or does not have it.
    """
    ref = parse_model_ref(model)
    required = None
    if signed_by is not None:
        place = None if signed_by.signature is None else Path(signed_by.signature)
        required = Required(signed_by.verifier(), place)
    return resolve_model(ref.scheme, ref.name, ref.revision, offline=offline, required=required)


def lock_of(recipe: Recipe, steps: Sequence[Step], source: ModelSource) -> dict[str, Any]:
    """Return the recipe with everything resolved: it runs the same again, whatever defaults or moving names
    become.
    """
    ref = parse_model_ref(recipe.model)
    if ref.scheme == "hf":
        model = f"hf://{ref.name}@{source.revision}"
    elif ref.scheme == "registry":
        model = str(parse_ref(ref.name).pinned(str(source.revision)))
    else:
        model = str(source.path.resolve()) if ref.scheme == "path" else recipe.model
    stages = [
        {"kind": step.stage.kind, **step.spec.model_dump(mode="json", serialize_as_any=True)}
        for step in steps
    ]
    named: Any = model
    if recipe.signed_by is not None:
        named = {"ref": model, "signed_by": recipe.signed_by.model_dump(mode="json", exclude_none=True)}
    lock: dict[str, Any] = {"version": recipe.version, "model": named, "seed": recipe.seed, "stages": stages}
    if recipe.push is not None:
        lock["push"] = recipe.push.model_dump(mode="json")
    if recipe.notify:
        lock["notify"] = [each.model_dump(mode="json") for each in recipe.notify]
    if cache := recipe.cache.model_dump(mode="json", by_alias=True, exclude_none=True):
        lock["cache"] = cache
    return lock


def _refuse_unproven_push(recipe: Recipe, steps: Sequence[Step]) -> None:
    """Refuse a push of a checkpoint that was exported after the last validation: its proof would be about
    something earlier.
    """
    gives = [step.stage.gives for step in steps]
    if Port.EVIDENCE in gives and gives[::-1].index(Port.EVIDENCE) > gives[::-1].index(Port.CHECKPOINT):
        raise RecipeError(
            f"{recipe.file}: validate comes before the last export, so what is pushed would be unproven. "
            f"Put validate last."
        )


def _check_push(push: Push, file: str, *, proven: bool) -> None:
    """Refuse a wrong registry, name or tag before hours of work, and gates that nothing measures."""
    if push.gates is not None and not proven:
        raise RecipeError(
            f"{file}: push: gates compare with what {push.gates.against_alias} holds, and nothing is "
            "measured: add a stage {kind: validate}."
        )
    try:
        registry = open_registry(push.to)
        if push.gates is not None:
            check_guarded(registry, push.to)
            compose_ref(push.to, push.name, push.gates.against_alias)
        for tag in (DEFAULT_TAG, *push.aliases):
            compose_ref(push.to, push.name, tag)
    except UsageError as error:
        raise RecipeError(f"{file}: push: {error}") from None


def reads_calibration(kind: str, raw: Mapping[str, Any]) -> bool:
    """Return whether a stage with these settings takes calibration text.

    Wrong settings count as such, and `build_steps` refuses them with the place of the error.
    """
    stage = STAGES.get(kind)
    try:
        spec = stage.spec.model_validate(dict(raw))
    except (ValidationError, UsageError):
        return True
    return Port.CALIB in stage.needs(spec)


def met_by(need: Need, present: Any) -> Port | None:
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

"""`compress plan`: what a run would do, before it does anything: stages, what is cached, memory, disk, time,
and who loads the result.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.output import JsonFlag, count_text, duration_text, emit, size_text, table
from compress.cli.recipes import CaseOption, RecipesArgument, one_recipe
from compress.cli.run import DEFAULT_WORKSPACE, OfflineOption, WorkspaceOption
from compress.errors import StorageError, UnsupportedArch

if TYPE_CHECKING:
    from compress.models.arch import Arch
    from compress.pipeline import Lookup, Step
    from compress.recipe import Recipe
    from compress.registry.model_source import ModelSource
    from compress.stages import Estimate

ASSUMED_FLOPS_PER_S = {"cpu": 1.5e11, "tiles": 2.4e11, "cuda": 2.5e14}
"""Sustained rates that the time estimate assumes: two server cores in float32, one core in bf16 by AMX, one
data-centre GPU in bf16.
"""
LAUNCH_S = {"cpu": 10e-6, "cuda": 15e-6}
"""Time of one small operation, launch included."""
_NOT_HERE = (
    "Files of the model are not on this machine, and a plan fetches none but its config: tensors, tokenizer, "
    "chat template and layers that predict tokens are checked once a run has fetched them, before its first "
    "stage."
)
MOVED_BYTES_PER_S = {"cpu": 2e8, "cuda": 2e9}
"""Rates of a stage without a forward pass, in bytes read and written: two busy server cores, which round; a
GPU, for which the disk decides."""


def plan(
    recipes: RecipesArgument,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Plan for cpu or cuda; what is here by default.", show_default=False),
    ] = None,
    case: CaseOption = None,
    ranks: Annotated[
        int,
        typer.Option("--ranks", min=1, max=8, help="Plan for so many processes of torchrun, a GPU each."),
    ] = 1,
    offline: OfflineOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what `run` would do. Needs no GPU and no weights; with --offline no network."""
    from compress.pipeline import device_kind
    from compress.recipe import load_cases

    loaded = one_recipe(recipes, case)
    target = device_kind(device) if device is not None else _default_device()
    if loaded is not None:
        document = _planned(loaded, workspace, target, ranks=ranks, offline=offline)
        emit(document, _text(document), as_json=as_json)
        return
    plans = [
        _planned(each, workspace, target, ranks=ranks, offline=offline)
        for recipe in recipes
        for each in load_cases(recipe)
    ]
    emit({"plans": plans}, _text_of_many(plans), as_json=as_json)


def _planned(loaded: "Recipe", workspace: Path, target: str, *, ranks: int, offline: bool) -> dict[str, Any]:
    """Return the plan of one recipe, or of one case, as a document.

    Raises:
        CompressError: what cannot work.
    """
    from compress.pipeline import build_steps, estimates, shapes_of

    steps = build_steps(loaded)
    read, source = _model(loaded.model, offline=offline)
    shapes = shapes_of(read)
    directory = None if source is None else source.path
    found_by_step = _lookups(loaded, steps, source, workspace, target, offline=offline)
    rows: list[dict[str, Any]] = []
    found = list(estimates(steps, shapes, target, num_ranks=ranks, source=directory))
    for step, hit, estimate in zip(steps, found_by_step, found, strict=True):
        rows.append(
            {
                "kind": step.stage.kind,
                "implied": step.implied,
                "cached": hit.cached,
                "found_in": hit.found_in,
                "reason": hit.reason,
                "peak_bytes": estimate.peak_bytes,
                "disk_bytes": estimate.disk_bytes,
                "seconds": round(seconds_of(estimate, target), 1),
                "notes": list(estimate.notes),
            }
        )
    return {
        "recipe": loaded.file,
        **({} if loaded.case is None else {"case": loaded.case.name}),
        "model": {"name": loaded.model, **_model_facts(shapes, source)},
        "device": target,
        "ranks": ranks,
        "assumed_flops_per_s": sorted({_assumed_rate(each, target) for each in found}),
        "assumed_bytes_per_s": MOVED_BYTES_PER_S[target] if any(each.moved_bytes for each in found) else None,
        "stages": rows,
        "push": loaded.push.model_dump(mode="json") if loaded.push is not None else None,
        "peak_bytes": max(row["peak_bytes"] for row in rows),
        "disk_bytes": sum(row["disk_bytes"] for row in rows),
        "on_a_gpu": _on_a_gpu(list(estimates(steps, shapes, "cuda", source=directory)))
        if target == "cpu"
        else None,
    }


def seconds_of(estimate: "Estimate", device: str) -> float:
    """Time of a stage at the rates assumed."""
    computing_s = estimate.flops / _assumed_rate(estimate, device) + estimate.num_launches * LAUNCH_S[device]
    return computing_s + estimate.moved_bytes / MOVED_BYTES_PER_S[device]


def _on_a_gpu(found: "list[Estimate]") -> dict[str, Any]:
    """Return what one GPU would take for all stages: seconds at the assumed rates, and bytes at the peak."""
    seconds = sum(seconds_of(each, "cuda") for each in found)
    return {"seconds": round(seconds, 1), "peak_bytes": max(each.peak_bytes for each in found)}


def _assumed_rate(estimate: "Estimate", device: str) -> float:
    return ASSUMED_FLOPS_PER_S["tiles" if estimate.in_tiles else device]


def _model_facts(shapes: "Arch | UnsupportedArch", source: "ModelSource | None") -> dict[str, Any]:
    """Return the document's facts of the model; None for those that only the decoder reads."""
    from compress.models.config_file import adapter_note
    from compress.models.config_notes import unread_note

    unseen = [_NOT_HERE] if source is None else []
    adapter = None if source is None else adapter_note(source.path)
    if isinstance(shapes, UnsupportedArch):
        return {
            "params": None,
            "active_params": None,
            "experts": None,
            "layers": None,
            "dtype": None,
            "notes": [shapes.message, *unseen],
        }
    sentences = [each for each in (unread_note(shapes), adapter) if each is not None]
    return {
        "params": shapes.num_params,
        "active_params": shapes.num_active_params,
        "experts": _experts_text(shapes),
        "layers": shapes.num_layers,
        "dtype": shapes.dtype,
        "notes": [*sentences, *unseen],
    }


def _model(model: str, *, offline: bool) -> "tuple[Callable[[], Arch], ModelSource | None]":
    """Return a function that reads the model's shapes, and the model, None where a run would first fetch
    some of its files."""
    from compress.recipe import parse_model_ref
    from compress.registry.model_source import kept_model

    ref = parse_model_ref(model)
    kept = kept_model(ref.name, ref.revision, offline=offline) if ref.scheme == "hf" else None
    if kept is None:
        return model_reader(model, offline=offline)
    return lambda: _arch_at(kept.path), kept


def _arch_at(path: Path) -> "Arch":
    """Return the shapes of the model in a directory: as a run finds them, from the config and the headers of
    its tensors, and from the config alone where there are none.

    Raises:
        CompressError: the config is not supported, or tensors do not fit it, are missing, cut off or pickled.
    """
    from compress.artifact.tensors import PICKLE_SUFFIXES
    from compress.export import codecs, open_weights
    from compress.models.checkpoint import arch_of
    from compress.models.config_file import read_config
    from compress.registry.model_source import WEIGHT_FILES

    patterns = (*WEIGHT_FILES, *(f"*{each}" for each in PICKLE_SUFFIXES))
    if any(next(path.glob(pattern), None) is not None for pattern in patterns):
        return open_weights(path).arch
    return arch_of(read_config(path), codecs())


def model_reader(model: str, *, offline: bool) -> "tuple[Callable[[], Arch], ModelSource | None]":
    """Return a function that reads the model's shapes (from its directory, from its config.json on the hub,
    or from those that ship with the package), and the model; None for one of the hub, whose weights are
    neither fetched nor looked for.
    """
    from compress.export import codecs
    from compress.models.checkpoint import arch_of
    from compress.models.known import known_config, known_models
    from compress.pipeline import resolve_source
    from compress.recipe import parse_model_ref
    from compress.registry.model_source import fetch_config

    ref = parse_model_ref(model)
    if ref.scheme != "hf":
        source = resolve_source(model, offline=offline)
        return lambda: _arch_at(source.path), source
    shipped = known_config(ref.name)
    if (
        shipped is None or not offline
    ):  # a fine-tune of the same name may have other widths: ask where one may ask
        try:
            config = fetch_config(ref.name, ref.revision, offline=offline, shipped=known_models())
            return lambda: arch_of(config, codecs()), None
        except StorageError:
            if shipped is None:
                raise
    return lambda: arch_of(shipped, codecs()), None


def _lookups(
    recipe: "Recipe",
    steps: "list[Step]",
    source: "ModelSource | None",
    root: Path,
    device: str,
    *,
    offline: bool,
) -> "list[Lookup]":
    """Return for each step whether and where a run would find it built, and else why not."""
    from compress.artifact.workspace import Workspace
    from compress.pipeline import Lookup, lookups
    from compress.pipeline.cache import opened

    if source is None:
        reason = "keys need the digest of the model's files, which are not all on this machine"
        return [Lookup(None, reason=reason)] * len(steps)
    if device != _default_device():
        reason = f"the key names the machine, and stages run on {_default_device()} here"
        return [Lookup(None, reason=reason)] * len(steps)
    trouble: list[str] = []
    cache = opened(recipe.cache.source, offline=offline, warn=trouble.append)
    found = lookups(recipe, steps, source, Workspace(root), device, cache=cache)
    if trouble and not found[0].cached:
        found[0] = replace(found[0], reason=f"{found[0].reason}; {trouble[0]}")
    return found


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _machine(device: str, ranks: int) -> str:
    return count_text(ranks, "GPU") if device == "cuda" else f"the CPU, {count_text(ranks, 'rank')}"


def _shape_text(model: dict[str, Any]) -> str:
    if model["params"] is None:
        return ""
    active = f" ({_millions(model['active_params'])} active)" if model["experts"] else ""
    experts = f" {model['experts']}" if model["experts"] else ""
    return (
        f"{_millions(model['params'])} parameters{active}, {model['layers']} layers{experts}, "
        f"{model['dtype']}; "
    )


def _millions(count: int) -> str:
    """Return a number of parameters in millions, a small one with two digits."""
    return f"{count / 1e6:,.0f} M" if count >= 9.5e6 else f"{count / 1e6:.2g} M"


def _experts_text(shapes: "Arch") -> str | None:
    """Return the experts of a mixture and how many serve a token; None for a dense model."""
    mixtures = [layer.experts for layer in shapes.layers if layer.experts is not None]
    if not mixtures:
        return None
    facts = mixtures[0]
    dense = sum(layer.has_ffn and layer.experts is None for layer in shapes.layers)
    mixers = sum(not layer.has_ffn for layer in shapes.layers)
    parts = [f"of {facts.num_experts} experts, {facts.top_k} a token"]
    if facts.shared_size:
        parts.append("and a shared one")
    if dense:
        parts.append(f"({dense} of them dense)")
    if mixers:
        parts.append(f"({mixers} of them without an FFN)")
    return " ".join(parts)


def _state(row: dict[str, Any]) -> str:
    """Return the word of the plan's table for where a stage is found."""
    if row["cached"]:
        return "cached" if row["found_in"] == "workspace" else f"in {row['found_in']}"
    return "unknown" if row["cached"] is None else "to build"


def _reason_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return why stages are not found, a line for each reason, and an empty line after them."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        if row["reason"]:
            kinds.setdefault(row["reason"], []).append(row["kind"])
    lines = [f"{', '.join(each)}: {reason}" for reason, each in kinds.items()]
    return [*lines, ""] if lines else []


def _text(document: dict[str, Any]) -> str:
    model = document["model"]
    lines = [
        f"{model['name']}: {_shape_text(model)}planned for {_machine(document['device'], document['ranks'])}",
        *model["notes"],
        "",
    ]
    header = ("stage", "state", "peak memory", "writes", "time about")
    body = [
        (
            row["kind"] + (" (default)" if row["implied"] else ""),
            _state(row),
            size_text(row["peak_bytes"]),
            size_text(row["disk_bytes"]),
            duration_text(row["seconds"]) if row["seconds"] >= 1 else "seconds",
        )
        for row in document["stages"]
    ]
    lines += [table([header, *body], right=(2, 3, 4)), ""]
    lines += _reason_lines(document["stages"])
    for row in document["stages"]:
        lines += [f"{row['kind']}: {note}" for note in row["notes"]]
    if document["push"]:
        lines.append(f"push: {document['push']['name']} to {document['push']['to']}, if every gate holds")
    lines += [
        "",
        f"peak {size_text(document['peak_bytes'])}, disk {size_text(document['disk_bytes'])} in the "
        f"workspace and the model itself;",
        "the interpreter and its libraries take about half a gigabyte more",
    ]
    rates = " and ".join(f"{rate / 1e12:g}" for rate in document["assumed_flops_per_s"])
    moved = document["assumed_bytes_per_s"]
    moves = f", and {moved / 1e9:g} GB/s read and written without a forward pass" if moved else ""
    lines.append(f"times assume {rates} TFLOP/s sustained{moves}")
    gpu = document["on_a_gpu"]
    if gpu is not None:
        took = duration_text(gpu["seconds"]) if gpu["seconds"] >= 1 else "seconds"
        rate = ASSUMED_FLOPS_PER_S["cuda"] / 1e12
        lines.append(
            f"on one data-centre GPU, at {rate:g} TFLOP/s: about {took}, peak {size_text(gpu['peak_bytes'])}"
        )
    return "\n".join(lines)


def _text_of_many(plans: list[dict[str, Any]]) -> str:
    """Return a row for each run; what several of them begin with is counted in each."""
    head = ("recipe", "case", "model", "stages", "cached", "peak memory", "writes", "time about")
    rows = [
        (
            plan["recipe"],
            plan.get("case", "-"),
            plan["model"]["name"],
            len(plan["stages"]),
            sum(row["cached"] is True for row in plan["stages"]),
            size_text(plan["peak_bytes"]),
            size_text(plan["disk_bytes"]),
            duration_text(sum(row["seconds"] for row in plan["stages"] if row["cached"] is not True)),
        )
        for plan in plans
    ]
    return "\n".join(
        [
            table([head, *rows], right=(3, 4, 5, 6, 7)),
            "",
            f"{count_text(len(plans), 'run')}; what several of them begin with is built once, and counted in "
            "each.",
            "Memory is that of one run: --jobs N takes that of N. `compress plan RECIPE --case CASE` has the "
            "stages of one.",
        ]
    )

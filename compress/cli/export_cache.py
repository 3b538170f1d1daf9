"""`compress export-cache`: results of stages from a workspace into a registry, for other machines."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.output import JsonFlag, count_text, emit, progress, size_text
from compress.cli.run import DEFAULT_WORKSPACE, DeviceOption, OfflineOption, WorkspaceOption
from compress.errors import StorageError

if TYPE_CHECKING:
    from compress.pipeline.exchange import Exchanged, Wanted

CacheArgument = Annotated[
    str, typer.Argument(help="The cache: a name in a registry, such as oci://host/path/stages.")
]
RecipeOption = Annotated[
    Path | None,
    typer.Option("--recipe", help="Only the stages of this recipe on this machine.", show_default=False),
]


def export_cache(
    ref: CacheArgument,
    recipe: RecipeOption = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    device: DeviceOption = None,
    offline: OfflineOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Copy finished results of stages into a registry; what it has is not sent again."""
    from compress.artifact.workspace import Workspace
    from compress.cli.du import check_workspace
    from compress.pipeline.exchange import export_entries
    from compress.registry.stage_cache import StageCache

    check_workspace(workspace)
    cache = StageCache(ref)
    wanted = stages_of(recipe, device, offline=offline)
    with progress("export") as report:
        found = export_entries(Workspace(workspace), cache, report, wanted=wanted)
    show(found, str(cache), "exported", as_json=as_json)


def stages_of(recipe: Path | None, device: str | None, *, offline: bool) -> "Wanted | None":
    """Return the stages of a recipe; None without one."""
    if recipe is None:
        return None
    from compress.pipeline import build_steps, pick_device, resolve_source
    from compress.pipeline.exchange import Wanted
    from compress.recipe import load_recipe

    loaded = load_recipe(recipe)
    steps = build_steps(loaded)
    return Wanted(loaded, steps, resolve_source(loaded.model, offline=offline), pick_device(device))


def show(found: "Exchanged", cache: str, verb: str, *, as_json: bool) -> None:
    """Print what was copied; what was refused makes it exit code 5."""
    document: dict[str, Any] = {
        "cache": cache,
        "copied": found.copied,
        "present": found.present,
        "missing": found.missing,
        "refused": [{"key": key, "reason": reason} for key, reason in found.refused.items()],
        "size_bytes": found.size_bytes,
    }
    lines = [
        f"{count_text(len(found.copied), 'result')} {verb}, {size_text(found.size_bytes)}; "
        f"{len(found.present)} there already"
    ]
    if found.missing:
        lines.append(f"not there: {', '.join(found.missing)}")
    lines += [f"refused {key[:16]}: {reason}" for key, reason in found.refused.items()]
    failure = None
    if found.refused:
        failure = StorageError(
            f"{count_text(len(found.refused), 'result')} could not be {verb}.", where=cache
        )
    emit(document, "\n".join(lines), as_json=as_json, failure=failure)
    if failure is not None:
        raise typer.Exit(failure.exit_code)

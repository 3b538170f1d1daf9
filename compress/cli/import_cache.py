"""`compress import-cache`: results of stages that another machine built, from a registry into a workspace."""

from compress.cli.export_cache import CacheArgument, RecipeOption, show, stages_of
from compress.cli.output import JsonFlag, progress
from compress.cli.run import DEFAULT_WORKSPACE, DeviceOption, OfflineOption, WorkspaceOption


def import_cache(
    ref: CacheArgument,
    recipe: RecipeOption = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    device: DeviceOption = None,
    offline: OfflineOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Copy results of stages from a registry into the workspace, each whole or not at all."""
    from compress.artifact.workspace import Workspace
    from compress.pipeline.exchange import import_entries
    from compress.registry.stage_cache import StageCache

    cache = StageCache(ref)
    wanted = stages_of(recipe, device, offline=offline)
    place = Workspace(workspace)
    with place.lock(), progress("import") as report:
        found = import_entries(place, cache, report, wanted=wanted)
    show(found, str(cache), "imported", as_json=as_json)

"""`compress gc`: remove from a workspace what is old, too much, or reached by no run."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.amounts import age_of, size_of
from compress.cli.du import DEFAULT_RUNS, PLURALS, RunsOption, check_workspace, entry_json
from compress.cli.output import JsonFlag, count_text, emit, size_text, table
from compress.cli.run import DEFAULT_WORKSPACE, WorkspaceOption

if TYPE_CHECKING:
    from compress.artifact.collection import Removal
    from compress.artifact.workspace_sizes import WorkspaceSizes


def gc(
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    runs: RunsOption = DEFAULT_RUNS,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", help="What was not used for so long: 12h, 30d, 8w.", show_default=False),
    ] = None,
    keep_bytes: Annotated[
        str | None,
        typer.Option(
            "--keep-bytes",
            help="The least recently used, until so much is left: 200GB, 1.5TiB.",
            show_default=False,
        ),
    ] = None,
    unreachable: Annotated[bool, typer.Option("--unreachable", help="All that no run reaches.")] = False,
    include_reached: Annotated[
        bool, typer.Option("--include-reached", help="Let also go what runs reach, by age or size.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; otherwise it is only shown.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what would go from a workspace and why, or with --yes remove it. Registries are never touched."""
    from compress.artifact.collection import Policy, choose, remove
    from compress.artifact.workspace import Workspace
    from compress.artifact.workspace_sizes import freed_bytes, measure
    from compress.pipeline.reached import reached, run_directories

    check_workspace(workspace)
    policy = Policy(
        None if older_than is None else age_of(older_than, "--older-than"),
        None if keep_bytes is None else size_of(keep_bytes, "--keep-bytes"),
        unreachable,
        include_reached,
    )
    place = Workspace(workspace)
    before = measure(place)
    by_key = reached(before, run_directories(workspace, runs))

    def choice(sizes: "WorkspaceSizes") -> "list[Removal]":
        by_key.update(reached(sizes, run_directories(workspace, runs)))
        return choose(sizes, policy, by_key, now_s=time.time())

    removals = remove(place, choice) if yes else choice(before)
    freed = freed_bytes(each.entry for each in removals)
    left = measure(place).disk_bytes if yes else before.disk_bytes - freed
    document = {
        "workspace": str(workspace),
        "removed": yes,
        "freed_bytes": freed,
        "disk_bytes": before.disk_bytes,
        "left_bytes": left,
        "over_limit_bytes": max(0, left - policy.keep_bytes) if policy.keep_bytes is not None else 0,
        "entries": [{**entry_json(each.entry, by_key), "reason": each.reason} for each in removals],
    }
    emit(document, _text(document), as_json=as_json)


def _text(document: Mapping[str, Any]) -> str:
    header = ("what", "stage", "key or name", "on disk", "why")
    rows = [
        (
            PLURALS[each["kind"]],
            each["stage"] or "",
            (each["key"] or Path(each["path"]).name)[:16],
            size_text(each["disk_bytes"]),
            each["reason"],
        )
        for each in document["entries"]
    ]
    lines = [table([header, *rows], right=(3,)), ""] if rows else []
    counted = count_text(len(rows), "entry").replace("entrys", "entries")
    verb = "removed" if document["removed"] else "would go"
    lines.append(
        f"{counted} {verb}: {size_text(document['freed_bytes'])} of {size_text(document['disk_bytes'])}, "
        f"{size_text(document['left_bytes'])} left"
    )
    if document["over_limit_bytes"]:
        lines.append(
            f"{size_text(document['over_limit_bytes'])} over the limit: runs reach what is left; "
            f"--include-reached lets more go"
        )
    if rows and not document["removed"]:
        lines.append("nothing was removed; --yes does it")
    return "\n".join(lines)

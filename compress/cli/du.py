"""`compress du`: what a workspace holds, by kind and stage and by the runs that reach it."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.output import JsonFlag, count_text, emit, size_text, table
from compress.cli.run import DEFAULT_WORKSPACE, WorkspaceOption

if TYPE_CHECKING:
    from compress.artifact.workspace_sizes import Entry, WorkspaceSizes

RunsOption = Annotated[
    Path, typer.Option("--runs", help="Directory of run directories, besides those that used this workspace.")
]
DEFAULT_RUNS = Path("runs")
PLURALS: Mapping[str, str] = {
    "result": "results",
    "resume point": "resume points",
    "kept": "kept between stages",
    "damaged": "set aside",
    "in progress": "being written",
    "leftover": "leftovers",
    "record": "records",
    "other": "not of this program",
}
"""Words for the kinds of entries, in the order of the table."""


def du(
    workspace: WorkspaceOption = DEFAULT_WORKSPACE, runs: RunsOption = DEFAULT_RUNS, as_json: JsonFlag = False
) -> None:
    """Show what a workspace holds: sizes on disk and apparent, last use, and which runs reach it."""
    from compress.artifact.workspace import Workspace
    from compress.artifact.workspace_sizes import measure
    from compress.pipeline.reached import reached, run_directories

    check_workspace(workspace)
    sizes = measure(Workspace(workspace))
    directories = run_directories(workspace, runs)
    by_key = reached(sizes, directories)
    groups = _groups(sizes)
    document = {
        "workspace": str(workspace),
        **_amounts(sizes.entries),
        "groups": [
            {"kind": kind, "stage": stage, **_amounts(each)} for (kind, stage), each in groups.items()
        ],
        "runs": [
            {"run": str(each.path), **_run_amounts(str(each.path), sizes, by_key)} for each in directories
        ],
        "entries": [entry_json(each, by_key) for each in sizes.entries if each.kind != "record"],
    }
    emit(document, _text(document), as_json=as_json)


def check_workspace(path: Path) -> None:
    """Raise UsageError where there is no workspace."""
    from compress.errors import UsageError

    if not path.is_dir():
        raise UsageError(f"there is no workspace at {path}; name one with --workspace.")


def entry_json(entry: "Entry", reached: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return one entry as the documents of `du` and `gc` show it."""
    return {
        "kind": entry.kind,
        "path": str(entry.path),
        "key": entry.key,
        "stage": entry.stage,
        "role": entry.role,
        **_amounts([entry]),
        "runs": list(reached.get(entry.key or "", ())),
    }


def _amounts(entries: "Iterable[Entry]") -> dict[str, Any]:
    """Return number, sizes and last use of some entries; what they share is counted once."""
    from compress.artifact.workspace_sizes import apparent_bytes, disk_bytes

    held = list(entries)
    return {
        "num_entries": len([each for each in held if each.kind != "record"]),
        "disk_bytes": disk_bytes(held),
        "apparent_bytes": apparent_bytes(held),
        "last_use": stamp(max((each.last_use_s for each in held), default=0.0)),
    }


def _run_amounts(run: str, sizes: "WorkspaceSizes", reached: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the amounts that a run reaches, and the bytes that no other run does."""
    from compress.artifact.workspace_sizes import disk_bytes

    entries = [each for each in sizes.entries if run in reached.get(each.key or "", ())]
    alone = [each for each in entries if reached[each.key or ""] == (run,)]
    return {**_amounts(entries), "alone_bytes": disk_bytes(alone)}


def _groups(sizes: "WorkspaceSizes") -> "dict[tuple[str, str | None], list[Entry]]":
    """Return the entries by kind and stage, in the order of the table. An entry that shares files with an
    earlier group is counted in both, and once in the total.
    """
    found: dict[tuple[str, str | None], list[Entry]] = {}
    for kind in PLURALS:
        of_kind = [each for each in sizes.entries if each.kind == kind]
        for each in sorted(of_kind, key=lambda entry: entry.stage or ""):
            found.setdefault((kind, each.stage), []).append(each)
    return found


def stamp(time_s: float) -> str | None:
    """Return a time as ISO 8601 with the offset of this machine; None for no time."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time_s)) if time_s else None


def _text(document: Mapping[str, Any]) -> str:
    header = ("what", "stage", "entries", "on disk", "apparent", "last use")
    rows = [
        (
            PLURALS[each["kind"]],
            each["stage"] or "",
            each["num_entries"] or "",
            size_text(each["disk_bytes"]),
            size_text(each["apparent_bytes"]),
            _day(each["last_use"]),
        )
        for each in document["groups"]
    ]
    total = ("all", "", document["num_entries"], *_sizes(document), _day(document["last_use"]))
    lines = [f"workspace {document['workspace']}", "", table([header, *rows, total], right=(2, 3, 4)), ""]
    if not document["runs"]:
        lines.append("no run directory reaches it")
        return "\n".join(lines)
    reach = [
        (each["run"], each["num_entries"], size_text(each["disk_bytes"]), size_text(each["alone_bytes"]))
        for each in document["runs"]
    ]
    free = [each for each in document["entries"] if each["kind"] == "result" and not each["runs"]]
    lines.append(table([("run", "entries", "on disk", "no other run"), *reach], right=(1, 2, 3)))
    lines.append(f"{count_text(len(free), 'result')} that no run reaches")
    return "\n".join(lines)


def _sizes(amounts: Mapping[str, Any]) -> tuple[str, str]:
    return size_text(amounts["disk_bytes"]), size_text(amounts["apparent_bytes"])


def _day(text: str | None) -> str:
    return "" if text is None else text[:16].replace("T", " ")

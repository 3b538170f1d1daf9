"""The collection of a workspace's garbage: which entries go, why, and their removal.

What a policy selects is a pure function of sizes, reached keys and the time, so that a dry run shows exactly
what the removal would take. An entry that a run reaches stays unless the policy includes those, too. Each
entry goes by one rename, then its seal and parts, then its bytes: after a kill between any two of these steps
the entry is whole or gone, and the next collection removes the rest.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compress.artifact.seal import SEALS
from compress.artifact.workspace import PARTS, Workspace
from compress.artifact.workspace_sizes import Entry, Inode, Kind, WorkspaceSizes, measure

DAY_S = 86400.0
_HAS_KEY = ("result", "resume point")
_MAY_GO: tuple[Kind, ...] = ("result", "resume point", "kept", "damaged")


@dataclass(frozen=True)
class Policy:
    """A choice of entries: those not used for so many seconds, those that no run reaches, and the least
    recently used ones until so many bytes on disk are left. Leftovers go always.

    `include_reached` lets entries go that runs reach. Kept results cannot be traced to a run, so they go by
    age and size only.
    """

    older_than_s: float | None = None
    keep_bytes: int | None = None
    unreachable: bool = False
    include_reached: bool = False


@dataclass(frozen=True)
class Removal:
    """One entry that goes, and the reason."""

    entry: Entry
    reason: str


def choose(
    sizes: WorkspaceSizes, policy: Policy, reached: Mapping[str, tuple[str, ...]], *, now_s: float
) -> list[Removal]:
    """Return what goes, in the order of removal; `reached` maps keys to the runs that reach them."""
    chosen = [Removal(each, "left by a killed process") for each in sizes.of_kind("leftover")]
    may_go = sizes.of_kind(*_MAY_GO)
    if not policy.include_reached:
        may_go = [each for each in may_go if not _is_reached(each, reached)]
    candidates = sorted(may_go, key=lambda each: (each.last_use_s, str(each.path)))
    for each in candidates:
        if (reason := _reason(each, policy, reached, now_s)) is not None:
            chosen.append(Removal(each, reason))
    if policy.keep_bytes is not None:
        chosen += _over_size(sizes, policy.keep_bytes, chosen, candidates)
    return chosen


def remove(
    workspace: Workspace,
    choice: Callable[[WorkspaceSizes], list[Removal]],
) -> list[Removal]:
    """Remove what `choice` selects of the workspace as it is now, and return that.

    Raises:
        LockHeld: a run holds the workspace.
        OSError: an entry cannot be renamed; those before it are gone.
    """
    with workspace.lock():
        chosen = choice(measure(workspace))
        for each in chosen:
            _remove_entry(workspace, each.entry)
    return chosen


def _remove_entry(workspace: Workspace, entry: Entry) -> None:
    workspace.remove(entry.path)
    if entry.kind not in _HAS_KEY or entry.key is None:
        return
    if entry.kind == "result":
        for seal in (workspace.root / SEALS).glob(f"{entry.key}@*"):
            seal.unlink(missing_ok=True)
    if not any((workspace.root / tree / entry.key).exists() for tree in ("store", "scratch", "damaged")):
        (workspace.root / PARTS / f"{entry.key}.json").unlink(missing_ok=True)


def _is_reached(entry: Entry, reached: Mapping[str, tuple[str, ...]]) -> bool:
    return entry.kind in _HAS_KEY and entry.key in reached


def _reason(entry: Entry, policy: Policy, reached: Mapping[str, tuple[str, ...]], now_s: float) -> str | None:
    """Return why an entry goes by its age or for want of a run, None where it stays."""
    age_s = now_s - entry.last_use_s
    if policy.older_than_s is not None and age_s > policy.older_than_s:
        return f"last used {ago(age_s)}"
    if policy.unreachable and entry.kind != "kept" and not _is_reached(entry, reached):
        return "set aside as damaged" if entry.kind == "damaged" else "no run reaches it"
    return None


def ago(age_s: float) -> str:
    """Return an age in words: `3 days ago`."""
    for name, size_s in (("day", DAY_S), ("hour", 3600.0), ("minute", 60.0)):
        if (count := int(age_s / size_s)) >= 1:
            return f"{count:,} {name}{'s' * (count > 1)} ago"
    return "just now"


def _over_size(
    sizes: WorkspaceSizes, keep_bytes: int, chosen: list[Removal], candidates: list[Entry]
) -> list[Removal]:
    """Return the least recently used of the candidates that must go, too, for the limit to hold."""
    gone = {each.entry.path for each in chosen}
    left: Counter[Inode] = Counter()
    for each in sizes.entries:
        if each.path not in gone or each.kind == "record":
            left.update(each.names)
    total = sum(inode.disk_bytes for inode in left)
    found = []
    for each in candidates:
        if total <= keep_bytes:
            break
        if each.path in gone:
            continue
        left.subtract(each.names)
        total -= sum(inode.disk_bytes for inode in each.names if left[inode] == 0)
        found.append(Removal(each, "least recently used, over the limit"))
    return found

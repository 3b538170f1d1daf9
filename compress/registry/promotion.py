"""Aliases with a history: who held them, why they moved, and the way back.

A move of an alias is a record, a small manifest that refers to the artifact that the alias then points to, as
evidence does. It lists the manifests that held the alias before, so that rolling back needs nothing else and
every registry with `attach` can keep it:

    {"schema": 1, "kind": "promotion" | "rollback" | "withdrawn", "name", "alias", "before", "after",
     "reason", "when", "earlier": [digests, oldest first]}

The record is stored first and the alias moves last, in one step, if it still points where it did
(`write_tag_if`). Of two jobs that promote at a time one loses: its record is followed by one that withdraws
it.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from compress.digest import digest_bytes
from compress.errors import LockHeld, StorageError, UsageError
from compress.registry.blobs import read_blob
from compress.registry.image import EMPTY_CONFIG, FILE_LAYER, PROMOTION, Descriptor, ImageManifest
from compress.registry.protocol import GuardedRegistry, Registry, open_registry
from compress.registry.ref import Ref
from compress.untrusted.fields import Fields
from compress.untrusted.parse import Malformed, parse_json

Kind = Literal["promotion", "rollback", "withdrawn"]
MAX_EARLIER = 64
"""Holders of an alias that a record remembers."""
_TITLE = "promotion.json"
_EMPTY = Descriptor(EMPTY_CONFIG, digest_bytes(b"{}"), 2)


@dataclass(frozen=True)
class Move:
    """One move of an alias; digests are those of manifests. `before` None: nothing held the alias."""

    kind: Kind
    name: str
    alias: str
    before: str | None
    after: str
    reason: str
    when: str
    earlier: tuple[str, ...]


def check_guarded(registry: Registry, url: str) -> None:
    """Raise UsageError for a registry in which two jobs could both promote."""
    if not isinstance(registry, GuardedRegistry):
        raise UsageError(
            f"{url} cannot move an alias only if it still points where it did, so two jobs could both "
            "promote; promote in another registry, such as layout://registry."
        )


def holder(registry: Registry, name: str, alias: str) -> Descriptor | None:
    """Return the manifest that holds an alias; None where nothing does, or there is no registry yet."""
    try:
        return registry.read_tag(name, alias)
    except UsageError:  # no registry there; the first push makes one
        return None


def promote(
    registry: Registry,
    name: str,
    tags: Sequence[str],
    manifest: Descriptor,
    *,
    alias: str,
    expected: str | None,
    reason: str,
) -> None:
    """Point tags to a stored manifest if the alias still points to `expected`; where the alias is one of the
    tags and moves, the move is recorded.

    Raises:
        LockHeld: another job moved the alias meanwhile; nothing was moved here.
    """
    record = None
    if alias in tags and expected != manifest.digest:
        last = last_move(registry, name, alias)
        behind = (*(() if last is None else last.earlier), *(() if expected is None else (expected,)))
        earlier = behind[-MAX_EARLIER:]
        record = Move("promotion", name, alias, expected, manifest.digest, reason, _now(), earlier)
    _move(registry, record, name, tags, manifest, alias=alias, expected=expected)


def last_move(registry: Registry, name: str, alias: str) -> Move | None:
    """Return the move that brought an alias to where it points now; None where that was no promotion.

    Raises:
        StorageError: a record is damaged.
    """
    held = holder(registry, name, alias)
    if held is None:
        return None
    for each in reversed(registry.attached(held)):
        if each.artifact_type != PROMOTION:
            continue
        move = _read(registry, each)
        if (move.name, move.alias) == (name, alias):
            return move if move.kind != "withdrawn" and move.after == held.digest else None
    return None


def rollback(ref: Ref, *, reason: str = "", to: str | None = None) -> Move:
    """Point an alias to the manifest that held it before, or to the one given, and record it.

    Raises:
        UsageError: nothing holds the alias, nothing held it before, or the registry cannot guard it.
        LockHeld: another job moved the alias meanwhile.
    """
    registry = open_registry(ref.registry).repository(ref.name)
    check_guarded(registry, ref.registry)
    move = planned_rollback(registry, ref, reason=reason, to=to)
    target = registry.find(move.after)
    if target is None:
        raise UsageError(f"{ref.registry} holds no manifest {move.after}; name another one with --to.")
    _move(registry, move, ref.name, (ref.tag,), target, alias=ref.tag, expected=move.before)
    return move


def planned_rollback(registry: Registry, ref: Ref, *, reason: str = "", to: str | None = None) -> Move:
    """Return the move that `rollback` would make.

    Raises:
        UsageError: as `rollback`.
    """
    held = holder(registry, ref.name, ref.tag)
    if held is None:
        raise UsageError(f"nothing in {ref.registry} has the alias {ref.name}:{ref.tag}.")
    last = last_move(registry, ref.name, ref.tag)
    earlier = () if last is None else last.earlier
    if to is None:
        if not earlier:
            raise UsageError(
                f"no promotion of {ref.name}:{ref.tag} to {held.digest} is recorded with a holder before it; "
                "name the manifest to go back to with --to sha256:..."
            )
        to = earlier[-1]
    if to == held.digest:
        raise UsageError(f"{ref.name}:{ref.tag} points to {to} already.")
    behind = earlier[: earlier.index(to)] if to in earlier else earlier
    return Move("rollback", ref.name, ref.tag, held.digest, to, reason or "no reason given", _now(), behind)


def _move(
    registry: Registry,
    record: Move | None,
    name: str,
    tags: Sequence[str],
    manifest: Descriptor,
    *,
    alias: str,
    expected: str | None,
) -> None:
    check_guarded(registry, "this registry")
    assert isinstance(registry, GuardedRegistry)
    if record is not None:
        _store(registry, record, manifest)
    if registry.write_tag_if(name, tags, manifest, guard=alias, expected=expected):
        return
    if record is not None:
        _store(
            registry, replace(record, kind="withdrawn", reason="another job moved the alias first"), manifest
        )
    now = holder(registry, name, alias)
    raise LockHeld(
        f"{name}:{alias} was moved to {'nothing' if now is None else now.digest} by another job meanwhile, "
        "so nothing was moved here. Run it again: it is then compared with what holds the alias now."
    )


def _store(registry: Registry, move: Move, subject: Descriptor) -> None:
    data = (json.dumps({"schema": 1, **asdict(move)}, indent=1) + "\n").encode()
    layer = Descriptor(FILE_LAYER, digest_bytes(data), len(data), _TITLE)
    image = ImageManifest(PROMOTION, _EMPTY, (layer,), subject=subject)
    for blob, source in ((layer, data), (_EMPTY, b"{}"), (image.descriptor, image.to_bytes())):
        if not registry.has(blob):
            registry.put(blob, source)
    registry.attach(image.descriptor, subject)


def _read(registry: Registry, record: Descriptor) -> Move:
    image = ImageManifest.from_bytes(read_blob(registry, record), f"manifest {record.digest}")
    where = f"the record of a promotion {record.digest}"
    if len(image.layers) != 1:
        raise StorageError(f"{where} is damaged: it has {len(image.layers)} files.")
    try:
        fields = Fields(parse_json(read_blob(registry, image.layers[0])), where, StorageError)
    except Malformed as error:
        raise StorageError(f"{where} is damaged: {error}.") from None
    if fields.integer("schema", 0, 1 << 30) != 1:
        raise StorageError(f"{where} has another schema than 1, which is read here.")
    kind = fields.text("kind")
    return Move(
        kind="rollback" if kind == "rollback" else "promotion" if kind == "promotion" else "withdrawn",
        name=fields.text("name"),
        alias=fields.text("alias"),
        before=fields.text("before") if fields.has("before") else None,
        after=fields.text("after"),
        reason=fields.text("reason"),
        when=fields.text("when"),
        earlier=tuple(fields.texts("earlier")),
    )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")

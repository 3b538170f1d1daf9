"""`compress rollback`: an alias goes back to what held it before."""

from dataclasses import asdict
from typing import Annotated

import typer

from compress.cli.output import JsonFlag, emit, table


def rollback(
    ref: Annotated[
        str,
        typer.Argument(help="The alias, such as layout://registry/my-model:production.", show_default=False),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Digest of a manifest in the registry; by default the one that held the alias before.",
            show_default=False,
        ),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Kept with the move.", show_default=False)] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show how the alias came here and where it would go.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Point an alias to the artifact that held it before its last promotion, and record why."""
    from compress.errors import UsageError
    from compress.registry.promotion import last_move, planned_rollback
    from compress.registry.promotion import rollback as roll_back
    from compress.registry.protocol import open_registry
    from compress.registry.ref import parse_ref

    place = parse_ref(ref)
    if place.digest:
        raise UsageError(f"'{ref}' names a digest; an alias goes back, such as {place.name}:production.")
    registry = open_registry(place.registry).repository(place.name)
    last = last_move(registry, place.name, place.tag)
    move = (
        planned_rollback(registry, place, reason=reason, to=to)
        if dry_run
        else roll_back(place, reason=reason, to=to)
    )
    rows = [(f"{move.name}:{move.alias}", "would go back" if dry_run else "went back")]
    rows += [("from", move.before or "nothing"), ("to", move.after), ("reason", move.reason)]
    if last is not None:
        rows.append(("came by", f"{last.kind} of {last.when}: {last.reason}"))
    emit({"moved": not dry_run, **asdict(move)}, table(rows), as_json=as_json)

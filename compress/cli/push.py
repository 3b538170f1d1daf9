"""`compress push`: an artifact, with its evidence if given, into a registry."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.output import JsonFlag, count_text, emit, progress, size_text, table
from compress.errors import GateFailed, UsageError, did_you_mean
from compress.untrusted.fields import Fields
from compress.untrusted.parse import Malformed, read_json

if TYPE_CHECKING:
    from compress.artifact.manifest import Artifact
    from compress.registry.ref import Ref
    from compress.registry.transfer import PushResult
    from compress.validate.gates import GateResult

MAX_LIMIT = 1e6


def push(
    artifact: Annotated[Path, typer.Argument(help="Directory of the artifact.")],
    ref: Annotated[
        str,
        typer.Argument(
            help="Where to: layout://, oci://, s3://, mlflow+https:// or hf://, such as "
            "oci://host/path/my-model:candidate; the tag becomes an alias."
        ),
    ],
    alias: Annotated[list[str] | None, typer.Option("--alias", help="One more tag; may be repeated.")] = None,
    evidence: Annotated[
        Path | None,
        typer.Option("--evidence", help="Directory of report.json, provenance.json, README.md and plots."),
    ] = None,
    against_alias: Annotated[
        str | None,
        typer.Option(
            "--against-alias",
            help="Push only if it is as good as what this alias holds, by the evidence of both.",
            show_default=False,
        ),
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            "--gate",
            help="limit=number against the alias, such as kl_increase=0.001 or tpot_ratio=1.05; may be "
            "repeated. Without any: kl_increase=0.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Store an artifact in a registry, with the signature next to it, unless a gate failed in its evidence;
    only the last step, moving the tags, is visible.
    """
    from compress.artifact.manifest import open_artifact, verify_artifact
    from compress.registry.protocol import open_registry
    from compress.registry.ref import parse_ref
    from compress.registry.transfer import push as push_artifact

    target = parse_ref(ref)
    if target.digest:
        raise UsageError(
            f"'{ref}' names a digest; a push gives a name: write {target.registry}/{target.name}:tag."
        )
    opened = open_artifact(artifact)
    verify_artifact(opened)  # a blob that the registry has is not read again
    if evidence is not None:
        _check_evidence(evidence / "report.json", opened.digest)
    if against_alias is not None:
        _challenge(opened, target, [*(alias or ())], evidence, against_alias, gate or [], as_json=as_json)
        return
    if gate:
        raise UsageError("--gate limits a change against an alias; name that with --against-alias.")
    with progress("push") as report:
        result = push_artifact(
            open_registry(target.registry),
            opened,
            name=target.name,
            aliases=(target.tag, *(alias or ())),
            evidence=evidence,
            progress=report,
        )
    emit(*_pushed(target, result), as_json=as_json)


def _pushed(target: "Ref", result: "PushResult") -> tuple[dict[str, Any], str]:
    """Return what was pushed as a document and as text."""
    pinned = str(target.pinned(result.manifest_digest))
    new = (
        count_text(result.num_new_blobs, "new blob")
        if result.num_new_blobs
        else "all blobs were there already"
    )
    signed = "; signed" if result.signature_digest else ""
    text = f"{pinned}\ntags {', '.join(result.tags)}; {size_text(result.size_bytes)}; {new}{signed}"
    return {"ref": pinned, **asdict(result)}, text


def _challenge(
    artifact: "Artifact",
    target: "Ref",
    aliases: list[str],
    evidence: Path | None,
    against_alias: str,
    gates: list[str],
    *,
    as_json: bool,
) -> None:
    """Push against the champion that an alias holds, and show the gates."""
    from compress.pipeline.promote import Place, challenge
    from compress.recipe import ChampionGates

    limits = ChampionGates(against_alias=against_alias, **_limits(gates))
    place = Place(target.registry, target.name, (target.tag, *aliases))
    found = challenge(artifact, limits, place, evidence=evidence)
    rows = [
        ("gate", "pass" if each.passed else "FAIL", f"{each.name} <= {each.limit:g}", _measured(each))
        for each in found.gates
    ]
    document: dict[str, Any] = {
        "gates": [asdict(each) for each in found.gates],
        "champion": found.champion,
        "reason": found.reason,
    }
    if found.pushed is None:
        failed = ", ".join(each.name for each in found.failed)
        failure = GateFailed(f"not pushed: {failed} out of limits. {against_alias} stays where it is.")
        shown = {**document, "status": "gate_failed"}
        emit(shown, table(rows), as_json=as_json, failure=failure)
        raise typer.Exit(failure.exit_code)
    pushed, text = _pushed(target, found.pushed)
    if not rows:
        text = f"{text}\n{found.reason}"
    emit({**pushed, **document}, "\n".join(filter(None, (table(rows), text))), as_json=as_json)


def _measured(gate: "GateResult") -> str:
    if gate.value is None or gate.bound is None:
        return gate.note
    return f"{gate.value:.4g}, bound {gate.bound:.4g}  {gate.note}"


def _limits(options: list[str]) -> dict[str, Any]:
    """Return the limits of `--gate name=number`.

    Raises:
        UsageError: there is no such limit, or it is no number.
    """
    from compress.recipe import ChampionGates

    known = ChampionGates.model_fields.keys() - {"against_alias", "tasks"}
    limits: dict[str, Any] = {"tasks": {}}
    for each in options:
        name, _, text = each.partition("=")
        task = name.removeprefix("tasks.").removesuffix(".accuracy_drop")
        is_task = name == f"tasks.{task}.accuracy_drop"
        if name not in known and not is_task:
            raise UsageError(f"--gate {each}: there is no limit '{name}'.{did_you_mean(name, known)}")
        try:
            limit = float(text)
        except ValueError:
            raise UsageError(f"--gate {each}: write name=number, such as kl_increase=0.001.") from None
        if not abs(limit) <= MAX_LIMIT:
            raise UsageError(f"--gate {each}: the limit must be a number within a million.")
        if is_task:
            limits["tasks"][task] = limit
        else:
            limits[name] = limit
    return limits


def _check_evidence(file: Path, digest: str) -> None:
    """Check that evidence is about this artifact and that no gate failed in it.

    Raises:
        UsageError: the report is of another artifact, or is not JSON.
        GateFailed: a gate failed.
    """
    if not file.exists():
        return
    try:
        report = Fields(read_json(file), str(file), UsageError)
    except Malformed as error:
        raise UsageError(f"{file} is not JSON: {error}.") from None
    about = report.fields("artifact", default={}).text("digest", default=digest)
    if about != digest:
        raise UsageError(
            f"{file} is about the artifact {about}, and this one is {digest}; validate this one first."
        )
    verdict = report.fields("verdict", default={})
    if not verdict.flag("passed", default=True):
        reasons = " ".join(verdict.texts("reasons", default=()))
        raise GateFailed(f"not pushed: {reasons} The artifact is kept; {file} says by how much.")

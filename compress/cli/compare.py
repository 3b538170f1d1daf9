"""`compress compare`: compares any number of validated models and states which one dominates another."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.artifact.manifest import LINKS_NAME
from compress.cli.output import JsonFlag, emit, note, progress, table
from compress.cli.run import DeviceOption, OfflineOption
from compress.cli.validate import DataOption, NumSamplesOption, SeqLenOption
from compress.errors import UsageError

if TYPE_CHECKING:
    from compress.pipeline.proof import Proof
    from compress.validate.compare.evidence import Evidence

NO_CLAIM = "Nobody dominates another: for no pair do the data show it."


def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Two or more: evidence (a directory or report.json), a run, an artifact of a run, a "
            "registry reference, or with --against any checkpoint. NAME=... gives it a name.",
            show_default=False,
        ),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write the page to this file.", show_default=False)
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            help="Objectives of dominance, with commas between them, such as size_bytes,kl_mean; by default "
            "size, KL, and what was timed.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", min=1, help="Of TTFT and TPOT; the smallest by default.", show_default=False
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="Validate models without evidence against this source.", show_default=False
        ),
    ] = None,
    data: DataOption = "builtin://python-eval",
    num_samples: NumSamplesOption = 32,
    seq_len: SeqLenOption = 512,
    latency: Annotated[
        bool, typer.Option("--latency/--no-latency", help="Also time what --against validates.")
    ] = True,
    proofs: Annotated[
        Path, typer.Option("--proofs", help="Where the evidence of --against is kept and found again.")
    ] = Path("comparison"),
    device: DeviceOption = None,
    offline: OfflineOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare validated models: size, accuracy and speed with intervals, and who dominates whom."""
    from compress.validate.compare.document import compare_document
    from compress.validate.compare.dominance import check_objectives
    from compress.validate.compare.page import claims, render_compare_page, table_rows

    objectives = None if by is None else check_objectives([each.strip() for each in by.split(",")])
    named = _named(models)
    if len(named) < 2:
        raise UsageError("a comparison needs at least two models; name one more.")
    proof = None
    if against is not None:
        proof = _proof(against, data, num_samples, seq_len, latency=latency, device=device, offline=offline)
    reports = {label: _report(ref, label, proof, proofs) for label, ref in named.items()}
    document = compare_document(*read_models(reports, batch_size), objectives=objectives)
    for warning in document["warnings"]:
        note(f"warning: {warning}")
    if html is not None:
        from compress.artifact.atomic import write_atomic

        write_atomic(html, render_compare_page(document).encode())
    page = [] if html is None else [f"page  {html}"]
    text = "\n".join([table(table_rows(document)), "", *(claims(document) or [NO_CLAIM]), *page])
    emit({**document, "page": None if html is None else str(html)}, text, as_json=as_json)


def _named(models: list[str]) -> dict[str, str]:
    """Return name -> reference: names given as NAME=..., else the last parts of their paths."""
    found: dict[str, str] = {}
    for model in models:
        name, given, ref = model.partition("=")
        if not given or "/" in name or Path(model).exists():
            name = _short(model, models)
            ref = model
        elif not name.strip() or not ref:
            raise UsageError(f"{model} has an empty side; write NAME=MODEL, or the model alone.")
        if name in found:
            raise UsageError(f"two models are called {name}; call one of them otherwise: NAME={ref}.")
        found[name] = ref
    return found


def _short(model: str, models: list[str]) -> str:
    """Return the shortest end of a path that no other one has; folders that all runs have do not count."""

    def parts(text: str) -> list[str]:
        return [each for each in text.split("/") if each not in ("", ".", *_COMMON)] or [text]

    own = parts(model)
    for count in range(1, len(own) + 1):
        name = "/".join(own[-count:])
        if sum("/".join(parts(other)[-count:]) == name for other in models) == 1:
            return name
    return model


_COMMON = ("evidence", "report.json", LINKS_NAME, "export")


def _proof(
    against: str,
    data: str,
    num_samples: int,
    seq_len: int,
    *,
    latency: bool,
    device: str | None,
    offline: bool,
) -> "Proof":
    from compress.pipeline import pick_device, resolve_source
    from compress.pipeline.proof import Proof
    from compress.stages.validate.spec import Latency, Validate

    timed = Latency() if latency else None
    spec = Validate(data=data, num_samples=num_samples, seq_len=seq_len, latency=timed, speculative=None)
    return Proof(resolve_source(against, offline=offline), spec, pick_device(device), offline)


def _report(ref: str, label: str, proof: "Proof | None", proofs: Path) -> Any:
    """Return the report of a model; where it has no evidence, that of a validation now."""
    from compress.pipeline.evidence import REPORT_NAME, read_evidence_of, read_report

    found = read_evidence_of(ref)
    if found is not None:
        return found
    if proof is None:
        raise UsageError(
            f"{ref} has no evidence; validate it with `compress validate {ref} --against SOURCE --out PROOF` "
            "and name PROOF here, or add --against SOURCE."
        )
    from compress.pipeline.model_dir import find_candidate
    from compress.pipeline.proof import check_found, write_proof

    out = proofs / label.replace("/", "-")
    candidate = find_candidate(ref, offline=proof.offline)
    if out.exists():
        return check_found(out, proof, candidate)
    proofs.mkdir(parents=True, exist_ok=True)
    with progress(label) as shown:
        write_proof(proof, candidate, out, shown)
    return read_report(out / REPORT_NAME)


def read_models(
    reports: dict[str, Any], batch_size: int | None = None
) -> "tuple[list[Evidence], list[Evidence]]":
    """Return the evidence of the models and, once each, of their sources; `reports` are by label."""
    from compress.validate.compare.evidence import read_evidence, source_evidence

    models = [read_evidence(report, label, batch_size=batch_size) for label, report in reports.items()]
    sources: dict[str, Evidence] = {}
    for label, report in reports.items():
        own = source_evidence(report, label, batch_size=batch_size)
        sources.setdefault(own.digest, own)
    if batch_size is not None:
        _check_batch_size(reports, batch_size)
    return models, list(sources.values())


def _check_batch_size(reports: dict[str, Any], batch_size: int) -> None:
    """Name the models that were not timed at a batch size; refuse one at which none was.

    Raises:
        UsageError: no model was timed at it.
    """
    sizes = {
        label: {row["batch_size"] for row in (report.get("latency") or {}).get("candidate") or ()}
        for label, report in reports.items()
    }
    lacking = [label for label, own in sizes.items() if batch_size not in own]
    if len(lacking) == len(sizes):
        timed = ", ".join(map(str, sorted(set().union(*sizes.values())))) or "none"
        raise UsageError(
            f"--batch-size {batch_size}: no model was timed at this batch size; batch sizes that were timed: "
            f"{timed}."
        )
    if lacking:
        note(f"warning: {', '.join(lacking)}: not timed at batch size {batch_size}.")

"""`compress validate`: prove a model that exists already, outside of a recipe, of this tool or another."""

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.output import JsonFlag, emit, note, progress, table
from compress.cli.run import DeviceOption, OfflineOption
from compress.cli.verdict import accuracy_facts, accuracy_texts, gate_text
from compress.errors import GateFailed, UsageError

DataOption = Annotated[
    str, typer.Option("--data", help="Evaluation text: a data card or builtin://python-eval.")
]
NumSamplesOption = Annotated[
    int, typer.Option("--num-samples", min=2, max=1 << 20, help="Windows of evaluation text.")
]
SeqLenOption = Annotated[int, typer.Option("--seq-len", min=8, max=1 << 20, help="Tokens a window.")]


def validate(
    artifact: Annotated[
        str,
        typer.Argument(
            help="An artifact, or a checkpoint of any tool, dense or quantized: a directory, hf:// or a "
            "registry reference.",
            show_default=False,
        ),
    ],
    against: Annotated[str, typer.Option("--against", help="The source model: builtin://, a path or hf://.")],
    data: DataOption = "builtin://python-eval",
    num_samples: NumSamplesOption = 32,
    seq_len: SeqLenOption = 512,
    kv_format: Annotated[
        str | None,
        typer.Option(
            "--kv-format",
            help="KV cache of the artifact: DENSE, FP8_STATIC, FP8_ATTENTION, *_TOKEN_HEAD; by default what "
            "it states.",
        ),
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            "--gate",
            help="metric=limit or metric@device=limit, may be repeated; a failed gate is exit code 3.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="New directory for report.html, report.json and the model card.")
    ] = Path("validation"),
    latency: Annotated[
        bool, typer.Option("--latency/--no-latency", help="Also time both models on this machine.")
    ] = True,
    speculative: Annotated[
        bool,
        typer.Option(
            "--speculative/--no-speculative",
            help="Also serve the artifact with the draft that it carries, if it does.",
        ),
    ] = True,
    assistant: Annotated[
        str | None,
        typer.Option(
            "--assistant",
            help="Also serve it with this published assistant: a directory or hf://org/name@revision.",
            show_default=False,
        ),
    ] = None,
    attach: Annotated[
        bool,
        typer.Option(
            "--attach", help="Also attach the evidence to the registry reference that was validated."
        ),
    ] = False,
    device: DeviceOption = None,
    offline: OfflineOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare an artifact with its source: accuracy with uncertainty, latency, gates, report."""
    from compress.pipeline import pick_device, resolve_source
    from compress.pipeline.evidence import REPORT_NAME, read_report
    from compress.pipeline.model_dir import find_candidate
    from compress.pipeline.proof import Proof, check_new_directory, write_proof
    from compress.registry.protocol import REGISTRIES
    from compress.registry.transfer import attach_evidence
    from compress.stages.validate import REPORT_HTML
    from compress.stages.validate.spec import Latency, Speculation, Validate, kv_format_named, read_gates

    if attach and artifact.partition("://")[0] not in REGISTRIES.names():
        raise UsageError(f"--attach needs a reference of a registry, and {artifact} is none.")
    if assistant is not None and not speculative:
        raise UsageError("--assistant names who proposes, and --no-speculative measures no proposals.")
    check_new_directory(out)
    chosen = pick_device(device)
    limits = _gates(gate or [])
    read_gates(limits)
    spec = Validate(
        data=data,
        num_samples=num_samples,
        seq_len=seq_len,
        kv_format=kv_format_named(kv_format),
        latency=Latency() if latency else None,
        speculative=Speculation(assistant=assistant) if speculative else None,
        gates=limits,
    )
    source = resolve_source(against, offline=offline)
    candidate = find_candidate(artifact, offline=offline)
    with progress("validate") as report:
        facts = write_proof(Proof(source, spec, chosen, offline), candidate, out, report)
    if attach:
        note(f"attached {attach_evidence(artifact, out)} to {artifact}")
    page = out / REPORT_HTML
    accuracy = accuracy_facts(read_report(out / REPORT_NAME))
    rows = [
        *(("accuracy", text) for text in accuracy_texts(accuracy)),
        *(("gate", gate_text(gate)) for gate in facts["gates"]),
        ("report", str(page)),
    ]
    document = {
        "verdict": facts["verdict"],
        "accuracy": accuracy,
        "gates": facts["gates"],
        "report": str(page),
    }
    failure = None
    if facts["verdict"]["passed"] is False:
        reasons = " ".join(facts["verdict"]["reasons"])
        failure = GateFailed(f"a gate failed: {reasons}", where=page)
        document = {**document, "status": "gate_failed"}
    for warning in facts.get("warnings", []):
        note(f"warning: {warning}")
    emit(document, table(rows), as_json=as_json, failure=failure)
    if failure is not None:
        raise typer.Exit(failure.exit_code)


def _gates(options: list[str]) -> dict[str, float | dict[str, float]]:
    """Return gates as a recipe has them: `ppl_ratio=1.1`, or `tpot_ms_p50@cpu=30` for a limit that holds on
    one kind of device.
    """
    gates: dict[str, float | dict[str, float]] = {}
    given = set[str]()
    for each in options:
        name, _, limit = each.partition("=")
        metric, at, device = name.partition("@")
        try:
            number = float(limit)
        except ValueError:
            raise UsageError(
                f"--gate {each}: write metric=number, such as ppl_ratio=1.1 or tpot_ms_p50@cuda-sm90=2."
            ) from None
        if name in given or (at and metric in given) or (not at and metric in gates):
            raise UsageError(f"--gate {each}: {metric} has a limit already; leave one of them out.")
        given.add(name)
        limits = gates.setdefault(metric, {} if at else number)
        if isinstance(limits, dict):
            limits[device] = number
    return gates

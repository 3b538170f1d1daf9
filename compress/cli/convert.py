"""`compress convert`: the same codes in another checkpoint format."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.output import JsonFlag, emit, note, progress, size_text, table
from compress.cli.run import OfflineOption


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A quantized model: an artifact, or a checkpoint of any tool (a path or hf://); "
            "for ONNX also a dense one.",
            show_default=False,
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="compressed-tensors, fp8, gptq, awq, modelopt, onnx or onnx-float16.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="New directory for the checkpoint.", show_default=False)],
    offline: OfflineOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a model in another checkpoint format, bit for bit; refuse what the format cannot express
    exactly.
    """
    from compress.export import FORMATS
    from compress.export.conversion import convert as convert_model
    from compress.models.arch import Arch
    from compress.pipeline import resolve_source
    from compress.quant.model_scheme import ModelScheme
    from compress.quant.scheme import DENSE

    form = FORMATS.get(to)
    model = resolve_source(source, offline=offline)
    with progress("convert") as report:
        artifact = convert_model(model, to, out, progress=report)
    if not any(record.path.startswith("tokenizer") for record in artifact.manifest.files):
        note(
            f"{source} holds no tokenizer, so neither does {out}; copy it from the model that it was made "
            f"from."
        )
    manifest = artifact.manifest
    assert manifest.arch is not None
    scheme = None if manifest.scheme is None else ModelScheme.from_json(manifest.scheme)
    consumers = (
        [] if scheme is None else form.consumers(Arch.from_json(manifest.arch, manifest.layers), scheme)
    )
    rows = [
        ("format", to),
        ("scheme", DENSE if scheme is None else scheme.name),
        ("artifact", f"{artifact.digest}  {size_text(artifact.size_bytes)}"),
        ("", str(out)),
        *((each.name, f"{'loads' if each.loads else 'does not load'} ({each.note})") for each in consumers),
    ]
    document = {
        "format": to,
        "scheme": manifest.scheme,
        "path": str(out),
        "digest": artifact.digest,
        "size_bytes": artifact.size_bytes,
    }
    emit({**document, "consumers": [asdict(each) for each in consumers]}, table(rows), as_json=as_json)

"""`quantize_by_name`: round the linears of any safetensors checkpoint to codes, found by the names and shapes
of its tensors, for models that the decoder does not support.

Weights are read, rounded to nearest with the full range of each scale group, and written one tensor at a
time; no text goes through the model. Everything else of the checkpoint is written as it is. A shard is a
resume point.

spec.py        what a recipe states          estimate.py   for `compress plan`
selection.py   what will be written
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.artifact.atomic import place, write_atomic
from compress.artifact.resume import ResumePoint, are_whole, digests
from compress.artifact.tensor_stream import tensor_stream
from compress.artifact.tensors import INDEX_NAME, SINGLE_NAME
from compress.artifact.writer import ArtifactWriter
from compress.calibrate.layer_files import check_finite
from compress.context import Context
from compress.errors import UnsupportedFormat
from compress.models.config_file import CONFIG_NAME
from compress.models.named_linears import Choice
from compress.quant.model_scheme import ModelScheme
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.stages import STAGES, Inputs, Port
from compress.stages.quantize_by_name.estimate import ROUNDED_AT_ONCE, estimate
from compress.stages.quantize_by_name.selection import Selection, select
from compress.stages.quantize_by_name.spec import QuantizeByName

NOT_VALIDATED = (
    "Quantized by the names of its tensors and not validated on the bundled runtime: no kernel was "
    "measured, and there is no latency."
)
PARAMETERS = ("weight", "bias")
"""Last parts of the names of tensors that are parameters."""
ROW_BLOCK = 128
"""Rows that are rounded at once are a multiple of this, so that no block of rows is cut."""


def _depends(spec: QuantizeByName, device: str) -> dict[str, str]:
    return {"device": torch.device(device).type}


@STAGES.stage(
    "quantize_by_name",
    version=4,
    takes=(Port.SOURCE,),
    gives=Port.CHECKPOINT,
    spec=QuantizeByName,
    estimate=estimate,
    depends=_depends,
)
def quantize_by_name(spec: QuantizeByName, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    """Write the checkpoint with codes in place of its linears.

    Raises:
        UsageError, UnsupportedFormat, StorageError: as `select`.
        UnsupportedFormat: a weight is NaN or infinite, also of those that stay dense.
        Interrupted: between two shards; those that are written are resume points.
    """
    selection = select(spec, inputs.source.path)
    places = _write_shards(selection, out.path, ctx)
    if len(set(places.values())) > 1:
        total = {"total_size": selection.written_bytes}
        _write_json(out.path / INDEX_NAME, {"metadata": total, "weight_map": dict(sorted(places.items()))})
    config = {**selection.config, "quantization_config": selection.quantization_config()}
    _write_json(out.path / CONFIG_NAME, config)
    inputs.source.copy_text_files(out.path)
    inputs.source.copy_documents(out.path)
    out.describe(
        role="checkpoint",
        scheme=ModelScheme(spec.weights).to_json(),
        facts={
            "format": spec.format,
            "by_name": selection.facts(),
            "warnings": [NOT_VALIDATED, *selection.warnings],
        },
    )


def _write_shards(selection: Selection, directory: Path, ctx: Context) -> dict[str, str]:
    """Write one file for each file of the source and return the file of every tensor."""
    by_file: dict[str, list[str]] = {}
    for name in selection.files.names():
        by_file.setdefault(selection.files.file(name).name, []).append(name)
    done = 0
    total = len(selection.quantized)
    places: dict[str, str] = {}
    for file, names in sorted(by_file.items()):
        stored = file if len(by_file) > 1 else SINGLE_NAME
        point = ResumePoint(ctx.scratch / f"{stored}.json", ctx.progress.log)
        found = point.load()
        ctx.boundary(done, total, stored)
        if found is None or not are_whole(ctx.scratch, found["files"], ctx.progress.log):
            _write_shard(selection, names, ctx.scratch / stored, (done, total), ctx)
            point.save({"files": digests(ctx.scratch, [stored])})
        place(ctx.scratch / stored, directory / stored)
        done += sum(len(selection.parts_of(name)) for name in names)
        places.update(dict.fromkeys(selection.forms(names), stored))
    ctx.progress.update(total, total, "all linears")
    return places


def _write_shard(
    selection: Selection, names: list[str], path: Path, step: tuple[int, int], ctx: Context
) -> None:
    """Write one file, a tensor at a time. `step`: linears that are done, and all linears."""
    done, total = step
    codec = selection.spec.written_as.codec
    with tensor_stream(path, selection.forms(names)) as stream:
        for name in names:
            tensor = selection.files.get(name)
            parts = selection.parts_of(name)
            if not parts:
                _check_copied(tensor, name)
                stream.write(name, tensor)
            for part in parts:
                matrix = tensor if part.stacked is None else part.stacked.place.matrix_of(tensor)
                ctx.progress.update(done, total, part.module)
                weight = _rounded(matrix, part, selection.spec.weights, torch.device(ctx.device))
                for leaf, each in codec.encode(weight).items():
                    stream.write(f"{part.module}.{leaf}", each)
                done += 1


def _check_copied(tensor: Tensor, name: str) -> None:
    """Check a tensor that is written as it is: no NaN, and in a parameter no infinity, which other tensors
    may hold, as a mask of attention does. Numbers of 8 bits are left to their scales.

    Raises:
        UnsupportedFormat: it holds one.
    """
    if not tensor.is_floating_point() or tensor.itemsize == 1 or not tensor.numel():
        return
    ends = [float(end) for end in tensor.aminmax()]
    is_parameter = name.rpartition(".")[2] in PARAMETERS
    if any(math.isnan(end) or (is_parameter and math.isinf(end)) for end in ends):
        raise UnsupportedFormat(
            f"the tensor '{name}' of the model holds NaN or infinity: the checkpoint is damaged."
        )


def _rounded(w_OI: Tensor, choice: Choice, scheme: Scheme, device: torch.device) -> QuantizedWeight:
    """Return the weight rounded to nearest, some rows at a time; rows are independent of one another.

    Raises:
        UnsupportedFormat: it holds NaN or infinity.
    """
    check_finite({"weight": w_OI}, choice.module)
    rows = max(1, ROUNDED_AT_ONCE // w_OI.shape[1] // ROW_BLOCK) * ROW_BLOCK
    parts = [nearest_weight(part.to(device), scheme, part.dtype) for part in w_OI.split(rows)]
    zeros = [part.zero_point_OG.cpu() for part in parts if part.zero_point_OG is not None]
    return QuantizedWeight(
        scheme,
        torch.cat([part.codes_OI.cpu() for part in parts]),
        torch.cat([part.scale_OG.cpu() for part in parts]),
        torch.cat(zeros) if zeros else None,
    )


def _write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())

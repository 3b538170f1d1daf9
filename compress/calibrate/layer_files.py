"""The way of a layer from its source to the device, and from there to its file in the canonical store.

A layer's file is written first and its resume point second, which vouches for the file: a run that is started
again takes a layer from its file where both are whole.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compress.artifact.resume import ResumePoint, are_whole, digests
from compress.artifact.tensors import save_tensors
from compress.calibrate.layer_state import Row
from compress.context import Context
from compress.errors import UnsupportedFormat
from compress.models.arch import Arch
from compress.models.canonical import encoded, layer_name
from compress.models.weights import Weights, dense


def stored_dtype(arch: Arch) -> torch.dtype:
    """Return the dtype in which a model stores dense weights and scales."""
    dtype: torch.dtype = getattr(torch, arch.dtype)
    return dtype


def placed(weights: Weights, idx: int, device: torch.device) -> dict[str, Tensor]:
    """Return the layer's dense weights on the device, after a check that they are finite."""
    on_device = {name: dense(value).to(device=device, non_blocking=True) for name, value in weights.items()}
    check_finite(on_device, f"layers.{idx}")
    return on_device


def check_finite(weights: Mapping[str, Tensor], where: str) -> None:
    """Raise UnsupportedFormat for NaN or infinity: rounding would turn them into codes that look like any
    other.

    The two ends of the range show both, since NaN becomes both ends. They are found without a second matrix:
    0.1 ns for a bfloat16 number on a core, where `isfinite` takes 10.
    """
    for name, value in weights.items():
        if not all(math.isfinite(float(end)) for end in value.aminmax()):
            raise UnsupportedFormat(
                f"the weight '{where}.{name}' of the model holds NaN or infinity: the checkpoint is damaged."
            )


def on_host(weights: Weights) -> dict[str, Tensor]:
    """Return the tensors of a layer's file; codes are packed on the device, before the copy."""
    return {name: tensor.to("cpu") for name, tensor in encoded(weights).items()}


def store_layer(
    out: Path, idx: int, tensors: Mapping[str, Tensor], rows: Sequence[Row], ctx: Context
) -> None:
    """Write a layer's weights first, and second the resume point with its rows, which vouches for them."""
    save_tensors(out / layer_name(idx), tensors)
    _point(out, idx, ctx).save({"rows": list(rows), "files": digests(out, [layer_name(idx)])})


def is_stored(out: Path, idx: int, ctx: Context) -> bool:
    """Return whether the layer's file and its resume point are there, and whole."""
    stored = _point(out, idx, ctx).load()
    return stored is not None and are_whole(out, stored["files"], ctx.progress.log)


def stored_rows(out: Path, idx: int, ctx: Context) -> list[Row]:
    """Return the report rows of a layer that is stored."""
    rows: list[Row] = _point(out, idx, ctx).saved()["rows"]
    return rows


def _point(out: Path, idx: int, ctx: Context) -> ResumePoint:
    return ResumePoint(out / f"layer-{idx:05d}.json", ctx.progress.log)

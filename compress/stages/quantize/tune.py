"""`tune`: train the scales of the rounded layers end to end against the source, on the calibration text
(`distill/scales.py`).

An eighth of the samples is held out. The tuned scales are kept only where they lower the KL on those.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from compress.context import Context
from compress.data.tokens import TokenSet
from compress.distill.learn import Measurements, learn
from compress.distill.losses import Divergence
from compress.distill.objective import Objective, Teacher, checkpoint_layers_, measure
from compress.distill.scales import in_tuning, tuned_layer
from compress.distill.train import Batch, TrainConfig, Training, Windows
from compress.errors import UsageError
from compress.models.canonical import layer_name, load_weights, save_weights
from compress.models.weights import Weights, WeightSource, build_decoder
from compress.quant.scheme import Schemes
from compress.recipe import MAX_BATCH, Spec

DIRECTORY = "tuned"
HELD_OUT = 8
"""One of this many samples is held out, and at least one."""
RECOMPUTED_TOKENS = 1 << 13
"""Tokens of a batch from which on the backward pass computes the layers again instead of keeping their
values."""


class Tune(Spec):
    """How scales are trained."""

    kind: Literal["scales"] = "scales"
    epochs: int = Field(4, ge=1, le=1_000, description="passes over the calibration samples")
    batch_size: int = Field(4, ge=1, le=MAX_BATCH, description="samples a step")
    lr: float = Field(
        1e-3, gt=0, le=0.1, description="largest learning rate, of scales relative to what they were"
    )


def tune_scales(
    spec: Tune,
    source: WeightSource,
    schemes: Schemes,
    tokens: TokenSet,
    ctx: Context,
    *,
    compute_dtype: torch.dtype,
) -> dict[str, Any]:
    """Train the scales of the layers in the scratch directory, on all ranks, and return facts for the report.

    Tuned layers are written into `DIRECTORY` of the scratch directory where they lower the held-out KL.

    Raises:
        UsageError: too few samples, or a loss that is not finite.
        Interrupted: the run was asked to stop; the same call resumes there.
    """
    device = torch.device(ctx.device)
    directory = ctx.scratch / DIRECTORY
    held_out_NS = tokens.tokens_NS[::HELD_OUT]
    training_NS = _without(tokens.tokens_NS, HELD_OUT)
    counted_NS = tokens.counted_NS
    held_out_counted_NS = None if counted_NS is None else counted_NS[::HELD_OUT]
    training_counted_NS = None if counted_NS is None else _without(counted_NS, HELD_OUT)
    check_num_samples(spec, len(tokens.tokens_NS))

    def layer(idx: int) -> Weights:
        return load_weights(ctx.scratch / layer_name(idx), schemes, prefix=f"layers.{idx}.")

    decoder = build_decoder(source, dtype=compute_dtype, device=device)
    student = in_tuning(decoder, layer, dtype=compute_dtype, device=device)
    teacher = Teacher(decoder, device=device)
    if spec.batch_size * training_NS.shape[1] > RECOMPUTED_TOKENS:
        checkpoint_layers_(student)
    steps_of_epoch = len(training_NS) // spec.batch_size
    config = TrainConfig(
        num_steps=spec.epochs * steps_of_epoch,
        batch_size=spec.batch_size,
        micro_batch_size=1 if ctx.ranks.size > 1 else spec.batch_size,
        peak_lr=spec.lr,
        warmup_frac=0.05,
        weight_decay=0.0,
        compute_dtype=torch.float32,  # the modules compute in their own
        log_every=steps_of_epoch,
    )
    objective = Objective(Divergence(), teacher, compute_dtype=compute_dtype, weighted=counted_NS is not None)
    batches = Windows(training_NS, batch_size=spec.batch_size, seed=ctx.seed)
    batch_of: Callable[[int], Batch] = batches.batch
    if training_counted_NS is not None:
        batch_of = partial(batches.weighted, counted_NS=training_counted_NS)
    training = Training(student, objective, batch_of, config, device=device, ranks=ctx.ranks)

    num_bytes = max(1, tokens.num_bytes * len(held_out_NS) // len(tokens.tokens_NS))

    def measure_held_out() -> dict[str, float]:
        return measure(
            student,
            teacher,
            held_out_NS,
            device,
            compute_dtype=compute_dtype,
            ranks=ctx.ranks,
            counted_NS=held_out_counted_NS,
        ).recovery(num_bytes)

    curve = learn(training, config, Measurements(measure_held_out, steps_of_epoch), ctx)
    kl = [row["kl"] for row in curve if "kl" in row]
    keeps = kl[-1] < kl[0]
    if keeps and ctx.ranks.rank == 0:
        directory.mkdir(exist_ok=True)
        for idx in range(source.arch.num_layers):
            save_weights(directory / layer_name(idx), tuned_layer(student, idx, layer(idx)))
    tokens_seen = max(row["tokens"] for row in curve)
    return {
        "tokens": tokens_seen,
        "held_out_samples": len(held_out_NS),
        "kl_before": kl[0],
        "kl_after": kl[-1],
        "kept": keeps,
        "curve": curve,
    }


def tuned_directory(scratch: Path, facts: Mapping[str, Any]) -> Path:
    """Return the directory of the stage's final layers: the tuned ones where tuning kept them, else the
    scratch directory."""
    return scratch / DIRECTORY if facts.get("tuning", {}).get("kept") else scratch


def check_num_samples(spec: Tune, num_samples: int) -> None:
    """Refuse fewer samples than one step of training takes.

    Raises:
        UsageError: besides those held out, there are fewer than a batch.
    """
    if num_samples - math.ceil(num_samples / HELD_OUT) < spec.batch_size:
        raise UsageError(
            f"tuning scales takes at least {spec.batch_size} calibration samples besides those held out, one "
            f"in {HELD_OUT}, and there are {num_samples}; give more samples."
        )


def _without(tokens_NS: torch.Tensor, every: int) -> torch.Tensor:
    """Return the rows without rows 0, `every`, 2 x `every` and so on."""
    return tokens_NS[torch.arange(len(tokens_NS)) % every != 0]

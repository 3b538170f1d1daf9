"""A training run that may be stopped anywhere: the loop with its held-out measurements, its state on disk,
and early stopping.

`state.safetensors` holds parameters, optimizers, step and the curve so far; it is replaced in one step,
so a kill at any instant leaves the last whole one, and the run goes on from it with the same bits as if
nothing had happened. It is written as often as a small share of the time allows, and when the run must
stop.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.artifact.resume import ResumePoint
from compress.context import Context
from compress.distill.train import TrainConfig, Training, TrainLogRow

STATE_NAME = "state.safetensors"
TIMES_OF_A_SAVE = 20.0
"""Between two states, of what the last one took to write: a twentieth of a run goes into them at most."""
MIN_GAIN = 0.005
"""Share by which the held-out KL must fall to count as better."""
_JSON = "curve"

Curve = list[dict[str, Any]]
"""Rows {step, tokens} with {loss, grad_norm, learning_rate} where the loop logged and {kl, ...} where it was
measured."""


@dataclass(frozen=True)
class Measurements:
    """Measurements on held-out text, `kl` and the other entries of a curve's row; when they are made, and
    when to stop: after `patience` of them without a better KL (None: never)."""

    look: Callable[[], Mapping[str, float]]
    every: int
    patience: int | None = None


def learn(training: Training, config: TrainConfig, held_out: Measurements, ctx: Context) -> Curve:
    """Train to the end, from the state on disk if there is one, and return the curve. All ranks call it;
    rank 0 writes.

    Raises:
        UsageError: the loss is not finite. The last good state stays on disk.
        Interrupted: the run had to stop; the same call goes on from there.
    """
    point = ResumePoint(ctx.scratch / STATE_NAME, ctx.progress.log)
    taken_s = 0.0
    if ctx.ranks.from_lead(lambda: point.load_tensors() is not None):
        curve = _restored(point.saved_tensors(), training)
    else:
        curve = [_measured(held_out, training.step, 0)]
    saved_s = time.monotonic()
    if not _is_over(curve, held_out.patience):
        for row in training.rows():
            curve.append(_log_row(row))
            if row.step % held_out.every == 0 or row.step == config.num_steps:
                curve[-1] |= _measured(held_out, row.step, row.num_tokens)
            started_s = time.monotonic()
            due = ctx.stop_signal() is not None or started_s - saved_s >= TIMES_OF_A_SAVE * taken_s
            if ctx.ranks.rank == 0 and due:
                _save(point, training, curve)
                saved_s = time.monotonic()
                taken_s = saved_s - started_s
            ctx.boundary(row.step, config.num_steps, _note(row, curve))
            if _is_over(curve, held_out.patience):
                break
    return curve


def _log_row(row: TrainLogRow) -> dict[str, Any]:
    """Return a log row without its speed, so that two runs of the same arithmetic give equal rows."""
    return {
        "step": row.step,
        "tokens": row.num_tokens,
        "loss": row.loss,
        "grad_norm": row.grad_norm,
        "learning_rate": row.learning_rate,
    }


def _measured(held_out: Measurements, step: int, num_tokens: int) -> dict[str, Any]:
    return {"step": step, "tokens": num_tokens, **held_out.look()}


def _is_over(curve: Curve, patience: int | None) -> bool:
    """Return whether the last `patience` measurements of the held-out KL were all no better than one before
    them."""
    best = math.inf
    since = 0
    for kl in (row["kl"] for row in curve if "kl" in row):
        best, since = (kl, 0) if kl < best * (1 - MIN_GAIN) else (best, since + 1)
    return patience is not None and since >= patience


def _note(row: TrainLogRow, curve: Curve) -> str:
    kl = next(each["kl"] for each in reversed(curve) if "kl" in each)
    return f"loss {row.loss:.4f}, held-out KL {kl:.4f}, {row.tokens_per_s:,.0f} tokens/s"


def _save(point: ResumePoint, training: Training, curve: Curve) -> None:
    text = torch.frombuffer(bytearray(json.dumps(curve).encode()), dtype=torch.uint8)
    point.save_tensors({**training.tensors(), _JSON: text})


def _restored(tensors: dict[str, Tensor], training: Training) -> Curve:
    curve: Tensor = tensors.pop(_JSON)
    training.restore_(tensors)
    found: Curve = json.loads(curve.numpy().tobytes())
    return found

"""`distill`: the dense weights, or a smaller model of their own config, learn to say what a teacher says; resumable at any instant, by
several ranks together. The result is a dense model.

spec.py   what a recipe may say    text.py   windows to train and to measure on    models.py   teacher and student
estimate.py   for `compress plan`
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.artifact.context import Context
from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.artifact.workspace import ArtifactWriter
from compress.calibrate.arithmetic import has_bfloat16_tiles
from compress.calibrate.dataset import save_token_set
from compress.distill.kept import KeptLogits
from compress.distill.learn import Curve, Measurements, learn
from compress.distill.lora import add_lora_, merge_lora_
from compress.distill.objective import HeldOut, Objective, Teacher, checkpoint_layers_, measure
from compress.distill.train import Batch, TrainConfig, Training, Windows
from compress.models.canonical import OUTER_NAME, layer_name, save_weights
from compress.models.decoder import Decoder
from compress.models.weights import MemorySource, build_decoder
from compress.stages import STAGES, Inputs, Port
from compress.stages.calibrate import TOKENS_NAME, data_identity
from compress.stages.distill.estimate import estimate, reshape
from compress.stages.distill.models import NamedTeacher, build_student, check_pair, identity_of, teacher_of
from compress.stages.distill.spec import SOURCE, Distill
from compress.stages.distill.text import Text, read_text, sampled

LOG_ROWS = 200
"""Rows of the loss curve, about."""


@dataclass(frozen=True)
class Learnt:
    """What a distillation ends with; the same on every rank."""

    student: Decoder
    text: Text
    teacher: NamedTeacher
    curve: Curve
    teacher_bits_per_byte: float


def compute_dtype(spec: Distill, device: torch.device) -> torch.dtype:
    if spec.compute_dtype != "auto":
        return getattr(torch, spec.compute_dtype)
    return torch.bfloat16 if device.type == "cuda" or has_bfloat16_tiles() else torch.float32


def _depends(spec: Distill, device: str) -> Mapping[str, str]:
    """The text, teacher and student named by references, and what is computed in."""
    place = torch.device(device)
    checkpoint = None if spec.student is None else spec.student.checkpoint
    named = {"teacher": None if spec.teacher == SOURCE else spec.teacher, "student": checkpoint}
    models = {name: identity_of(ref) for name, ref in named.items() if ref is not None}
    return {**data_identity(spec, device), **models, "device": place.type, "dtype": str(compute_dtype(spec, place))}


def distill_together(spec: Distill, inputs: Inputs, ctx: Context) -> Learnt:
    """Train the student, on all ranks together. Rank 0 reads the text, and writes states.

    Raises:
        UsageError: too little text, models that do not belong together, or a loss that is not finite.
        Interrupted: asked to stop.
    """
    device = torch.device(ctx.device)
    dtype = compute_dtype(spec, device)
    named = teacher_of(spec, inputs, ctx)
    student = build_student(spec, inputs, named, ctx, dtype=torch.float32 if spec.lora is None else dtype, device=device)
    check_pair(named, student.arch, inputs)
    lead = ctx.ranks.rank == 0
    text = ctx.ranks.broadcast(_text(spec, inputs, named, ctx) if lead else None)
    assert text is not None
    place = torch.device(spec.teacher_device or device)
    teacher = Teacher(build_decoder(named.weights, dtype=dtype, device=place), device=device, compile=spec.compile)
    if spec.lora is None:
        student.requires_grad_(True)
    else:
        add_lora_(student, spec.lora.rank, alpha=spec.lora.alpha or 2.0 * spec.lora.rank, generator=ctx.rng("lora"))
    if spec.recompute:
        checkpoint_layers_(student)
    config = train_config(spec, dtype)
    objective = Objective(spec.loss.divergence(), teacher, compute_dtype=dtype, compile=spec.compile)
    batch_of = _batches(spec, text, teacher, named, ctx, device)
    training = Training(student, objective, batch_of, config, device=device, ranks=ctx.ranks)

    def look() -> HeldOut:
        return measure(student, teacher, text.held_out_NS, device, compute_dtype=dtype, ranks=ctx.ranks)

    teacher_bits = look().bits_per_byte(text.num_bytes)[1]
    curve = learn(training, config, Measurements(look, text.num_bytes, spec.steps_between_measurements, spec.early_stop), ctx)
    if spec.lora is not None:
        merge_lora_(student)
    return Learnt(student, text, named, curve, teacher_bits)


def train_config(spec: Distill, dtype: torch.dtype) -> TrainConfig:
    """Log rows fall on every measurement."""
    every = spec.steps_between_measurements
    return TrainConfig(
        num_steps=spec.num_steps,
        batch_size=spec.batch_size,
        micro_batch_size=spec.micro_batch,
        peak_lr=spec.lr,
        optimizer=spec.optimizer,
        warmup_frac=spec.warmup_frac,
        weight_decay=spec.weight_decay,
        max_grad_norm=spec.max_grad_norm,
        compute_dtype=dtype,
        log_every=next(each for each in range(max(1, spec.num_steps // LOG_ROWS), every + 1) if every % each == 0),
    )


def _text(spec: Distill, inputs: Inputs, named: NamedTeacher, ctx: Context) -> Text:
    ctx.boundary(0, spec.num_steps, f"reading {spec.data}")
    text = read_text(spec, inputs.source, ctx)
    if spec.sample is None:
        return text
    written_NS = sampled(spec.sample, text.training.tokens_NS, named.weights, ctx, device=torch.device(spec.teacher_device or ctx.device))
    return text.with_training(written_NS)


def _batches(spec: Distill, text: Text, teacher: Teacher, named: NamedTeacher, ctx: Context, device: torch.device) -> Any:
    """What a step trains on: tokens, and with `top_k` what was kept of the teacher."""
    tokens_NS: Tensor = text.training.tokens_NS
    windows = Windows(tokens_NS, batch_size=spec.batch_size, seed=ctx.seed)
    if spec.loss.top_k is None:
        return windows.batch
    kept = KeptLogits(
        ctx.scratch if ctx.kept is None else ctx.kept,
        tokens_NS,
        teacher=named.digest,
        tokens=text.training.digest(),
        num_kept=spec.loss.top_k,
        temperature=spec.loss.temperature,
    )
    kept.fill(
        teacher,
        ctx.ranks,
        lambda shards: ctx.boundary(shards, kept.num_shards, "asking the teacher, shards of its logits on disk"),
        device=device,
        at_once=spec.micro_batch,
    )

    def batch_of(step: int) -> Batch:
        return (windows.batch(step), *kept.rows(windows.chosen(step)))

    return batch_of


@STAGES.stage(
    "distill",
    version=1,
    takes=(Port.SOURCE, Port.DENSE),
    gives=Port.DENSE,
    spec=Distill,
    estimate=estimate,
    depends=_depends,
    together=distill_together,
    reshape=reshape,
)
def distill(spec: Distill, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    learnt = distill_together(spec, inputs, ctx)
    arch = learnt.student.arch
    weights = MemorySource(learnt.student, dtype=getattr(torch, arch.dtype))
    save_weights(out.path / OUTER_NAME, weights.outer())
    for idx in range(arch.num_layers):
        save_weights(out.path / layer_name(idx), weights.layer(idx))
    save_token_set(learnt.text.training, out.path / TOKENS_NAME)
    described, layers = arch.to_json()
    facts = {**_carried(spec, inputs), "distillation": _facts(spec, learnt, ctx)}
    out.describe(role="dense", arch=described, layers=layers, facts=facts)


def _carried(spec: Distill, inputs: Inputs) -> dict[str, Any]:
    """What earlier stages said of the weights, where they are still what is described."""
    dense = inputs[Port.DENSE].path
    if spec.student is not None or not (dense / MANIFEST_NAME).exists():
        return {}
    facts = open_artifact(dense).manifest.facts
    return {key: facts[key] for key in ("pruning",) if key in facts}


def _facts(spec: Distill, learnt: Learnt, ctx: Context) -> dict[str, Any]:
    looks = [row for row in learnt.curve if "kl" in row]
    card = learnt.text.training.source
    keys = ("passes", "seq_len", "batch_size", "lr", "optimizer", "weight_decay", "warmup_frac")
    return {
        "teacher": {"name": learnt.teacher.name, "digest": learnt.teacher.digest, "bits_per_byte": learnt.teacher_bits_per_byte},
        "student": {"params": learnt.student.arch.num_params},
        "loss": spec.loss.model_dump(mode="json"),
        "trained": "All weights" if spec.lora is None else f"LoRA of rank {spec.lora.rank}",
        "data": {"title": card["title"], "license": card["license"], "digest": learnt.text.training.digest()},
        "sampled": spec.sample is not None,
        "settings": {key: getattr(spec, key) for key in keys},
        "compute_dtype": str(compute_dtype(spec, torch.device(ctx.device))).removeprefix("torch."),
        "held_out_windows": spec.eval_samples,
        "tokens": looks[-1]["tokens"],
        "num_steps": looks[-1]["step"],
        "stopped_early": looks[-1]["step"] < spec.num_steps,
        "before": {key: looks[0][key] for key in ("kl", "bits_per_byte")},
        "after": {key: looks[-1][key] for key in ("kl", "bits_per_byte")},
        "curve": learnt.curve,
    }

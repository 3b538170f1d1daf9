"""`distill`: the dense weights, or a smaller model of their own config, learn to say what a teacher says;
resumable at any instant, by several ranks together. The result is a dense model.

spec.py   what a recipe may say    text.py   windows to train and to measure on    models.py   teacher and
          student
learning.py   what `draft` has too    estimate.py   for `compress plan`
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.artifact.workspace import ArtifactWriter
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME, data_identity
from compress.data.tokens import save_token_set
from compress.distill.learn import Curve, Measurements, learn
from compress.distill.lora import add_lora_, merge_lora_
from compress.distill.objective import HeldOut, Objective, Teacher, checkpoint_layers_, measure
from compress.distill.train import Training
from compress.models.canonical import OUTER_NAME, layer_name, save_weights
from compress.models.decoder import Decoder
from compress.models.weights import MemorySource, build_decoder
from compress.stages import STAGES, Inputs, Port
from compress.stages.distill.estimate import estimate, reshape
from compress.stages.distill.learning import batches, learning_facts
from compress.stages.distill.models import NamedTeacher, build_student, check_pair, identity_of, teacher_of
from compress.stages.distill.spec import SOURCE, Distill
from compress.stages.distill.text import Text, prepared_text


@dataclass(frozen=True)
class Learnt:
    """What a distillation ends with; the same on every rank."""

    student: Decoder
    text: Text
    teacher: NamedTeacher
    curve: Curve
    teacher_bits_per_byte: float


def _depends(spec: Distill, device: str) -> Mapping[str, str]:
    """The text, teacher and student named by references, and what is computed in."""
    place = torch.device(device)
    checkpoint = None if spec.student is None else spec.student.checkpoint
    named = {"teacher": None if spec.teacher == SOURCE else spec.teacher, "student": checkpoint}
    models = {name: identity_of(ref) for name, ref in named.items() if ref is not None}
    return {
        **data_identity(spec, device),
        **models,
        "device": place.type,
        "dtype": str(spec.computes_in(place)),
    }


def distill_together(spec: Distill, inputs: Inputs, ctx: Context) -> Learnt:
    """Train the student, on all ranks together. Rank 0 reads the text, and writes states.

    Raises:
        UsageError: too little text, models that do not belong together, or a loss that is not finite.
        Interrupted: asked to stop.
    """
    device = torch.device(ctx.device)
    dtype = spec.computes_in(device)
    named = teacher_of(spec, inputs, ctx)
    student = build_student(
        spec, inputs, named, ctx, dtype=torch.float32 if spec.lora is None else dtype, device=device
    )
    check_pair(named, student.arch, inputs)
    lead = ctx.ranks.rank == 0
    place = torch.device(spec.teacher_device or device)
    text = ctx.ranks.broadcast(
        prepared_text(spec, inputs.source, named.weights, ctx, device=place) if lead else None
    )
    assert text is not None
    teacher = Teacher(
        build_decoder(named.weights, dtype=dtype, device=place), device=device, compile=spec.compile
    )
    if spec.lora is None:
        student.requires_grad_(True)
    else:
        add_lora_(
            student, spec.lora.rank, alpha=spec.lora.alpha or 2.0 * spec.lora.rank, generator=ctx.rng("lora")
        )
    if spec.recompute:
        checkpoint_layers_(student)
    config = spec.train_config(dtype)
    objective = Objective(spec.loss.divergence(), teacher, compute_dtype=dtype, compile=spec.compile)
    batch_of = batches(spec, text.training, teacher, ctx, digest=named.digest, device=device)
    training = Training(student, objective, batch_of, config, device=device, ranks=ctx.ranks)

    def look() -> HeldOut:
        return measure(student, teacher, text.held_out_NS, device, compute_dtype=dtype, ranks=ctx.ranks)

    teacher_bits = look().bits_per_byte(text.num_bytes)[1]
    looks = Measurements(
        lambda: look().recovery(text.num_bytes), spec.steps_between_measurements, spec.early_stop
    )
    curve = learn(training, config, looks, ctx)
    if spec.lora is not None:
        merge_lora_(student)
    return Learnt(student, text, named, curve, teacher_bits)


@STAGES.stage(
    "distill",
    version=1,
    takes=(Port.SOURCE, Port.DENSE),
    gives=Port.DENSE,
    spec=Distill,
    estimate=estimate,
    depends=_depends,
    on_all_ranks=distill_together,
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
    return {
        "teacher": {
            "name": learnt.teacher.name,
            "digest": learnt.teacher.digest,
            "bits_per_byte": learnt.teacher_bits_per_byte,
        },
        "student": {"params": learnt.student.arch.num_params},
        "trained": "All weights" if spec.lora is None else f"LoRA of rank {spec.lora.rank}",
        "data": learnt.text.facts,
        "stopped_early": looks[-1]["step"] < spec.num_steps,
        "before": {key: looks[0][key] for key in ("kl", "bits_per_byte")},
        "after": {key: looks[-1][key] for key in ("kl", "bits_per_byte")},
        **learning_facts(spec, spec.computes_in(torch.device(ctx.device)), learnt.curve),
    }

"""`distill`: train the dense weights, or a smaller model of their family, to predict what a teacher predicts.
The result is a dense model.

Training can be stopped at any time, resumes where it was, and may be shared by several ranks.

spec.py       what a recipe states             text.py       windows to train and to measure on
learning.py   the keys that `draft` shares     models.py     teacher and student
training.py   what `recover` shares            estimate.py   for `compress plan`
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME, data_identity
from compress.data.tokens import save_token_set
from compress.distill.learn import Curve
from compress.distill.lora import add_lora_, merge_lora_
from compress.distill.objective import Teacher
from compress.models.canonical import OUTER_NAME, layer_name, save_weights
from compress.models.decoder import Decoder
from compress.models.family import family_of_arch
from compress.models.indexer import train_all_but_indexers_
from compress.models.weights import MemorySource, build_decoder
from compress.stages import STAGES, Inputs, Port
from compress.stages.distill.estimate import estimate, reshape
from compress.stages.distill.learning import learning_facts
from compress.stages.distill.models import (
    NamedTeacher,
    build_student,
    check_pair,
    identity_of,
    teacher_of,
    untouched_weights,
)
from compress.stages.distill.spec import SOURCE, Distill
from compress.stages.distill.text import TrainingText, shared_text
from compress.stages.distill.training import learn_from


@dataclass(frozen=True)
class TrainedStudent:
    """A trained student, with its text, teacher and curve; the same on every rank."""

    student: Decoder
    text: TrainingText
    teacher: NamedTeacher
    curve: Curve
    teacher_bits_per_byte: float


def _depends(spec: Distill, device: str) -> Mapping[str, str]:
    """Return the identities of the text and of the models named by references, and the dtype that is
    computed in."""
    checkpoint = None if spec.student is None else spec.student.checkpoint
    references = {"teacher": None if spec.teacher == SOURCE else spec.teacher, "student": checkpoint}
    return {
        **data_identity(spec, device),
        **{name: identity_of(ref) for name, ref in references.items() if ref is not None},
        "device": torch.device(device).type,
        "dtype": str(spec.computes_in(torch.device(device))),
    }


def train_student(spec: Distill, inputs: Inputs, ctx: Context) -> TrainedStudent:
    """Train the student on all ranks. Rank 0 reads the text and writes the training state.

    Raises:
        UsageError: too little text, models that do not belong to each other, a LoRA's rank above that of a
            linear, or a loss that is not finite.
        Interrupted: the run was asked to stop.
    """
    device = torch.device(ctx.device)
    dtype = spec.computes_in(device)
    teacher_source = teacher_of(spec, inputs, ctx)
    student = build_student(
        spec, inputs, teacher_source, ctx, dtype=torch.float32 if spec.lora is None else dtype, device=device
    )
    if spec.lora is not None:
        spec.lora.check_rank(student.arch, "distill", is_trained=lambda _: True)
    check_pair(teacher_source, student.arch, inputs)
    teacher_device = torch.device(spec.teacher_device or device)
    text = shared_text(spec, inputs.source, teacher_source.weights, ctx, device=teacher_device)
    teacher = Teacher(
        build_decoder(teacher_source.weights, dtype=dtype, device=teacher_device),
        device=device,
        compile=spec.compile,
    )
    if spec.lora is None:
        train_all_but_indexers_(student)
        if student.arch.layer_embed_size:
            # A row of this table is read for one token, and it is larger than all else.
            student.layer_embeds.table.requires_grad_(False)
    else:
        add_lora_(
            student, spec.lora.rank, alpha=spec.lora.alpha or 2.0 * spec.lora.rank, generator=ctx.rng("lora")
        )
    curve, teacher_bits = learn_from(
        teacher,
        student,
        spec,
        spec.train_config(dtype),
        text,
        ctx,
        digest=teacher_source.digest,
        early_stop=spec.early_stop,
    )
    if spec.lora is not None:
        merge_lora_(student)
    return TrainedStudent(student, text, teacher_source, curve, teacher_bits)


@STAGES.stage(
    "distill",
    version=3,
    takes=(Port.SOURCE, Port.DENSE),
    gives=Port.DENSE,
    spec=Distill,
    estimate=estimate,
    depends=_depends,
    on_all_ranks=train_student,
    reshape=reshape,
)
def distill(spec: Distill, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    trained = train_student(spec, inputs, ctx)
    arch = trained.student.arch
    beside = untouched_weights(spec, inputs, ctx) if family_of_arch(arch).untouched else {}
    weights = MemorySource(trained.student, dtype=getattr(torch, arch.dtype), untouched=beside)
    save_weights(out.path / OUTER_NAME, weights.outer())
    for idx in range(arch.num_layers):
        save_weights(out.path / layer_name(idx), weights.layer(idx))
    save_token_set(trained.text.training, out.path / TOKENS_NAME)
    described, layers = arch.to_json()
    facts = {**_carried(spec, inputs), "distillation": _facts(spec, trained, ctx)}
    out.describe(role="dense", arch=described, layers=layers, facts=facts)


def _carried(spec: Distill, inputs: Inputs) -> dict[str, Any]:
    """Return the facts of earlier stages that still describe the weights."""
    dense = inputs[Port.DENSE].path
    if spec.student is not None or not (dense / MANIFEST_NAME).exists():
        return {}
    facts = open_artifact(dense).manifest.facts
    return {key: facts[key] for key in ("pruning",) if key in facts}


def _facts(spec: Distill, trained: TrainedStudent, ctx: Context) -> dict[str, Any]:
    measured = [row for row in trained.curve if "kl" in row]
    return {
        "teacher": {
            "name": trained.teacher.name,
            "digest": trained.teacher.digest,
            "bits_per_byte": trained.teacher_bits_per_byte,
        },
        "student": {"params": trained.student.arch.num_params},
        "trained": "All weights" if spec.lora is None else f"LoRA of rank {spec.lora.rank}",
        "data": trained.text.facts,
        "stopped_early": measured[-1]["step"] < spec.num_steps,
        "before": {key: measured[0][key] for key in ("kl", "bits_per_byte")},
        "after": {key: measured[-1][key] for key in ("kl", "bits_per_byte")},
        **learning_facts(spec, spec.computes_in(torch.device(ctx.device)), trained.curve),
    }

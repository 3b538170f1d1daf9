"""Teacher and student of a distillation: where they come from, and whether they belong together."""

from dataclasses import dataclass
from pathlib import Path

import torch

from compress.context import Context
from compress.data.tokens import load_tokenizer
from compress.distill.student import sliced_decoder, student_arch
from compress.errors import UsageError
from compress.export import open_weights
from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.initialise import fresh_decoder
from compress.models.weights import WeightSource, build_decoder
from compress.recipe import parse_model_ref
from compress.registry.model_source import ModelSource, resolve_model
from compress.stages import Inputs, Port
from compress.stages.distill.spec import SOURCE, Distill, check_dense


@dataclass(frozen=True)
class NamedTeacher:
    """Quantized weights are what their codes stand for."""

    name: str
    digest: str
    path: Path
    weights: WeightSource


def identity_of(ref: str) -> str:
    """What decides a referenced model, for a cache key; asks no network.

    Raises:
        UsageError: no such model, or a hub name that may mean another one tomorrow.
    """
    model = parse_model_ref(ref)
    if model.scheme != "hf":
        return resolve_model(model.scheme, model.name, model.revision).digest
    if model.revision is None:
        raise UsageError(
            f"'{ref}' names a branch that moves. Name the commit, as in hf://{model.name}@<revision>."
        )
    return ref


def _resolved(ref: str, ctx: Context) -> ModelSource:
    model = parse_model_ref(ref)
    return resolve_model(model.scheme, model.name, model.revision, offline=ctx.offline)


def teacher_of(spec: Distill, inputs: Inputs, ctx: Context) -> NamedTeacher:
    source = inputs.source if spec.teacher == SOURCE else _resolved(spec.teacher, ctx)
    return NamedTeacher(source.name, source.digest, source.path, open_weights(source.path))


def build_student(
    spec: Distill,
    inputs: Inputs,
    teacher: NamedTeacher,
    ctx: Context,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """The model that is to learn, with the weights that it starts from.

    Raises:
        UsageError: it is the teacher itself, or its numbers are wrong.
        UnsupportedFormat: it is quantized.
    """
    asked = spec.student
    dense = inputs[Port.DENSE]
    if asked is None or asked.checkpoint is not None:
        path, digest = (
            (dense.path, dense.digest)
            if asked is None or asked.checkpoint is None
            else _place(asked.checkpoint, ctx)
        )
        if digest == teacher.digest:
            raise UsageError(
                f"distill: student and teacher are the same model, {teacher.name}. Prune before it, or name "
                "another teacher."
            )
        weights = open_weights(path)
        check_dense(weights.arch)
        return build_decoder(weights, dtype=dtype, device=device)
    weights = open_weights(dense.path)
    check_dense(weights.arch)
    arch = student_arch(weights.arch, asked.shape())
    student = (
        fresh_decoder(arch, generator=ctx.rng("student"))
        if asked.init == "random"
        else sliced_decoder(weights, arch)
    )
    return student.to(device=device, dtype=dtype).requires_grad_(False)


def _place(ref: str, ctx: Context) -> tuple[Path, str]:
    source = _resolved(ref, ctx)
    return source.path, source.digest


def check_pair(teacher: NamedTeacher, student: Arch, inputs: Inputs) -> None:
    """Raises UsageError: the two do not speak of the same tokens."""
    if teacher.weights.arch.vocab_size != student.vocab_size:
        raise UsageError(
            f"the teacher {teacher.name} has {teacher.weights.arch.vocab_size} tokens and the student "
            f"{student.vocab_size}: their distributions cannot be compared. Name a teacher with the same "
            "tokenizer."
        )
    if (teacher.path / "tokenizer.json").is_file() and teacher.path != inputs.source.path:
        (_, theirs) = load_tokenizer(teacher.path)
        (_, ours) = load_tokenizer(inputs.source.path)
        if theirs != ours:
            raise UsageError(
                f"the teacher {teacher.name} has another tokenizer.json than {inputs.source.name}, so the "
                "same id may be another token. Name a teacher with the same tokenizer."
            )

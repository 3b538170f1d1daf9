"""The models of a distillation: where teacher and student come from, and whether they fit each other."""

from dataclasses import dataclass
from pathlib import Path

import torch

from compress.context import Context
from compress.data.tokenizer import load_tokenizer
from compress.distill.student import sliced_decoder, student_arch
from compress.errors import UsageError
from compress.export import open_weights
from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.initialise import fresh_decoder
from compress.models.weights import Weights, WeightSource, build_decoder, split_outer
from compress.recipe import parse_model_ref
from compress.registry.model_source import ModelSource, resolve_model
from compress.stages import Inputs, Port
from compress.stages.distill.spec import SOURCE, Distill, check_student


@dataclass(frozen=True)
class NamedTeacher:
    """The teacher with its name and digest; quantized weights are dequantized when they are read."""

    name: str
    digest: str
    path: Path
    weights: WeightSource


def identity_of(ref: str) -> str:
    """Return the identity of a referenced model for a cache key, without using the network.

    Raises:
        UsageError: there is no such model, or the name may mean another one tomorrow.
    """
    model = parse_model_ref(ref)
    if model.scheme == "registry":
        if "@sha256:" in ref:
            return ref
        raise UsageError(f"'{ref}' has a tag, which moves. Name the digest, as in ...name@sha256:<hex>.")
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
    """Return the teacher that the recipe names, downloaded if it is on the hub."""
    source = inputs.source if spec.teacher == SOURCE else _resolved(spec.teacher, ctx)
    return NamedTeacher(source.portable_name, source.digest, source.path, open_weights(source.path))


def build_student(
    spec: Distill,
    inputs: Inputs,
    teacher: NamedTeacher,
    ctx: Context,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """Return the student with the weights that it starts from.

    Raises:
        UsageError: it is the teacher itself, or its numbers are wrong.
        UnsupportedFormat: it is quantized.
    """
    wanted = spec.student
    dense = inputs[Port.DENSE]
    if wanted is None or wanted.checkpoint is not None:
        path, digest = (
            (dense.path, dense.digest)
            if wanted is None or wanted.checkpoint is None
            else _located(wanted.checkpoint, ctx)
        )
        if digest == teacher.digest:
            raise UsageError(
                f"distill: student and teacher are the same model, {teacher.name}. Prune before it, or name "
                "another teacher."
            )
        weights = open_weights(path)
        check_student(weights.arch)
        return build_decoder(weights, dtype=dtype, device=device)
    weights = open_weights(dense.path)
    check_student(weights.arch)
    arch = student_arch(weights.arch, wanted.shape())
    student = (
        fresh_decoder(arch, generator=ctx.rng("student"))
        if wanted.init == "random"
        else sliced_decoder(weights, arch)
    )
    return student.to(device=device, dtype=dtype).requires_grad_(False)


def untouched_weights(spec: Distill, inputs: Inputs, ctx: Context) -> Weights:
    """Return the untouched weights of the model from which the student was made."""
    wanted = spec.student
    own = None if wanted is None else wanted.checkpoint
    path = inputs[Port.DENSE].path if own is None else _located(own, ctx)[0]
    return split_outer(open_weights(path).outer())[1]


def _located(ref: str, ctx: Context) -> tuple[Path, str]:
    source = _resolved(ref, ctx)
    return source.path, source.digest


def check_pair(teacher: NamedTeacher, student: Arch, inputs: Inputs) -> None:
    """Refuse a student whose tokens are not the teacher's.

    Raises:
        UsageError: sizes of vocabularies or tokenizers differ.
    """
    if teacher.weights.arch.vocab_size != student.vocab_size:
        raise UsageError(
            f"the teacher {teacher.name} has {teacher.weights.arch.vocab_size} tokens and the student "
            f"{student.vocab_size}: their distributions cannot be compared. Name a teacher with the same "
            "tokenizer."
        )
    if (teacher.path / "tokenizer.json").is_file() and teacher.path != inputs.source.path:
        (_, teacher_digest) = load_tokenizer(teacher.path)
        (_, source_digest) = load_tokenizer(inputs.source.path)
        if teacher_digest != source_digest:
            raise UsageError(
                f"the teacher {teacher.name} has another tokenizer.json than {inputs.source.name}, so the "
                "same id may be another token. Name a teacher with the same tokenizer."
            )

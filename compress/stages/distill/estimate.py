"""The estimate of a distillation for `compress plan`, from shapes alone.

operations   a token of training: 6 a weight of the student, 2 a weight of the teacher, and attention;
             held-out text: 2 and 2
memory       student: float32 master, gradient and two moments, 16 bytes a weight (LoRA: 2, and 16 of its
             own); teacher: its own width;
             activations of a micro-batch that the backward pass reads; a few float32 [slice, vocabulary]
disk         the result, the training tokens, and while it runs the state: 12 bytes a trained weight
"""

from dataclasses import replace
from pathlib import Path

from compress.data.card import Card, load_card
from compress.data.model_tokens import check_card, check_seq_len
from compress.distill.head import SLICE_VALUES
from compress.distill.student import student_arch
from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.arch_params import itemsize_of
from compress.stages import Estimate, PlanFacts
from compress.stages.distill.learning import Learning
from compress.stages.distill.spec import SOURCE, Distill, check_student

KEPT_BYTES = 6
"""Bytes of one kept token of the teacher: its id and log probability."""


def reshape(spec: Distill, arch: Arch) -> Arch:
    """Return the shapes of the student; of one that a checkpoint defines, which is read later, the shapes
    of the model as it is."""
    return (
        arch
        if spec.student is None or spec.student.checkpoint is not None
        else student_arch(arch, spec.student.shape())
    )


def forward_flops(arch: Arch, seq_len: int) -> float:
    """Return the operations of a forward pass for one token."""
    attention = sum(
        2.0 * layer.num_heads * layer.head_dim * min(seq_len, layer.window or seq_len)
        for layer in arch.layers
        if layer.attends
    )
    return 2.0 * (arch.num_active_linear_params + arch.vocab_size * arch.hidden_size) + attention


def estimate(spec: Distill, facts: PlanFacts) -> Estimate:
    """Return what one rank needs; `facts.source_arch` has the teacher's shapes where the teacher is the
    source."""
    spec.refuse_nothing_to_learn(facts.specs)
    check_text(spec, facts, "distill")
    check_student(facts.arch)
    teacher = facts.source_arch or facts.arch
    student = reshape(spec, facts.arch)
    check_seq_len(spec.seq_len, "distill: seq_len", student)
    check_seq_len(spec.seq_len, "distill: seq_len", teacher)
    is_read_later = spec.student is not None and spec.student.checkpoint is not None
    if spec.lora is not None and not is_read_later:
        spec.lora.check_rank(student, "distill", is_trained=lambda _: True)
    width = 4 if facts.device == "cpu" else 2
    table = student.layer_embed_rows * student.num_layers * student.layer_embed_size
    num_trained = student.num_params - table
    frozen = 4 * table
    if spec.lora is not None:
        num_trained = lora_params(student, spec.lora.rank)
        frozen = width * student.num_params
    found = training_estimate(spec, student, teacher, facts, num_trained=num_trained, frozen_bytes=frozen)
    return replace(found, notes=tuple(_notes(spec, student, teacher)))


def training_estimate(
    spec: Learning, student: Arch, teacher: Arch, facts: PlanFacts, *, num_trained: int, frozen_bytes: int
) -> Estimate:
    """Return what one rank needs for any training in which `num_trained` weights of the student learn and
    its others take `frozen_bytes`."""
    num_measurements = 1 + spec.num_steps // spec.steps_between_measurements
    measured_tokens = num_measurements * spec.eval_samples * spec.seq_len
    trained = spec.num_steps * spec.batch_size * spec.seq_len
    teacher_tokens = trained if spec.loss.top_k is None else min(trained, spec.num_windows * spec.seq_len)
    student_flops = forward_flops(student, spec.seq_len)
    teacher_flops = forward_flops(teacher, spec.seq_len)
    flops = (
        trained * 3 * student_flops
        + teacher_tokens * teacher_flops
        + measured_tokens * (student_flops + teacher_flops)
    )
    written = 0 if spec.sample is None else spec.num_windows * spec.seq_len
    flops += written * teacher_flops
    width = 4 if facts.device == "cpu" else 2
    peak = 16 * num_trained + frozen_bytes + width * teacher.num_params + _activations(spec, student, width)
    peak += 5 * 4 * SLICE_VALUES["cpu" if facts.device == "cpu" else "cuda"]
    kept = (
        0 if spec.loss.top_k is None else spec.num_windows * spec.seq_len * (KEPT_BYTES * spec.loss.top_k + 4)
    )
    disk = (
        itemsize_of(student) * student.num_params
        + 4 * spec.num_windows * (spec.seq_len + 1)
        + 12 * num_trained
        + kept
    )
    return Estimate(peak, disk, flops / facts.num_ranks)


def _notes(spec: Distill, student: Arch, teacher: Arch) -> list[str]:
    trained = "all weights" if spec.lora is None else f"LoRA of rank {spec.lora.rank}"
    size = f"{teacher.num_params / 1e6:,.1f} M"
    source = size if spec.teacher == SOURCE else f"{spec.teacher}, assumed to have the source's size"
    return [
        f"{student.num_params / 1e6:,.1f} M parameters learn from {source} ({trained}, {spec.loss.kind}), "
        f"{spec.extent}",
        f"{spec.data}: {spec.num_windows:,} windows of {spec.seq_len}, {spec.eval_samples} held out",
    ]


def check_text(spec: Learning, facts: PlanFacts, stage: str) -> None:
    """Refuse to train on the text that `validate` judges the result by.

    Raises:
        UsageError: the two stages name the same text.
    """
    card = load_card(spec.data)
    check_card(spec.data, facts.source)
    for evaluation in getattr(facts.specs.get("validate"), "texts", ()):
        other = load_card(evaluation)
        if not _bodies(card).isdisjoint(_bodies(other)):
            raise UsageError(
                f"{stage} trains on {spec.data} and validate judges on the same text, which would then prove "
                "nothing. Give one of them another data card, or another `part` of it."
            )


def _bodies(card: Card) -> set[tuple[str, Path]]:
    """Return the texts that a card names, those of a mix one by one."""
    return {(part.spec.model_dump_json(), part.folder.resolve()) for part, _ in card.parts()}


def _activations(spec: Learning, arch: Arch, width: int) -> int:
    """Return the bytes that the layers keep for the backward pass: about eight hidden and four FFN vectors
    of a token and layer, or one hidden vector where they are computed again."""
    tokens = spec.micro_batch * spec.seq_len
    of_layers = [
        8 * arch.hidden_size
        + 2 * arch.stream_size
        + 3 * layer.num_heads * layer.head_dim * layer.has_mixer
        + 4 * layer.intermediate_size * layer.has_ffn
        for layer in arch.layers
    ]
    if spec.recompute:
        return tokens * (4 * arch.stream_size * arch.num_layers + width * max(of_layers))
    return tokens * width * sum(of_layers)


def lora_params(arch: Arch, rank: int) -> int:
    """Return the number of weights of terms of that rank on all linears of the layers."""
    return sum(
        rank * sum(layer.linear_shape(name, arch.hidden_size))
        for layer in arch.layers
        for name in layer.linears
    )

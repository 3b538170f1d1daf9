"""The training of a student on prepared text against a teacher, measured on held-out text; for `distill` and
for `recover`."""

import torch

from compress.context import Context
from compress.distill.learn import Curve, Measurements, learn
from compress.distill.objective import HeldOut, Objective, Teacher, checkpoint_layers_, measure
from compress.distill.train import TrainConfig, Training
from compress.models.decoder import Decoder
from compress.stages.distill.learning import Learning, training_batches
from compress.stages.distill.text import TrainingText


def learn_from(
    teacher: Teacher,
    student: Decoder,
    spec: Learning,
    config: TrainConfig,
    text: TrainingText,
    ctx: Context,
    *,
    digest: str,
    early_stop: int | None,
) -> tuple[Curve, float]:
    """Train a student, in place and on all ranks, against the teacher of that digest; return its curve and
    the teacher's bits per byte of held-out text. Training ends after `early_stop` measurements without gain.

    Raises:
        UsageError: a loss that is not finite.
        Interrupted: the run was asked to stop; the same call goes on from there.
    """
    device = torch.device(ctx.device)
    dtype = spec.computes_in(device)
    if spec.recompute:
        checkpoint_layers_(student)
    objective = Objective(
        spec.loss.divergence(),
        teacher,
        compute_dtype=dtype,
        compile=spec.compile,
        weighted=text.training.counted_NS is not None,
    )
    batch_of = training_batches(spec, text.training, teacher, ctx, digest=digest, device=device)
    training = Training(student, objective, batch_of, config, device=device, ranks=ctx.ranks)

    def measure_student() -> HeldOut:
        return measure(
            student,
            teacher,
            text.held_out_NS,
            device,
            compute_dtype=dtype,
            ranks=ctx.ranks,
            counted_NS=text.held_out_counted_NS,
        )

    teacher_bits = measure_student().bits_per_byte(text.num_bytes)[1]
    measurements = Measurements(
        lambda: measure_student().recovery(text.num_bytes), spec.steps_between_measurements, early_stop
    )
    return learn(training, config, measurements, ctx), teacher_bits

"""Training of drafts that are heads over hidden states of the target, in the steps of the stage."""

from collections.abc import Callable
from functools import partial

from compress.context import Context
from compress.distill.draft_head import Drafted, DraftHead, DraftHeadObjective, Target, measure_head
from compress.distill.learn import Curve, Measurements, learn
from compress.distill.train import Training, Windows
from compress.models.eagle3 import Eagle3Decoder
from compress.models.mtp import MtpDecoder
from compress.stages.distill.learning import text_batches
from compress.stages.draft.inits import DraftTask


def train_head(
    head: Eagle3Decoder | MtpDecoder, target: Target, steps: int, task: DraftTask, ctx: Context
) -> tuple[Curve, Callable[[DraftHead], Drafted]]:
    """Train a head in place for so many steps ahead. Return the measurements while it was trained, and the
    function that made them.

    Raises:
        Interrupted: the run was asked to stop.
    """
    spec = task.spec
    text = task.text
    device = task.device
    objective = DraftHeadObjective(
        spec.loss.divergence(), target, steps, compute_dtype=task.dtype, compile=spec.compile
    )
    config = spec.train_config(task.dtype)
    windows = Windows(text.training.tokens_NS, batch_size=spec.batch_size, seed=ctx.seed)
    batch_of = text_batches(windows, text.training)
    training = Training(head, objective, batch_of, config, device=device, ranks=ctx.ranks)
    measure = partial(
        measure_head,
        target=target,
        tokens_NS=text.held_out_NS,
        device=device,
        compute_dtype=task.dtype,
        ranks=ctx.ranks,
    )
    measurements = Measurements(lambda: measure(head).drafting(), spec.steps_between_measurements)
    return learn(training, config, measurements, ctx), measure

"""`draft`: train a small model to propose tokens that the compressed model accepts, against that very model.

Training can be stopped at any time, resumes where it was, and may be shared by several ranks.

spec.py       what a recipe states            inits/              kinds of drafts, one a file
learning.py   the keys that kinds share       quantized.py        a draft model in codes
                                              quantized_head.py   an EAGLE-3 head in codes
"""

from collections.abc import Mapping

import torch

from compress.artifact.writer import ArtifactWriter
from compress.calibrate.arithmetic import computes_in
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME, check_seq_len, data_identity
from compress.data.tokens import save_token_set
from compress.export import open_weights
from compress.models.weights import build_decoder
from compress.stages import STAGES, Estimate, Inputs, PlanFacts, Port
from compress.stages.distill.estimate import check_text
from compress.stages.distill.learning import learning_facts
from compress.stages.distill.models import NamedTeacher
from compress.stages.distill.text import TrainingText, shared_text
from compress.stages.draft.inits import DraftTask, TrainedDraft
from compress.stages.draft.spec import Draft


def _depends(spec: Draft, device: str) -> Mapping[str, str]:
    """Return the identity of the text, the compute dtype, and for a quantized draft what decides its
    codes."""
    dtype = spec.computes_in(torch.device(device))
    training = {**data_identity(spec, device), **computes_in(device), "dtype": str(dtype)}
    if spec.quantize is None:
        return training
    stage = STAGES.get("quantize")
    codes = {f"quantize.{key}": value for key, value in stage.depends(spec.quantize, device).items()}
    return {**training, "quantize": str(stage.version), **codes}


def estimate(spec: Draft, facts: PlanFacts) -> Estimate:
    """Return the estimate of the draft's kind, after the checks that all kinds share."""
    check_text(spec, facts, "draft")
    check_seq_len(spec.seq_len, "draft: seq_len", facts.arch)
    return spec.kind.estimate(spec, facts)


def train_draft(spec: Draft, inputs: Inputs, ctx: Context) -> tuple[TrainedDraft, TrainingText]:
    """Train the draft on all ranks. Rank 0 reads the text and writes the training state.

    Raises:
        UsageError: too little text, or a loss that is not finite.
        Interrupted: the run was asked to stop.
    """
    device = torch.device(ctx.device)
    dtype = spec.computes_in(device)
    target_input = inputs.first(Port.QUANTIZED, Port.DENSE)[1]
    target = NamedTeacher(
        "the compressed model", target_input.digest, target_input.path, open_weights(target_input.path)
    )
    text = shared_text(spec, inputs.source, target.weights, ctx, device=device)
    decoder = build_decoder(target.weights, dtype=dtype, device=device)
    return spec.kind.make(DraftTask(spec, inputs.source, target, decoder, text, dtype, device), ctx), text


@STAGES.stage(
    "draft",
    version=2,
    takes=(Port.SOURCE, (Port.QUANTIZED, Port.DENSE)),
    gives=Port.DRAFT,
    spec=Draft,
    estimate=estimate,
    depends=_depends,
    on_all_ranks=train_draft,
)
def draft(spec: Draft, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    trained, text = train_draft(spec, inputs, ctx)
    described = trained.write(out)
    save_token_set(text.training, out.path / TOKENS_NAME)
    facts = {
        "target": inputs.first(Port.QUANTIZED, Port.DENSE)[1].digest,
        "data": text.facts,
        **learning_facts(spec, spec.computes_in(torch.device(ctx.device)), trained.curve),
        **trained.facts,
    }
    out.describe(role="draft", facts={"draft": facts}, **described)

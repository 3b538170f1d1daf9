"""`draft`: a small model learns to propose tokens that the compressed model accepts, trained against that
very model; resumable at any instant, by several ranks together.

spec.py   what a recipe may say    inits/   where a draft begins and what it is, one kind a file
          quantized.py   the draft in codes
"""

from collections.abc import Mapping

import torch

from compress.artifact.workspace import ArtifactWriter
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
from compress.stages.distill.text import Text, prepared_text
from compress.stages.draft.inits import Made, Setting
from compress.stages.draft.spec import Draft


def _depends(spec: Draft, device: str) -> Mapping[str, str]:
    """The text, what is computed in, and of a quantized draft what decides its codes."""
    place = torch.device(device)
    mine = {**data_identity(spec, device), **computes_in(device), "dtype": str(spec.computes_in(place))}
    if spec.quantize is None:
        return mine
    stage = STAGES.get("quantize")
    return {
        **mine,
        "quantize": str(stage.version),
        **{f"quantize.{key}": said for key, said in stage.depends(spec.quantize, device).items()},
    }


def estimate(spec: Draft, facts: PlanFacts) -> Estimate:
    """Text and windows are checked here, for every kind of draft."""
    check_text(spec, facts, "draft")
    check_seq_len(spec.seq_len, "draft: seq_len", facts.arch)
    return spec.start.estimate(spec, facts)


def draft_together(spec: Draft, inputs: Inputs, ctx: Context) -> tuple[Made, Text]:
    """Train the draft, on all ranks together. Rank 0 reads the text, and writes states.

    Raises:
        UsageError: too little text, or a loss that is not finite.
        Interrupted: asked to stop.
    """
    device = torch.device(ctx.device)
    dtype = spec.computes_in(device)
    place = inputs.first(Port.QUANTIZED, Port.DENSE)[1]
    target = NamedTeacher("the compressed model", place.digest, place.path, open_weights(place.path))
    text = ctx.ranks.broadcast(
        prepared_text(spec, inputs.source, target.weights, ctx, device=device)
        if ctx.ranks.rank == 0
        else None
    )
    assert text is not None
    decoder = build_decoder(target.weights, dtype=dtype, device=device)
    return spec.start.make(Setting(spec, inputs.source, target, decoder, text, dtype, device), ctx), text


@STAGES.stage(
    "draft",
    version=1,
    takes=(Port.SOURCE, (Port.QUANTIZED, Port.DENSE)),
    gives=Port.DRAFT,
    spec=Draft,
    estimate=estimate,
    depends=_depends,
    on_all_ranks=draft_together,
)
def draft(spec: Draft, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    made, text = draft_together(spec, inputs, ctx)
    described = made.write(out)
    save_token_set(text.training, out.path / TOKENS_NAME)
    facts = {
        "target": inputs.first(Port.QUANTIZED, Port.DENSE)[1].digest,
        "data": text.facts,
        **learning_facts(spec, spec.computes_in(torch.device(ctx.device)), made.curve),
        **made.facts,
    }
    out.describe(role="draft", facts={"draft": facts}, **described)

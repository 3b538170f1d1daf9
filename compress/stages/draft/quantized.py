"""A trained draft in codes: the stage `quantize` runs over the draft's weights and the text that it was
trained on."""

from dataclasses import replace
from pathlib import Path

from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME
from compress.data.tokens import TokenSet, save_token_set
from compress.registry.model_source import ModelSource
from compress.stages import Input, Inputs, Port
from compress.stages.quantize import quantize
from compress.stages.quantize.layers import quantize_layers
from compress.stages.quantize.spec import Quantize

KEY = "quantized"
CALIBRATION = "calibration"


def quantized(
    spec: Quantize, dense: Artifact, tokens: TokenSet, parts: Workspace, source: ModelSource, ctx: Context
) -> Artifact:
    """Quantize the draft's weights on all ranks, into an artifact in `parts`; resumable.

    Raises:
        UnsupportedFormat: the draft cannot be quantized so.
        Interrupted: the run was asked to stop.
    """
    leads = ctx.ranks.rank == 0
    calibration = parts.root / CALIBRATION
    if leads:
        calibration.mkdir(exist_ok=True)
        save_token_set(tokens, calibration / TOKENS_NAME)
    inside = replace(ctx, scratch=parts.scratch(KEY))
    inputs = Inputs(
        source, {Port.DENSE: Input(dense.path, dense.digest), Port.CALIB: Input(Path(calibration), "")}
    )
    exists = ctx.ranks.from_lead(lambda: parts.get(KEY) is not None)
    if leads:
        parents = {Port.DENSE.value: dense.digest}
        parts.commit(KEY, "quantize", parents, lambda out: quantize(spec, inputs, out, inside))
    elif not exists:
        quantize_layers(spec, inputs, inside)
    ctx.ranks.barrier()  # rank 0 writes the artifact before any rank reads it
    found = parts.get(KEY)
    assert found is not None, "rank 0 has just made it"
    return found

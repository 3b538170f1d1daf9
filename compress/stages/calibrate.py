"""`calibrate`: tokenize text of a data card into a fixed token set, an artifact of its own."""

from pydantic import Field

from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME, check_card, check_seq_len, data_identity, read_tokens
from compress.data.tokens import save_token_set
from compress.recipe import MAX_SAMPLES, MAX_SEQ_LEN, Spec
from compress.stages import STAGES, Estimate, Inputs, PlanFacts, Port


class Calibrate(Spec):
    """The calibration text, and how much of it is read."""

    data: str = Field("builtin://python", description="a data card (path of a YAML file) or builtin://python")
    num_samples: int = Field(128, ge=1, le=MAX_SAMPLES, description="windows of text")
    seq_len: int = Field(512, ge=8, le=MAX_SEQ_LEN, description="tokens of a window")


def calibration_of(facts: PlanFacts) -> Calibrate:
    """Return the `calibrate` stage of the plan, or one with default settings where the recipe has none."""
    calib = facts.specs.get("calibrate") or Calibrate()
    assert isinstance(calib, Calibrate)
    return calib


def _estimate(spec: Calibrate, facts: PlanFacts) -> Estimate:
    check_seq_len(spec.seq_len, "calibrate: seq_len", facts.arch)
    check_card(spec.data, facts.source)
    token_bytes = 4 * spec.num_samples * spec.seq_len
    return Estimate(
        peak_bytes=token_bytes,
        disk_bytes=token_bytes,
        flops=0.0,
        notes=(f"{spec.num_samples} x {spec.seq_len} tokens",),
    )


@STAGES.stage(
    "calibrate",
    version=2,
    takes=(Port.SOURCE,),
    gives=Port.CALIB,
    spec=Calibrate,
    estimate=_estimate,
    depends=data_identity,
)
def calibrate(spec: Calibrate, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    ctx.boundary(0, 1, f"reading {spec.data}")
    tokens, facts = read_tokens(
        inputs.source,
        spec.data,
        num_samples=spec.num_samples,
        seq_len=spec.seq_len,
        seed=ctx.seed,
        offline=ctx.offline,
    )
    save_token_set(tokens, out.path / TOKENS_NAME)
    out.describe(
        role="calibration",
        facts={**facts, "num_samples": spec.num_samples, "seq_len": spec.seq_len, "data": spec.data},
    )
    ctx.progress.update(1, 1, f"{spec.num_samples} x {spec.seq_len} tokens")

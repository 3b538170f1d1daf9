"""The stage's keys in a recipe: evaluation text, conditions of latency and speculation, and gates."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from compress.errors import UsageError, did_you_mean
from compress.export import PROPOSED
from compress.models.arch import Arch
from compress.recipe import MAX_FACTOR, MAX_SAMPLES, MAX_SEQ_LEN, Spec, checked_by
from compress.runtime.engine_config import EngineConfig
from compress.runtime.speculative.acceptance import Rule
from compress.runtime.speculative.speculation import MAX_K
from compress.validate.accuracy import ACCURACY_METRICS
from compress.validate.gates import Gate, parse_gates

KVFormat = Literal["DENSE", "FP8_STATIC", "FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD", "INT4_TOKEN_HEAD"]


QUANTIZE = "quantize"


def read_gates(raw: Mapping[str, Any]) -> tuple[Gate, ...]:
    """Return gates on the artifact, and as `quantize.<metric>` on the change that quantization alone made.

    Raises:
        UsageError: as `parse_gates`, or of quantization alone something else than accuracy.
    """
    gates = parse_gates(raw, stages=(QUANTIZE,))
    for gate in gates:
        stage, _, metric = gate.name.rpartition(".")
        if stage and metric not in ACCURACY_METRICS:
            raise UsageError(
                f"gate '{gate.name}': of {stage} alone accuracy is measured: {', '.join(ACCURACY_METRICS)}."
            )
    return gates


BatchSize = Annotated[int, Field(ge=1, le=1024)]


class Latency(Spec):
    """Conditions of the latency measurement; `repeats` is the most that are counted, fewer where three or
    more agree.
    """

    batch_sizes: tuple[BatchSize, ...] = Field(
        (1, 4), min_length=1, max_length=64, description="requests that arrive together"
    )
    prompt_tokens: int = Field(128, ge=1, le=MAX_SEQ_LEN, description="tokens of each prompt")
    output_tokens: int = Field(32, ge=2, le=MAX_SEQ_LEN, description="tokens generated for each request")
    repeats: int = Field(5, ge=2, le=1_000, description="measured rounds of each batch size")
    warmups: int = Field(1, ge=0, le=1_000, description="rounds before them that are not counted")


EMBEDDED = "builtin://python-eval"


class Speculation(Spec):
    """How the artifact is served with the draft that lies in it, or by prompt lookup."""

    kind: Literal["draft", "ngram"] = Field(
        "draft", description="who proposes; lookup is measured beside a draft in any case"
    )
    k: int = Field(PROPOSED, ge=1, le=MAX_K, description="tokens proposed a step")
    rule: Rule = Field(
        "rejection",
        description="how drawn tokens are kept: rejection, as other engines do, or coupled: "
        "those of plain decoding",
    )
    batch_sizes: tuple[BatchSize, ...] = Field(
        (1, 4, 16), min_length=1, max_length=64, description="requests that are served together"
    )
    temperatures: tuple[Annotated[float, Field(ge=0, le=MAX_FACTOR)], ...] = Field(
        (1.0, 0.0), min_length=1, max_length=64, description="0 is greedy"
    )
    data: dict[str, str] = Field(
        default_factory=dict,
        description="category -> data card of prompts; by default the evaluation text, "
        "the embedded one as code and prose",
    )
    num_prompts: int = Field(8, ge=2, le=MAX_SAMPLES, description="of each category")
    prompt_tokens: int = Field(64, ge=2, le=MAX_SEQ_LEN, description="tokens of each prompt")
    output_tokens: int = Field(48, ge=16, le=MAX_SEQ_LEN, description="tokens generated for each prompt")


class Validate(Spec):
    """Evaluation text, latency conditions, and the gates that decide."""

    against: Literal["source"] = Field("source", description="the model that the artifact is compared with")
    data: str = Field(EMBEDDED, description="evaluation text: a data card or builtin://python-eval")
    num_samples: int = Field(32, ge=2, le=MAX_SAMPLES, description="windows of evaluation text")
    seq_len: int = Field(512, ge=8, le=MAX_SEQ_LEN, description="tokens of a window")
    kv_format: KVFormat | None = Field(
        None,
        description="of the candidate's KV cache; by default what the artifact states, "
        "the model's dtype where it states nothing",
    )
    latency: Latency | None = Field(Latency(), description="what is timed; `null` measures no latency")
    speculative: Speculation | None = Field(
        Speculation(), description="measured where the artifact has a draft; null: not at all"
    )
    gates: Annotated[dict[str, float | dict[str, float]], checked_by(read_gates)] = Field(
        default_factory=dict, description="metric -> limit, latency per device"
    )

    @property
    def prompt_data(self) -> dict[str, str]:
        """Category -> data card, of the prompts that are continued by speculation."""
        stated = {} if self.speculative is None else self.speculative.data
        return stated or (
            {each: f"{EMBEDDED}/{each}" for each in ("code", "prose")}
            if self.data == EMBEDDED
            else {"evaluation": self.data}
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """Data cards that judge; none may have been trained on."""
        return (self.data, *self.prompt_data.values())

    def engine_config(self, *, speculates: bool) -> EngineConfig:
        """Room for what is measured and no more: engines share the device, and a cache for the model's full
        length would fill it.
        """
        latency = self.latency
        own = self.speculative if speculates else None
        batch_sizes = (1, *(latency.batch_sizes if latency else ()), *(own.batch_sizes if own else ()))
        lengths = [
            self.seq_len,
            *(each.prompt_tokens + each.output_tokens for each in (latency, own) if each is not None),
        ]
        return EngineConfig(max_batch_size=max(batch_sizes), max_model_len=max(lengths))

    def windows_at_once(self, arch: Arch) -> int:
        """Return how many windows have float32 logits of half a gigabyte a model at most."""
        return self.windows_of(arch.vocab_size)

    def windows_of(self, vocab_size: int) -> int:
        """Return the same for a vocabulary of that size."""
        return max(1, min(8, (1 << 27) // (self.seq_len * vocab_size)))


def kv_format_named(name: str | None) -> KVFormat | None:
    """Return the KV cache format of that name.

    Raises:
        UsageError: there is no such format.
    """
    known = {each: each for each in get_args(KVFormat)}
    if name is not None and name not in known:
        raise UsageError(f"unknown KV cache format '{name}'.{did_you_mean(name, known)}")
    return known.get(name)

"""The stage's keys in a recipe: evaluation text, conditions of latency and speculation, and gates."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from compress.errors import UsageError, did_you_mean
from compress.export import PROPOSED
from compress.models.arch import Arch
from compress.quant.kv import KV_DENSE
from compress.recipe import MAX_FACTOR, MAX_SAMPLES, MAX_SEQ_LEN, MAX_SIZE, Spec, checked_by
from compress.runtime.engine_config import EngineConfig
from compress.runtime.speculative.acceptance import Rule
from compress.runtime.speculative.speculation import MAX_K
from compress.validate.accuracy import ACCURACY_METRICS
from compress.validate.gates import Gate, parse_gates
from compress.validate.load.compare import LOAD_GATES
from compress.validate.load.lengths import LengthLaw
from compress.validate.load.objectives import objectives_of
from compress.validate.tasks.task import AnyTask, check_names

KVFormat = Literal[
    "DENSE",
    "FP8_STATIC",
    "FP8_TOKEN_HEAD",
    "FP8_ATTENTION",
    "INT8_TOKEN_HEAD",
    "INT4_TOKEN_HEAD",
    "INT4_TOKEN_HEAD_HADAMARD",
]


QUANTIZE = "quantize"
LOAD = "load"
TASKS = "tasks"
TASK_GATE = "accuracy_drop"


def read_gates(raw: Mapping[str, Any]) -> tuple[Gate, ...]:
    """Return gates on the artifact, as `quantize.<metric>` on the change that quantization alone made, as
    `load.<metric>` on what was measured under load, and as `tasks.<name>.accuracy_drop` on a task.

    Raises:
        UsageError: as `parse_gates`, or of quantization alone something else than accuracy.
    """
    gates = parse_gates(raw, stages=(QUANTIZE, LOAD), groups=(TASKS,))
    for gate in gates:
        stage, _, metric = gate.name.rpartition(".")
        if stage == QUANTIZE and metric not in ACCURACY_METRICS:
            raise UsageError(
                f"gate '{gate.name}': of {stage} alone accuracy is measured: {', '.join(ACCURACY_METRICS)}."
            )
        if stage == LOAD and metric not in LOAD_GATES:
            raise UsageError(f"gate '{gate.name}': under load these are measured: {', '.join(LOAD_GATES)}.")
        if stage.startswith(f"{TASKS}.") != (metric == TASK_GATE):
            raise UsageError(
                f"gate '{gate.name}': of a task the drop of accuracy is limited, as "
                f"{TASKS}.<name>.{TASK_GATE}."
            )
    return gates


MAX_MEDIANS = 4
"""The longest prompt or output under load, in medians of its law."""
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


class Load(Spec):
    """Requests that arrive while others are served: at `request_rate`, or from `max_concurrency` clients, or
    all at once where both are left out.
    """

    request_rate: float | None = Field(None, gt=0, le=MAX_FACTOR, description="requests a second that arrive")
    burstiness: float = Field(
        1.0, gt=0, le=1_000, description="of arrivals: 1 is Poisson, less gives bursts, more even spacing"
    )
    max_concurrency: BatchSize | None = Field(None, description="unfinished requests at most")
    num_requests: int = Field(32, ge=2, le=MAX_SAMPLES, description="requests of a repeat")
    prompt_tokens: int = Field(128, ge=1, le=MAX_SEQ_LEN, description="median tokens of prompts")
    output_tokens: int = Field(32, ge=2, le=MAX_SEQ_LEN, description="median tokens of outputs")
    spread: float = Field(
        0.0,
        ge=0,
        le=3,
        description="deviation of the logarithm of lengths, which end at four medians; 0: fixed",
    )
    max_batch_size: BatchSize = Field(8, description="requests that run at once; more wait")
    repeats: int = Field(3, ge=2, le=1_000, description="measured repeats, with other tokens each")
    warmups: int = Field(4, ge=0, le=MAX_SAMPLES, description="requests before them that are not counted")
    goodput: Annotated[dict[str, Annotated[float, Field(gt=0, le=MAX_FACTOR)]], checked_by(objectives_of)] = (
        Field(
            default_factory=dict, description="limits of a good request in ms, of `ttft`, `tpot` and `e2el`"
        )
    )

    def law(self, median: int) -> LengthLaw:
        """Return the law of lengths around a median."""
        return LengthLaw(median, self.spread, 1, MAX_MEDIANS * median)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that can be drawn, prompt and output."""
        return self.law(self.prompt_tokens).longest + self.law(self.output_tokens).longest


EMBEDDED = "builtin://python-eval"


class Speculation(Spec):
    """How the artifact is served with the draft or the MTP head that lies in it, or by prompt lookup."""

    kind: Literal["draft", "ngram"] = Field(
        "draft",
        description="who proposes: a draft, or the layer of the checkpoint that predicts a further token, or "
        "lookup, which is measured beside them in any case",
    )
    assistant: str | None = Field(
        None,
        description="a published assistant of the model, which proposes, too: a directory, "
        "hf://org/name@revision or a registry reference with a digest",
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


class Apart(Spec):
    """Models that are scored one after the other, so that the memory holds one of them; the scores of the
    source are kept on disk.
    """

    top_k: int | None = Field(
        None,
        ge=1,
        le=MAX_SIZE,
        description="keep the likeliest tokens, the mass of the rest and some drawn from it, which estimate "
        "KL; left out, all logits, which give the same bits as side by side",
    )
    streamed: bool = Field(
        False,
        description="read the layers of the source from disk one at a time, for one that does not fit either",
    )


class Generation(Spec):
    """Prompts that source and candidate continue, greedily and sampled."""

    prompts: str = Field(
        min_length=1,
        description="a .jsonl file with `prompt` (or `turns`) in each row, or a text with one a line",
    )
    num_prompts: int = Field(16, ge=2, le=MAX_SAMPLES, description="the first so many")
    max_tokens: int = Field(64, ge=1, le=MAX_SEQ_LEN, description="tokens generated for each at most")
    temperature: float = Field(
        0.8, ge=0, le=MAX_FACTOR, description="of the sampled texts; 0: greedy ones alone"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="share of the likeliest tokens that are drawn from")
    chat: bool = Field(False, description="ask by the model's chat template")
    num_shown: int = Field(4, ge=0, le=64, description="prompts whose texts are in the report")
    batch_size: BatchSize = Field(8, description="prompts that are continued at once")
    max_length: int = Field(
        2048,
        ge=8,
        le=MAX_SEQ_LEN,
        description="tokens of the longest prompt with its text; longer ones are cut",
    )


class LongContext(Spec):
    """Perplexity by position, and a fact in a long text that is to be found again."""

    seq_len: int = Field(4096, ge=64, le=MAX_SEQ_LEN, description="tokens of a window")
    data: str | None = Field(None, description="a data card; by default the evaluation text")
    num_samples: int = Field(8, ge=2, le=MAX_SAMPLES, description="windows")
    num_buckets: int = Field(8, ge=1, le=256, description="buckets of positions")
    depths: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (0.0, 0.25, 0.5, 0.75, 1.0),
        max_length=64,
        description="of the fact in the text; empty: no such probe",
    )
    needle_lengths: tuple[Annotated[int, Field(ge=64, le=MAX_SEQ_LEN)], ...] = Field(
        (), max_length=16, description="tokens of the text with the fact; by default seq_len and half of it"
    )
    kv_formats: tuple[KVFormat, ...] = Field(
        (), max_length=8, description="further KV cache formats of the candidate's weights"
    )


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
    apart: Apart | None = Field(
        None, description="score source and candidate one after the other; by default both are in memory"
    )
    load: Load | None = Field(None, description="requests that arrive one by one; by default none")
    speculative: Speculation | None = Field(
        Speculation(), description="measured where the artifact has a draft; null: not at all"
    )
    tasks: Annotated[tuple[AnyTask, ...], checked_by(check_names)] = Field(
        (), max_length=64, description="benchmarks that source and candidate answer; by default none"
    )
    generation: Generation | None = Field(
        None, description="prompts that both models continue, side by side; by default none"
    )
    long_context: LongContext | None = Field(
        None, description="perplexity by position, and a fact to be found again; by default neither"
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

    def engine_config(self, *, speculates: bool, max_position: int = MAX_SEQ_LEN) -> EngineConfig:
        """Room for what is measured and no more: engines share the device, and a cache for the model's full
        length would fill it. Questions of tasks are cut to `max_position`.
        """
        latency = self.latency
        own = self.speculative if speculates else None
        load = self.load
        batch_sizes = (
            1,
            *(latency.batch_sizes if latency else ()),
            *(own.batch_sizes if own else ()),
            *((load.max_batch_size,) if load else ()),
            *(each.batch_size for each in self.tasks),
            *((self.generation.batch_size,) if self.generation else ()),
        )
        lengths = [
            self.seq_len,
            *((load.longest,) if load else ()),
            *(each.prompt_tokens + each.output_tokens for each in (latency, own) if each is not None),
            *(min(each.max_length, max_position) for each in self.tasks),
            *((min(self.generation.max_length, max_position),) if self.generation else ()),
            *((self.long_context.seq_len,) if self.long_context else ()),
        ]
        return EngineConfig(max_batch_size=max(batch_sizes), max_model_len=max(lengths))

    def kv_formats(self) -> tuple[str, ...]:
        """Return the formats of a KV cache that is quantized, which the model is to be served with."""
        own = () if self.long_context is None else self.long_context.kv_formats
        named = (self.kv_format, *own)
        return tuple(each for each in named if each is not None and each != KV_DENSE)

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

"""What speculation gives on text: tokens a step, time a token, whether greedy tokens are those of plain decoding, and whether it pays.

    acceptance length   tokens that come out of a request's step, the model's own included: k + 1 at most. Tokens over steps, the last
                        steps of a request, which have no room for k, left out; the interval is over prompts
    rate of position j  share of these steps that kept the j-th proposal; the rates add up to the acceptance length - 1
    speed-up            time from the first token to the last, plainly over speculatively, for the same prompts and numbers of tokens
    prediction          t = (k t_draft + t_verify) / acceptance length a token (arXiv 2211.17192), where t_draft and t_verify are measured
                        apart: the clock on the proposer, and steps that verify what costs nothing to propose
    repeated 4-grams    share of a plain continuation's 4-grams that it had before: a model that repeats itself is easy to guess

Requests do not end at an end of sequence, so that all have the same length. Categories are mixed in every batch, and told apart by prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from compress.errors import UsageError
from compress.runtime.engine import Engine
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.speculative.acceptance import Rule
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from compress.validate.payoff import SpeedRow, predicted
from compress.validate.stats import Array, Estimate, ratio_estimate
from compress.validate.watched import Watch, Watched

Prompt = tuple[int, ...]
Runs = Mapping[tuple[float, int], Sequence[Finished]]
"""Results by temperature and batch size."""

ALL = "all"
"""The category of all prompts together."""
FEWEST = 4
"""Requests timed at a batch size smaller than that."""
PROBE_STEPS = 8


@dataclass(frozen=True)
class Conditions:
    """`prompts` by category. At the largest batch size all of them are continued, at smaller ones the first."""

    prompts: Mapping[str, Sequence[Prompt]]
    k: int
    rule: Rule
    batch_sizes: Sequence[int]
    temperatures: Sequence[float]
    output_tokens: int

    def __post_init__(self) -> None:
        if self.output_tokens <= self.k + 1:
            raise UsageError(
                f"no step of {self.output_tokens} output tokens has room for {self.k} proposals behind the first token."
            )
        if min(map(len, self.prompts.values()), default=0) < 2:
            raise UsageError(
                "acceptance needs at least two prompts of each category: its uncertainty is over prompts."
            )

    @property
    def mixed(self) -> list[tuple[str, Prompt]]:
        """The categories' prompts in turn."""
        placed = [
            (place / len(each), category, prompt)
            for category, each in self.prompts.items()
            for place, prompt in enumerate(each)
        ]
        return [(category, prompt) for _, category, prompt in sorted(placed, key=lambda item: item[0])]

    def requests(self, temperature: float, batch_size: int) -> list[Request]:
        """Where there are fewer prompts than a batch takes, they come again with other seeds."""
        prompts = [prompt for _, prompt in self.mixed]
        num = max(batch_size, len(prompts) if batch_size == max(self.batch_sizes) else FEWEST)
        params = SamplingParams(self.output_tokens, temperature=temperature, ignore_eos=True)
        return [
            Request(str(idx), prompts[idx % len(prompts)], replace(params, seed=idx)) for idx in range(num)
        ]

    @property
    def settings(self) -> list[tuple[float, int]]:
        return [
            (temperature, batch_size) for temperature in self.temperatures for batch_size in self.batch_sizes
        ]


@dataclass(frozen=True)
class AcceptanceRow:
    """One proposer, temperature and category."""

    proposer: str
    temperature: float
    category: str
    num_prompts: int
    num_steps: int
    acceptance_length: Estimate
    acceptance_rates: tuple[float, ...]
    repeated_4grams: float


@dataclass(frozen=True)
class SpeculationEvidence:
    """Gates look at the first rows: the first proposer, temperature and batch size, all prompts."""

    acceptance: tuple[AcceptanceRow, ...]
    speed: tuple[SpeedRow, ...]

    @property
    def metrics(self) -> dict[str, Estimate]:
        return {"acceptance_length": self.acceptance[0].acceptance_length, "speedup": self.speed[0].speedup}

    @property
    def equality(self) -> tuple[int, int]:
        """Of how many compared continuations how many were equal."""
        compared = [row for row in self.speed if row.num_equal is not None]
        return sum(row.num_equal or 0 for row in compared), sum(row.num_requests for row in compared)

    def as_json(self) -> dict[str, Any]:
        equal, compared = self.equality
        rows = {
            "acceptance": [_flat(asdict(row)) for row in self.acceptance],
            "speed": [_flat(asdict(row)) for row in self.speed],
        }
        return {**rows, "num_equal": equal, "num_compared": compared}


def measure_speculation(
    plain: Engine,
    engine_for: Callable[[Speculative], Engine],
    proposers: Mapping[str, ProposerOptions],
    conditions: Conditions,
    said: Callable[[str], None] = lambda note: None,
) -> SpeculationEvidence:
    """Decode plainly, then with each proposer in an engine of its own, which is gone when the next one is made.

    Raises:
        UsageError: a proposer that cannot propose for this model.
    """
    runs: dict[tuple[float, int], Sequence[Finished]] = {}
    for temperature, batch_size in conditions.settings:
        said(f"plain decoding, temperature {temperature:g}, batch {batch_size}")
        runs[temperature, batch_size] = timed(plain, conditions.requests(temperature, batch_size), batch_size)
    acceptance: list[AcceptanceRow] = []
    speed: list[SpeedRow] = []
    for name, options in proposers.items():
        rows = _of_proposer(name, options, runs, engine_for, conditions, said)
        acceptance += rows.acceptance
        speed += rows.speed
    return SpeculationEvidence(tuple(acceptance), tuple(speed))


def _of_proposer(
    name: str,
    options: ProposerOptions,
    plain: Runs,
    engine_for: Callable[[Speculative], Engine],
    conditions: Conditions,
    said: Callable[[str], None],
) -> SpeculationEvidence:
    watch = Watch()
    engine = engine_for(Speculative(Watched(options, watch), k=conditions.k, rule=conditions.rule))
    acceptance: list[AcceptanceRow] = []
    speed: list[SpeedRow] = []
    for temperature in conditions.temperatures:
        runs: dict[int, list[Finished]] = {}
        costs: dict[int, tuple[float, float]] = {}
        for batch_size in conditions.batch_sizes:
            said(f"{name} proposes, temperature {temperature:g}, batch {batch_size}")
            requests = conditions.requests(temperature, batch_size)
            runs[batch_size] = timed(engine, requests, batch_size)
            costs[batch_size] = probe(engine, watch, requests[:batch_size], conditions.k)
        largest = max(conditions.batch_sizes)
        rows = acceptance_rows(name, temperature, runs[largest], plain[temperature, largest], conditions)
        acceptance += rows
        same_tokens = temperature == 0 or conditions.rule == "coupled"
        for batch_size, finished in runs.items():
            row = speed_row(
                name,
                temperature,
                batch_size,
                finished,
                plain[temperature, batch_size],
                costs[batch_size],
                conditions.k,
            )
            row = row if same_tokens else replace(row, num_equal=None)
            speed.append(row if isinstance(options, NGram) else predicted(row, rows[0].acceptance_rates))
    return SpeculationEvidence(tuple(acceptance), tuple(speed))


def timed(engine: Engine, requests: Sequence[Request], batch_size: int) -> list[Finished]:
    """So many requests at once, until all are done. On CUDA all is done twice: a first time captures graphs of every size that comes."""
    groups = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
    for _ in range(2 if engine.device.type == "cuda" else 1):
        finished = [each for group in groups for each in engine.generate(group)]
    return finished


def probe(engine: Engine, watch: Watch, requests: Sequence[Request], k: int) -> tuple[float, float]:
    """Seconds of one call of the proposer, and of a step whose proposals cost nothing: medians."""
    short = [replace(each, params=replace(each.params, max_tokens=PROBE_STEPS + k + 1)) for each in requests]
    watch.seconds.clear()
    watch.mode = "timed"
    engine.generate(short)
    watch.mode = "idle"
    ends = sorted({moment for each in engine.generate(short) for moment in each.token_times_s})
    watch.mode = "own"
    return float(np.median(watch.seconds)), float(np.median(np.diff(ends)))


def step_sizes(finished: Finished, k: int) -> list[int]:
    """Tokens that came out of each step with room for k proposals. Tokens of one step arrive together, the first comes from the prompt."""
    sizes = []
    num_left = len(finished.tokens) - 1
    for _, arrivals in groupby(finished.token_times_s[1:]):
        size = sum(1 for _ in arrivals)
        if num_left > k:
            sizes.append(size)
        num_left -= size
    return sizes


def repeated_4grams(tokens: Prompt) -> float:
    grams = [tokens[start : start + 4] for start in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def decode_seconds(finished: Sequence[Finished]) -> Array:
    """From the first token to the last, of each request."""
    return np.array([each.token_times_s[-1] - each.token_times_s[0] for each in finished])


def tpot_ms(finished: Sequence[Finished]) -> float:
    """Median over requests of the time of each token after the first."""
    return float(np.median(decode_seconds(finished) / [len(each.tokens) - 1 for each in finished])) * 1e3


def acceptance_rows(
    name: str,
    temperature: float,
    finished: Sequence[Finished],
    plain: Sequence[Finished],
    conditions: Conditions,
) -> list[AcceptanceRow]:
    """All prompts first; then each category, if there are several. A prompt counts once, however often it came."""
    categories = [category for category, _ in conditions.mixed]
    k = conditions.k
    rows = []
    for category in (ALL, *(conditions.prompts if len(conditions.prompts) > 1 else ())):
        chosen = [idx for idx, own in enumerate(categories) if category in (ALL, own)]
        sizes = [step_sizes(finished[idx], k) for idx in chosen]
        num_steps = sum(map(len, sizes))
        kept = [sum(size > place for each in sizes for size in each) for place in range(1, k + 1)]
        tokens_N, steps_N = (
            np.array([count(each) for each in sizes], dtype=np.float64) for count in (sum, len)
        )
        length = ratio_estimate(tokens_N, steps_N)
        rows.append(
            AcceptanceRow(
                proposer=name,
                temperature=temperature,
                category=category,
                num_prompts=len(chosen),
                num_steps=num_steps,
                acceptance_length=Estimate(length.value, max(length.lower, 1.0), min(length.upper, k + 1.0)),
                acceptance_rates=tuple(count / num_steps for count in kept),
                repeated_4grams=float(np.mean([repeated_4grams(plain[idx].tokens) for idx in chosen])),
            )
        )
    return rows


def speed_row(
    name: str,
    temperature: float,
    batch_size: int,
    finished: Sequence[Finished],
    plain: Sequence[Finished],
    costs: tuple[float, float],
    k: int,
) -> SpeedRow:
    """`costs`: seconds of the proposer's call and of verification."""
    before_N = decode_seconds(plain)
    after_N = decode_seconds(finished)
    num_tokens = sum(len(each.tokens) - 1 for each in finished)
    sizes = [size for each in finished for size in step_sizes(each, k)]
    propose_s, verify_s = costs
    return SpeedRow(
        proposer=name,
        temperature=temperature,
        batch_size=batch_size,
        num_requests=len(finished),
        num_equal=sum(ours.tokens == theirs.tokens for ours, theirs in zip(finished, plain, strict=True)),
        tpot_ms_plain=float(before_N.sum()) / num_tokens * 1e3,
        tpot_ms=float(after_N.sum()) / num_tokens * 1e3,
        speedup=ratio_estimate(before_N, after_N),
        acceptance_length=sum(sizes) / len(sizes),
        draft_ms=propose_s / k * 1e3,
        verify_ms=verify_s * 1e3,
        draft_frac=propose_s / (propose_s + verify_s),
    )


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """An interval becomes `<name>_lower` and `<name>_upper` beside `<name>`."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {name: value["value"], f"{name}_lower": value["lower"], f"{name}_upper": value["upper"]}
        else:
            flat[name] = value
    return flat

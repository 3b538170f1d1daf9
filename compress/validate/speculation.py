"""Speculative decoding measured on text: tokens a step, time a token, whether tokens are those of plain
decoding, and whether it pays.

    acceptance   `acceptance.py`
    speed-up     time from the first token to the last, plainly over speculatively, for the same prompts and
                 numbers of tokens
    prediction   t = (k t_draft + t_verify) / acceptance length a token (arXiv 2211.17192), where t_draft and
                 t_verify are measured apart: with the proposer timed, and with steps that verify what costs
                 nothing to propose (`payoff.py`)

Requests do not end at an end of sequence, so that all have the same length. Categories are mixed in every
batch. Batches are decoded plainly and speculatively in turn, in alternating order, so that what slows the
machine down slows both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from compress.errors import UsageError
from compress.runtime.engine import Engine
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.speculative.acceptance import Rule
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from compress.validate.acceptance import AcceptanceRow, acceptance_rows, step_sizes
from compress.validate.contention import CpuTimes, cpu_clock
from compress.validate.payoff import SpeedRow, predicted
from compress.validate.probed_proposer import ProbedOptions, ProposerProbe
from compress.validate.stability import lost_processor
from compress.validate.stats import Array, Estimate, ratio_estimate

Prompt = tuple[int, ...]

MIN_REQUESTS = 4
"""Requests timed at a batch size smaller than that."""
PROBE_STEPS = 8


@dataclass(frozen=True)
class Conditions:
    """Prompts and how they are decoded.

    `prompts` by category: at the largest batch size all of them are continued, at smaller ones the first.

    Raises:
        UsageError: too few output tokens for a step of k proposals, or fewer than two prompts of a category.
    """

    prompts: Mapping[str, Sequence[Prompt]]
    k: int
    rule: Rule
    batch_sizes: Sequence[int]
    temperatures: Sequence[float]
    output_tokens: int

    def __post_init__(self) -> None:
        if self.output_tokens <= self.k + 1:
            raise UsageError(
                f"no step of {self.output_tokens} output tokens has room for {self.k} proposals after the "
                "first token."
            )
        if min(map(len, self.prompts.values()), default=0) < 2:
            raise UsageError(
                "acceptance needs at least two prompts of each category: its uncertainty is over prompts."
            )

    @property
    def mixed(self) -> list[tuple[str, Prompt]]:
        """All prompts with their categories, in an order that mixes the categories evenly."""
        placed = [
            (place / len(each), category, prompt)
            for category, each in self.prompts.items()
            for place, prompt in enumerate(each)
        ]
        return [(category, prompt) for _, category, prompt in sorted(placed, key=lambda item: item[0])]

    def requests(self, temperature: float, batch_size: int) -> list[Request]:
        """Return the requests of one measurement; where a batch takes more than there are prompts, they come
        again with other seeds.
        """
        prompts = [prompt for _, prompt in self.mixed]
        num = max(batch_size, len(prompts) if batch_size == max(self.batch_sizes) else MIN_REQUESTS)
        params = SamplingParams(self.output_tokens, temperature=temperature, ignore_eos=True)
        return [
            Request(str(idx), prompts[idx % len(prompts)], replace(params, seed=idx)) for idx in range(num)
        ]


@dataclass(frozen=True)
class SpeculationEvidence:
    """Rows of acceptance and of speed.

    Gates look at the first ones: the first proposer, temperature and batch size, all prompts.
    """

    acceptance: tuple[AcceptanceRow, ...]
    speed: tuple[SpeedRow, ...]

    @property
    def metrics(self) -> dict[str, Estimate]:
        """The numbers that gates may name."""
        return {"acceptance_length": self.acceptance[0].acceptance_length, "speedup": self.speed[0].speedup}

    @property
    def unproven(self) -> dict[str, str]:
        """The metrics whose measurement proves nothing, each with the reason."""
        return {"speedup": self.speed[0].instability} if self.speed[0].unstable else {}

    @property
    def equality(self) -> tuple[int, int]:
        """How many compared continuations were equal, and how many were compared."""
        compared = [row for row in self.speed if row.num_equal is not None]
        return sum(row.num_equal or 0 for row in compared), sum(row.num_requests for row in compared)

    def as_json(self) -> dict[str, Any]:
        """Return the rows, flat, and the counts of `equality`."""
        equal, compared = self.equality
        rows = {
            "acceptance": [_flat(asdict(row)) for row in self.acceptance],
            "speed": [_flat(asdict(row)) for row in self.speed],
        }
        return {**rows, "num_equal": equal, "num_compared": compared}


@dataclass(frozen=True)
class _Comparison:
    """Results of the same requests, decoded plainly and speculatively."""

    plain: list[Finished]
    speculative: list[Finished]
    lost_frac: float | None


def measure_speculation(
    plain: Engine,
    engine_for: Callable[[Speculative], Engine],
    proposers: Mapping[str, ProposerOptions],
    conditions: Conditions,
    progress: Callable[[str], None] = lambda note: None,
) -> SpeculationEvidence:
    """Decode plainly and with each proposer, in an engine of its own that is dropped before the next one is
    made.

    Raises:
        UsageError: a proposer that cannot propose for this model.
    """
    acceptance: list[AcceptanceRow] = []
    speed: list[SpeedRow] = []
    for name, options in proposers.items():
        rows = _measure_proposer(name, options, plain, engine_for, conditions, progress)
        acceptance += rows.acceptance
        speed += rows.speed
    return SpeculationEvidence(tuple(acceptance), tuple(speed))


def _measure_proposer(
    name: str,
    options: ProposerOptions,
    plain: Engine,
    engine_for: Callable[[Speculative], Engine],
    conditions: Conditions,
    progress: Callable[[str], None],
) -> SpeculationEvidence:
    k = conditions.k
    probe = ProposerProbe()
    engine = engine_for(Speculative(ProbedOptions(options, probe), k=k, rule=conditions.rule))
    categories = [category for category, _ in conditions.mixed]
    largest = max(conditions.batch_sizes)
    acceptance: list[AcceptanceRow] = []
    speed: list[SpeedRow] = []
    for temperature in conditions.temperatures:
        compared: dict[int, _Comparison] = {}
        costs: dict[int, tuple[float, float]] = {}
        for batch_size in conditions.batch_sizes:
            progress(f"{name} proposes, temperature {temperature:g}, batch {batch_size}")
            requests = conditions.requests(temperature, batch_size)
            compared[batch_size] = _compare(plain, engine, requests, batch_size)
            costs[batch_size] = step_costs(engine, probe, requests[:batch_size], k)
        whole = compared[largest]
        rows = acceptance_rows(name, temperature, whole.speculative, whole.plain, categories=categories, k=k)
        acceptance += rows
        same_tokens = temperature == 0 or conditions.rule == "coupled"
        for batch_size, each in compared.items():
            row = speed_row(name, temperature, batch_size, each, costs[batch_size], k)
            row = row if same_tokens else replace(row, num_equal=None)
            speed.append(row if isinstance(options, NGram) else predicted(row, rows[0].acceptance_rates))
    return SpeculationEvidence(tuple(acceptance), tuple(speed))


def _compare(plain: Engine, engine: Engine, requests: Sequence[Request], batch_size: int) -> _Comparison:
    """Decode batches in turn; on CUDA twice, as the first time captures graphs of every size that occurs."""
    engines = {"plain": plain, "speculative": engine}
    groups = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
    clock = cpu_clock(on_cpu=engine.device.type == "cpu")
    for _ in range(2 if engine.device.type == "cuda" else 1):
        before = clock()
        found: dict[str, list[Finished]] = {name: [] for name in engines}
        for turn, group in enumerate(groups):
            for name in list(engines)[:: -1 if turn % 2 else 1]:
                found[name] += engines[name].generate(group)
        spent: CpuTimes = clock() - before
    return _Comparison(**found, lost_frac=spent.lost_frac)


def step_costs(
    engine: Engine, probe: ProposerProbe, requests: Sequence[Request], k: int
) -> tuple[float, float]:
    """Return the seconds of one call of the proposer, and of a step whose proposals cost nothing: medians."""
    short = [replace(each, params=replace(each.params, max_tokens=PROBE_STEPS + k + 1)) for each in requests]
    probe.seconds.clear()
    probe.mode = "timed"
    engine.generate(short)
    probe.mode = "idle"
    ends = sorted({moment for each in engine.generate(short) for moment in each.token_times_s})
    probe.mode = "own"
    return float(np.median(probe.seconds)), float(np.median(np.diff(ends)))


def speed_row(
    name: str,
    temperature: float,
    batch_size: int,
    compared: _Comparison,
    costs: tuple[float, float],
    k: int,
) -> SpeedRow:
    """Return the times of one comparison; `costs` are the seconds of a call of the proposer and of a
    verification.
    """
    plain_N = decode_seconds(compared.plain)
    speculative_N = decode_seconds(compared.speculative)
    num_tokens = sum(len(each.tokens) - 1 for each in compared.speculative)
    sizes = [size for each in compared.speculative for size in step_sizes(each, k)]
    propose_s, verify_s = costs
    instability = lost_processor(compared.lost_frac)
    return SpeedRow(
        proposer=name,
        temperature=temperature,
        batch_size=batch_size,
        num_requests=len(compared.speculative),
        num_equal=sum(
            each.tokens == other.tokens
            for each, other in zip(compared.speculative, compared.plain, strict=True)
        ),
        tpot_ms_plain=float(plain_N.sum()) / num_tokens * 1e3,
        tpot_ms=float(speculative_N.sum()) / num_tokens * 1e3,
        speedup=ratio_estimate(plain_N, speculative_N),
        acceptance_length=sum(sizes) / len(sizes),
        draft_ms=propose_s / k * 1e3,
        verify_ms=verify_s * 1e3,
        draft_frac=propose_s / (propose_s + verify_s),
        cpu_lost_frac=compared.lost_frac,
        unstable=bool(instability),
        instability=instability,
    )


def decode_seconds(finished: Sequence[Finished]) -> Array:
    """Return the seconds from the first token to the last of each request."""
    return np.array([each.token_times_s[-1] - each.token_times_s[0] for each in finished])


def tpot_ms(finished: Sequence[Finished]) -> float:
    """Return the median over requests of the time of each token after the first."""
    return float(np.median(decode_seconds(finished) / [len(each.tokens) - 1 for each in finished])) * 1e3


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with each interval as `<name>_lower` and `<name>_upper` next to `<name>`."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {name: value["value"], f"{name}_lower": value["lower"], f"{name}_upper": value["upper"]}
        else:
            flat[name] = value
    return flat

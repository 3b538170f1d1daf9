"""Latency of the bundled runtime's own serving path: the `Engine.step()` that is timed is the one that
serves.

    TTFT   first token on the host - arrival                          (all requests of a batch arrive at once)
    TPOT   (end to end - TTFT) / (n - 1), one value a request
    ITL    the gaps between consecutive tokens, all of them
    floor  bytes that one decode step must move / measured bandwidth: all weights once, and keys and values of
           every sequence at its mean length; of a mixture of experts the weights that a step of this batch
           size reads if every choice of the routers is equally likely

Models that are compared are measured in turn, one repeat each, and the order is reversed after every turn (A
B, B A, A B ...): what slows the machine down for a while slows them all, and a steady drift cancels. Prompts
are random tokens, fresh for every request of every repeat and the same for all models, so that nothing can be
found in a prefix cache ("cold"). A warm-up is a whole repeat that is not counted: compilation, graph capture
and autotuning fall into it. Nothing of that kind happens on a CPU, where a warm-up only touches the memory
and ends after eight tokens.

Requests of one repeat share its disturbances, so intervals are taken over repeats. With fewer than six
repeats no order statistics reach 95 % (the range of n values holds the median with probability 1 - 2^(1-n)),
so that the interval of a median is then at least Student's, over the repeats' own medians. A row states by
`stability.py` whether its repeats agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compress.errors import CompressError, UsageError
from compress.runtime.request import Request, SamplingParams
from compress.validate.contention import CpuClock, CpuTimes, cpu_clock
from compress.validate.stability import Stability, instability, stability
from compress.validate.stats import Array, Estimate, mean_estimate, quantile_estimate, quantiles

if TYPE_CHECKING:
    from compress.runtime.engine import Engine
    from compress.runtime.request import Finished

LATENCY_METRICS = (
    "ttft_ms_p50",
    "ttft_ms_p95",
    "tpot_ms_p50",
    "tpot_ms_p95",
    "tpot_ms_p99",
    "itl_ms_p50",
    "itl_ms_p90",
    "itl_ms_p95",
    "itl_ms_p99",
    "output_tokens_per_s",
    "floor_frac",
)
"""The numbers of a row that gates may name."""
_CPU_WARMUP_TOKENS = 8
_MIN_RANKED_REPEATS = 6


@dataclass(frozen=True)
class LatencyRow:
    """One model at one batch size: the conditions, and the times in ms.

    `interleaved`: other models were measured in turn with this one. `unstable`: its repeats prove nothing,
    for the reasons in `tpot_instability` and `ttft_instability`.
    """

    batch_size: int
    prompt_tokens: int
    output_tokens: int
    repeats: int
    warmups: int
    prefix_cache: str
    ttft_ms_p50: Estimate
    ttft_ms_p95: Estimate
    tpot_ms_p50: Estimate
    tpot_ms_p95: Estimate
    tpot_ms_p99: Estimate
    itl_ms_p50: float
    itl_ms_p90: float
    itl_ms_p95: float
    itl_ms_p99: float
    output_tokens_per_s: float  # of the whole batch, prefill included, median over repeats
    step_bytes: int  # expected, for a mixture of experts
    floor_ms: float
    floor_frac: float  # floor / median TPOT: 1 is the hardware's limit
    interleaved: bool
    tpot_spread_frac: float
    tpot_drift_frac: float
    ttft_spread_frac: float
    ttft_drift_frac: float
    cpu_lost_frac: float | None
    unstable: bool
    tpot_instability: str
    ttft_instability: str
    uniform_routing: bool = False  # of a mixture of experts: its floor assumes that all are chosen alike

    def metrics(self) -> dict[str, Estimate]:
        """Return the numbers that gates may name, each with its interval over repeats where it has one."""
        values = {name: getattr(self, name) for name in LATENCY_METRICS}
        return {
            name: value if isinstance(value, Estimate) else Estimate.exact(float(value))
            for name, value in values.items()
        }

    def unproven(self) -> dict[str, str]:
        """Return the metrics that the repeats do not prove, each with the reason."""
        reasons = {
            name: self.ttft_instability if name.startswith("ttft") else self.tpot_instability
            for name in LATENCY_METRICS
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def as_json(self) -> dict[str, Any]:
        """Return a flat row: an interval becomes `<name>_lower` and `<name>_upper` next to `<name>`."""
        row: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name == "uniform_routing" and not value:
                continue
            if isinstance(value, Estimate):
                row |= {name: value.value, f"{name}_lower": value.lower, f"{name}_upper": value.upper}
            else:
                row[name] = value
        return row


@dataclass(frozen=True)
class LatencyConditions:
    """How one batch is timed.

    At most `repeats` repeats are counted, and at least `min_repeats` (None: all of them): in between the
    measurement ends when the repeats of every model agree. `bandwidth_bytes_per_s` is what
    `machine.measure_bandwidth` measured on the same device.

    Raises:
        UsageError: fewer than two repeats (no uncertainty can be stated) or fewer than two output tokens
        (TPOT needs a gap).
    """

    prompt_tokens: int
    output_tokens: int
    repeats: int
    warmups: int
    vocab_size: int
    bandwidth_bytes_per_s: float
    seed: int
    min_repeats: int | None = None

    def __post_init__(self) -> None:
        if self.repeats < 2 or self.output_tokens < 2:
            raise UsageError(
                f"latency needs repeats >= 2 and output_tokens >= 2; here repeats = {self.repeats}, "
                f"output_tokens = {self.output_tokens}."
            )

    def prompts(self, batch_size: int) -> list[list[list[int]]]:
        """Return random prompts for every warm-up and repeat; no other batch size has the same."""
        generator = torch.Generator().manual_seed(self.seed + batch_size)
        size = (self.warmups + self.repeats, batch_size, self.prompt_tokens)
        return torch.randint(self.vocab_size, size, generator=generator).tolist()


def measure_latency(
    engine: "Engine", conditions: LatencyConditions, *, batch_sizes: Sequence[int]
) -> list[LatencyRow]:
    """Return one row a batch size of one engine alone.

    Raises:
        UsageError: the engine has unfinished requests.
        CompressError: the engine returned other requests or other lengths than were requested.
    """
    return [
        compare_latency({"": engine}, conditions, batch_size=batch_size)[""] for batch_size in batch_sizes
    ]


def compare_latency(
    engines: "Mapping[str, Engine]",
    conditions: LatencyConditions,
    *,
    batch_size: int,
    clock: CpuClock | None = None,
) -> dict[str, LatencyRow]:
    """Return one row an engine, all measured in turn.

    Args:
        clock: the process's use of processors, for tests; by default what the system counts.

    Raises:
        UsageError: an engine has unfinished requests.
        CompressError: an engine returned other requests or other lengths than were requested.
    """
    if any(engine.has_work for engine in engines.values()):
        raise UsageError("the engine has unfinished requests; latency is measured on an idle engine.")
    runs = {name: _Runs(engine, conditions, batch_size, clock=clock) for name, engine in engines.items()}
    prompts = conditions.prompts(batch_size)
    for each in prompts[: conditions.warmups]:
        for run in runs.values():
            run.warm_up(each)
    at_least = conditions.repeats if conditions.min_repeats is None else conditions.min_repeats
    for turn, each in enumerate(prompts[conditions.warmups :]):
        for run in list(runs.values())[:: -1 if turn % 2 else 1]:
            run.repeat(each)
        if turn + 1 >= at_least and all(run.agrees for run in runs.values()):
            break
    return {name: run.row(interleaved=len(runs) > 1) for name, run in runs.items()}


class _Runs:
    """The repeats of one engine at one batch size, as they are measured."""

    def __init__(
        self, engine: "Engine", conditions: LatencyConditions, batch_size: int, *, clock: CpuClock | None
    ) -> None:
        self._engine = engine
        self._conditions = conditions
        self._batch_size = batch_size
        self._on_cpu = engine.device.type == "cpu"
        self._clock = clock if clock is not None else cpu_clock(on_cpu=self._on_cpu)
        self._cpu_times = CpuTimes()
        self._repeats: list[list[Finished]] = []

    def warm_up(self, prompts: list[list[int]]) -> None:
        """Run a batch that is not counted."""
        num_tokens = self._conditions.output_tokens
        self._run(prompts, min(num_tokens, _CPU_WARMUP_TOKENS) if self._on_cpu else num_tokens)

    def repeat(self, prompts: list[list[int]]) -> None:
        """Run a batch that is counted."""
        before = self._clock()
        self._repeats.append(self._run(prompts, self._conditions.output_tokens))
        self._cpu_times += self._clock() - before

    @property
    def agrees(self) -> bool:
        """Whether the repeats so far agree, in both TPOT and TTFT."""
        times = _Times.of(self._repeats)
        return times.tpot_stability.agrees and times.ttft_stability.agrees

    def row(self, *, interleaved: bool) -> LatencyRow:
        """Return what the repeats show."""
        conditions = self._conditions
        context = conditions.prompt_tokens + conditions.output_tokens / 2
        weight_bytes = self._engine.expected_weight_bytes(self._batch_size)
        of_request = context * self._engine.kv_bytes_per_token + self._engine.arch.step_state_bytes
        step_bytes = int(weight_bytes + self._batch_size * of_request)
        floor_ms = step_bytes / conditions.bandwidth_bytes_per_s * 1e3
        times = _Times.of(self._repeats)
        tpot_ms_p50 = _median_estimate(times.tpot_ms_RB)
        itl_ms_p50, itl_ms_p90, itl_ms_p95, itl_ms_p99 = quantiles(times.gaps_ms, (0.5, 0.9, 0.95, 0.99))
        lost_frac = self._cpu_times.lost_frac
        tpot_instability = instability(times.tpot_stability, lost_frac=lost_frac)
        ttft_instability = instability(times.ttft_stability, lost_frac=lost_frac)
        return LatencyRow(
            batch_size=self._batch_size,
            prompt_tokens=conditions.prompt_tokens,
            output_tokens=conditions.output_tokens,
            repeats=len(self._repeats),
            warmups=conditions.warmups,
            prefix_cache="cold",
            ttft_ms_p50=_median_estimate(times.ttft_ms_RB),
            ttft_ms_p95=quantile_estimate(times.ttft_ms_RB, 0.95),
            tpot_ms_p50=tpot_ms_p50,
            tpot_ms_p95=quantile_estimate(times.tpot_ms_RB, 0.95),
            tpot_ms_p99=quantile_estimate(times.tpot_ms_RB, 0.99),
            itl_ms_p50=itl_ms_p50,
            itl_ms_p90=itl_ms_p90,
            itl_ms_p95=itl_ms_p95,
            itl_ms_p99=itl_ms_p99,
            output_tokens_per_s=self._batch_size
            * conditions.output_tokens
            / float(np.median(times.whole_ms_R))
            * 1e3,
            step_bytes=step_bytes,
            floor_ms=floor_ms,
            floor_frac=floor_ms / tpot_ms_p50.value,
            interleaved=interleaved,
            tpot_spread_frac=times.tpot_stability.spread_frac,
            tpot_drift_frac=times.tpot_stability.drift_frac,
            ttft_spread_frac=times.ttft_stability.spread_frac,
            ttft_drift_frac=times.ttft_stability.drift_frac,
            cpu_lost_frac=lost_frac,
            unstable=bool(tpot_instability or ttft_instability),
            tpot_instability=tpot_instability,
            ttft_instability=ttft_instability,
            uniform_routing=self._engine.arch.has_experts,
        )

    def _run(self, prompts: list[list[int]], num_tokens: int) -> "list[Finished]":
        params = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, seed=self._conditions.seed, ignore_eos=True
        )
        return _run_batch(self._engine, prompts, params)


@dataclass(frozen=True)
class _Times:
    """Times of repeats in ms: R repeats of B requests."""

    ttft_ms_RB: Array
    tpot_ms_RB: Array
    gaps_ms: Array
    whole_ms_R: Array

    @staticmethod
    def of(repeats: "list[list[Finished]]") -> "_Times":
        times_RBN = np.array([[done.token_times_s for done in each] for each in repeats]) * 1e3
        arrival_RB = np.array([[done.arrival_s for done in each] for each in repeats]) * 1e3
        num_gaps = times_RBN.shape[2] - 1
        return _Times(
            ttft_ms_RB=times_RBN[:, :, 0] - arrival_RB,
            tpot_ms_RB=(times_RBN[:, :, -1] - times_RBN[:, :, 0]) / num_gaps,
            gaps_ms=np.diff(times_RBN, axis=2),
            whole_ms_R=times_RBN.max(axis=(1, 2)) - arrival_RB.min(axis=1),
        )

    @property
    def tpot_stability(self) -> Stability:
        return stability(np.median(self.tpot_ms_RB, axis=1))

    @property
    def ttft_stability(self) -> Stability:
        return stability(np.median(self.ttft_ms_RB, axis=1))


def _median_estimate(values_RB: Array) -> Estimate:
    """Return the median of all values and its interval over repeats: Woodruff's, and Student's too where
    repeats are few.
    """
    ranked = quantile_estimate(values_RB, 0.5)
    if values_RB.shape[0] >= _MIN_RANKED_REPEATS:
        return ranked
    means = mean_estimate(np.median(values_RB, axis=1))
    return Estimate(ranked.value, max(min(ranked.lower, means.lower), 0.0), max(ranked.upper, means.upper))


def _run_batch(engine: "Engine", prompts: list[list[int]], params: SamplingParams) -> "list[Finished]":
    requests = [
        Request(id=f"latency-{index}", prompt=tuple(prompt), params=params)
        for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request)
    finished: list[Finished] = []
    while engine.has_work:
        finished += engine.step()
    lengths = {done.id: len(done.token_times_s) for done in finished}
    if lengths != {request.id: params.max_tokens for request in requests}:
        raise CompressError(
            f"requested {params.max_tokens} tokens for each of {len(requests)} requests and the engine "
            f"returned {lengths}; "
            "nothing was measured."
        )
    return finished

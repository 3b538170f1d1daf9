"""Metrics for Prometheus, under the names of vLLM, so that dashboards made for it work here too.

Times have buckets from 0.25 ms. Gauges and the counters that the engine keeps itself are read when the page
is asked for.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from compress.llm import LLM
from compress.serve.choice import Choice
from compress.serve.engine_thread import EngineThread

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TIME_BUCKETS_S = tuple(
    round(digit * 10.0**power, 6)
    for power in range(-4, 3)
    for digit in (1, 1.5, 2.5, 4, 6.5)
    if 0.00025 <= round(digit * 10.0**power, 6) <= 400
)
_COUNT_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """The metrics of a server; it observes tokens as they come (`TokenObserver`) and texts when they end."""

    def __init__(self, llm: LLM, thread: EngineThread, model_name: str) -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": "0"}

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, [*labels, *more], registry=self.registry)

        def histogram(name: str, text: str, buckets: Iterable[float] = TIME_BUCKETS_S) -> Histogram:
            made = Histogram(name, text, list(labels), registry=self.registry, buckets=tuple(buckets))
            return made.labels(**labels)

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed.").labels(**labels)
        self._generated = counter("vllm:generation_tokens", "Tokens generated.").labels(**labels)
        ended = counter("vllm:request_success", "Texts that ended, by reason.", "finished_reason")
        self._ended = {each: ended.labels(**labels, finished_reason=each) for each in REASONS}
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to the first token.")
        self._itl = histogram("vllm:inter_token_latency_seconds", "Time between two tokens.")
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a text's tokens after the first."
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.")
        self._queue = histogram("vllm:request_queue_time_seconds", "Time from arrival to the first step.")
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "Time from the first step to the first token."
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "Time from the first token to the last one."
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "Time from the first step to the last token."
        )
        self._prompt_sizes = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a text.", _COUNT_BUCKETS
        )
        self._text_sizes = histogram(
            "vllm:request_generation_tokens", "Generated tokens of a text.", _COUNT_BUCKETS
        )
        self._max_tokens = histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request.", _COUNT_BUCKETS
        )
        self._n = histogram("vllm:request_params_n", "n of a request.", _COUNT_BUCKETS[:9])
        self._responses = Counter(
            "http_requests",
            "Answered HTTP requests.",
            ["method", "handler", "status"],
            registry=self.registry,
        )
        self._disconnects = Counter(
            "compress:client_disconnects",
            "Clients that left before their answer ended.",
            registry=self.registry,
        )
        Gauge("compress:build", "The version of compress.", ["version"], registry=self.registry).labels(
            _version()
        ).set(1)
        self.registry.register(_EngineCollector(llm, thread, labels))

    def page(self) -> bytes:
        """Return the page of all metrics, as text."""
        return generate_latest(self.registry)

    def asked(self, *, n: int, max_tokens: int) -> None:
        """Count an accepted request."""
        self._n.observe(n)
        self._max_tokens.observe(max_tokens)

    def first_token(self, ttft_s: float) -> None:
        """Observe the time to the first token of a text."""
        self._ttft.observe(ttft_s)

    def later_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Observe the times between later tokens."""
        for _ in range(num_tokens):
            self._itl.observe(gap_s)

    def generated(self, num_tokens: int) -> None:
        """Count generated tokens."""
        self._generated.inc(num_tokens)

    def ended(self, choice: Choice) -> None:
        """Count a text that has ended, with its times."""
        reason = choice.finish_reason or "length"
        self._ended[reason if reason in self._ended else "error"].inc()
        self._prompt_sizes.observe(len(choice.prompt.tokens))
        self._text_sizes.observe(choice.num_tokens)
        admitted_s = None if choice.finished is None else choice.finished.admitted_s
        if admitted_s is not None:
            self._queue.observe(max(0.0, admitted_s - choice.arrival_s))
        if admitted_s is not None or choice.prompt_logprobs is not None:
            self._prompt_tokens.inc(len(choice.prompt.tokens))
        if choice.first_s is None or choice.last_s is None:
            return
        self._e2e.observe(choice.last_s - choice.arrival_s)
        self._decode.observe(choice.last_s - choice.first_s)
        if choice.tpot_s is not None:
            self._tpot.observe(choice.tpot_s)
        if admitted_s is not None:
            self._prefill.observe(choice.first_s - admitted_s)
            self._inference.observe(choice.last_s - admitted_s)

    def answered(self, *, method: str, path: str, status: int) -> None:
        """Count an answered HTTP request."""
        self._responses.labels(method, path, f"{status // 100}xx").inc()

    def disconnected(self) -> None:
        """Count a client that left before its answer ended."""
        self._disconnects.inc()


class _EngineCollector(Collector):
    """Reads the counts of the engine when they are asked for."""

    def __init__(self, llm: LLM, thread: EngineThread, labels: dict[str, str]) -> None:
        self._llm = llm
        self._thread = thread
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges and counters of the engine."""
        counts = self._thread.counts
        waiting = self._thread.num_queued + counts.num_waiting
        usage = counts.reserved_positions / max(counts.cache_positions, 1)
        live = counts.live_tokens / counts.reserved_positions if counts.reserved_positions else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", counts.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a place in it.", waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", usage)
        yield self._gauge(
            "compress:kv_cache_live_share", "Share of the used KV cache that holds keys and values.", live
        )
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", counts.prefix_queried)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found.", counts.prefix_hits)
        yield self._counter("vllm:num_preemptions", "Requests that lost their blocks.", counts.preemptions)
        yield self._counter("compress:prefix_cache_evictions", "Cached blocks evicted.", counts.evictions)
        yield self._counter("compress:swapped_out", "Requests swapped to the host.", counts.swapped_out)
        yield self._counter("compress:swapped_in", "Requests swapped back.", counts.swapped_in)
        acceptance = self._llm.acceptance
        if acceptance is not None:
            yield self._counter("vllm:spec_decode_num_drafts", "Verified drafts.", acceptance.num_rows)
            yield self._counter(
                "vllm:spec_decode_num_draft_tokens", "Proposed tokens.", sum(acceptance.proposed)
            )
            yield self._counter(
                "vllm:spec_decode_num_accepted_tokens", "Accepted tokens.", sum(acceptance.accepted)
            )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._family(GaugeMetricFamily, name, text, value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._family(CounterMetricFamily, name, text, value)

    def _family(self, kind: Any, name: str, text: str, value: float) -> Metric:
        family = kind(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def _version() -> str:
    import compress

    return compress.__version__

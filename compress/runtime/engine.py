"""The engine: it serves requests. `step()` = schedule, launch, read.

One step serves every running request once: decodes first, then prefill chunks, within a budget of tokens
(`scheduler.py`).

Launch ahead. `step()` schedules and launches the next step before it reads the tokens of the last one
(`step_queue.py`), so the device never waits for the host: the next step takes them from where they are on the
device (`decode.py`). That holds for steps that admit requests, prefill chunks, and follow the last token of a
request whose length is known. A token's time is still the moment at which the host has it. A request that
turns out to have ended is served once more than needed, and the surplus tokens are dropped. A step waits for
the last one's tokens where it has to preempt, where a graph is captured first, and where a request asks for
the likeliest tokens. With `sync` every step ends with its own tokens on the host.

With `speculative` a decode step verifies proposed tokens (`speculative/`) and gives a request one token or
several. Blocks for proposed tokens are taken only if free, never from another request, and kept until the
request ends. Steps are launched ahead where proposals are made on the device, while the same requests decode
and none can be admitted.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from compress.errors import UsageError
from compress.kernels.operands.paged import DENSE_FORMATS
from compress.models.arch import Arch
from compress.models.weights import WeightSource
from compress.quant.kv import KV_DENSE
from compress.runtime.batching import Batching
from compress.runtime.block_pool import BlockPool
from compress.runtime.cache_plan import plan_cache
from compress.runtime.decode import PlainDecoding
from compress.runtime.decode_run import Decoding, PendingTokens
from compress.runtime.engine_config import EngineConfig
from compress.runtime.generation import Generation
from compress.runtime.kv_cache import KVCache, chunk_multiple, kv_bytes_per_token
from compress.runtime.loader import load_model
from compress.runtime.model_runner import ModelRunner
from compress.runtime.prefill import Prefill
from compress.runtime.prefixes import Prefixes, keep_prefixes
from compress.runtime.request import EngineCounts, Finished, Reason, Request, TopLogprobs
from compress.runtime.scheduler import Scheduler
from compress.runtime.speculative.decoding import SpeculativeDecoding
from compress.runtime.speculative.proposer import CacheSizes
from compress.runtime.speculative.speculation import Acceptance
from compress.runtime.step_budget import StepBudget
from compress.runtime.step_queue import LaunchedStep, StepQueue
from compress.runtime.swap import HostSwap
from compress.runtime.token_reader import Observer, TokenReader
from compress.runtime.unfinished import Unfinished
from compress.runtime.waiting_queue import WaitingQueue


class Engine:
    """A loaded model with its KV cache and its queue of requests.

    Raises:
        UsageError: the sizes in `config` do not fit the model or the cache.
        EnvironmentUnfit: no kernel here serves the checkpoint.
    """

    def __init__(
        self, source: WeightSource, *, device: torch.device, config: EngineConfig | None = None
    ) -> None:
        self.config = config = config if config is not None else EngineConfig()
        self.device = device
        self.arch: Arch = source.arch
        self.dtype = config.dtype_for(source.arch, device)
        self._block_size = config.block_size_on(device)
        deployment = config.deployment(device, self.dtype)
        kv_format = config.kv_format if config.kv_format is not None else source.kv_format
        self.kv_format = DENSE_FORMATS[self.dtype] if kv_format in (None, KV_DENSE) else kv_format
        longest = deployment.num_positions(self.arch)
        self.kv_bytes_per_token = kv_bytes_per_token(
            self.arch, self.kv_format, num_positions=longest, dtype=self.dtype
        )
        weights = load_model(source, deployment)
        self.weight_bytes = weights.weight_bytes
        self.weight_bytes_read = weights.bytes_read
        self.expected_weight_bytes = weights.expected_bytes_read
        speculative = config.speculative
        proposer = (
            None
            if speculative is None
            else speculative.build(source.arch, deployment, block_size=self._block_size)
        )
        plan = plan_cache(self.arch, config, proposer, deployment, kv_bytes_per_token=self.kv_bytes_per_token)
        self.max_model_len = plan.max_model_len
        self._cache_positions = (plan.num_blocks - 1) * self._block_size
        cache = KVCache(
            self.arch,
            num_blocks=plan.num_blocks,
            block_size=self._block_size,
            kv_format=self.kv_format,
            device=device,
            static_scales=weights.kv_scales,
            num_slots=plan.num_slots,
            num_kept=config.num_kept,
            num_saved=plan.num_saved,
            num_positions=longest,
            dtype=self.dtype,
        )
        self.runner = ModelRunner(weights, cache, max_model_len=self.max_model_len)
        self._pool = BlockPool(plan.num_blocks, num_first=plan.num_first)
        self._prefixes = (
            keep_prefixes(
                self.arch,
                plan,
                self._pool,
                proposer,
                kv_format=self.kv_format,
                block_size=self._block_size,
                device=device,
                short_prompt_tokens=self.runner.short_prompt_rows,
            )
            if config.prefix_cache and plan.can_keep_prefixes
            else Prefixes()
        )
        self._swap = (
            HostSwap(cache, num_bytes=config.swap_bytes, device=device)
            if config.swap_bytes and plan.blocks_hold_all
            else None
        )
        self._batching = Batching(
            config.max_batch_size, policy=config.policy, delay_s=config.batch_delay_ms / 1e3
        )
        self._scheduler = Scheduler(
            self._pool,
            WaitingQueue(shortest_first=config.order == "shortest", limit=config.max_waiting),
            block_size=self._block_size,
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
            batching=self._batching,
            prefixes=self._prefixes,
            num_unsure=0 if speculative is None else speculative.k + 1,
            swap=self._swap,
            shares_prompts=plan.blocks_hold_all,
            chunk_multiple=math.lcm(chunk_multiple(self.kv_format), self._prefixes.chunk_multiple),
        )
        self._budget = StepBudget(None if config.itl_target_ms is None else config.itl_target_ms / 1e3)
        self._speculation: SpeculativeDecoding | None = None
        if speculative is not None and proposer is not None:
            sizes = CacheSizes(plan.num_blocks, self._block_size, plan.max_model_len, plan.num_slots)
            self._speculation = SpeculativeDecoding(
                speculative, proposer, self.runner, sizes, deployment, self._scheduler
            )
        decoding: Decoding = self._speculation or PlainDecoding(
            self.runner,
            self._scheduler,
            max_batch_size=config.max_batch_size,
            max_model_len=self.max_model_len,
            block_size=self._block_size,
            device=device,
        )
        prefill = Prefill(
            (self._speculation or self.runner).prefill,
            block_size=self._block_size,
            short_prompt_rows=self.runner.short_prompt_rows,
            device=device,
        )
        self._decoding = decoding
        self._launched = StepQueue(decoding, prefill, cache, proposer)
        self._reader = TokenReader(self.arch.eos_token_ids)
        self._unfinished = Unfinished()

    @property
    def observer(self) -> Observer | None:
        """The function that is called with the logits of every token, if any. No step is launched ahead while
        there is one.
        """
        return self._reader.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._reader.observer = observer

    @property
    def wait_s(self) -> float:
        """The time spent waiting for the device, in seconds."""
        return self._reader.wait_s

    @property
    def has_work(self) -> bool:
        """Whether `step()` has anything to do."""
        return self._scheduler.has_work or len(self._launched) > 0

    @property
    def num_preemptions(self) -> int:
        """How often a request has lost its blocks."""
        return self._scheduler.num_preemptions

    @property
    def counts(self) -> EngineCounts:
        """The requests and positions that the engine holds now, and counts since it was made."""
        scheduler = self._scheduler
        swap = self._swap
        return EngineCounts(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            cache_positions=self._cache_positions,
            reserved_positions=scheduler.reserved_positions,
            live_tokens=scheduler.live_tokens,
            prefix_queried=self._prefixes.num_queried,
            prefix_hits=self._prefixes.num_hits,
            evictions=self._pool.num_evictions,
            preemptions=scheduler.num_preemptions,
            swapped_out=0 if swap is None else swap.num_out,
            swapped_in=0 if swap is None else swap.num_in,
            shared_prompts=scheduler.num_shared,
            copied_blocks=scheduler.num_copied,
        )

    @property
    def acceptance(self) -> Acceptance | None:
        """Counts of all speculative steps since `reset_acceptance`, if any; None without `speculative`."""
        return None if self._speculation is None else self._speculation.total

    def reset_acceptance(self) -> None:
        """Set the counts of `acceptance` to zero."""
        if self._speculation is not None:
            self._speculation.reset()

    def add(self, request: Request) -> None:
        """Append a request to the queue.

        Raises:
            UsageError: the prompt is empty, too long with its continuation, or holds unknown tokens; the id
                is in use.
            QueueFull: `max_waiting` requests wait.
        """
        request.check(self.arch, max_model_len=self.max_model_len)
        self._unfinished.check_unused(request.id)
        generation = Generation(request, time.perf_counter(), list(request.prompt))
        self._scheduler.add(generation)
        self._unfinished.add(generation)
        self._batching.flush = False

    def flush(self) -> None:
        """Begin a static batch with the requests that wait, full or not. A request that is added later ends
        this.
        """
        self._batching.flush = True

    def logprobs_of(self, request_id: str, *, start: int = 0) -> list[float]:
        """Return the log probabilities of `tokens_of`, for a request that asked for them.

        Raises:
            UsageError: no unfinished request has this id.
        """
        return self._unfinished.find(request_id).logprobs[start:]

    def top_logprobs_of(self, request_id: str, *, start: int = 0) -> list[TopLogprobs]:
        """Return the likeliest tokens at the position of each of `tokens_of`, for a request that asked for
        them.

        Raises:
            UsageError: no unfinished request has this id.
        """
        return self._unfinished.find(request_id).top_logprobs[start:]

    def tokens_of(self, request_id: str, *, start: int = 0) -> list[int]:
        """Return the tokens generated so far for an unfinished request, without the first `start`.

        Call it after `step()` to stream; a request that `step()` returned is finished, and its `Finished`
        holds all tokens.

        Raises:
            UsageError: no unfinished request has this id.
        """
        generation = self._unfinished.find(request_id)
        return generation.tokens[len(generation.request.prompt) + start :]

    def cancel(self, request_id: str) -> Finished:
        """Stop an unfinished request, free its blocks and return what it has generated; `reason` is
        "cancelled".

        The other requests go on with the same tokens. `step()` never returns a cancelled request.

        Raises:
            UsageError: no unfinished request has this id.
        """
        return self._finish(self._unfinished.find(request_id), "cancelled")

    def generate(self, requests: Sequence[Request]) -> list[Finished]:
        """Serve requests until all are finished; return results in the order of the requests.

        Raises:
            UsageError: `add` refuses a request, and then none is served, or the engine has unfinished
                requests already, whose results would be lost.
        """
        if self.has_work:
            raise UsageError(
                "the engine still has requests of its own; finish them with step() before generate()."
            )
        for num_added, request in enumerate(requests):
            try:
                self.add(request)
            except UsageError:
                for added in requests[:num_added]:
                    self.cancel(added.id)
                raise
        self.flush()
        finished: dict[str, Finished] = {}
        while self.has_work:
            finished.update((each.id, each) for each in self.step())
        return [finished[request.id] for request in requests]

    def step(self) -> list[Finished]:
        """Serve every running request once; return the requests that have finished. Nothing runs while a
        group of a static or dynamic batch gathers.
        """
        now_s = time.perf_counter()
        finished = [self._finish(each, "deadline") for each in self._unfinished.overdue(now_s)]
        if not self._launched:
            self._launch(now_s)
        if self._launched:
            if self._overlaps:
                self._launch_ahead(now_s)
            finished += self._read_oldest()
        if self._overlaps and not self._launched:
            self._launch(time.perf_counter())
        return finished

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return which kernel serves what, and why no faster one does.

        There is one row for each linear and phase, then the head and the other ops; then the same of a draft
        model or an EAGLE-3 head, with "draft " before the name. Keys: layer (None outside layers), linear
        (names joined by "+", or the op), op, scheme, n, k, m_range [min, max], phase ("decode" or "prefill"),
        kernel, refused {faster candidate: reason}.
        """
        return self.runner.kernel_report() + (
            [] if self._speculation is None else self._speculation.kernel_report()
        )

    @torch.inference_mode()
    def _launch(self, now_s: float) -> None:
        """Schedule a step and launch it, if anything can run.

        On a CPU, where a launch returns when all is computed, decodes are read before prompts are launched.
        """
        batch = self._scheduler.schedule(now_s, max_prefill_tokens=self._budget.num_tokens)
        if batch.decodes or batch.prefills:
            self._launched.launch(batch, defers=self.device.type == "cpu" and not self._overlaps)

    def _launch_ahead(self, now_s: float) -> None:
        """Launch the next step if it can do without the tokens of the last one on the host."""
        if self._launched.newest.holds_logits:
            return
        admits = self._scheduler.may_admit(now_s)
        if not admits and self._launched.launch_next(self._scheduler.running):
            return
        decodes = self._scheduler.decodes_ahead()
        if decodes is not None and self._decoding.may_load_ahead(decodes):
            self._launch(now_s)

    @property
    def _overlaps(self) -> bool:
        """Whether decode steps are launched ahead, of requests that do not ask for the likeliest tokens."""
        return (
            self._decoding.runs_ahead
            and self.device.type == "cuda"
            and not self.config.sync
            and self.observer is None
        )

    def _read_oldest(self) -> list[Finished]:
        """Read the tokens of the oldest step; return the requests that have finished."""
        step = self._launched.pop_oldest()
        finished: list[Finished] = []
        if step.decoded is not None:
            finished += self._read(step.decodes, step.decoded)
            self._budget.read(time.perf_counter())
        self._launch_deferred(step)
        self._budget.launched(step.num_prefill_tokens, beside_decodes=step.decoded is not None)
        if step.prefilled is not None:
            finished += self._read(step.prefilled.generations, step.prefilled)
        return finished

    def _read(self, generations: Sequence[Generation], pending: PendingTokens) -> list[Finished]:
        return [self._finish(*each) for each in self._reader.read(generations, pending)]

    @torch.inference_mode()
    def _launch_deferred(self, step: LaunchedStep) -> None:
        if step.deferred:
            self._launched.launch_deferred(step)

    def _finish(self, generation: Generation, reason: Reason) -> Finished:
        self._scheduler.finish(generation)
        self._unfinished.remove(generation)
        return generation.finished(reason)

"""The engine: requests in, finished requests out. `step()` = schedule, run, sample, postprocess.

One step serves every running request once: decodes first, then prefill chunks, within a budget of tokens (`scheduler.py`).

While the same requests decode and nobody waits, the host runs one step ahead: `step()` launches the next decode step and only then reads
the tokens of the one before. A token's time is still the time its caller could have had it. A request that turns out to have ended was
then served once more than needed; that token is dropped. With `sync` every step ends with its own tokens on the host.

With `speculative` a decode is a verification of proposed tokens (`speculative/`), which gives a request one token or several; blocks for
proposed tokens are taken where any are free, and nobody is preempted for them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compress.errors import UsageError
from compress.kernels.paged import DENSE_FORMATS, PADDING_BLOCK
from compress.models.arch import Arch
from compress.models.weights import WeightSource
from compress.quant.kv import DENSE
from compress.runtime.decode import DecodeSteps, Launched
from compress.runtime.decode_state import DecodeRow
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import BlockAllocator, KVCache, kv_bytes_per_token
from compress.runtime.loader import Target, load_model
from compress.runtime.model_runner import ModelRunner, PrefillBatch
from compress.runtime.request import Finished, Request
from compress.runtime.sampler import Choice, sample
from compress.runtime.scheduler import Generation, Scheduled, Scheduler
from compress.runtime.speculative.proposer import Pages
from compress.runtime.speculative.speculation import Acceptance, Speculation
from compress.runtime.speculative.state import RunningRow
from compress.runtime.speculative.verify import Verified

Observer = Callable[[Sequence[Request], Sequence[int], torch.Tensor], None]
"""Called with requests, the positions of the tokens just chosen for them, and the logits [R, V] that they were chosen from."""


@dataclass
class _Run:
    """Decode steps 0, 1, ..., `last` of the same requests, each launched before the tokens of the one before are read.

    `due`: the rows that enter a new block with step n are those of n modulo the block size.
    """

    generations: list[Generation]
    due: dict[int, list[int]]
    last: int  # some request has all its tokens then
    launched: Launched  # and not yet read: the step `num_launched - 1`
    num_launched: int = 1
    stale: bool = False  # a request has ended: no further step of the same rows


@dataclass(frozen=True)
class _Prefilled:
    """Prompts whose first tokens are chosen, on the device."""

    generations: list[Generation]
    positions: list[int]
    logits_WV: torch.Tensor
    choice: Choice


class Engine:
    """A loaded model with its cache and its queue.

    `observer` is called with the logits of every token chosen, in `sync` mode; `wait_s` is the time spent waiting for the device.

    Raises:
        UsageError: the sizes asked for do not fit the model or the cache.
        EnvironmentUnfit: no kernel here serves the checkpoint.
    """

    def __init__(self, source: WeightSource, *, device: torch.device, config: EngineConfig | None = None) -> None:
        self.config = config = config if config is not None else EngineConfig()
        self.device = device
        self.arch: Arch = source.arch
        self.dtype = config.dtype_for(source.arch, device)
        target = Target(device, self.dtype, max_batch_size=config.max_batch_size, max_step_tokens=config.max_step_tokens)
        weights = load_model(source, target)
        self.weight_bytes = weights.weight_bytes
        speculative = config.speculative
        proposer = None if speculative is None else speculative.build(source.arch, target, block_size=config.block_size_on(device))
        stated = config.kv_format if config.kv_format is not None else source.kv_format
        self.kv_format = DENSE_FORMATS[self.dtype] if stated in (None, DENSE) else stated
        self.kv_bytes_per_token = kv_bytes_per_token(self.arch, self.kv_format)
        self._block_size = config.block_size_on(device)
        bytes_per_token = self.kv_bytes_per_token + (proposer.kv_bytes_per_token if proposer is not None else 0)
        self.max_model_len, num_blocks = config.size_cache(self.arch, device, bytes_per_token=bytes_per_token)
        cache = KVCache(
            self.arch,
            num_blocks=num_blocks,
            block_size=self._block_size,
            kv_format=self.kv_format,
            device=device,
            static_scales=weights.kv_scales,
        )
        self.runner = ModelRunner(weights, cache, max_model_len=self.max_model_len)
        self._decoding = DecodeSteps(
            self.runner,
            max_batch_size=config.max_batch_size,
            max_model_len=self.max_model_len,
            block_size=self._block_size,
            device=device,
        )
        self._speculation: Speculation | None = None
        if speculative is not None and proposer is not None:
            pages = Pages(num_blocks, self._block_size, self.max_model_len)
            self._speculation = Speculation(speculative, proposer, self.runner, pages, target)
        self._run: _Run | None = None
        self._eos = frozenset(self.arch.eos_token_ids)
        self.wait_s = 0.0
        self.observer: Observer | None = None
        self._scheduler = Scheduler(
            BlockAllocator(num_blocks),
            block_size=self._block_size,
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
        )
        self._ids: set[str] = set()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._run is not None

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its blocks and was recomputed, since the engine was made."""
        return self._scheduler.num_preemptions

    @property
    def acceptance(self) -> Acceptance | None:
        """Of all speculative steps so far, or since `reset_acceptance`; None where nothing is proposed."""
        return None if self._speculation is None else self._speculation.total

    def reset_acceptance(self) -> None:
        """Count acceptance anew."""
        if self._speculation is not None:
            self._speculation.reset()

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            UsageError: the prompt is empty, too long with its continuation, or holds unknown tokens; the id is in use.
        """
        prompt, length = request.prompt, len(request.prompt) + request.params.max_tokens
        if not prompt:
            raise UsageError(
                f"request '{request.id}' has an empty prompt; give at least one token (the beginning-of-sequence token if nothing else)."
            )
        if length > self.max_model_len:
            raise UsageError(
                f"request '{request.id}' has {len(prompt)} prompt tokens and asks for {request.params.max_tokens} more, {length} in all; "
                f"this engine holds sequences of {self.max_model_len} tokens at most. Shorten it, or raise max_model_len or kv_cache_bytes."
            )
        if min(prompt) < 0 or max(prompt) >= self.arch.vocab_size:
            raise UsageError(f"request '{request.id}' has a token outside 0..{self.arch.vocab_size - 1}: the tokenizer is another model's.")
        if request.id in self._ids:
            raise UsageError(f"request id '{request.id}' is in use by an unfinished request; ids are the caller's to keep apart.")
        self._ids.add(request.id)
        self._scheduler.add(Generation(request, time.perf_counter(), list(prompt)))

    def step(self) -> list[Finished]:
        """Serve every running request once; the requests that are known to have finished."""
        if (run := self._run) is None:
            return self._scheduled_step() if self._scheduler.has_work else []
        launched, following = run.launched, self._launch_next(run)
        if following is not None:
            run.launched = following
            return self._read(run, launched, ends=False)
        self._run = None
        finished = self._read(run, launched, ends=True)
        return finished + self._scheduled_step() if self._scheduler.has_work else finished

    @torch.inference_mode()
    def _scheduled_step(self) -> list[Finished]:
        step = self._scheduler.schedule()
        decodes = [each.generation for each in step.decodes]
        if self._speculation is not None:
            return self._speculative_step(self._speculation, decodes, step.prefills)
        run = self._launch_first(decodes) if decodes else None
        if run is not None and not step.prefills and self._overlaps:
            self._run = run
            return []
        prefilled = self._launch_prefill(step.prefills) if step.prefills else None
        finished = [] if run is None else self._read(run, run.launched, ends=True)
        return finished if prefilled is None else finished + self._read_prefill(prefilled)

    def _speculative_step(self, speculation: Speculation, decodes: list[Generation], prefills: tuple[Scheduled, ...]) -> list[Finished]:
        verified = speculation.launch([self._running_row(each, speculation.k) for each in decodes]) if decodes else None
        prefilled = self._launch_prefill(prefills) if prefills else None
        finished = [] if verified is None else self._read_verified(speculation, decodes, verified)
        return finished if prefilled is None else finished + self._read_prefill(prefilled)

    def _running_row(self, generation: Generation, k: int) -> RunningRow:
        """The last token that may be generated is never fed, so that one fewer may be proposed."""
        num_tokens, wanted = len(generation.tokens), min(k, generation.num_left - 1)
        self._scheduler.extend(generation, num_tokens + wanted)
        room = len(generation.blocks) * self._block_size - num_tokens
        return RunningRow(generation.tokens, generation.blocks, generation.request.params, min(wanted, room))

    def _read_verified(self, speculation: Speculation, generations: list[Generation], verified: Verified) -> list[Finished]:
        """Take the tokens of each request one after the other, as far as it goes on; a request's last one ends it wherever it stands."""
        started = time.perf_counter()
        verified.wait()
        now = time.perf_counter()
        self.wait_s += now - started
        tokens, logprobs, finished = speculation.read(verified), verified.logprobs, []
        for place in range(verified.q_len):
            rows = [row for row, generation in enumerate(generations) if place < len(tokens[row]) and generation.blocks]
            taking = [generations[row] for row in rows]
            if self.observer is not None and rows:
                positions = [len(each.tokens) for each in taking]
                self.observer([each.request for each in taking], positions, verified.logits[rows, place])
            own = None if logprobs is None else [logprobs[row][place] for row in rows]
            finished += self._take(taking, [tokens[row][place] for row in rows], own, now)
        return finished

    @property
    def _overlaps(self) -> bool:
        return self.device.type == "cuda" and not self.config.sync and self.observer is None

    def _launch_first(self, generations: list[Generation]) -> "_Run":
        due: dict[int, list[int]] = {}
        for row_idx, each in enumerate(generations):
            due.setdefault((len(each.blocks) * self._block_size - len(each.tokens) + 1) % self._block_size, []).append(row_idx)
        self._decoding.load([DecodeRow(each.tokens[-1], len(each.tokens), each.blocks, each.request.params) for each in generations])
        return _Run(generations, due, min(each.num_left for each in generations) - 1, self._decoding.launch())

    def _launch_next(self, run: "_Run") -> Launched | None:
        """The run's next step, before the last one's tokens are known; None when what comes next is not the same requests' decode."""
        if run.stale or run.num_launched > run.last or self._scheduler.may_admit:
            return None
        for row_idx in run.due.get(run.num_launched % self._block_size, ()):
            generation = run.generations[row_idx]
            if self._scheduler.extend(generation, len(generation.tokens) + 1) is None:
                return None
            self._decoding.set_next_block(row_idx, generation.blocks[-1])
        run.num_launched += 1
        return self._decoding.launch()

    def _read(self, run: "_Run", launched: Launched, *, ends: bool) -> list[Finished]:
        """Take a launched step's tokens, once they are there; `ends` if a request may have all of its tokens then."""
        started = time.perf_counter()
        launched.wait()
        now = time.perf_counter()
        self.wait_s += now - started
        tokens, generations = launched.tokens, run.generations
        if self.observer is not None:
            self.observer([each.request for each in generations], [len(each.tokens) for each in generations], launched.logits)
        if not ends and self._eos.isdisjoint(tokens) and not launched.has_logprobs:
            for generation, token in zip(generations, tokens, strict=True):  # `_take` of the run's last step brings the rest up to date
                generation.tokens.append(token)
                generation.token_times_s.append(now)
            return []
        finished = self._take(generations, tokens, launched.logprobs, now)
        run.stale = bool(finished)
        return finished

    def _launch_prefill(self, prefills: tuple[Scheduled, ...]) -> "_Prefilled | None":
        """None when no prompt came to its end."""
        sampling: list[Generation] = []
        logits: list[torch.Tensor] = []
        for group, short in self._prefill_groups(prefills):
            batch = self._prefill_batch(group)
            runner = self.runner if self._speculation is None else self._speculation
            logits.append(runner.prefill(batch, short=short))
            sampling += [each.generation for each in group if each.samples]
        for each in prefills:
            each.generation.num_computed += each.num_tokens
        if not sampling:
            return None
        logits_WV, positions = torch.cat(logits), [len(each.tokens) for each in sampling]
        return _Prefilled(sampling, positions, logits_WV, sample(logits_WV, [each.request.params for each in sampling], positions))

    def _prefill_groups(self, prefills: tuple[Scheduled, ...]) -> Iterator[tuple[tuple[Scheduled, ...], bool]]:
        """What runs at once, and whether it is short prompts: few rows at a time, while chunks of long prompts all run together."""
        few_rows = self.runner.few_rows
        group: list[Scheduled] = []
        long_ones = []
        for each in prefills:
            if max(len(each.generation.request.prompt), each.num_tokens) > few_rows:
                long_ones.append(each)
                continue
            if sum(one.num_tokens for one in (*group, each)) > few_rows:
                yield tuple(group), True
                group = []
            group.append(each)
        if group:
            yield tuple(group), True
        if long_ones:
            yield tuple(long_ones), False

    def _read_prefill(self, prefilled: "_Prefilled") -> list[Finished]:
        sampling, choice = prefilled.generations, prefilled.choice
        tokens = choice.tokens_R.tolist()
        logprobs = None if choice.logprobs_R is None else choice.logprobs_R.tolist()
        now = time.perf_counter()
        if self.observer is not None:
            self.observer([each.request for each in sampling], prefilled.positions, prefilled.logits_WV)
        return self._take(sampling, tokens, logprobs, now)

    def _take(self, generations: list[Generation], tokens: list[int], logprobs: list[float] | None, now: float) -> list[Finished]:
        """Append each request's new token; those that this finished."""
        finished = []
        for row_idx, (generation, token) in enumerate(zip(generations, tokens, strict=True)):
            if not generation.blocks:
                continue  # it ended one step ago, and this token is one too many
            generation.num_computed = len(generation.tokens)
            generation.tokens.append(token)
            generation.token_times_s.append(now)
            if logprobs is not None:
                generation.logprobs.append(logprobs[row_idx])
            stopped = token in self._eos and not generation.request.params.ignore_eos
            if stopped or generation.num_left == 0:
                finished.append(self._finish(generation, "stop" if stopped else "length"))
        return finished

    def generate(self, requests: Sequence[Request]) -> list[Finished]:
        """Run requests to their end; results in the order of the requests.

        Raises:
            UsageError: as `add`, or the engine still has requests of its own, whose results would be lost.
        """
        if self.has_work:
            raise UsageError("the engine still has requests of its own; finish them with step() before generate().")
        for request in requests:
            self.add(request)
        finished: dict[str, Finished] = {}
        while self.has_work:
            finished.update((each.id, each) for each in self.step())
        return [finished[request.id] for request in requests]

    def kernel_report(self) -> list[dict[str, Any]]:
        """One row for each linear and phase, then the head and the other ops: which kernel runs for which M, and why no faster one does.

        Keys: layer (None outside layers), linear (fused names joined by "+", or the op), op, scheme, n, k, m_range [min, max], phase
        ("decode" or "prefill"), kernel, refused {faster candidate: reason}.
        """
        return self.runner.kernel_report()

    def _finish(self, generation: Generation, reason: Literal["stop", "length"]) -> Finished:
        request = generation.request
        self._scheduler.finish(generation)
        self._ids.remove(request.id)
        return Finished(
            id=request.id,
            prompt=request.prompt,
            tokens=tuple(generation.generated),
            reason=reason,
            arrival_s=generation.arrival_s,
            token_times_s=tuple(generation.token_times_s),
            logprobs=tuple(generation.logprobs) if request.params.logprobs else None,
        )

    def _prefill_batch(self, prefills: tuple[Scheduled, ...]) -> PrefillBatch:
        block_size = self._block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted_rows: list[int] = []
        for each in prefills:
            generation, start = each.generation, each.generation.num_computed
            span = range(start, start + each.num_tokens)
            tokens += generation.tokens[start : span.stop]
            positions += span
            slots += [generation.blocks[position // block_size] * block_size + position % block_size for position in span]
            if each.samples:
                wanted_rows.append(len(tokens) - 1)
        num_blocks = max(len(each.generation.blocks) for each in prefills)
        table = [each.generation.blocks + [PADDING_BLOCK] * (num_blocks - len(each.generation.blocks)) for each in prefills]
        return PrefillBatch(
            tokens_T=self._tensor(tokens),
            positions_T=self._tensor(positions),
            slots_T=self._tensor(slots),
            block_table_RB=self._tensor(table),
            query_lens=tuple(each.num_tokens for each in prefills),
            context_lens=tuple(each.generation.num_computed + each.num_tokens for each in prefills),
            wanted_rows_W=self._tensor(wanted_rows),
        )

    def _tensor(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

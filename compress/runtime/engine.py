"""The engine: requests in, finished requests out. `step()` = schedule, run, sample, postprocess.

One step serves every running request once: decodes first, then prefill chunks, within a budget of tokens (`scheduler.py`).

While the same requests decode and nobody waits, the host runs one step ahead (`running.py`): `step()` launches the next decode step and
only then reads the tokens of the one before. A token's time is still the time its caller could have had it. A request that turns out to
have ended was then served once more than needed; what that gave is dropped. With `sync` every step ends with its own tokens on the host.

With `speculative` a decode is a verification of proposed tokens (`speculative/`), which gives a request one token or several; blocks for
proposed tokens are taken where any are free, never from another request, and kept until the request ends. Steps run ahead where proposals
are made on the device.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compress.errors import UsageError
from compress.kernels.operands.paged import DENSE_FORMATS, PADDING_BLOCK
from compress.models.arch import Arch
from compress.models.weights import WeightSource
from compress.quant.kv import KV_DENSE
from compress.runtime.decode import DecodeSteps
from compress.runtime.deployment import Deployment
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import BlockAllocator, KVCache, kv_bytes_per_token
from compress.runtime.loader import load_model
from compress.runtime.model_runner import ModelRunner, PrefillBatch
from compress.runtime.request import Finished, Reason, Request
from compress.runtime.running import Launched, Run, Steps
from compress.runtime.sampler import Choice, sample
from compress.runtime.scheduler import Generation, Scheduled, Scheduler
from compress.runtime.speculative.proposer import Pages
from compress.runtime.speculative.speculation import Acceptance, Speculation

Observer = Callable[[Sequence[Request], Sequence[int], torch.Tensor], None]
"""Called with requests, the positions of the tokens just chosen for them, and the logits [R, V] that they were chosen from."""


@dataclass(frozen=True)
class _Prefilled:
    """Prompts whose first tokens are chosen, on the device; to be read like a step."""

    generations: list[Generation]
    logits_WV: torch.Tensor
    choice: Choice

    def wait(self) -> None:
        if self.logits_WV.is_cuda:
            torch.cuda.current_stream(self.logits_WV.device).synchronize()

    def read(self) -> list[list[int]]:
        return self.choice.tokens_R.unsqueeze(1).tolist()  # type: ignore[no-any-return]

    @property
    def logprobs(self) -> list[list[float]] | None:
        return None if self.choice.logprobs_R is None else self.choice.logprobs_R.unsqueeze(1).tolist()

    @property
    def logits(self) -> torch.Tensor:
        return self.logits_WV.unsqueeze(1)


class Engine:
    """A loaded model with its cache and its queue.

    `observer` is called with the logits of every token chosen, in `sync` mode; `wait_s` is the time spent waiting for the device.

    Raises:
        UsageError: the sizes asked for do not fit the model or the cache.
        EnvironmentUnfit: no kernel here serves the checkpoint.
    """

    def __init__(
        self, source: WeightSource, *, device: torch.device, config: EngineConfig | None = None
    ) -> None:
        self.config = config = config if config is not None else EngineConfig()
        self.device = device
        self.arch: Arch = source.arch
        self.dtype = config.dtype_for(source.arch, device)
        deployment = Deployment(
            device, self.dtype, max_batch_size=config.max_batch_size, max_step_tokens=config.max_step_tokens
        )
        weights = load_model(source, deployment)
        self.weight_bytes = weights.weight_bytes
        speculative = config.speculative
        proposer = (
            None
            if speculative is None
            else speculative.build(source.arch, deployment, block_size=config.block_size_on(device))
        )
        stated = config.kv_format if config.kv_format is not None else source.kv_format
        self.kv_format = DENSE_FORMATS[self.dtype] if stated in (None, KV_DENSE) else stated
        self.kv_bytes_per_token = kv_bytes_per_token(self.arch, self.kv_format)
        self._block_size = config.block_size_on(device)
        bytes_per_token = self.kv_bytes_per_token + (
            proposer.kv_bytes_per_token if proposer is not None else 0
        )
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
        self._scheduler = Scheduler(
            BlockAllocator(num_blocks),
            block_size=self._block_size,
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
        )
        self._speculation: Speculation | None = None
        if speculative is not None and proposer is not None:
            pages = Pages(num_blocks, self._block_size, self.max_model_len)
            self._speculation = Speculation(
                speculative, proposer, self.runner, pages, deployment, self._scheduler
            )
        self._steps: Steps = self._speculation or DecodeSteps(
            self.runner,
            self._scheduler,
            max_batch_size=config.max_batch_size,
            max_model_len=self.max_model_len,
            block_size=self._block_size,
            device=device,
        )
        self._run: Run | None = None
        self._eos = frozenset(self.arch.eos_token_ids)
        self.wait_s = 0.0
        self.observer: Observer | None = None
        self._unfinished: dict[str, Generation] = {}

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
        prompt = request.prompt
        length = len(request.prompt) + request.params.max_tokens
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
            raise UsageError(
                f"request '{request.id}' has a token outside 0..{self.arch.vocab_size - 1}: the tokenizer is another model's."
            )
        if request.id in self._unfinished:
            raise UsageError(
                f"request id '{request.id}' is in use by an unfinished request; ids are the caller's to keep apart."
            )
        generation = Generation(request, time.perf_counter(), list(prompt))
        self._unfinished[request.id] = generation
        self._scheduler.add(generation)

    def tokens_of(self, request_id: str, *, start: int = 0) -> list[int]:
        """Return the tokens generated so far for an unfinished request, without the first `start`.

        Call it after `step()` to stream; a request that `step()` returned is finished, and its `Finished` holds all tokens.

        Raises:
            UsageError: no unfinished request has this id.
        """
        generation = self._find(request_id)
        return generation.tokens[len(generation.request.prompt) + start :]

    def cancel(self, request_id: str) -> Finished:
        """Stop an unfinished request, free its blocks and return what it has generated; `reason` is "cancelled".

        The other requests go on with the same tokens. `step()` never returns a cancelled request.

        Raises:
            UsageError: no unfinished request has this id.
        """
        generation = self._find(request_id)
        if self._run is not None:
            self._run.end()
        return self._finish(generation, "cancelled")

    def _find(self, request_id: str) -> Generation:
        generation = self._unfinished.get(request_id)
        if generation is None:
            raise UsageError(f"no unfinished request has the id '{request_id}'.")
        return generation

    def step(self) -> list[Finished]:
        """Serve every running request once; the requests that are known to have finished."""
        if (run := self._run) is None:
            return self._scheduled_step() if self._scheduler.has_work else []
        if not self._scheduler.may_admit and run.launch_next():
            return self._read_oldest(run)
        self._run = None
        finished = self._read_oldest(run)
        return finished + self._scheduled_step() if self._scheduler.has_work else finished

    @torch.inference_mode()
    def _scheduled_step(self) -> list[Finished]:
        step = self._scheduler.schedule()
        run = Run(self._steps, [each.generation for each in step.decodes]) if step.decodes else None
        if run is not None and not step.prefills and self._overlaps:
            self._run = run
            return []
        prefilled = self._launch_prefill(step.prefills) if step.prefills else None
        finished = [] if run is None else self._read_oldest(run)
        return finished if prefilled is None else finished + self._read(prefilled.generations, prefilled)

    @property
    def _overlaps(self) -> bool:
        return (
            self._steps.runs_ahead
            and self.device.type == "cuda"
            and not self.config.sync
            and self.observer is None
        )

    def _read_oldest(self, run: Run) -> list[Finished]:
        finished = self._read(run.generations, run.oldest())
        if finished:
            run.end()
        return finished

    def _read(self, generations: Sequence[Generation], launched: Launched) -> list[Finished]:
        """Take what was launched, once it is there: of each request its tokens, up to its last."""
        started = time.perf_counter()
        launched.wait()
        now = time.perf_counter()
        self.wait_s += now - started
        tokens = launched.read()
        logprobs = launched.logprobs
        finished = list[Finished]()
        lengths = [len(each.tokens) for each in generations] if self.observer is not None else []
        for row_idx, (generation, new) in enumerate(zip(generations, tokens, strict=True)):
            if not generation.blocks:
                continue  # it ended one step ago, and these are too many
            ended = generation.take(new, now, self._eos, None if logprobs is None else logprobs[row_idx])
            if ended is not None:
                finished.append(self._finish(generation, ended))
        if self.observer is not None:
            rows = [
                row_idx
                for row_idx, length in enumerate(lengths)
                for _ in range(len(generations[row_idx].tokens) - length)
            ]
            positions = [
                position
                for length, each in zip(lengths, generations, strict=True)
                for position in range(length, len(each.tokens))
            ]
            places = [position - lengths[row_idx] for row_idx, position in zip(rows, positions, strict=True)]
            self.observer(
                [generations[row_idx].request for row_idx in rows], positions, launched.logits[rows, places]
            )
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
        logits_WV = torch.cat(logits)
        positions = [len(each.tokens) for each in sampling]
        return _Prefilled(
            sampling, logits_WV, sample(logits_WV, [each.request.params for each in sampling], positions)
        )

    def _prefill_groups(
        self, prefills: tuple[Scheduled, ...]
    ) -> Iterator[tuple[tuple[Scheduled, ...], bool]]:
        """What runs at once, and whether it is short prompts: few rows at a time, while chunks of long prompts all run together."""
        short_rows = self.runner.short_prompt_rows
        group: list[Scheduled] = []
        long_ones = []
        for each in prefills:
            if max(len(each.generation.request.prompt), each.num_tokens) > short_rows:
                long_ones.append(each)
                continue
            if sum(one.num_tokens for one in (*group, each)) > short_rows:
                yield tuple(group), True
                group = []
            group.append(each)
        if group:
            yield tuple(group), True
        if long_ones:
            yield tuple(long_ones), False

    def generate(self, requests: Sequence[Request]) -> list[Finished]:
        """Run requests to their end; results in the order of the requests.

        Raises:
            UsageError: as `add`, or the engine still has requests of its own, whose results would be lost.
        """
        if self.has_work:
            raise UsageError(
                "the engine still has requests of its own; finish them with step() before generate()."
            )
        for request in requests:
            self.add(request)
        finished: dict[str, Finished] = {}
        while self.has_work:
            finished.update((each.id, each) for each in self.step())
        return [finished[request.id] for request in requests]

    def kernel_report(self) -> list[dict[str, Any]]:
        """One row for each linear and phase, then the head and the other ops: which kernel runs for which M, and why no faster one does.
        Then the same of a draft model or an EAGLE-3 head, behind "draft ".

        Keys: layer (None outside layers), linear (fused names joined by "+", or the op), op, scheme, n, k, m_range [min, max], phase
        ("decode" or "prefill"), kernel, refused {faster candidate: reason}.
        """
        return self.runner.kernel_report() + (
            [] if self._speculation is None else self._speculation.kernel_report()
        )

    def _finish(self, generation: Generation, reason: Reason) -> Finished:
        request = generation.request
        self._scheduler.finish(generation)
        del self._unfinished[request.id]
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
            generation = each.generation
            start = each.generation.num_computed
            span = range(start, start + each.num_tokens)
            tokens += generation.tokens[start : span.stop]
            positions += span
            slots += [
                generation.blocks[position // block_size] * block_size + position % block_size
                for position in span
            ]
            if each.samples:
                wanted_rows.append(len(tokens) - 1)
        num_blocks = max(len(each.generation.blocks) for each in prefills)
        table = [
            each.generation.blocks + [PADDING_BLOCK] * (num_blocks - len(each.generation.blocks))
            for each in prefills
        ]
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

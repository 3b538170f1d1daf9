"""The engine: requests in, finished requests out. `step()` = schedule, run, sample, postprocess.

One step serves every running request once: decodes first, then prefill chunks, within a budget of tokens (`scheduler.py`). The step ends
when its tokens are on the host, so a token's time is the time its caller could have had it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.weights import WeightSource
from compress.runtime.kv_cache import PADDING_BLOCK, BlockAllocator, KVCache, kv_bytes_per_token
from compress.runtime.loader import Target, load_model
from compress.runtime.model_runner import ForwardBatch, ModelRunner
from compress.runtime.request import Finished, Request
from compress.runtime.sampler import sample
from compress.runtime.scheduler import Generation, Scheduled, Scheduler, Step

CPU_CACHE_BYTES = 256 << 20
GPU_CACHE_FRAC = 0.8
"""Share of the GPU memory that is free after loading; the rest is for activations and logits."""


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine.

    `dtype` None: the checkpoint's on CUDA, float32 on CPU. `max_model_len` None: the model's own limit, or what the cache holds if
    that is less. `kv_cache_bytes` None: 80 % of the free memory on CUDA, 256 MiB on CPU, and never more than a full batch of the longest
    sequences needs. `max_step_tokens` is the budget of one step: longer prompts are prefilled in chunks.

    Raises:
        UsageError: sizes that contradict one another.
    """

    dtype: torch.dtype | None = None
    max_batch_size: int = 8
    max_model_len: int | None = None
    block_size: int = 16
    max_step_tokens: int = 2048
    kv_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or self.max_step_tokens < self.max_batch_size:
            raise UsageError(
                f"max_batch_size is {self.max_batch_size} and max_step_tokens {self.max_step_tokens}; a step must hold one token of each "
                "request of a full batch: max_step_tokens >= max_batch_size >= 1."
            )


class Engine:
    """A loaded model with its cache and its queue.

    Raises:
        UsageError: the sizes asked for do not fit the model or the cache.
        EnvironmentUnfit: no kernel here serves the checkpoint.
    """

    def __init__(self, source: WeightSource, *, device: torch.device, config: EngineConfig | None = None) -> None:
        self.config = config = config if config is not None else EngineConfig()
        self.device = device
        self.arch: Arch = source.arch
        self.dtype = config.dtype if config.dtype is not None else _default_dtype(source.arch, device)
        target = Target(device, self.dtype, max_batch_size=config.max_batch_size, max_step_tokens=config.max_step_tokens)
        weights = load_model(source, target)
        self.weight_bytes = weights.weight_bytes
        self.kv_bytes_per_token = kv_bytes_per_token(self.arch, self.dtype)
        self.max_model_len, num_blocks = _size_cache(self.arch, config, device, bytes_per_token=self.kv_bytes_per_token)
        cache = KVCache(self.arch, num_blocks=num_blocks, block_size=config.block_size, dtype=self.dtype, device=device)
        self.runner = ModelRunner(weights, cache, max_model_len=self.max_model_len)
        self._scheduler = Scheduler(
            BlockAllocator(num_blocks),
            block_size=config.block_size,
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
        )
        self._ids: set[str] = set()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its blocks and was recomputed, since the engine was made."""
        return self._scheduler.num_preemptions

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

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Serve every running request once; the requests that this finished."""
        if not self.has_work:
            return []
        step = self._scheduler.schedule()
        sampling = [each.generation for each in (*step.decodes, *step.prefills) if each.samples]
        logits_RV = self.runner.forward(self._forward_batch(step))
        for each in (*step.decodes, *step.prefills):
            each.generation.num_computed += each.num_tokens
        if not sampling:
            return []
        choice = sample(logits_RV, [each.request.params for each in sampling], [len(each.tokens) for each in sampling])
        tokens = choice.tokens_R.tolist()
        logprobs = [0.0] * len(tokens) if choice.logprobs_R is None else choice.logprobs_R.tolist()
        now = time.perf_counter()
        for generation, token, logprob in zip(sampling, tokens, logprobs, strict=True):
            generation.tokens.append(token)
            generation.token_times_s.append(now)
            generation.logprobs.append(logprob)
        return [finished for generation in sampling if (finished := self._finish(generation)) is not None]

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

    def _finish(self, generation: Generation) -> Finished | None:
        request, tokens = generation.request, tuple(generation.generated)
        stopped = not request.params.ignore_eos and tokens[-1] in self.arch.eos_token_ids
        if not stopped and len(tokens) < request.params.max_tokens:
            return None
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        self._scheduler.finish(generation)
        self._ids.remove(request.id)
        return Finished(
            id=request.id,
            prompt=request.prompt,
            tokens=tokens,
            reason=reason,
            arrival_s=generation.arrival_s,
            token_times_s=tuple(generation.token_times_s),
            logprobs=tuple(generation.logprobs) if request.params.logprobs else None,
        )

    def _forward_batch(self, step: Step) -> ForwardBatch:
        scheduled: tuple[Scheduled, ...] = (*step.decodes, *step.prefills)
        block_size = self.config.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        for each in scheduled:
            generation, start = each.generation, each.generation.num_computed
            span = range(start, start + each.num_tokens)
            tokens += generation.tokens[start : span.stop]
            positions += span
            slots += [generation.blocks[position // block_size] * block_size + position % block_size for position in span]
            if each.samples:
                logit_rows.append(len(tokens) - 1)
        query_lens = tuple(each.num_tokens for each in scheduled)
        context_lens = tuple(each.generation.num_computed + each.num_tokens for each in scheduled)
        num_blocks = max(len(each.generation.blocks) for each in scheduled)
        table = [each.generation.blocks + [PADDING_BLOCK] * (num_blocks - len(each.generation.blocks)) for each in scheduled]
        return ForwardBatch(
            tokens_T=self._tensor(tokens),
            positions_T=self._tensor(positions),
            slot_mapping_T=self._tensor(slots),
            block_table_BM=self._tensor(table),
            context_lens_B=self._tensor(context_lens),
            query_lens=query_lens,
            context_lens=context_lens,
            num_decodes=len(step.decodes),
            logit_rows_R=self._tensor(logit_rows),
        )

    def _tensor(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _default_dtype(arch: Arch, device: torch.device) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, arch.dtype) if device.type == "cuda" else torch.float32
    return dtype


def _size_cache(arch: Arch, config: EngineConfig, device: torch.device, *, bytes_per_token: int) -> tuple[int, int]:
    """Model length and number of blocks, the padding block included."""
    wanted = config.max_model_len if config.max_model_len is not None else arch.max_position
    if not 0 < wanted <= arch.max_position:
        raise UsageError(f"max_model_len is {wanted}; this model has positions 1..{arch.max_position}.")
    limit_bytes = config.kv_cache_bytes
    if limit_bytes is None:
        limit_bytes = int(torch.cuda.mem_get_info(device)[0] * GPU_CACHE_FRAC) if device.type == "cuda" else CPU_CACHE_BYTES
    affordable = limit_bytes // (bytes_per_token * config.block_size) - 1
    sequence_blocks = -(-wanted // config.block_size)
    if affordable < (sequence_blocks if config.max_model_len is not None else 1):
        raise UsageError(
            f"a KV cache of {limit_bytes} bytes holds {max(affordable, 0) * config.block_size} positions of {bytes_per_token} bytes, "
            f"fewer than one sequence of {wanted} tokens. Raise kv_cache_bytes or lower max_model_len."
        )
    num_blocks = min(affordable, config.max_batch_size * sequence_blocks)
    return min(wanted, num_blocks * config.block_size), num_blocks + 1

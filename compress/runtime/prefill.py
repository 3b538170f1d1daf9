"""Prefill: the prompt chunks of a step as ragged batches, and the first token of each finished prompt."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compress.kernels.operands.paged import PADDING_BLOCK
from compress.kernels.step.host_memory import received, sent
from compress.runtime.batch import LATER_TOKENS, PrefillBatch, slots_of
from compress.runtime.decode_run import FirstTokens, HostResults
from compress.runtime.generation import Generation
from compress.runtime.sampler import SampledTokens, sample
from compress.runtime.scheduled import PrefillChunk


@dataclass(frozen=True)
class PrefilledTokens:
    """The pending first tokens of prompts, one for each of `generations`."""

    generations: list[Generation]
    logits_WV: Tensor
    sampled: SampledTokens
    results: HostResults

    @property
    def firsts(self) -> FirstTokens:
        """The tokens on the device."""
        return FirstTokens(self.generations, self.sampled.tokens_R)

    def wait(self) -> None:
        """Wait until the device has chosen the tokens."""
        self.results.wait()

    def read(self) -> list[list[int]]:
        """Return one token for each request."""
        return [[token] for token in self.results.tokens.tolist()]

    @property
    def logprobs(self) -> list[list[float]] | None:
        """Log probabilities of the tokens, or None where no request wants them."""
        if self.sampled.logprobs_R is None:
            return None
        return [[logprob] for logprob in self.results.logprobs.tolist()]

    @property
    def logits(self) -> Tensor:
        """Logits [R, 1, V]."""
        return self.logits_WV.unsqueeze(1)


class Prefill:
    """Launches the prefill chunks of a step.

    `run(batch, short=...)` returns the logits [W, V] of a batch (`ModelRunner.prefill`). A prompt of at most
    `short_prompt_rows` tokens is short: short prompts run in batches of at most as many rows, with the bits
    that each has alone. Chunks of long prompts all run in one batch, whose bits depend on its rows, and which
    counts as short where they are so few: what follows a cached prefix, or ends a prompt.
    """

    def __init__(
        self,
        run: Callable[..., Tensor],
        *,
        block_size: int,
        short_prompt_rows: int,
        device: torch.device,
    ) -> None:
        self._run = run
        self._block_size = block_size
        self._short_prompt_rows = short_prompt_rows
        self._device = device

    def launch(self, chunks: Sequence[PrefillChunk]) -> PrefilledTokens | None:
        """Prefill these chunks; return the first tokens of the prompts that they complete, or None if there
        are none.
        """
        generations: list[Generation] = []
        passes: list[tuple[PrefillBatch, bool]] = []
        for group, short in self._groups(chunks):
            passes.append((self._batch(group), short))
            generations += [one for each in group if each.is_last for one in each.generations]
        prefilled = self._compute(passes, generations)
        for each in chunks:
            for generation in each.generations:
                generation.num_computed += each.num_tokens
        for generation in generations:
            generation.num_pending += 1
        return prefilled

    def _compute(
        self, passes: Sequence[tuple[PrefillBatch, bool]], generations: list[Generation]
    ) -> PrefilledTokens | None:
        """Have the device run the passes and choose the tokens of the requests whose prompts end in them."""
        logits = [self._run(batch, short=short) for batch, short in passes]
        if not generations:
            return None
        logits_WV = torch.cat(logits)
        params = [each.request.params for each in generations]
        sampled = sample(logits_WV, params, [len(each.tokens) for each in generations])
        tokens_R = received(sampled.tokens_R)
        logprobs_R = tokens_R if sampled.logprobs_R is None else received(sampled.logprobs_R)
        results = HostResults(tokens_R, logprobs_R, torch.cuda.Event() if logits_WV.is_cuda else None)
        results.record()
        return PrefilledTokens(generations, logits_WV, sampled, results)

    def _groups(self, chunks: Sequence[PrefillChunk]) -> Iterator[tuple[Sequence[PrefillChunk], bool]]:
        """Yield the chunks of each batch, and whether it is short."""
        short: list[PrefillChunk] = []
        long: list[PrefillChunk] = []
        for each in chunks:
            if max(len(each.generation.request.prompt), each.num_tokens) > self._short_prompt_rows:
                long.append(each)
                continue
            if sum(one.num_tokens for one in (*short, each)) > self._short_prompt_rows:
                yield short, True
                short = []
            short.append(each)
        if short:
            yield short, True
        if long:
            yield long, sum(each.num_tokens for each in long) <= self._short_prompt_rows

    def _batch(self, chunks: Sequence[PrefillChunk]) -> PrefillBatch:
        """Return the ragged batch of these chunks, on the device."""
        tokens: list[int] = []
        positions: list[Tensor] = []
        slots: list[Tensor] = []
        wanted_rows: list[int] = []
        next_tokens: list[tuple[int, ...]] = []
        tables: list[Tensor] = []
        for each in chunks:
            generation = each.generation
            start = generation.num_computed
            stop = start + each.num_tokens
            tokens += generation.tokens[start:stop]
            next_tokens.append(tuple(generation.tokens[stop : stop + LATER_TOKENS]))
            positions.append(torch.arange(start, stop))
            tables.append(torch.tensor(generation.blocks))
            slots.append(slots_of(positions[-1], tables[-1], self._block_size))
            if each.is_last:
                wanted_rows += [len(tokens) - 1] * len(each.generations)
        table_RB = pad_sequence(tables, batch_first=True, padding_value=PADDING_BLOCK)
        tokens_T = torch.from_numpy(np.array(tokens, np.int64))  # quicker than `torch.tensor`
        return PrefillBatch(
            tokens_T=self._sent(tokens_T),
            positions_T=self._sent(torch.cat(positions)),
            slots_T=self._sent(torch.cat(slots)),
            block_table_RB=self._sent(table_RB),
            query_lens=tuple(each.num_tokens for each in chunks),
            context_lens=tuple(each.generation.num_computed + each.num_tokens for each in chunks),
            wanted_rows_W=self._sent(torch.tensor(wanted_rows, dtype=torch.int64)),
            next_tokens=tuple(next_tokens),
        )

    def _sent(self, tensor: Tensor) -> Tensor:
        return sent(tensor, self._device)

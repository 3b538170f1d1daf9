"""Plain decoding: one token for every running request and step, as one graph launch on CUDA.

    step:  logits = runner.decode(state.begin());  tokens = sample(logits);  state.end(tokens)

All that a step reads is on the device, and it ends by writing what the next step reads
(`kernels/step/decode.py`). So steps follow one another without the host, and one graph serves every step of
as many rows (`graphs.py`): for the host a step is one launch and one event. The host writes only when
requests come or go (`DecodeState.load`), and when a sequence enters a new block (`set_next_block`). It need
not have the last tokens for that: a row takes its token from the row that its request had before, or from
the first tokens of the prompts that were just prefilled.

Padding rows fill a batch up to the size of a graph: a context of one token that never grows, in the padding
block.

Shapes: R rows of a step, S rows of the state, D hidden, V vocabulary, B blocks of the longest sequence and
one more, for the step after the last one of a request.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.kernels.operands.paged import PADDING_BLOCK, SHORT_CONTEXT
from compress.kernels.step.decode import DecodeBuffers, begin_step, end_step
from compress.kernels.step.host_memory import host_visible
from compress.runtime.decode_run import FirstTokens, HostResults, host_results
from compress.runtime.generation import Generation
from compress.runtime.graphs import Graphs, positions_of_graph
from compress.runtime.model_runner import ModelRunner
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import SampledTokens, SamplingPlan, SamplingRows, sample_rows
from compress.runtime.scheduler import Scheduler


class DecodeState:
    """The device state of decode steps: for at most `max_rows` requests the next token, context, blocks and
    sampling parameters.

    `results[n % 2]` are those of step n, of all that were launched.
    """

    def __init__(self, *, max_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self._block_size = block_size
        self._device = device
        self._loaded = LoadedRows(max_rows, -(-max_model_len // block_size) + 1, device)
        facts = self._loaded.facts
        self._buffers = DecodeBuffers(
            tokens_S=torch.zeros(max_rows, dtype=torch.int64, device=device),
            context_lens_S=facts[_CONTEXT, :max_rows],
            running_S=facts[_RUNNING, :max_rows],
            block_table_SB=self._loaded.table_SB,
            num_steps=facts[_STEPS, :1],
            next_block_S=host_visible(max_rows, dtype=torch.int64, device=device),
            host_tokens_2S=host_visible(2, max_rows, dtype=torch.int64, device=device),
            host_logprobs_2S=host_visible(2, max_rows, dtype=torch.float32, device=device),
        )
        self.results = host_results(self._buffers.host_tokens_2S, self._buffers.host_logprobs_2S, device)
        next_block_S = self._buffers.next_block_S
        # The host writes an entry ten times faster through numpy.
        self._next_block: Any = next_block_S if next_block_S.is_cuda else next_block_S.numpy()
        self._sampling = SamplingRows.of((), device, pad_to=max_rows)
        self._params: list[SamplingParams] = []
        self.load(())

    def load(
        self,
        generations: Sequence[Generation],
        *,
        sources: Sequence[int] = (),
        firsts_W: Tensor | None = None,
        num_steps: int = 0,
    ) -> None:
        """Assign rows 0, 1, ... to these requests and make the others padding; `num_steps` were launched so
        far. All but the last one have been read.

        Row r takes the last token that the host has of its request or, where there are `sources`, entry
        `sources[r]` of: the tokens that the host has of the rows, the tokens of the rows before this call,
        and `firsts_W`.
        """
        self._loaded.fill(generations, sources, num_steps)
        params = [each.request.params for each in generations]
        sampling: SamplingRows | None = None
        if params != self._params and SamplingPlan.of(params).draws:  # nothing else reads them
            self._params = params
            sampling = SamplingRows.of(params, self._device, pad_to=self.max_rows)
        self._send(firsts_W if sources else None, sampling, gathers=bool(sources))

    def _send(self, firsts_W: Tensor | None, sampling: SamplingRows | None, *, gathers: bool) -> None:
        """Have the device take the rows that the host has filled in, and sampling parameters if given."""
        tokens_S = self._buffers.tokens_S
        self._loaded.send()
        if sampling is not None:
            self._sampling.copy_(sampling)
        known_S = self._loaded.facts[_TOKEN, : self.max_rows]
        if not gathers:
            tokens_S.copy_(known_S)
            return
        choices = torch.cat((known_S, tokens_S) if firsts_W is None else (known_S, tokens_S, firsts_W))
        torch.index_select(choices, 0, self._loaded.facts[_SOURCE, : self.max_rows], out=tokens_S)

    @contextmanager
    def only_padding(self) -> Iterator[None]:
        """Make every row padding, so that warm-up steps change no request. `load` must follow."""
        self.load(())
        yield

    def set_next_block(self, row_idx: int, block: int) -> None:
        """Set the block that a running row enters with the next step launched. It entered the last one a
        block of steps ago.
        """
        self._next_block[row_idx] = block

    def begin(
        self, num_rows: int, embed_VD: Tensor, *, max_blocks: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Begin a step of the first rows; return its embeddings, positions, slots, block table and context
        lengths. The table has the first `max_blocks` columns, or all.
        """
        buffers = self._buffers
        x_RD, positions_R, slots_R = begin_step(buffers, num_rows, embed_VD, block_size=self._block_size)
        return (
            x_RD,
            positions_R,
            slots_R,
            buffers.block_table_SB[:num_rows, :max_blocks],
            buffers.context_lens_S[:num_rows],
        )

    def end(self, sampled: SampledTokens) -> None:
        """End a step that chose these tokens."""
        end_step(self._buffers, sampled.tokens_R, sampled.logprobs_R)

    def sampling(self, num_rows: int) -> SamplingRows:
        """Return the sampling parameters of the first rows."""
        return self._sampling.first(num_rows)


MIN_ROWS_BY_LENGTH = 32
"""Rows from which steps of short contexts have graphs of their own: attention of fewer is spread alike for
every length."""
_TOKEN, _SOURCE, _CONTEXT, _RUNNING, _STEPS = range(5)
"""The rows of facts: the token that the host has, where to take the token from, the context length, whether
a request is there; and in the first column, the number of steps launched."""
_ALIGNMENT = 16


class LoadedRows:
    """The rows of a state on the device, and on the host in memory from which the device takes them while the
    host goes on: `facts` [5, S or more] and block table [S, B].
    """

    def __init__(self, max_rows: int, num_columns: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        shapes = (5, -(-max_rows // _ALIGNMENT) * _ALIGNMENT), (max_rows, num_columns)
        self.facts, self.table_SB = (torch.zeros(each, dtype=torch.int64, device=device) for each in shapes)
        self._host_facts, self._host_table_SB = (
            torch.zeros(each, dtype=torch.int64, pin_memory=on_cuda) for each in shapes
        )
        self._sent = torch.cuda.Event() if on_cuda else None

    def fill(self, generations: Sequence[Generation], sources: Sequence[int], num_steps: int) -> None:
        """Fill in the rows of these requests, and padding after them. Waits for the last `send`, which comes
        before a step that has been read.
        """
        if self._sent is not None:
            self._sent.synchronize()
        facts: Any = self._host_facts.numpy()
        table_SB: Any = self._host_table_SB.numpy()
        facts[:] = [[0], [0], [1], [0], [num_steps]]
        table_SB[:] = PADDING_BLOCK
        if not generations:
            return
        facts[:_STEPS, : len(generations)] = [
            [each.tokens[-1] for each in generations],
            sources or [0] * len(generations),
            [each.length for each in generations],
            [1] * len(generations),
        ]
        counts_R = np.array([len(each.blocks) for each in generations])
        rows_N = np.repeat(np.arange(len(generations)), counts_R)
        columns_N = np.arange(len(rows_N)) - np.repeat(counts_R.cumsum() - counts_R, counts_R)
        table_SB[rows_N, columns_N] = list(chain.from_iterable(each.blocks for each in generations))

    def send(self) -> None:
        """Have the device take what is filled in, after all that was launched before."""
        self.facts.copy_(self._host_facts, non_blocking=True)
        self.table_SB.copy_(self._host_table_SB, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


@dataclass(frozen=True)
class DecodedTokens:
    """The pending tokens of a plain decode step: one for each of `num_rows` requests."""

    num_rows: int
    has_logprobs: bool
    logits_SV: Tensor
    results: HostResults

    def wait(self) -> None:
        """Wait until the device has chosen the tokens."""
        self.results.wait()

    def read(self) -> list[list[int]]:
        """Return one token for each request."""
        return [[token] for token in self.results.tokens.tolist()[: self.num_rows]]

    @property
    def logprobs(self) -> list[list[float]] | None:
        """Log probabilities of the tokens, or None where no request wants them."""
        if not self.has_logprobs:
            return None
        return [[logprob] for logprob in self.results.logprobs.tolist()[: self.num_rows]]

    @property
    def logits(self) -> Tensor:
        """Logits [R, 1, V], until the next step is launched."""
        return self.logits_SV[: self.num_rows].unsqueeze(1)


class PlainDecoding:
    """Launches plain decode steps of at most `max_batch_size` requests over one state."""

    runs_ahead = True

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        max_batch_size: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._graphs: Graphs[Tensor] = Graphs(device, max_batch_size)
        self._state = DecodeState(
            max_rows=self._graphs.max_rows,
            max_model_len=max_model_len,
            block_size=block_size,
            device=device,
        )
        self._generations: Sequence[Generation] = ()
        self._plan = SamplingPlan.of(())
        self._rows_entering: dict[int, list[int]] = {}
        """Rows that enter a new block with step n of the run, by n modulo the block size."""
        self._max_steps = 0
        """The number of steps of the run after which some request has all its tokens, or a context that is
        too long for the graph."""
        self._num_of_run = 0
        self._num_launched = 0
        self._run_step: Callable[[], Tensor]

    def may_load_ahead(self, generations: Sequence[Generation]) -> bool:
        """Return whether a run of these requests needs no new graph: what is run before a graph is captured
        overwrites the tokens of the last step.
        """
        return self._graphs.has(self._key(generations))

    def load(self, generations: Sequence[Generation], firsts: FirstTokens | None = None) -> None:
        """Begin a run of steps of these requests. The caller has read every earlier step, or all but the last
        one where `may_load_ahead`; `firsts` are the first tokens that the last one chose.
        """
        sources = self._sources(generations, firsts)
        self._generations = generations
        self._num_of_run = 0
        self._max_steps = min(each.end - each.length for each in generations)
        num_rows, max_blocks, self._plan = key = self._key(generations)
        if max_blocks is not None:
            longest = max(each.length for each in generations)
            self._max_steps = min(self._max_steps, max_blocks * self._block_size - longest)
        self._rows_entering = {}
        for row_idx, each in enumerate(generations):
            step = (len(each.blocks) * self._block_size - each.length + 1) % self._block_size
            self._rows_entering.setdefault(step, []).append(row_idx)
        plan = self._plan
        self._run_step = self._graphs.prepare(
            key, lambda: self._step(num_rows, max_blocks, plan), set_aside=self._state.only_padding
        )
        self._state.load(
            generations,
            sources=sources,
            firsts_W=None if firsts is None else firsts.tokens_W,
            num_steps=self._num_launched,
        )

    def make_ready(self) -> bool:
        """Take the blocks that rows enter with one more step; return False if a request ends before or no
        block is free.
        """
        if self._num_of_run >= self._max_steps:
            return False
        for row_idx in self._rows_entering.get(self._num_of_run % self._block_size, ()):
            generation = self._generations[row_idx]
            if not self._scheduler.extend(generation, generation.length):
                return False
            self._state.set_next_block(row_idx, generation.blocks[-1])
        return True

    def launch(self) -> DecodedTokens:
        """Launch one step of the loaded requests."""
        self._num_of_run += 1
        self._num_launched += 1
        results = self._state.results[self._num_launched % 2]
        logits_SV = self._run_step()
        results.record()
        for each in self._generations:
            each.num_pending += 1
            each.num_computed += 1
        return DecodedTokens(len(self._generations), self._plan.logprobs, logits_SV, results)

    def _key(self, generations: Sequence[Generation]) -> tuple[int, int | None, SamplingPlan]:
        """Return the number of rows of a graph, of blocks of a context of it, None for as many as a sequence
        may have, and the plan."""
        plan = SamplingPlan.of([each.request.params for each in generations])
        num_rows = self._graphs.num_rows(len(generations))
        longest = max((each.length for each in generations), default=0)
        most = positions_of_graph(longest + 1)
        if num_rows >= MIN_ROWS_BY_LENGTH and longest < SHORT_CONTEXT:
            most = SHORT_CONTEXT
        return num_rows, most // self._block_size if most < self._max_model_len else None, plan

    def _sources(self, generations: Sequence[Generation], firsts: FirstTokens | None) -> list[int]:
        """Return where each row takes its token from, as `DecodeState.load` counts the places; nothing if the
        host has all tokens.
        """
        if not any(each.num_pending for each in generations):
            return []
        size = self._state.max_rows
        places = {each: size + row_idx for row_idx, each in enumerate(self._generations)}
        if firsts is not None:
            places |= {each: 2 * size + idx for idx, each in enumerate(firsts.generations)}
        return [places[each] if each.num_pending else row_idx for row_idx, each in enumerate(generations)]

    @torch.inference_mode()
    def _step(self, num_rows: int, max_blocks: int | None, plan: SamplingPlan) -> Tensor:
        """Run one step; return its logits [R, V]."""
        state = self._state
        x_RD, positions_R, slots_R, table_RB, context_lens_R = state.begin(
            num_rows, self._runner.embedding, max_blocks=max_blocks
        )
        logits_RV = self._runner.decode(x_RD, positions_R, slots_R, table_RB, context_lens_R)
        state.end(sample_rows(logits_RV, state.sampling(num_rows), context_lens_R, plan))
        return logits_RV

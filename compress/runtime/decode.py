"""Plain decoding: one token for every running request and step, as one graph launch on CUDA.

    step:  logits = runner.decode(state.begin());  tokens = sample(logits);  state.end(tokens)

All that a step reads is on the device, and it ends by writing what the next step reads
(`kernels/step/decode.py`). So steps follow one another without the host, and one graph serves every step of
as many rows (`graphs.py`): for the host a step is one launch and one event. The host writes only when
requests come or go (`DecodeState.load`), and when a sequence enters a new block (`set_next_block`).

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

from compress.kernels.operands.paged import PADDING_BLOCK
from compress.kernels.step.decode import DecodeBuffers, begin_step, end_step
from compress.kernels.step.host_memory import host_visible
from compress.runtime.decode_run import HostResults, host_results
from compress.runtime.generation import Generation
from compress.runtime.graphs import Graphs
from compress.runtime.model_runner import ModelRunner
from compress.runtime.sampler import SampledTokens, SamplingPlan, SamplingRows, sample_rows
from compress.runtime.scheduler import Scheduler


class DecodeState:
    """The device state of decode steps: for at most `max_rows` requests the next token, context, blocks and
    sampling parameters.

    `results[n % 2]` are those of step n since `load`.
    """

    def __init__(self, *, max_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self._block_size = block_size
        self._device = device
        num_columns = -(-max_model_len // block_size) + 1

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._buffers = DecodeBuffers(
            tokens_S=zeros(max_rows),
            context_lens_S=zeros(max_rows) + 1,
            running_S=zeros(max_rows),
            block_table_SB=zeros(max_rows, num_columns) + PADDING_BLOCK,
            num_steps=zeros(1),
            next_block_S=host_visible(max_rows, dtype=torch.int64, device=device),
            host_tokens_2S=host_visible(2, max_rows, dtype=torch.int64, device=device),
            host_logprobs_2S=host_visible(2, max_rows, dtype=torch.float32, device=device),
        )
        self.results = host_results(self._buffers.host_tokens_2S, self._buffers.host_logprobs_2S, device)
        next_block_S = self._buffers.next_block_S
        # The host writes an entry ten times faster through numpy.
        self._next_block: Any = next_block_S if next_block_S.is_cuda else next_block_S.numpy()
        self._loaded = LoadedRows(max_rows, num_columns, device)
        self._sampling = self._sampling_rows(())

    def load(self, generations: Sequence[Generation]) -> None:
        """Assign rows 0, 1, ... to these requests and make the others padding. The device must have finished
        all earlier steps.
        """
        self._loaded.send(generations, self._buffers)
        self._buffers.num_steps.zero_()
        for row_idx, each in enumerate(generations):
            self._next_block[row_idx] = each.blocks[(len(each.tokens) - 1) // self._block_size]
        self._sampling.copy_(self._sampling_rows(generations))

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

    def begin(self, num_rows: int, embed_VD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Begin a step of the first rows; return its embeddings, positions, slots, block table and context
        lengths.
        """
        buffers = self._buffers
        x_RD, positions_R, slots_R = begin_step(buffers, num_rows, embed_VD, block_size=self._block_size)
        return (
            x_RD,
            positions_R,
            slots_R,
            buffers.block_table_SB[:num_rows],
            buffers.context_lens_S[:num_rows],
        )

    def end(self, sampled: SampledTokens) -> None:
        """End a step that chose these tokens."""
        end_step(self._buffers, sampled.tokens_R, sampled.logprobs_R)

    def sampling(self, num_rows: int) -> SamplingRows:
        """Return the sampling parameters of the first rows."""
        return self._sampling.first(num_rows)

    def _sampling_rows(self, generations: Sequence[Generation]) -> SamplingRows:
        params = [each.request.params for each in generations]
        return SamplingRows.of(params, self._device, pad_to=self.max_rows)


class LoadedRows:
    """The rows of a state on the host, in memory from which the device takes them while the host goes on."""

    def __init__(self, max_rows: int, num_columns: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._facts_3S = torch.zeros(3, max_rows, dtype=torch.int64, pin_memory=on_cuda)
        self._table_SB = torch.zeros(max_rows, num_columns, dtype=torch.int64, pin_memory=on_cuda)
        self._sent = torch.cuda.Event() if on_cuda else None

    def send(self, generations: Sequence[Generation], buffers: DecodeBuffers) -> None:
        """Bring the rows of these requests, and padding after them, to the buffers."""
        if self._sent is not None:
            self._sent.synchronize()
        facts_3S: Any = self._facts_3S.numpy()
        table_SB: Any = self._table_SB.numpy()
        facts_3S[:] = [[0], [1], [0]]
        table_SB[:] = PADDING_BLOCK
        if generations:
            facts_3S[:, : len(generations)] = [
                [each.tokens[-1] for each in generations],
                [len(each.tokens) for each in generations],
                [1] * len(generations),
            ]
            counts_R = np.array([len(each.blocks) for each in generations])
            rows_N = np.repeat(np.arange(len(generations)), counts_R)
            columns_N = np.arange(len(rows_N)) - np.repeat(counts_R.cumsum() - counts_R, counts_R)
            table_SB[rows_N, columns_N] = list(chain.from_iterable(each.blocks for each in generations))
        tokens_S, context_lens_S, running_S = self._facts_3S
        buffers.tokens_S.copy_(tokens_S, non_blocking=True)
        buffers.context_lens_S.copy_(context_lens_S, non_blocking=True)
        buffers.running_S.copy_(running_S, non_blocking=True)
        buffers.block_table_SB.copy_(self._table_SB, non_blocking=True)
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
        """The number of steps of the run after which some request has all its tokens."""
        self._num_launched = 0
        self._run_step: Callable[[], Tensor]

    def load(self, generations: Sequence[Generation]) -> None:
        """Begin a run of steps of these requests. The caller has waited for every earlier step."""
        self._generations = generations
        self._num_launched = 0
        self._max_steps = min(each.num_left for each in generations)
        self._rows_entering = {}
        for row_idx, each in enumerate(generations):
            step = (len(each.blocks) * self._block_size - len(each.tokens) + 1) % self._block_size
            self._rows_entering.setdefault(step, []).append(row_idx)
        plan = SamplingPlan.of([each.request.params for each in generations])
        num_rows = self._graphs.num_rows(len(generations))
        self._plan = plan
        self._run_step = self._graphs.prepare(
            (num_rows, plan), lambda: self._step(num_rows, plan), set_aside=self._state.only_padding
        )
        self._state.load(generations)

    def make_ready(self) -> bool:
        """Take the blocks that rows enter with one more step; return False if a request ends before or no
        block is free.
        """
        if self._num_launched >= self._max_steps:
            return False
        for row_idx in self._rows_entering.get(self._num_launched % self._block_size, ()):
            generation = self._generations[row_idx]
            if not self._scheduler.extend(generation, len(generation.tokens) + 1):
                return False
            self._state.set_next_block(row_idx, generation.blocks[-1])
        return True

    def launch(self) -> DecodedTokens:
        """Launch one step of the loaded requests."""
        self._num_launched += 1
        results = self._state.results[self._num_launched % 2]
        logits_SV = self._run_step()
        results.record()
        return DecodedTokens(len(self._generations), self._plan.logprobs, logits_SV, results)

    @torch.inference_mode()
    def _step(self, num_rows: int, plan: SamplingPlan) -> Tensor:
        """Run one step; return its logits [R, V]."""
        state = self._state
        x_RD, positions_R, slots_R, table_RB, context_lens_R = state.begin(num_rows, self._runner.embedding)
        logits_RV = self._runner.decode(x_RD, positions_R, slots_R, table_RB, context_lens_R)
        state.end(sample_rows(logits_RV, state.sampling(num_rows), context_lens_R, plan))
        return logits_RV

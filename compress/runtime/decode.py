"""Decode steps: one token for every running request, as one graph launch on CUDA.

    step:  logits = runner.decode(state);  tokens = sample(logits);  state.advance(tokens)

On CUDA a step of R rows is captured once as a graph for the next size above R, sampler and state advance inside; replaying it costs the
host one launch and moves nothing to the device. Tokens come back through pinned memory, in two slots, so that a step may be launched
before the last one's tokens were read. Elsewhere a step runs as it is written.

Capturing follows a warm-up of the same step, in which kernels are compiled and tuned, on filler rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.runtime.decode_state import DecodeRow, DecodeState
from compress.runtime.model_runner import ModelRunner
from compress.runtime.sampler import Choice, SamplingPlan, sample_rows

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_WARMUPS = 2


@dataclass(frozen=True)
class Launched:
    """A step on its way. `tokens` and `logprobs` may be read after `wait`."""

    num_rows: int
    logits_RV: Tensor
    host_tokens_R: Tensor
    host_logprobs_R: Tensor | None
    done: torch.cuda.Event | None

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    @property
    def tokens(self) -> list[int]:
        return self.host_tokens_R.tolist()

    @property
    def logprobs(self) -> list[float] | None:
        return None if self.host_logprobs_R is None else self.host_logprobs_R.tolist()


@dataclass(frozen=True)
class _Step:
    """A captured step: its graph and the tensors that a replay fills."""

    graph: torch.cuda.CUDAGraph
    logits_RV: Tensor
    choice: Choice


@dataclass(frozen=True)
class _Landing:
    """Where a step's tokens arrive on the host, and the event that says they have."""

    tokens_R: Tensor
    logprobs_R: Tensor
    done: torch.cuda.Event | None

    @staticmethod
    def of(max_rows: int, *, graphed: bool) -> "_Landing":
        tokens_R = torch.zeros(max_rows, dtype=torch.int64, pin_memory=graphed)
        return _Landing(tokens_R, torch.zeros(max_rows, dtype=torch.float32, pin_memory=graphed), torch.cuda.Event() if graphed else None)


class DecodeSteps:
    """Runs decode steps of at most `max_batch_size` rows over one state."""

    def __init__(self, runner: ModelRunner, *, max_batch_size: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._runner = runner
        self._device = device
        self._graphed = device.type == "cuda"
        self._sizes = [size for size in GRAPH_SIZES if size < max_batch_size] + [_graph_size(max_batch_size)]
        max_rows = self._sizes[-1] if self._graphed else max_batch_size
        self._state = DecodeState(max_rows=max_rows, max_model_len=max_model_len, block_size=block_size, device=device)
        self._graphs: dict[tuple[int, SamplingPlan], _Step] = {}
        self._pool: Any = None
        self._plan = SamplingPlan.of(())
        self._num_rows = 0
        self._landings = [_Landing.of(max_rows, graphed=self._graphed) for _ in range(2)]

    def load(self, rows: Sequence[DecodeRow]) -> None:
        """Begin a run of steps over these requests; every earlier step has been waited for."""
        self._num_rows, self._plan = len(rows), SamplingPlan.of([row.params for row in rows])
        if self._graphed and (self._size, self._plan) not in self._graphs:
            self._graphs[self._size, self._plan] = self._capture(self._size, self._plan)
        self._state.load(rows)

    def append_block(self, row_idx: int, block_idx: int, block: int) -> None:
        self._state.append_block(row_idx, block_idx, block)

    def launch(self) -> Launched:
        """One step of the loaded rows."""
        if self._graphed:
            step = self._graphs[self._size, self._plan]
            step.graph.replay()
            logits_RV, choice = step.logits_RV, step.choice
        else:
            logits_RV, choice = self._step(self._num_rows, self._plan)
        return self._fetch(logits_RV, choice)

    @property
    def _size(self) -> int:
        return next(size for size in self._sizes if size >= self._num_rows)

    def _step(self, num_rows: int, plan: SamplingPlan) -> tuple[Tensor, Choice]:
        state = self._state
        positions_R, slots_R = state.positions(num_rows)
        context_lens_R, table_RB = state.context_lens_R[:num_rows], state.block_table_RB[:num_rows]
        logits_RV = self._runner.decode(state.tokens_R[:num_rows], positions_R, slots_R, table_RB, context_lens_R)
        choice = sample_rows(logits_RV, state.sampling(num_rows), context_lens_R, plan)
        state.advance_(choice.tokens_R)
        return logits_RV, choice

    def _fetch(self, logits_RV: Tensor, choice: Choice) -> Launched:
        rows, landing = slice(0, self._num_rows), self._landings[0]
        self._landings.reverse()
        host_tokens_R = landing.tokens_R[rows].copy_(choice.tokens_R[rows], non_blocking=True)
        host_logprobs_R = None
        if choice.logprobs_R is not None:
            host_logprobs_R = landing.logprobs_R[rows].copy_(choice.logprobs_R[rows], non_blocking=True)
        if landing.done is not None:
            landing.done.record()
        return Launched(self._num_rows, logits_RV[rows], host_tokens_R, host_logprobs_R, landing.done)

    def _capture(self, num_rows: int, plan: SamplingPlan) -> _Step:
        self._state.clear()
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        step = partial(self._step, num_rows, plan)
        with torch.cuda.stream(stream):
            for _ in range(_WARMUPS):
                step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits_RV, choice = step()
        self._pool = self._pool or graph.pool()
        return _Step(graph, logits_RV, choice)


def _graph_size(num_rows: int) -> int:
    """The least size of a graph that holds so many rows; above the largest, whole multiples of it."""
    largest = GRAPH_SIZES[-1]
    return next((size for size in GRAPH_SIZES if size >= num_rows), -(-num_rows // largest) * largest)

"""Decode steps: one token for every running request, as one graph launch on CUDA.

    step:  logits = runner.decode(state.begin());  tokens = sample(logits);  state.end(tokens)

On CUDA a step of R rows is captured once as a graph for the next size above R, state and sampler inside. The graph's kernels leave the
tokens in the host's memory, in two places in turn, so that a step may be launched before the last one's tokens were read: for the host a
step is one launch and one event. Elsewhere a step runs as it is written.

Capturing follows a warm-up of the same step, in which kernels are compiled and tuned, on filler rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.runtime.decode_state import DecodeRow, DecodeState
from compress.runtime.model_runner import ModelRunner
from compress.runtime.sampler import SamplingPlan, sample_rows
from compress.runtime.scheduler import Generation, Scheduler

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_WARMUPS = 2


@dataclass(frozen=True)
class _Landing:
    """Where a step's tokens [S] and log probabilities [S] arrive on the host, and the event that says they have."""

    tokens_S: Tensor
    logprobs_S: Tensor
    done: torch.cuda.Event | None


@dataclass(frozen=True)
class _Step:
    """A step's outputs: of a captured one, the tensors that a replay of its graph fills."""

    logits_SV: Tensor
    graph: torch.cuda.CUDAGraph | None = None


@dataclass(frozen=True)
class DecodeStep:
    """A step on its way. After `wait`, and until two more steps were launched, the rest may be read."""

    num_rows: int
    has_logprobs: bool
    step: _Step
    landing: _Landing

    def wait(self) -> None:
        if self.landing.done is not None:
            self.landing.done.synchronize()

    def read(self) -> list[list[int]]:
        """One token of each row."""
        return [[token] for token in self.landing.tokens_S.tolist()[: self.num_rows]]

    @property
    def logprobs(self) -> list[list[float]] | None:
        return (
            [[logprob] for logprob in self.landing.logprobs_S.tolist()[: self.num_rows]]
            if self.has_logprobs
            else None
        )

    @property
    def logits(self) -> Tensor:
        """[R, 1, V]."""
        return self.step.logits_SV[: self.num_rows].unsqueeze(1)


class DecodeSteps:
    """Runs decode steps of at most `max_batch_size` rows over one state."""

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
        self._device = device
        self._graphed = device.type == "cuda"
        self._sizes = [size for size in GRAPH_SIZES if size < max_batch_size] + [graph_size(max_batch_size)]
        max_rows = self._sizes[-1] if self._graphed else max_batch_size
        self._state = DecodeState(
            max_rows=max_rows, max_model_len=max_model_len, block_size=block_size, device=device
        )
        self._graphs: dict[tuple[int, SamplingPlan], _Step] = {}
        self._pool: Any = None
        self._plan = SamplingPlan.of(())
        self._generations: Sequence[Generation] = ()
        self._due: dict[
            int, list[int]
        ] = {}  # rows that enter a new block with step n, by n modulo the block size
        self._num_steps = self._num_launched = (
            0  # with as many as `_num_steps` some request has all its tokens
        )
        self._step: _Step | None = None
        events = [torch.cuda.Event() if self._graphed else None for _ in range(2)]
        self._landings = [_Landing(*self._state.landed(step), event) for step, event in enumerate(events)]

    def load(self, generations: Sequence[Generation]) -> None:
        """Begin a run of steps of these requests; every earlier step has been waited for."""
        rows = [
            DecodeRow(each.tokens[-1], len(each.tokens), each.blocks, each.request.params)
            for each in generations
        ]
        self._generations = generations
        self._due = {}
        self._num_launched = 0
        self._num_steps = min(each.num_left for each in generations)
        for row_idx, each in enumerate(generations):
            self._due.setdefault(
                (len(each.blocks) * self._block_size - len(each.tokens) + 1) % self._block_size, []
            ).append(row_idx)
        self._plan = SamplingPlan.of([row.params for row in rows])
        if self._graphed:
            size = next(size for size in self._sizes if size >= len(rows))
            if (size, self._plan) not in self._graphs:
                self._graphs[size, self._plan] = self._capture(size, self._plan)
            self._step = self._graphs[size, self._plan]
        self._state.load(rows)

    def make_ready(self) -> bool:
        """Blocks for one more step: of the rows that enter one with it."""
        if self._num_launched >= self._num_steps:
            return False
        for row_idx in self._due.get(self._num_launched % self._block_size, ()):
            generation = self._generations[row_idx]
            if not self._scheduler.extend(generation, len(generation.tokens) + 1):
                return False
            self._state.set_next_block(row_idx, generation.blocks[-1])
        return True

    def launch(self) -> DecodeStep:
        """One step of the loaded rows."""
        self._num_launched += 1
        landing = self._landings[self._num_launched % 2]
        step = self._step
        if step is not None and step.graph is not None:
            step.graph.replay()
        else:
            step = self._run(len(self._generations), self._plan)
        if landing.done is not None:
            landing.done.record()
        return DecodeStep(len(self._generations), self._plan.logprobs, step, landing)

    @torch.inference_mode()
    def _run(self, num_rows: int, plan: SamplingPlan) -> _Step:
        state = self._state
        x_RD, positions_R, slots_R, table_RB, context_lens_R = state.begin(num_rows, self._runner.embedding)
        logits_RV = self._runner.decode(x_RD, positions_R, slots_R, table_RB, context_lens_R)
        state.end(sample_rows(logits_RV, state.sampling(num_rows), context_lens_R, plan))
        return _Step(logits_RV)

    def _capture(self, num_rows: int, plan: SamplingPlan) -> _Step:
        self._state.clear()
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARMUPS):
                self._run(num_rows, plan)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step = self._run(num_rows, plan)
        self._pool = self._pool or graph.pool()
        return _Step(step.logits_SV, graph)


def graph_size(num_rows: int) -> int:
    """The least size of a graph that holds so many rows; above the largest, whole multiples of it."""
    largest = GRAPH_SIZES[-1]
    return next((size for size in GRAPH_SIZES if size >= num_rows), -(-num_rows // largest) * largest)

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
class Launched:
    """A step on its way. After `wait`, and until two more steps were launched, `tokens` and `logprobs` may be read."""

    num_rows: int
    has_logprobs: bool
    step: _Step
    landing: _Landing

    def wait(self) -> None:
        if self.landing.done is not None:
            self.landing.done.synchronize()

    @property
    def tokens(self) -> list[int]:
        return self.landing.tokens_S.tolist()[: self.num_rows]

    @property
    def logprobs(self) -> list[float] | None:
        return self.landing.logprobs_S.tolist()[: self.num_rows] if self.has_logprobs else None

    @property
    def logits(self) -> Tensor:
        return self.step.logits_SV[: self.num_rows]


class DecodeSteps:
    """Runs decode steps of at most `max_batch_size` rows over one state."""

    def __init__(self, runner: ModelRunner, *, max_batch_size: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._runner = runner
        self._device = device
        self._graphed = device.type == "cuda"
        self._sizes = [size for size in GRAPH_SIZES if size < max_batch_size] + [graph_size(max_batch_size)]
        max_rows = self._sizes[-1] if self._graphed else max_batch_size
        self._state = DecodeState(max_rows=max_rows, max_model_len=max_model_len, block_size=block_size, device=device)
        self._graphs: dict[tuple[int, SamplingPlan], _Step] = {}
        self._pool: Any = None
        self._plan = SamplingPlan.of(())
        self._num_rows = self._num_launched = 0
        self._step: _Step | None = None
        events = [torch.cuda.Event() if self._graphed else None for _ in range(2)]
        self._landings = [_Landing(*self._state.landed(step), event) for step, event in enumerate(events)]

    def load(self, rows: Sequence[DecodeRow]) -> None:
        """Begin a run of steps over these requests; every earlier step has been waited for."""
        self._num_rows, self._plan, self._num_launched = len(rows), SamplingPlan.of([row.params for row in rows]), 0
        if self._graphed:
            size = next(size for size in self._sizes if size >= len(rows))
            if (size, self._plan) not in self._graphs:
                self._graphs[size, self._plan] = self._capture(size, self._plan)
            self._step = self._graphs[size, self._plan]
        self._state.load(rows)

    def set_next_block(self, row_idx: int, block: int) -> None:
        """The block that a row enters with the next step to be launched."""
        self._state.set_next_block(row_idx, block)

    def launch(self) -> Launched:
        """One step of the loaded rows."""
        self._num_launched += 1
        landing, step = self._landings[self._num_launched % 2], self._step
        if step is not None and step.graph is not None:
            step.graph.replay()
        else:
            step = self._run(self._num_rows, self._plan)
        if landing.done is not None:
            landing.done.record()
        return Launched(self._num_rows, self._plan.logprobs, step, landing)

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

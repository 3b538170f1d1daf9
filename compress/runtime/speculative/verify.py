"""The verification step: every running request feeds its last token and k proposed ones through the model's decode kernels.

A row of it has the bits of the plain decode step at its position: linears do not see how many rows there are, attention gives each of a
request's last rows what it has alone, and no more rows go through the model at once than decode kernels were chosen for. Keys and values
of all rows are stored; those of rejected tokens lie behind the new end of the sequence, where nothing looks before they are overwritten.
So to roll back is not to advance.

On CUDA the step is a graph, acceptance inside; the tokens arrive in the host's memory, which waits for them before the next step.

Shapes: R rows, S rows of the state, Q = k + 1, T = R Q, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.runtime.model_runner import Features, ModelRunner
from compress.runtime.sampler import SamplingPlan, sample_rows
from compress.runtime.speculative.acceptance import Kept, Rule, accept_by_rejection, accept_coupled, accept_forced
from compress.runtime.speculative.graphs import Graphs
from compress.runtime.speculative.proposer import Drafts, Proposer
from compress.runtime.speculative.state import SpeculativeState


@dataclass(frozen=True)
class VerifyOutputs:
    """Float32 logits [T, V], tokens and their number [R, 1 + Q], log probabilities [R, Q] or None."""

    logits_TV: Tensor
    tokens_RX: Tensor
    logprobs_RQ: Tensor | None


@dataclass(frozen=True)
class _Landing:
    """Where a step's tokens and their number [S, 1 + Q], and log probabilities [S, Q], arrive on the host."""

    tokens_SX: Tensor
    logprobs_SQ: Tensor

    @staticmethod
    def of(num_rows: int, q_len: int, *, pinned: bool) -> "_Landing":
        tokens_SX = torch.zeros(num_rows, 1 + q_len, dtype=torch.int64, pin_memory=pinned)
        return _Landing(tokens_SX, torch.zeros(num_rows, q_len, dtype=torch.float32, pin_memory=pinned))


@dataclass(frozen=True)
class Verified:
    """A step on its way. After `wait`, and until the next step, the rest may be read: of each row the tokens that come out."""

    num_rows: int
    q_len: int
    has_logprobs: bool
    landing: _Landing
    logits_TV: Tensor
    done: torch.cuda.Event | None

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    @property
    def tokens(self) -> list[list[int]]:
        return [row[1 : 2 + row[0]] for row in self.landing.tokens_SX[: self.num_rows].tolist()]

    @property
    def logprobs(self) -> list[list[float]] | None:
        return self.landing.logprobs_SQ[: self.num_rows].tolist() if self.has_logprobs else None

    @property
    def logits(self) -> Tensor:
        """[R, Q, V], those of rejected tokens included."""
        return self.logits_TV[: self.num_rows * self.q_len].unflatten(0, (-1, self.q_len))


class VerifySteps:
    """Verifies what `state` holds, by one rule."""

    def __init__(
        self,
        runner: ModelRunner,
        state: SpeculativeState,
        proposer: Proposer,
        graphs: Graphs[VerifyOutputs],
        *,
        rule: Rule,
        forced_rate: float | None,
    ) -> None:
        self._runner = runner
        self._proposer = proposer
        self._state = state
        self._graphs = graphs
        self._rule = rule
        self._forced_rate = forced_rate
        on_cuda = state.device.type == "cuda"
        self._landings = {k: _Landing.of(state.max_rows, 1 + k, pinned=on_cuda) for k in (0, state.k)}
        self._done = torch.cuda.Event() if on_cuda else None

    def launch(self, num_rows: int, drafts: Drafts) -> Verified:
        """Of the loaded rows. Where nothing at all was proposed it is a plain decode step."""
        state, plan = self._state, self._state.plan
        k = state.k if any(drafts.counts) else 0
        state.propose(drafts.tokens_RK, drafts.counts)
        size = self._graphs.num_rows(num_rows)
        outputs = self._graphs.run((size, k, plan), lambda: self._run(size, k, plan, drafts.probs_SKV))
        landing = self._landings[k]
        landing.tokens_SX[:size].copy_(outputs.tokens_RX, non_blocking=True)
        if outputs.logprobs_RQ is not None:
            landing.logprobs_SQ[:size].copy_(outputs.logprobs_RQ, non_blocking=True)
        if self._done is not None:
            self._done.record()
        return Verified(num_rows, 1 + k, plan.logprobs, landing, outputs.logits_TV, self._done)

    def _run(self, num_rows: int, k: int, plan: SamplingPlan, probs_SKV: Tensor | None) -> VerifyOutputs:
        state = self._state
        drafts_RK, counts_R = state.drafts_SK[:num_rows, :k], state.counts_S[:num_rows]
        first_R, rows = state.context_lens_S[:num_rows], state.sampling.first(num_rows)
        tokens_RQ = torch.cat((state.last_SN[:num_rows, -1:], drafts_RK), dim=1)
        depths = self._proposer.feature_layers
        features = Features.empty(depths, tokens_RQ.numel(), self._runner.embedding) if depths else None
        logits_TV = state.logits(self._runner, tokens_RQ, first_R + k, features)
        if features is not None:
            self._proposer.verified(features, state, q_len=1 + k)
        positions_T = (first_R.unsqueeze(1) + torch.arange(1 + k, device=state.device)).flatten()
        chosen_RQ = sample_rows(logits_TV, rows.repeated(1 + k), positions_T, replace(plan, logprobs=False)).tokens_R.view(num_rows, -1)
        if not k:
            kept = Kept(chosen_RQ, torch.zeros_like(first_R))
        elif self._forced_rate is not None:
            kept = accept_forced(chosen_RQ, drafts_RK, counts_R, first_R, rows.seeds_R, self._forced_rate)
        elif self._rule == "rejection" and plan.draws:
            probs_RKV = None if probs_SKV is None else probs_SKV[:num_rows]
            kept = accept_by_rejection(logits_TV.view(num_rows, 1 + k, -1), chosen_RQ, drafts_RK, counts_R, first_R, rows, plan, probs_RKV)
        else:
            kept = accept_coupled(chosen_RQ, drafts_RK, counts_R)
        tokens_RX = torch.cat((kept.num_accepted_R.unsqueeze(1), kept.tokens_RQ), dim=1)
        return VerifyOutputs(logits_TV, tokens_RX, _logprobs(logits_TV, kept.tokens_RQ) if plan.logprobs else None)


def _logprobs(logits_TV: Tensor, tokens_RQ: Tensor) -> Tensor:
    """[R, Q] of the tokens that come out, as the sampler has them."""
    return logits_TV.log_softmax(dim=-1).gather(1, tokens_RQ.flatten().unsqueeze(1)).view(tokens_RQ.shape)

"""The verification step: every running request feeds its last token and k proposed ones through the model's decode kernels.

A row of it has the bits of the plain decode step at its position: linears do not see how many rows there are, attention gives each of a
request's last rows what it has alone, and no more rows go through the model at once than decode kernels were chosen for. Keys and values
of all rows are stored; those of rejected tokens lie behind the new end of the sequence, where nothing looks before they are overwritten.
So to roll back is not to advance.

On CUDA the step is a graph, which ends with the state of the next one; the tokens arrive in the host's memory, in two places in turn.

Shapes: R rows, S rows of the state, Q = k + 1, T = R Q, V vocabulary, N and Y as in `kernels/step/verify.py`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.runtime.model_runner import Features, ModelRunner
from compress.runtime.sampler import SamplingPlan, sample_rows
from compress.runtime.speculative.acceptance import Rule, accept_by_rejection, accept_forced
from compress.runtime.speculative.graphs import Graphs
from compress.runtime.speculative.proposer import Drafts, Proposer
from compress.runtime.speculative.state import SpeculativeState


@dataclass(frozen=True)
class Verified:
    """A step on its way. After `wait`, and until two more were launched, the rest may be read: of each row how many proposals could be
    kept, and the tokens that come out."""

    num_rows: int
    q_len: int
    has_logprobs: bool
    landed_SY: Tensor
    landed_logprobs_SN: Tensor
    logits_TV: Tensor
    done: torch.cuda.Event | None

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    @property
    def tokens(self) -> list[tuple[int, list[int]]]:
        return [(row[0], row[2 : 3 + row[1]]) for row in self.landed_SY.tolist()[: self.num_rows]]

    @property
    def logprobs(self) -> list[list[float]] | None:
        return self.landed_logprobs_SN.tolist()[: self.num_rows] if self.has_logprobs else None

    @property
    def logits(self) -> Tensor:
        """[R, Q, V], those of rejected tokens included, until the next step."""
        return self.logits_TV[: self.num_rows * self.q_len].unflatten(0, (-1, self.q_len))


class VerifySteps:
    """Verifies what `state` holds, by one rule."""

    def __init__(
        self,
        runner: ModelRunner,
        state: SpeculativeState,
        proposer: Proposer,
        graphs: Graphs[Tensor],
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
        self._done = [torch.cuda.Event() if on_cuda else None for _ in range(2)]

    def launch(self, num_rows: int, step: int, drafts: Drafts, *, any_kept: bool) -> Verified:
        """Step 1, 2, ... of the loaded rows. Where no proposal can be kept, it is a plain decode step."""
        state = self._state
        plan = self._state.plan
        k = state.k if any_kept else 0
        state.propose(drafts.tokens_RK, drafts.counts)
        size = self._graphs.num_rows(num_rows)
        logits_TV = self._graphs.run(
            (size, k, plan), lambda: self._run(size, k, plan, drafts.probs_SKV), aside=state.set_aside
        )
        done = self._done[step % 2]
        if done is not None:
            done.record()
        return Verified(num_rows, 1 + k, plan.logprobs, *state.landed(step), logits_TV, done)

    def _run(self, num_rows: int, k: int, plan: SamplingPlan, probs_SKV: Tensor | None) -> Tensor:
        """Logits [T, V]; the state is the next step's then."""
        state = self._state
        drafts_RK = state.step.drafts_SK[:num_rows, :k]
        first_R = state.context_lens_S[:num_rows]
        rows = state.sampling.first(num_rows)
        tokens_RQ = torch.cat((state.last_SN[:num_rows, -1:], drafts_RK), dim=1)
        depths = self._proposer.feature_layers
        features = Features.empty(depths, tokens_RQ.numel(), self._runner.embedding) if depths else None
        logits_TV = state.logits(self._runner, tokens_RQ, first_R + k, features)
        if features is not None:
            self._proposer.verified(features, state, q_len=1 + k)
        positions_T = (first_R.unsqueeze(1) + torch.arange(1 + k, device=state.device)).flatten()
        sampling = state.sampling_of_all.first(num_rows * (1 + k)) if k else rows
        tokens_RQ = sample_rows(
            logits_TV, sampling, positions_T, replace(plan, logprobs=False)
        ).tokens_R.view(num_rows, -1)
        accepted_R: Tensor | None = None
        if k and self._forced_rate is not None:
            kept = accept_forced(
                tokens_RQ, drafts_RK, state.step.counts(num_rows), first_R, rows.seeds_R, self._forced_rate
            )
            tokens_RQ = kept.tokens_RQ
            accepted_R = kept.num_accepted_R
        elif k and self._rule == "rejection" and plan.draws:
            probs_RKV = None if probs_SKV is None else probs_SKV[:num_rows]
            logits_RQV = logits_TV.view(num_rows, 1 + k, -1)
            counts_R = state.step.counts(num_rows)
            kept = accept_by_rejection(
                logits_RQV, tokens_RQ, drafts_RK, counts_R, first_R, rows, plan, probs_RKV
            )
            tokens_RQ = kept.tokens_RQ
            accepted_R = kept.num_accepted_R
        state.end(tokens_RQ, accepted_R, _logprobs(logits_TV, tokens_RQ) if plan.logprobs else None)
        return logits_TV


def _logprobs(logits_TV: Tensor, tokens_RQ: Tensor) -> Tensor:
    """[R, Q] of the tokens that come out, as the sampler has them."""
    return logits_TV.log_softmax(dim=-1).gather(1, tokens_RQ.flatten().unsqueeze(1)).view(tokens_RQ.shape)

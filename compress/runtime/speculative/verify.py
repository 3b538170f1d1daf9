"""Verification: every running request feeds its last token and k proposed ones through the model's decode
kernels, in one step.

A row has the bits of the plain decode step at its position: linears do not depend on how many rows there are,
attention computes each of a request's last rows as it would alone, and no more rows run at once than the
decode kernels were selected for. Keys and values of all rows are stored. Those of rejected tokens lie after
the new end of the sequence, where nothing reads them before they are overwritten, so a rollback only sets the
length.

On CUDA the step is a graph, which ends with the state of the next step.

Shapes: R rows, Q = k + 1, T = R Q, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from compress.runtime.batch import Features
from compress.runtime.graphs import Graphs
from compress.runtime.model_runner import ModelRunner
from compress.runtime.sampler import SamplingPlan, sample_rows
from compress.runtime.speculative.acceptance import Rule, accept_by_rejection, accept_forced
from compress.runtime.speculative.proposer import Drafts, Proposer
from compress.runtime.speculative.state import SpeculativeState


class Verifier:
    """Verifies proposals for the requests of `state`, by one rule."""

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

    def launch(self, drafts: Drafts, *, k: int) -> Tensor:
        """Launch a step that verifies the first `k` tokens of the drafts; return logits [S Q, V].

        With k = 0 it is a plain decode step of the same state.
        """
        state = self._state
        plan = state.plan
        state.propose(drafts.tokens_RK, drafts.counts)
        num_rows = self._graphs.num_rows(len(drafts.tokens_RK))
        return self._graphs.run(
            (num_rows, state.num_blocks, k, plan),
            lambda: self._step(num_rows, k, plan, drafts.probs_SKV),
            set_aside=state.only_padding,
        )

    def _step(self, num_rows: int, k: int, plan: SamplingPlan, probs_SKV: Tensor | None) -> Tensor:
        """Run one step and advance the state; return its logits [T, V]."""
        state = self._state
        drafts_RK = state.buffers.drafts_SK[:num_rows, :k]
        first_R = state.context_lens_S[:num_rows]
        rows = state.sampling.first(num_rows)
        tokens_RQ = torch.cat((state.last_SN[:num_rows, -1:], drafts_RK), dim=1)
        depths = self._proposer.feature_layers
        features = (
            Features.empty(depths, tokens_RQ.numel(), self._runner.stream_embedding) if depths else None
        )
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
                tokens_RQ, drafts_RK, state.buffers.counts(num_rows), first_R, rows.seeds_R, self._forced_rate
            )
            tokens_RQ = kept.tokens_RQ
            accepted_R = kept.num_accepted_R
        elif k and self._rule == "rejection" and plan.draws:
            probs_RKV = None if probs_SKV is None else probs_SKV[:num_rows]
            logits_RQV = logits_TV.view(num_rows, 1 + k, -1)
            counts_R = state.buffers.counts(num_rows)
            kept = accept_by_rejection(
                logits_RQV, tokens_RQ, drafts_RK, counts_R, first_R, rows, plan, probs_RKV
            )
            tokens_RQ = kept.tokens_RQ
            accepted_R = kept.num_accepted_R
        state.end(tokens_RQ, accepted_R, _logprobs(logits_TV, tokens_RQ) if plan.logprobs else None)
        return logits_TV


def _logprobs(logits_TV: Tensor, tokens_RQ: Tensor) -> Tensor:
    """Return the log probabilities [R, Q] of these tokens under the unfiltered softmax."""
    return logits_TV.log_softmax(dim=-1).gather(1, tokens_RQ.flatten().unsqueeze(1)).view(tokens_RQ.shape)

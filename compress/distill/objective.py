"""The training objective of a student: the divergence from a teacher through both heads, and both models
measured on held-out text.

The teacher runs in its own dtype and keeps no graph; it may be on another device, from which only hidden
states come. Documents are joined as in calibration (plain concatenation): positions run from 0 and
attention covers the whole window.

Shapes: B batch, S sequence, N windows, T tokens, D hidden, V vocabulary, K kept.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compress.context import OneRank, Ranks
from compress.distill.acceptance import K, steps_over
from compress.distill.head import Rows, Targets, mean_divergence, slices
from compress.distill.losses import Divergence, TopK, divergence_rows, keep_top
from compress.models.decoder import Decoder
from compress.models.logits import logits_of

EVALUATED_TOKENS = {"cuda": 1 << 14, "cpu": 1 << 11}
"""Held-out tokens in one forward."""


class Teacher:
    """A decoder that is asked and never trained; `device` is where its answers are wanted."""

    def __init__(self, decoder: Decoder, *, device: torch.device, compile: bool = False) -> None:
        self.arch = decoder.arch
        self._decoder = decoder.requires_grad_(False).eval()
        self._place = decoder.embed.weight.device
        self._device = device
        self._head_VD = decoder.head.weight.detach().to(device)
        self._bias_V = None if decoder.head.bias is None else decoder.head.bias.detach().to(device)
        self._hidden = torch.compile(Decoder.hidden, dynamic=False) if compile else Decoder.hidden

    def targets(self, tokens_BS: Tensor) -> Targets:
        """Yield logits of the tokens of a batch, flat, slice by slice."""
        with torch.no_grad(), torch.autocast(self._place.type, enabled=False):
            hidden_TD = self._hidden(self._decoder, tokens_BS.to(self._place)).flatten(0, 1).to(self._device)
        return lambda part: logits_of(self.arch, hidden_TD[part], self._head_VD, self._bias_V)

    def keep(self, tokens_BS: Tensor, num_kept: int, temperature: float) -> TopK:
        """Return the likeliest tokens at every position of a batch, [B, S, K], and the log of the remaining
        mass [B, S]."""
        targets = self.targets(tokens_BS)
        (num_rows, seq_len) = tokens_BS.shape
        parts = []
        for part in slices(tokens_BS.numel(), self.arch.vocab_size, self._device):
            logits_TV = targets(part)
            assert isinstance(logits_TV, Tensor)
            parts.append(keep_top(logits_TV, num_kept, temperature))
        ids, log_p, log_tail = (torch.cat(each) for each in zip(*parts, strict=True))
        return TopK(
            ids.view(num_rows, seq_len, -1),
            log_p.view(num_rows, seq_len, -1),
            log_tail.view(num_rows, seq_len),
        )


class Objective:
    """The training loop's loss: (student, tokens [B, S+1]) with a teacher, or (student, tokens, *the kept
    part of a teacher). With `weighted` the weights of the tokens [B, S+1] come after the tokens."""

    def __init__(
        self,
        loss: Divergence,
        teacher: Teacher | None,
        *,
        compute_dtype: torch.dtype = torch.float32,
        compile: bool = False,
        weighted: bool = False,
    ) -> None:
        self._loss = loss
        self._weighted = weighted
        self._teacher = teacher
        self._dtype = compute_dtype
        self._hidden = torch.compile(Decoder.hidden, dynamic=False) if compile else Decoder.hidden
        self._rows: Rows = torch.compile(divergence_rows, dynamic=False) if compile else divergence_rows

    def __call__(self, student: Decoder, tokens_BS: Tensor, *others: Tensor) -> Tensor:
        weights_T, kept = (others[0][:, 1:].flatten(), others[1:]) if self._weighted else (None, others)
        inputs_BS = tokens_BS[:, :-1]
        labels_T = tokens_BS[:, 1:].flatten()
        if kept:
            flat = [each.flatten(0, 1) for each in kept]
            targets: Targets = lambda part: TopK(*(each[part] for each in flat))  # noqa: E731
        else:
            assert self._teacher is not None, "without a teacher, what was kept of one comes with the tokens"
            targets = self._teacher.targets(inputs_BS)
        hidden_TD = self._hidden(student, inputs_BS).flatten(0, 1).to(self._dtype)
        return mean_divergence(
            hidden_TD,
            student.head.weight,
            targets,
            labels_T,
            self._loss,
            rows=self._rows,
            softcap=student.arch.logit_softcap,
            weights_T=weights_T,
            bias_V=student.head.bias,
        )


@dataclass(frozen=True)
class HeldOut:
    """Sums over held-out tokens. In nats: KL(teacher || student), and the cost of the text's own tokens for
    the two. For a student that drafts for its teacher: tokens that are the likeliest for both,
    probabilities that a proposal is kept, and the steps that it takes through the text with the tokens
    that come out of them (`acceptance.py`)."""

    num_tokens: int
    kl: float
    student_nll: float
    teacher_nll: float
    agreed: float
    accepted: float
    emitted: float
    steps: float

    @property
    def kl_mean(self) -> float:
        return self.kl / self.num_tokens

    @property
    def top1(self) -> float:
        return self.agreed / self.num_tokens

    @property
    def acceptance(self) -> float:
        """Probability that a token drawn from the student is kept by speculative sampling for the teacher."""
        return self.accepted / self.num_tokens

    @property
    def acceptance_length(self) -> float:
        """Tokens that come out of a step of `K` proposals."""
        return self.emitted / self.steps

    def bits_per_byte(self, num_bytes: int) -> tuple[float, float]:
        """Return the bits per byte of student and teacher."""
        return self.student_nll / math.log(2) / num_bytes, self.teacher_nll / math.log(2) / num_bytes

    def recovery(self, num_bytes: int) -> dict[str, float]:
        """Return the row of a curve for a student that will replace its teacher."""
        return {"kl": self.kl_mean, "bits_per_byte": self.bits_per_byte(num_bytes)[0]}

    def drafting(self) -> dict[str, float]:
        """Return the row of a curve for a student that will draft for its teacher."""
        return {
            "kl": self.kl_mean,
            "top1": self.top1,
            "acceptance": self.acceptance,
            "acceptance_length": self.acceptance_length,
        }


@torch.no_grad()
def measure(
    student: Decoder,
    teacher: Teacher,
    tokens_NS: Tensor,
    device: torch.device,
    *,
    compute_dtype: torch.dtype,
    ranks: Ranks | None = None,
    counted_NS: Tensor | None = None,
) -> HeldOut:
    """Measure both models on windows of S + 1 tokens, at temperature 1 over the whole vocabulary; each rank
    takes its share of the windows. With `counted_NS` sums are over predictions of the tokens that count, but
    `emitted` and `steps`, which need whole windows."""
    ranks = OneRank() if ranks is None else ranks
    at_once = max(1, EVALUATED_TOKENS[device.type] // tokens_NS.shape[1])
    sums = torch.zeros(7, dtype=torch.float64, device=device)
    kept: list[Tensor] = []
    accepted: list[Tensor] = []
    if counted_NS is None:
        counted_NS = torch.ones_like(tokens_NS, dtype=torch.bool)
    own = slice(ranks.rank, None, ranks.size)
    for batch_BS, counted_BS in zip(
        tokens_NS.split(at_once)[own], counted_NS.split(at_once)[own], strict=True
    ):
        counts_T = counted_BS[:, 1:].reshape(-1).to(device)
        tokens_BS = batch_BS.to(device=device, dtype=torch.int64)
        labels_T1 = tokens_BS[:, 1:].reshape(-1, 1)
        with torch.autocast(device.type, dtype=compute_dtype, enabled=compute_dtype != torch.float32):
            hidden_TD = student.hidden(tokens_BS[:, :-1]).flatten(0, 1)
        targets = teacher.targets(tokens_BS[:, :-1])
        weight_VD = student.head.weight.to(compute_dtype)
        for part in slices(hidden_TD.shape[0], weight_VD.shape[0], device):
            logits_TV: Any = targets(part)
            log_p_TV = logits_TV.to(torch.float32).log_softmax(-1)
            student_TV = logits_of(
                student.arch, hidden_TD[part].to(compute_dtype), weight_VD, student.head.bias
            )
            log_q_TV = student_TV.to(torch.float32).log_softmax(-1)
            p_TV = log_p_TV.exp()
            counts_t = counts_T[part]
            sums[0] += (p_TV * (log_p_TV - log_q_TV)).sum(-1).double()[counts_t].sum()
            sums[1] -= log_q_TV.gather(-1, labels_T1[part]).double()[counts_t].sum()
            sums[2] -= log_p_TV.gather(-1, labels_T1[part]).double()[counts_t].sum()
            sums[3] += (log_p_TV.argmax(-1) == log_q_TV.argmax(-1))[counts_t].sum()
            kept_t = torch.minimum(p_TV, log_q_TV.exp()).sum(-1).double()
            kept.append(kept_t)
            accepted.append(kept_t[counts_t])
    if kept:
        kept_NS = torch.cat(kept).view(-1, tokens_NS.shape[1] - 1)
        sums[4:] = torch.stack((torch.cat(accepted).sum().cpu(), *steps_over(kept_NS.cpu(), K)))
    ranks.all_reduce([sums])
    return HeldOut(int(counted_NS[:, 1:].sum()), *sums.tolist())


def checkpoint_layers_(decoder: Decoder) -> None:
    """Make every layer keep only its input and run again in the backward pass: a third more work for a
    fraction of the memory."""
    for layer in decoder.layers:
        forward = layer.forward

        def again(*args: Any, forward: Any = forward) -> Tensor:
            return checkpoint(forward, *args, use_reentrant=False)

        layer.forward = again

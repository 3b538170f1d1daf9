"""Losses of the training loop: cross entropy of the next token, and divergences between a teacher's and a
student's next-token distribution.

With p the teacher's and q the student's distribution, both at temperature t (their logits divided by it),
and m = (p + q) / 2:

    forward_kl   sum p log(p/q)    covers every token that the teacher may choose (1503.02531)
    reverse_kl   sum q log(q/p)    stays with tokens that the teacher would choose (2306.08543)
    js           1/2 sum p log(p/m) + 1/2 sum q log(q/m)    bounded, between the two (2306.13649)
    tv           1 - a,  a = sum min(p, q)    the share that speculative sampling rejects (2211.17192)
    lk           -log a    the same, steeper where little is kept (2602.23881)

(arXiv ids), times t^2, so that the size of gradients does not depend on t. A `hard_frac` of the loss may
be the cross entropy of the text's own token.

A teacher whose logits were kept is given by its k likeliest tokens and the mass of all others, one
bucket. The divergence is then between two distributions over k + 1 outcomes: never negative, zero when
they agree, never above the full one (data processing inequality).

Every divergence comes with its gradient by the student's logits z. With h = q dL/dq for each outcome,
dL/dz = h - q sum h at t = 1, and the tail's h is distributed in proportion to q. (For a, h is q where q <
p, and zero elsewhere.) So nothing is recomputed and autograd keeps no copy of [T, V] in float32.

Shapes: B batch, S sequence, T tokens, V vocabulary, K kept.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.errors import UsageError

Kind = Literal["forward_kl", "reverse_kl", "js", "tv", "lk"]
_LOG_2 = 0.6931471805599453
_TINY = torch.finfo(torch.float32).tiny


def next_token(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    """Mean cross entropy of each token given those before it in its window; token ids are int64 [B, S+1]."""
    logits_BSV = model(tokens_BS[:, :-1])
    return F.cross_entropy(logits_BSV.flatten(0, 1).to(torch.float32), tokens_BS[:, 1:].flatten())


@dataclass(frozen=True)
class Divergence:
    """The loss that the student minimises."""

    kind: Kind = "forward_kl"
    temperature: float = 1.0
    hard_frac: float = 0.0


class TopK(NamedTuple):
    """A teacher's distribution by its likeliest tokens: ids int [T, K], natural log probabilities [T, K],
    log of the remaining mass [T]."""

    ids_TK: Tensor
    log_p_TK: Tensor
    log_tail_T: Tensor


def keep_top(logits_TV: Tensor, num_kept: int, temperature: float = 1.0) -> TopK:
    """Return the distribution at that temperature, float32, likeliest first.

    Raises:
        UsageError: there would be no tail.
    """
    if num_kept >= logits_TV.shape[-1]:
        raise UsageError(
            f"top_k is {num_kept} and the vocabulary has {logits_TV.shape[-1]} tokens: leave out top_k to "
            "use all of them."
        )
    log_p_TV = (logits_TV.to(torch.float32) / temperature).log_softmax(-1)
    log_p_TK, ids_TK = log_p_TV.topk(num_kept, dim=-1)
    return TopK(ids_TK, log_p_TK, _log_tail(log_p_TV, ids_TK))


def divergence_rows(
    student_TV: Tensor, teacher: Tensor | TopK, labels_T: Tensor, loss: Divergence
) -> tuple[Tensor, Tensor]:
    """Return (loss of each token float32 [T], its gradient by the student's logits in their dtype [T, V]).
    `teacher` is logits [T, V], or the tokens that were kept of them at the loss's temperature."""
    temperature = loss.temperature
    log_q_TV = (student_TV.to(torch.float32) / temperature).log_softmax(-1)
    if isinstance(teacher, TopK):
        loss_T, grad_TV = _bucketed(log_q_TV, teacher, loss.kind)
    else:
        log_p_TV = (teacher.to(torch.float32) / temperature).log_softmax(-1)
        loss_T, h_TV = _pointwise(log_p_TV, log_q_TV, loss.kind)
        grad_TV = h_TV - log_q_TV.exp() * h_TV.sum(-1, keepdim=True)
    soft = 1.0 - loss.hard_frac
    loss_T = soft * temperature**2 * loss_T
    grad_TV = soft * temperature * grad_TV
    if loss.hard_frac:
        log_q_TV = student_TV.to(torch.float32).log_softmax(-1)
        label_T1 = labels_T.unsqueeze(1)
        loss_T = loss_T - loss.hard_frac * log_q_TV.gather(-1, label_T1).squeeze(1)
        grad_TV = grad_TV + loss.hard_frac * log_q_TV.exp()
        grad_TV = grad_TV.scatter_add(
            -1, label_T1, torch.full_like(label_T1, -loss.hard_frac, dtype=torch.float32)
        )
    return loss_T, grad_TV.to(student_TV.dtype)


def _pointwise(log_p: Tensor, log_q: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return (divergence, h = q dL/dq of each outcome up to a multiple of q, which does not change the
    gradient by the logits)."""
    if kind == "forward_kl":
        p = log_p.exp()
        return (p * (log_p - log_q)).sum(-1), -p
    q = log_q.exp()
    if kind == "reverse_kl":
        h = q * (log_q - log_p)
        return h.sum(-1), h
    if kind in ("tv", "lk"):
        p = log_p.exp()
        kept = torch.minimum(p, q).sum(-1, keepdim=True).clamp(min=_TINY)
        h = torch.where(q < p, -q, 0.0)
        return ((1 - kept).squeeze(-1), h) if kind == "tv" else (-kept.log().squeeze(-1), h / kept)
    log_m = torch.logaddexp(log_p, log_q) - _LOG_2
    h = 0.5 * q * (log_q - log_m)
    return h.sum(-1) + 0.5 * (log_p.exp() * (log_p - log_m)).sum(-1), h


def _bucketed(log_q_TV: Tensor, teacher: TopK, kind: Kind) -> tuple[Tensor, Tensor]:
    ids_TK = teacher.ids_TK.to(torch.int64)
    log_tail_T1 = _log_tail(log_q_TV, ids_TK).unsqueeze(1)
    log_q_TK = log_q_TV.gather(-1, ids_TK)
    log_p_TN = torch.cat(
        (teacher.log_p_TK.to(torch.float32), teacher.log_tail_T.to(torch.float32).unsqueeze(1)), dim=-1
    )
    loss_T, h_TN = _pointwise(log_p_TN, torch.cat((log_q_TK, log_tail_T1), dim=-1), kind)
    total_T1 = h_TN.sum(-1, keepdim=True)
    h_TK = h_TN[:, :-1]
    h_tail_T1 = h_TN[:, -1:]
    in_tail_TV = (log_q_TV - log_tail_T1).exp() * h_tail_T1 - log_q_TV.exp() * total_T1
    return loss_T, in_tail_TV.scatter(-1, ids_TK, h_TK - log_q_TK.exp() * total_T1)


def _log_tail(log_p_TV: Tensor, ids_TK: Tensor) -> Tensor:
    """Log of the mass outside `ids`, summed and not taken from 1, which would leave nothing of a small
    one."""
    return log_p_TV.scatter(-1, ids_TK, float("-inf")).logsumexp(-1)

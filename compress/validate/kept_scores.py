"""Scores of a source for evaluation windows, kept on disk, so that a candidate is compared with them when the
source is no longer in memory.

    <place>/scores-<digest>/<batch>.safetensors
        exact    logits float32 [B, T, V]
        top k    ids int32 [B, T, K], log_p float32 [B, T, K], log_tail float32 [B, T],
                 drawn int32 [B, T, R], log_drawn float32 [B, T, R], nll float32 [B, T], top1 int32 [B, T]

The digest covers everything that decides the content: source, tokens, dtype, kind of machine, sizes that
kernels are chosen by, versions, K. So a file of another model or text is never read, and a file that was
damaged is made again.

Exact scores give the same bits as both models side by side. With the k likeliest tokens, perplexity and top-1
agreement are exact as well. Let m be the mass of the source p outside of the kept tokens, Q that of the
candidate q, and p', q' the two of the tail alone, normalised. By the chain rule

    KL(p || q) = sum_kept p log(p/q) + m log(m/Q)  +  m KL(p' || q')

The first two terms are exact, and a lower bound. The last is estimated from R tokens r that were drawn from
p': the mean of x - 1 - log x, x = q'(r) / p'(r), which is never negative and has the right expectation
(x has the mean 1). So a mean over text is unbiased, and the spread of its windows includes the drawing.

Shapes: N windows, B of a batch, S tokens of a window, T = S - 1 scored positions, V vocabulary, K kept,
R drawn.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compress.artifact.resume import ResumePoint
from compress.digest import digest_json
from compress.errors import UsageError
from compress.validate.accuracy import (
    ROWS_AT_ONCE,
    Accuracy,
    WindowScores,
    check_scores,
    kl_divergence,
    score_window,
    summarize,
)

_LAYOUT = 1
"""Part of the digest: raise it when files of the same name would hold something else."""
TOKEN_BYTES = 8
"""Bytes of one kept or drawn token: its id and log probability."""
NUM_DRAWN = 16
"""Tokens that are drawn from the tail of each position."""


class KeptScores:
    """The scores of one source on windows [N, S], in batches. `identity` names all that decides them."""

    def __init__(
        self,
        place: Path,
        tokens_NS: Tensor,
        *,
        identity: Mapping[str, str | int],
        batch_size: int,
        top_k: int | None,
        log: Callable[[str], None],
    ) -> None:
        name = {**identity, "batch_size": batch_size, "top_k": top_k, "layout": _LAYOUT}
        self.directory = place / f"scores-{digest_json(name).removeprefix('sha256:')[:32]}"
        self.top_k = top_k
        self._tokens_NS = tokens_NS
        self._batch_size = batch_size
        self._log = log

    @property
    def num_batches(self) -> int:
        """Number of batches, each in a file."""
        return -(-len(self._tokens_NS) // self._batch_size)

    def are_whole(self) -> bool:
        """Return whether all of them are on disk, undamaged."""
        return all(self._point(idx).load_tensors() is not None for idx in range(self.num_batches))

    def fill(self, logits: Iterable[Tensor]) -> None:
        """Write the logits [B, S, V] of each batch, in order.

        Raises:
            UsageError: `top_k` leaves no tail, or logits are not finite.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        batches = self._tokens_NS.split(self._batch_size)
        for idx, (tokens_BS, logits_BSV) in enumerate(zip(batches, logits, strict=True)):
            if not bool(logits_BSV.amax().isfinite()):
                raise UsageError(
                    f"the source model gives logits that are not finite in evaluation windows from "
                    f"{idx * self._batch_size}; check the checkpoint and its dtype."
                )
            if self.top_k is None:
                tensors = {"logits": logits_BSV[:, :-1].to("cpu", torch.float32).contiguous()}
            else:
                generator = torch.Generator(logits_BSV.device).manual_seed(idx)
                rows = [
                    likeliest(*each, self.top_k, generator)
                    for each in zip(logits_BSV, tokens_BS, strict=True)
                ]
                tensors = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            self._point(idx).save_tensors(tensors)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of each batch.

        Raises:
            StorageError: a file is gone, or damaged since it was written.
        """
        for idx in range(self.num_batches):
            yield self._point(idx).saved_tensors()

    def num_bytes(self) -> int:
        """Return the bytes on disk."""
        return sum(path.stat().st_size for path in self.directory.glob("*.safetensors"))

    def _point(self, batch_idx: int) -> ResumePoint:
        return ResumePoint(self.directory / f"{batch_idx:05d}.safetensors", self._log)


def kept_bytes(num_windows: int, window_size: int, vocab_size: int, top_k: int | None) -> int:
    """Return the bytes of the scores on disk, without headers."""
    of_position = 4 * vocab_size if top_k is None else TOKEN_BYTES * (top_k + NUM_DRAWN) + 12
    return num_windows * (window_size - 1) * of_position


def compare_kept(
    kept: Sequence[KeptScores],
    logits: Iterable[Tensor],
    tokens_NS: Tensor,
    *,
    num_bytes: int,
    batch_size: int,
) -> list[tuple[Accuracy, Accuracy]]:
    """Return the accuracy of a candidate, given by its logits of each batch, against each source, with the
    lower bound of KL and with KL; both are the same where the scores are exact.

    Raises:
        UsageError: the candidate has another vocabulary. GateFailed: as `measure_pairs`.
        StorageError: kept scores are gone, or damaged since they were written.
    """
    lower: list[list[WindowScores]] = [[] for _ in kept]
    whole: list[list[WindowScores]] = [[] for _ in kept]
    sources = zip(*(each.batches() for each in kept), strict=True)
    with torch.inference_mode():
        for tokens_BS, stored, logits_BSV in zip(tokens_NS.split(batch_size), sources, logits, strict=True):
            for idx, tensors in enumerate(stored):
                _check_vocabulary(tensors, logits_BSV)
                for row, (logits_SV, tokens_S) in enumerate(zip(logits_BSV, tokens_BS, strict=True)):
                    of_window = {name: value[row].to(logits_SV.device) for name, value in tensors.items()}
                    if "logits" in of_window:
                        found = (score_window(of_window["logits"], logits_SV[:-1], tokens_S),) * 2
                    else:
                        found = score_top_k(of_window, logits_SV[:-1], tokens_S)
                    for scores in found:
                        check_scores(scores, window=len(lower[idx]))
                    lower[idx].append(found[0])
                    whole[idx].append(found[1])
    size = tokens_NS.shape[1]
    return [
        tuple(summarize(each, window_size=size, num_bytes=num_bytes) for each in pair)  # type: ignore[misc]
        for pair in zip(lower, whole, strict=True)
    ]


def _check_vocabulary(stored: Mapping[str, Tensor], logits_BSV: Tensor) -> None:
    kept = stored.get("logits")
    if kept is not None and kept.shape[2] != logits_BSV.shape[2]:
        raise UsageError(
            f"the source has {kept.shape[2]} tokens and the candidate {logits_BSV.shape[2]}: both models "
            "must share one vocabulary."
        )


def likeliest(
    logits_SV: Tensor, tokens_S: Tensor, top_k: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return what is kept of one window of logits.

    Raises:
        UsageError: there would be no tail.
    """
    if top_k >= logits_SV.shape[1]:
        raise UsageError(
            f"top_k is {top_k} and the vocabulary has {logits_SV.shape[1]} tokens: leave out top_k to keep "
            "all of them."
        )
    parts: dict[str, list[Tensor]] = {}
    for part in range(0, len(logits_SV) - 1, ROWS_AT_ONCE):
        rows_TV = logits_SV[:-1][part : part + ROWS_AT_ONCE].to(torch.float32)
        labels_T1 = tokens_S[1:][part : part + ROWS_AT_ONCE, None].to(rows_TV.device, torch.int64)
        log_p_TV = rows_TV.log_softmax(-1)
        log_p_TK, ids_TK = log_p_TV.topk(top_k, dim=-1)
        tail_TV = log_p_TV.scatter(-1, ids_TK, float("-inf"))
        tail_p_TV = tail_TV.exp()
        tail_p_TV[tail_p_TV.sum(-1) <= 0] = 1.0  # what is drawn of a tail without mass weighs nothing
        drawn_TR = torch.multinomial(tail_p_TV, NUM_DRAWN, replacement=True, generator=generator)
        found = {
            "ids": ids_TK.to(torch.int32),
            "log_p": log_p_TK,
            "log_tail": tail_TV.logsumexp(-1),
            "drawn": drawn_TR.to(torch.int32),
            "log_drawn": log_p_TV.gather(1, drawn_TR),
            "nll": -log_p_TV.gather(1, labels_T1)[:, 0],
            "top1": rows_TV.argmax(-1).to(torch.int32),
        }
        for name, value in found.items():
            parts.setdefault(name, []).append(value.cpu())
    return {name: torch.cat(values) for name, values in parts.items()}


def score_top_k(
    kept: Mapping[str, Tensor], candidate_TV: Tensor, tokens_S: Tensor
) -> tuple[WindowScores, WindowScores]:
    """Return the scores of one window, with the lower bound of KL and with KL."""
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(candidate_TV), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        rows_TV = candidate_TV[part].to(torch.float32)
        labels_T1 = tokens_S[1:][part, None].to(rows_TV.device, torch.int64)
        log_q_TV = rows_TV.log_softmax(-1)
        ids_TK = kept["ids"][part].to(torch.int64)
        log_q_TK = log_q_TV.gather(1, ids_TK)
        in_tail_TV = log_q_TV.scatter(1, ids_TK, float("-inf"))
        log_m_T1 = kept["log_tail"][part, None]
        log_tail_q_T1 = in_tail_TV.logsumexp(1, keepdim=True)
        log_p = torch.cat((kept["log_p"][part], log_m_T1), dim=1)
        lower_T = kl_divergence(log_p, torch.cat((log_q_TK, log_tail_q_T1), dim=1))
        log_x_TR = log_q_TV.gather(1, kept["drawn"][part].to(torch.int64)) - log_tail_q_T1
        log_x_TR = log_x_TR - (kept["log_drawn"][part] - log_m_T1)
        in_tail_T = (torch.expm1(log_x_TR) - log_x_TR).mean(1)
        tail_T = torch.where(log_m_T1[:, 0] > -100, log_m_T1[:, 0].exp() * in_tail_T, 0.0)
        nll_T = -log_q_TV.gather(1, labels_T1)[:, 0]
        parts.append((nll_T, lower_T, lower_T + tail_T, kept["top1"][part] == rows_TV.argmax(-1)))
    nll_T, lower_T, whole_T, same_T = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
    of_source = kept["nll"].cpu()
    return (
        WindowScores(of_source, nll_T, lower_T, same_T),
        WindowScores(of_source, nll_T, whole_T, same_T),
    )

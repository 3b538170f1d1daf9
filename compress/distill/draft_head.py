"""Training of a head that drafts from the hidden states of its target model, an EAGLE-3 head
(`models/eagle3.py`) or an MTP head (`models/mtp.py`), with the training-time test of arXiv 2503.01840.

A served head continues from its own hidden states, so it is trained on them. Row t drafts from the
target's hidden state of token t. In step 0 it reads that state and token t + 1; in step s its own output
of step s - 1 and token t + 1 + s, at position t + s:

    g[s, t] = head(y[t+1+s], f[t] if s = 0 else g[s-1, t]),  attends to rows 0..t of step 0 and
                                                             to row t of steps 1..s
    L = sum_s w_s mean_t D(p[t+1+s] || q[s, t]),    w_s = 0.8^s / sum of all

Later proposals are reached more seldom, so they weigh less. p is the target's distribution of that token,
restricted to the head's vocabulary and normalised; q is the head's. The tokens are those of the text, as
if proposals had been kept so far.

Shapes: B batch, S sequence, R rows (one fewer), N windows, D hidden, E features, V vocabulary, W the
head's, K steps, H heads, C head dimension, T tokens of a slice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from compress.context import OneRank, Ranks
from compress.distill.acceptance import K, steps_through
from compress.distill.head import Rows, mean_divergence, slices
from compress.distill.losses import Divergence, divergence_rows
from compress.distill.objective import EVALUATED_TOKENS
from compress.models import repeatable
from compress.models.arch import Arch
from compress.models.attention import AttentionFn, Choose, Compress, FullAttention, attend_with_scores
from compress.models.decoder import Decoder
from compress.models.embedding import looked_up
from compress.models.logits import logits_of
from compress.models.tap import Tap, no_tap

STEP_WEIGHT = 0.8


def frequent_tokens(tokens: Tensor, num_kept: int, *, vocab_size: int) -> Tensor:
    """Return int64 [W], rising: the `num_kept` most frequent tokens of a text; of equally frequent tokens
    the lower one."""
    counts_V = torch.bincount(tokens.flatten().to(torch.int64), minlength=vocab_size)
    return counts_V.sort(descending=True, stable=True).indices[:num_kept].sort().values


class UnrolledAttention:
    """Attention of one step after another, each over the first rows of the step before: a row sees the rows
    up to its own of step 0, and itself in later steps."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._index_keys: list[Tensor] = []

    def __call__(
        self,
        layer_idx: int,
        q_BSHC: Tensor,
        k_BSKC: Tensor | None,
        v_BSKC: Tensor | None,
        *,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        chunk: int | None = None,
        kept: bool = False,
        source: int | None = None,
        relative: Tensor | None = None,
        slopes: Tensor | None = None,
        compress: Compress | None = None,
        rate: int = 0,
        index_keys: Tensor | None = None,
        choose: Choose | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        del chunk, kept, source, rate
        assert chosen is None, "a head has one layer"
        assert relative is None, "a head has no relative logits"
        assert slopes is None, "a head has a rope"
        assert compress is None, "a head has attention to keys and values"
        assert layer_idx == 0, "a head has one layer"
        assert k_BSKC is not None
        assert v_BSKC is not None
        self._keys.append(k_BSKC)
        self._values.append(v_BSKC)
        num_rows = q_BSHC.shape[1]
        repeat = q_BSHC.shape[2] // k_BSKC.shape[2]
        q = q_BSHC.transpose(1, 2)
        k, v = (
            torch.cat([each[:, :num_rows] for each in steps], dim=1)
            .transpose(1, 2)
            .repeat_interleave(repeat, dim=1)
            for steps in (self._keys, self._values)
        )
        seen = _seen(num_rows, len(self._keys) - 1, window, q.device)
        if index_keys is not None and choose is not None:
            self._index_keys.append(index_keys)
            so_far = torch.cat([each[:, :num_rows] for each in self._index_keys], dim=1)
            chosen = choose(so_far, seen)
            seen = seen if chosen is None else seen & chosen
        if softcap is None and sinks is None:
            out = repeatable.attend(q, k, v, mask=seen, scale=scale)
        else:
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            out = attend_with_scores(q, k, v, seen, scale, softcap, sinks)
        return out.transpose(1, 2)


def _seen(num_rows: int, step: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys of steps 0, 1, ... the rows of a step see, bool [R, R (step + 1)]. A row of step s
    has its position plus s."""
    own = torch.eye(num_rows, dtype=torch.bool, device=device)
    first = torch.ones_like(own).tril()
    if window is None:
        return torch.cat((first, own.repeat(1, step)), dim=1)
    later = [own if step - each < window else torch.zeros_like(own) for each in range(1, step + 1)]
    return torch.cat((first.triu(step - window + 1), *later), dim=1)


class Target:
    """The target model, which is never trained and returns hidden states of the layers that the head reads
    and of its end. Results go to `device`."""

    def __init__(
        self,
        decoder: Decoder,
        layer_ids: tuple[int, ...],
        vocabulary_W: Tensor,
        *,
        device: torch.device,
        compile: bool = False,
    ):
        self._decoder = decoder.requires_grad_(False).eval()
        self.arch = decoder.arch
        self._place = decoder.embed.weight.device
        self._device = device
        self._layer_ids = layer_ids
        self.vocabulary_W = vocabulary_W.to(device)
        self.head_VD = decoder.head.weight.detach().to(device)
        self.head_WD = self.head_VD[self.vocabulary_W]
        bias_V = decoder.head.bias
        self.bias_V = None if bias_V is None else bias_V.detach().to(device)
        self.bias_W = None if self.bias_V is None else self.bias_V[self.vocabulary_W]
        self._walk = torch.compile(_walk, dynamic=False) if compile else _walk

    def features(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (embeddings [B, S, D], features [B, S, E], final normed hidden states [B, S, D]) of a
        batch."""
        with torch.no_grad(), torch.autocast(self._place.type, enabled=False):
            states = self._walk(self._decoder, tokens_BS.to(self._place))
            features_BSE = torch.cat([states[depth] for depth in self._layer_ids], dim=-1)
            final_BSD = self._decoder.norm(states[-1])
            # without the scale that some models have, because the head norms it
            embed = self._decoder.embed
            embedded_BSD = looked_up(self.arch, embed.weight, tokens_BS.to(self._place), embed.norm_weight)
        return embedded_BSD.to(self._device), features_BSE.to(self._device), final_BSD.to(self._device)


def _walk(decoder: Decoder, tokens_BS: Tensor) -> list[Tensor]:
    """Yield the embedding and the hidden state after each layer."""
    positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    attention = FullAttention()
    states = [decoder.embedded(tokens_BS, positions, attention)]
    for layer in decoder.layers:
        states.append(layer(states[-1], positions, attention))
    return states


class DraftHead(Protocol):
    """The module of a head that drafts from hidden states of its target."""

    def fuse(self, features_BSE: Tensor) -> Tensor:
        """Return f [B, S, D]."""

    def __call__(
        self,
        embedded_BSD: Tensor,
        hidden_BSD: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        tap: Tap = ...,
    ) -> Tensor:
        """Return g [B, S, D] of embedded next tokens, and of f or of g where there is none yet."""

    def normed(self, out_BSD: Tensor) -> Tensor:
        """Return g as a matrix of logits reads it."""

    def own_head(self) -> Tensor | None:
        """Return the matrix of logits [W, D], None where the head has that of its target."""


def unrolled(
    head: DraftHead, embedded_BSD: Tensor, features_BSE: Tensor, num_steps: int, tap: Tap = no_tap
) -> Iterator[Tensor]:
    """Yield normed outputs [B, S - 1 - s, D] of steps s = 0, 1, ...; row t predicts token t + 2 + s, as the
    target does at token t + 1 + s."""
    hidden = head.fuse(features_BSE[:, :-1])
    attention = UnrolledAttention()
    for step in range(num_steps):
        num_rows = hidden.shape[1] - (step > 0)
        positions = step + torch.arange(num_rows, device=hidden.device)
        hidden = head(embedded_BSD[:, 1 + step :], hidden[:, :num_rows], positions, attention, tap)
        yield head.normed(hidden)


class DraftHeadObjective:
    """The training loop's loss: (head, tokens [B, S+1]) -> L, or (head, tokens, weights of the tokens), by
    which the divergence of each drafted token is multiplied."""

    def __init__(
        self,
        loss: Divergence,
        target: Target,
        num_steps: int,
        *,
        compute_dtype: torch.dtype = torch.float32,
        compile: bool = False,
    ) -> None:
        assert not loss.hard_frac, "the text's own token may be none of the head's"
        self._loss = loss
        self._target = target
        self._dtype = compute_dtype
        weights = [STEP_WEIGHT**step for step in range(num_steps)]
        self._weights = [weight / sum(weights) for weight in weights]
        self._rows: Rows = torch.compile(divergence_rows, dynamic=False) if compile else divergence_rows

    def __call__(self, head: DraftHead, tokens_BS: Tensor, weights_BS: Tensor | None = None) -> Tensor:
        embedded_BSD, features_BSE, final_BSD = self._target.features(tokens_BS[:, :-1])
        total = torch.zeros((), device=embedded_BSD.device)
        for step, normed in enumerate(unrolled(head, embedded_BSD, features_BSE, len(self._weights))):
            final_TD = final_BSD[:, 1 + step :].flatten(0, 1)
            normed_TD = normed.flatten(0, 1).to(self._dtype)
            targets = partial(_logits, self._target.arch, final_TD, self._target.head_WD, self._target.bias_W)
            no_labels_T = torch.zeros(len(normed_TD), dtype=torch.int64, device=normed_TD.device)
            loss = mean_divergence(
                normed_TD,
                _matrix_of(head, self._target),
                targets,
                no_labels_T,
                self._loss,
                rows=self._rows,
                weights_T=None if weights_BS is None else weights_BS[:, 2 + step :].flatten(),
            )
            total = total + self._weights[step] * loss
        return total


def _logits(arch: Arch, final_TD: Tensor, head_WD: Tensor, bias_W: Tensor | None, part: slice) -> Tensor:
    return logits_of(arch, final_TD[part], head_WD, bias_W)


@dataclass(frozen=True)
class Drafted:
    """Means over held-out text. `kl`: of the first proposal, over the head's vocabulary, in nats; `top1`:
    how often it is the target's likeliest token; `acceptance`: the probability that a drawn proposal is
    kept, for each step, if all before it were; `acceptance_length`: tokens that come out of a step of as
    many proposals (`acceptance.py`); `covered`: the target's probability of the head's vocabulary."""

    kl: float
    top1: float
    acceptance: tuple[float, ...]
    acceptance_length: float
    covered: float

    def drafting(self) -> dict[str, float]:
        """Return the row of a curve."""
        return {
            "kl": self.kl,
            "top1": self.top1,
            "acceptance": self.acceptance[0],
            "acceptance_length": self.acceptance_length,
        }


@torch.no_grad()
def measure_head(
    head: DraftHead,
    target: Target,
    tokens_NS: Tensor,
    device: torch.device,
    *,
    compute_dtype: torch.dtype,
    ranks: Ranks | None = None,
    num_steps: int = K,
) -> Drafted:
    """Measure a head at temperature 1, on windows of S + 1 tokens, each of which gives S - num_steps steps;
    each rank takes its share of the windows."""
    ranks = OneRank() if ranks is None else ranks
    at_once = max(1, EVALUATED_TOKENS[device.type] // tokens_NS.shape[1])
    sums = torch.zeros(5 + num_steps, dtype=torch.float64, device=device)
    kept = []
    for batch_BS in tokens_NS.split(at_once)[ranks.rank :: ranks.size]:
        embedded_BSD, features_BSE, final_BSD = target.features(
            batch_BS[:, :-1].to(device=device, dtype=torch.int64)
        )
        num_rows = embedded_BSD.shape[1] - num_steps
        kept_K = []
        with torch.autocast(device.type, dtype=compute_dtype, enabled=compute_dtype != torch.float32):
            outputs = list(unrolled(head, embedded_BSD, features_BSE, num_steps))
        for step, normed in enumerate(outputs):
            final_TD = final_BSD[:, 1 + step : 1 + step + num_rows].flatten(0, 1)
            kept_T, kl, top1, covered = _compared(
                head, target, normed[:, :num_rows].flatten(0, 1).to(compute_dtype), final_TD
            )
            kept_K.append(kept_T.view(-1, num_rows))
            if step == 0:
                sums[:3] += torch.stack((kl, top1, covered))
        kept.append(torch.stack(kept_K, dim=2).cpu())
    if kept:
        kept_NRK = torch.cat(kept)
        sums[3:] = torch.cat((torch.stack(steps_through(kept_NRK)), kept_NRK.sum(dim=(0, 1)))).to(device)
    ranks.all_reduce([sums])
    kl, top1, covered, emitted, steps, *accepted = sums.tolist()
    num_tokens = tokens_NS.shape[0] * (tokens_NS.shape[1] - 1 - num_steps)
    acceptance = tuple(each / num_tokens for each in accepted)
    return Drafted(kl / num_tokens, top1 / num_tokens, acceptance, emitted / steps, covered / num_tokens)


def _matrix_of(head: DraftHead, target: Target) -> Tensor:
    """Return the matrix of logits [W, D] of a head."""
    own = head.own_head()
    return target.head_WD if own is None else own


def _compared(
    head: DraftHead, target: Target, normed_TD: Tensor, final_TD: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (probability that each proposal is kept float64 [T]; sums of KL, of agreement in the likeliest
    token, of the mass covered)."""
    sums = torch.zeros(3, dtype=torch.float64, device=final_TD.device)
    kept = []
    weight_WD = _matrix_of(head, target).to(normed_TD.dtype)
    words_W = target.vocabulary_W
    for part in slices(len(final_TD), len(target.head_VD), final_TD.device):
        logits_TV = _logits(target.arch, final_TD, target.head_VD, target.bias_V, part)
        log_p_TV = logits_TV.to(torch.float32).log_softmax(-1)
        log_p_TW = log_p_TV[:, words_W]
        log_q_TW = (normed_TD[part] @ weight_WD.T).to(torch.float32).log_softmax(-1)
        covered_T = log_p_TW.logsumexp(-1)
        among_TW = log_p_TW - covered_T.unsqueeze(1)
        sums[0] += (among_TW.exp() * (among_TW - log_q_TW)).sum(-1).double().sum()
        sums[1] += (log_p_TV.argmax(-1) == words_W[log_q_TW.argmax(-1)]).sum()
        sums[2] += covered_T.exp().double().sum()
        kept.append(torch.minimum(log_p_TW.exp(), log_q_TW.exp()).sum(-1).double())
    return torch.cat(kept), sums[0], sums[1], sums[2]

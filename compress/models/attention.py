"""Causal attention for calibration, training and as the oracle: over one whole sequence, or with a
contiguous cache of earlier positions. With `compress`, queries attend to entries, too, which it computes of
what follows the keys in the cache (`compressed.py`). With `choose`, a query attends to some of its keys, or
of the entries, which an indexer chooses by the index keys that it caches (`indexer.py`).

`Decoder.forward` takes the attention as an argument, so that a training step and a cached decode differ
in this object and in nothing of the model. The serving runtime has its own paged attention, which is
tested against these two.

Shapes: B batch, S sequence, P past, H heads, K kv heads, C head dimension, R width of a latent, I index keys
of a position, E entries. `window`
counts positions including the query itself; with a `chunk`, a query sees no key of an earlier chunk of so
many positions.
"""

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Protocol

import torch
from torch import Tensor

from compress.models import causal_gradient, repeatable
from compress.models.alibi import by_distance
from compress.models.ngrams import NO_POSITION
from compress.models.recurrence import RecurrentState
from compress.models.relative_logits import by_keys

Compress = Callable[[Tensor], Tensor]
"""(what a compressor computes of positions [B, P, F]) -> their entries [B, E, C]."""
Choose = Callable[[Tensor, Tensor], Tensor | None]
"""(index keys of all positions so far [B, P, I], which keys each query sees [S, P]) -> which of these keys
each query attends to, bool [B, 1 or H, S, P], or None where it attends to all that it sees."""


class AttentionFn(Protocol):
    """(layer, queries, keys, values of this call) -> [B, S, H, C]. `scale` None is 1 / sqrt(C); scores x
    are capped to `softcap` tanh(x / `softcap`) if one is given; `sinks` [H] are scores without a value.
    `relative` [B, S, H, E] are added to the scores of keys by how far back these are
    (`relative_logits.py`), or the distance times `slopes` [H] is subtracted (`alibi.py`). Keys and
    values that are `kept` are read by later layers, which name their `source` and bring none. With
    `compress`, keys are values, the numbers [B, P, F] follow them, of which it returns the entries [B, E, C],
    and a query sees an entry once its `rate` positions are over.
    `index_keys` [B, S, I] are cached next to the keys, and `choose` reads those of all positions so far. With
    `compress` it reads the numbers that follow the keys instead, and chooses entries [B, 1, S, E] of those
    that a query sees [S, E]. `chosen` [B, 1, S, P] is the choice of an earlier layer.
    """

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
    ) -> Tensor: ...


def causal_mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device, chunk: int | None = None
) -> Tensor:
    """bool [S, P + S], True where the query at absolute position P + s may look."""
    queries = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    keys = torch.arange(num_keys, device=device).unsqueeze(0)
    seen = keys <= queries
    if chunk is not None:
        seen = seen & (keys // chunk == queries // chunk)
    return seen if window is None else seen & (keys > queries - window)


def _attend(
    q_BSHC: Tensor,
    k_BPKC: Tensor,
    v_BPKC: Tensor,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    sinks_H: Tensor | None,
    chunk: int | None,
    relative_BSHE: Tensor | None = None,
    slopes_H: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    num_queries = q_BSHC.shape[1]
    num_keys = k_BPKC.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q_BSHC, k_BPKC, v_BPKC))
    if any(each is not None for each in (softcap, sinks_H, relative_BSHE, slopes_H)):
        mask = _among(chosen, causal_mask(num_queries, num_keys, window, q.device, chunk))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        relative = None if relative_BSHE is None else by_keys(relative_BSHE.transpose(1, 2), num_keys)
        if slopes_H is not None:
            relative = by_distance(slopes_H, num_queries, num_keys)
        return attend_with_scores(q, k, v, mask, scale, softcap, sinks_H, relative)
    sees_all = all(each is None or each >= num_keys for each in (window, chunk))
    if num_queries == num_keys and sees_all and chosen is None:
        if scale is None and causal_gradient.is_faster(q, k, v):
            return causal_gradient.attend(q, k, v).transpose(1, 2)
        out = repeatable.attend(q, k, v, scale=scale)
    else:
        mask = _among(chosen, causal_mask(num_queries, num_keys, window, q.device, chunk))
        out = repeatable.attend(q, k, v, mask=mask, scale=scale)
    return out.transpose(1, 2)


def _seen(q_BSHC: Tensor, index_keys_BPI: Tensor, window: int | None, chunk: int | None) -> Tensor:
    return causal_mask(q_BSHC.shape[1], index_keys_BPI.shape[1], window, q_BSHC.device, chunk)


def _among(chosen: Tensor | None, mask_SP: Tensor) -> Tensor:
    """Return which of the chosen keys [B, 1 or H, S, P] a query sees, or of all."""
    return mask_SP if chosen is None else mask_SP & chosen


def _attend_to_entries(
    q_BSHC: Tensor,
    cached_BP1F: Tensor,
    window: int | None,
    scale: float | None,
    sinks_H: Tensor | None,
    compress: Compress,
    rate: int,
    choose: Choose | None,
) -> Tensor:
    head_dim = q_BSHC.shape[-1]
    k_BPC, raw_BPF = cached_BP1F.squeeze(2).tensor_split([head_dim], dim=-1)
    entries_BEC = compress(raw_BPF)
    num_queries = q_BSHC.shape[1]
    num_keys = k_BPC.shape[1]
    ends_E = (torch.arange(entries_BEC.shape[1], device=q_BSHC.device) + 1) * rate
    positions_S1 = torch.arange(num_keys - num_queries, num_keys, device=q_BSHC.device).unsqueeze(1)
    near_SP = causal_mask(num_queries, num_keys, window, q_BSHC.device)
    over_SE = ends_E <= positions_S1 + 1
    over = _among(None if choose is None else choose(raw_BPF, over_SE), over_SE)
    mask = torch.cat((over, near_SP.expand(*over.shape[:-1], -1)), dim=-1)
    k = torch.cat((entries_BEC, k_BPC), dim=1).unsqueeze(1)
    scale = head_dim**-0.5 if scale is None else scale
    return attend_with_scores(q_BSHC.transpose(1, 2), k, k, mask, scale, None, sinks_H)


def attend_with_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_SP: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None = None,
    relative_BHSP: Tensor | None = None,
    growth_S: Tensor | None = None,
) -> Tensor:
    """Return attention [B, S, H, C] with capped scores, with terms added to them, and then a factor of each
    query, or with a sink as one more, of [B, H, S, C] and [B, K, P, C]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.matmul(q, k.mT) * scale
    if relative_BHSP is not None:
        scores = scores.to(torch.promote_types(torch.float32, scores.dtype)) + relative_BHSP
        scores = scores if growth_S is None else scores * growth_S.unsqueeze(-1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask_SP, -math.inf)
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    probs = torch.softmax(scores, dim=-1, dtype=torch.promote_types(torch.float32, q.dtype)).to(q.dtype)
    return torch.matmul(probs[..., : k.shape[2]], v).transpose(1, 2)


class FullAttention:
    """Each sequence of the batch attends to itself from position 0. The inputs of layers other than the
    stream are here: embeddings of the tokens for each layer, and keys and values that later layers read."""

    def __init__(self) -> None:
        self.layer_inputs: Mapping[int, Tensor] = {}
        """Layer -> the embeddings [B, S, P] of the tokens of this call for it (`layer_embedding.py`), or the
        rows [B, S, H] of its n-grams (`ngrams.py`)."""
        self.tokens_BS: Tensor | None = None
        """The tokens of this call, which are read where a table chooses experts (`Experts.table_size`)."""
        self.kept: MutableMapping[int, tuple[Tensor, Tensor]] = {}
        """Layer -> its keys and values [B, S, K, C]; with latents, those of this call [B, S, R] and the
        dimensions that all keys share."""
        self.choices: MutableMapping[int, Tensor] = {}
        """Layer -> the keys that its indexer chose for the queries of this call [B, 1, S, P], where later
        layers attend to them, too, and not all are chosen."""

    def tokens_before(self, tokens_BS: Tensor, num_tokens: int) -> Tensor:
        """Return so many tokens before these [B, W], `NO_POSITION` before the first position: of none here,
        and of a cache those of earlier calls, which has these tokens afterwards."""
        return tokens_BS.new_full((len(tokens_BS), num_tokens), NO_POSITION)

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
        if k_BSKC is None or v_BSKC is None:
            assert source is not None
            k_BSKC, v_BSKC = self.kept[source]
        elif kept:
            self.kept[layer_idx] = (k_BSKC, v_BSKC)
        if compress is not None:
            return _attend_to_entries(q_BSHC, k_BSKC, window, scale, sinks, compress, rate, choose)
        if choose is not None and index_keys is not None:
            chosen = choose(index_keys, _seen(q_BSHC, index_keys, window, chunk))
        return _attend(q_BSHC, k_BSKC, v_BSKC, window, scale, softcap, sinks, chunk, relative, slopes, chosen)


class CachedAttention(FullAttention):
    """Attention with the keys and values, and the states of recurrences, of earlier calls; every sequence of
    the batch has the same length."""

    def __init__(self) -> None:
        super().__init__()
        self._past: dict[int, tuple[Tensor, Tensor]] = {}
        self._past_index: dict[int, Tensor] = {}
        self.states: dict[int, RecurrentState] = {}
        """The state of each layer that has a recurrence in place of attention."""
        self.conv_inputs: dict[tuple[int, str], Tensor] = {}
        """Layer and convolution with a residual -> its last inputs [B, W - 1, F] (`residual_conv.py`)."""
        self.ngram_inputs: dict[int, Tensor] = {}
        """The last inputs [B, W - 1, n D] of the convolution of each layer with embeddings of n-grams."""
        self._past_tokens: Tensor | None = None

    def tokens_before(self, tokens_BS: Tensor, num_tokens: int) -> Tensor:
        before_BW = self._past_tokens
        if before_BW is None:
            before_BW = super().tokens_before(tokens_BS, num_tokens)
        self._past_tokens = torch.cat((before_BW, tokens_BS), dim=1)[:, -num_tokens:]
        return before_BW

    @property
    def length(self) -> int:
        """The number of positions whose keys are cached; 0 for a model without attention."""
        return next(iter(self._past.values()))[0].shape[1] if self._past else 0

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
        del kept
        if k_BSKC is None or v_BSKC is None:
            assert source is not None
            return _attend(
                q_BSHC, *self._past[source], window, scale, softcap, sinks, chunk, relative, slopes, chosen
            )
        if layer_idx in self._past:
            past_k, past_v = self._past[layer_idx]
            k_BSKC = torch.cat((past_k, k_BSKC), dim=1)
            v_BSKC = torch.cat((past_v, v_BSKC), dim=1)
        self._past[layer_idx] = (k_BSKC, v_BSKC)
        if compress is not None:
            return _attend_to_entries(q_BSHC, k_BSKC, window, scale, sinks, compress, rate, choose)
        if choose is not None and index_keys is not None:
            if layer_idx in self._past_index:
                index_keys = torch.cat((self._past_index[layer_idx], index_keys), dim=1)
            self._past_index[layer_idx] = index_keys
            chosen = choose(index_keys, _seen(q_BSHC, index_keys, window, chunk))
        return _attend(q_BSHC, k_BSKC, v_BSKC, window, scale, softcap, sinks, chunk, relative, slopes, chosen)


def layer_input_of(attention: AttentionFn, layer_idx: int) -> Tensor:
    """Return the embeddings [B, S, P] of the tokens of a call for a layer."""
    assert isinstance(attention, FullAttention)
    return attention.layer_inputs[layer_idx]


def tokens_of(attention: AttentionFn) -> Tensor:
    """Return the tokens [B, S] of a call."""
    assert isinstance(attention, FullAttention)
    assert attention.tokens_BS is not None
    return attention.tokens_BS


def kept_by(attention: AttentionFn) -> MutableMapping[int, tuple[Tensor, Tensor]]:
    """Return what an attention keeps of some layers for later ones."""
    assert isinstance(attention, FullAttention)
    return attention.kept


def choices_of(attention: AttentionFn) -> MutableMapping[int, Tensor]:
    """Return the choices that an attention keeps of some layers for later ones."""
    assert isinstance(attention, FullAttention)
    return attention.choices

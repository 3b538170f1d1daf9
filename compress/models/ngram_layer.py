"""The module of embeddings of n-grams (`ngrams.py`), and its inputs.

Shapes: B batch, S sequence, n streams, D hidden, E = n D, H heads of all orders, W positions before.
"""

from collections.abc import MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.attention import AttentionFn, CachedAttention, FullAttention, layer_input_of
from compress.models.gated_residual_layer import StreamNorm
from compress.models.linear import Linear
from compress.models.ngrams import NGrams, heads_of, lags_of, rows_of_ngrams, softened
from compress.models.recurrence import last_inputs


def inputs_of_ngrams(arch: Arch, tokens_BS: Tensor, attention: FullAttention) -> dict[int, Tensor]:
    """Return the rows [B, S, H] of the tables of layers with embeddings of n-grams; `attention` has the
    tokens of earlier calls, and these afterwards."""
    layers = {idx: layer.ngrams for idx, layer in enumerate(arch.layers) if layer.ngrams is not None}
    if not layers:
        return {}
    most = max(each.order for each in layers.values()) - 1
    lags = lags_of(tokens_BS, attention.tokens_before(tokens_BS, most))
    return {
        idx: rows_of_ngrams(each, arch.vocab_size, heads_of(each, tokens_BS.device), lags[: each.order])
        for idx, each in layers.items()
    }


def take_ngrams(arch: Arch, tokens_BS: Tensor, attention: AttentionFn) -> None:
    """Have an attention hold the rows of the tables for the tokens of this call."""
    assert isinstance(attention, FullAttention)
    attention.layer_inputs = inputs_of_ngrams(arch, tokens_BS, attention)


class NGramEmbedding(nn.Module):
    """The embeddings of n-grams of a layer, and what it adds of them to the streams of the residual."""

    def __init__(self, arch: Arch, facts: NGrams) -> None:
        super().__init__()
        self.facts = facts
        size = facts.num_streams * arch.hidden_size
        self.table = nn.ModuleList(nn.Embedding(rows, facts.head_dim) for rows in facts.part_sizes)
        self.key = Linear(facts.width, size, bias=False)
        self.value = Linear(facts.width, arch.hidden_size, bias=False)
        norm = facts.num_streams, arch.hidden_size, arch.norm_eps, arch.norm_offset
        self.key_norm = StreamNorm(*norm)
        self.query_norm = StreamNorm(*norm)
        self.conv_norm = StreamNorm(*norm)
        self.conv = nn.Conv1d(size, size, facts.kernel_size, groups=size, dilation=facts.order, bias=False)

    def forward(
        self, streams_BSE: Tensor, rows_BSH: Tensor, kept: MutableMapping[int, Tensor], layer_idx: int
    ) -> Tensor:
        """Return the streams [B, S, n D] with what the layer adds to them. `kept` holds the last inputs of
        convolutions by layer, from one call to the next."""
        values_BSE = self._gated(streams_BSE, self._embedded(rows_BSH, streams_BSE.dtype))
        inputs_BSE = self.conv_norm(values_BSE)
        past_BWE = kept.get(layer_idx)
        width = self.facts.kept_positions
        all_BSE = (
            F.pad(inputs_BSE, (0, 0, width - 1, 0))
            if past_BWE is None
            else torch.cat((past_BWE, inputs_BSE), dim=1)
        )
        kept[layer_idx] = last_inputs(inputs_BSE, past_BWE, width)
        mixed_BSE = self.conv(all_BSE.transpose(1, 2)).transpose(1, 2)
        return streams_BSE + (values_BSE + F.silu(mixed_BSE))

    def added(self, streams_BSE: Tensor, attention: AttentionFn, layer_idx: int) -> Tensor:
        """Return the streams [B, S, n D] with what the layer adds to them, of the n-grams that an attention
        holds; what a cached decode goes on from is in it, too."""
        kept = attention.ngram_inputs if isinstance(attention, CachedAttention) else {}
        after_BSE: Tensor = self(streams_BSE, layer_input_of(attention, layer_idx), kept, layer_idx)
        return after_BSE

    def _embedded(self, rows_BSH: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the embeddings [B, S, P] of all heads, by rows of the table."""
        parts = self.facts.part_sizes
        flat = rows_BSH.flatten()
        found = torch.zeros(len(flat), self.facts.head_dim, dtype=dtype, device=flat.device)
        start = 0
        for part, size in zip(self.table, parts, strict=True):
            places = ((flat >= start) & (flat < start + size)).nonzero().squeeze(1)
            if len(places):
                found = found.index_copy(0, places, part(flat[places] - start).to(dtype))
            start += size
        return found.unflatten(0, rows_BSH.shape).flatten(-2)

    def _gated(self, streams_BSE: Tensor, embedded_BSP: Tensor) -> Tensor:
        """Return y of all streams [B, S, n D]."""
        n = self.facts.num_streams
        keys_BSnD = self.key_norm(self.key(embedded_BSP)).unflatten(-1, (n, -1))
        queries_BSnD = self.query_norm(streams_BSE).unflatten(-1, (n, -1))
        products = (keys_BSnD.to(torch.float32) * queries_BSnD.to(torch.float32)).sum(-1, keepdim=True)
        gates = torch.sigmoid(softened(products / keys_BSnD.shape[-1] ** 0.5))
        values = self.value(embedded_BSP).to(torch.float32).unsqueeze(-2)
        return (gates * values).flatten(-2).to(streams_BSE.dtype)

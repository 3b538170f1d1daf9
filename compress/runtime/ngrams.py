"""Embeddings of n-grams in serving (`models/ngrams.py`): operations of torch, which a CUDA graph can capture
and whose bits of a row do not depend on the other rows, around the kernels of linears and of short
convolutions.

The rows of the embedding table bring their tokens (`token_digits.py`). The tokens before a row come from a
convolution whose weights are 1 at one position and 0 at the others, over ids in float32, where they are
exact: the states of sequences, and what becomes of rows that are not kept, are those of any short
convolution.

Shapes: T rows, n streams, D hidden, E = n D, P embedding of all heads, F channels and W positions of a
convolution, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.act_mul.reference import in_whole_vectors
from compress.kernels.operands.recurrent_states import RecurrentStates
from compress.kernels.problem import Phase
from compress.kernels.rms_norm.reference import rms_norm
from compress.models.altup import mean_of_pairs
from compress.models.arch import Arch
from compress.models.ngrams import NGrams, heads_of, rows_of_ngrams, softened
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse
from compress.runtime.kv_cache import NGramKept

Convolve = Callable[[Tensor, Tensor, RecurrentStates], Tensor]
"""(x [T, F], weights [F, W], states) -> the causal convolution of each channel [T, F], in the dtype of x; the
states have the inputs afterwards."""


@dataclass(frozen=True)
class NGramWeights:
    """The embeddings of n-grams of a layer. `shift_FW` are the weights by which the tokens before a row are
    found, and `conv_EW` those of the convolution, with zeros at the positions that it leaves out; factors of
    norms [n D] are float32, and `heads` are `heads_of` the facts."""

    facts: NGrams
    vocab_size: int
    norm_eps: float
    table: Tensor
    heads: Tensor
    key: FusedLinear
    value: FusedLinear
    key_norm_E: Tensor
    query_norm_E: Tensor
    conv_norm_E: Tensor
    shift_FW: Tensor
    conv_EW: Tensor

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of these weights, but for the few rows of the table."""
        norms = (self.key_norm_E, self.query_norm_E, self.conv_norm_E, self.conv_EW)
        return self.key.weight_bytes + self.value.weight_bytes + sum(each.nbytes for each in norms)

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return self.key.report(layer_idx) + self.value.report(layer_idx)

    def added(
        self, streams_TE: Tensor, tokens_T: Tensor, kept: NGramKept, convolve: Convolve, phase: Phase
    ) -> Tensor:
        """Return the streams [T, n D] with what the layer adds to them before its first half."""
        embedded_TP = self._embedded(tokens_T, kept.tokens, convolve)
        values_TE = self._gated(streams_TE, embedded_TP, phase)
        inputs_TE = self._normed(values_TE, self.conv_norm_E)
        mixed_TE = convolve(inputs_TE, self.conv_EW, kept.inputs).to(torch.float32)
        mixed_TE = in_whole_vectors(F.silu, mixed_TE).to(streams_TE.dtype)
        return streams_TE + (values_TE + mixed_TE)

    def _embedded(self, tokens_T: Tensor, states: RecurrentStates, convolve: Convolve) -> Tensor:
        """Return the embeddings [T, P] of the n-grams that end in each row."""
        ids_T1 = (tokens_T + 1).to(torch.float32).unsqueeze(1)
        lags = self.facts.order - 1
        before_TF = convolve(ids_T1.expand(-1, lags).contiguous(), self.shift_FW, states)
        tokens = [ids_T1.squeeze(1), *before_TF.unbind(1)]
        tokens = [each.to(torch.int64) - 1 for each in tokens]
        rows_TH = rows_of_ngrams(self.facts, self.vocab_size, self.heads, tokens)
        return F.embedding(rows_TH, self.table).flatten(1)

    def _gated(self, streams_TE: Tensor, embedded_TP: Tensor, phase: Phase) -> Tensor:
        """Return y of all streams [T, n D]."""
        n = self.facts.num_streams
        keys_TE = self._normed(self.key(embedded_TP, phase), self.key_norm_E).to(torch.float32)
        queries_TE = self._normed(streams_TE, self.query_norm_E).to(torch.float32)
        products_TnD = (keys_TE * queries_TE).unflatten(-1, (n, -1))
        size = products_TnD.shape[-1]
        scores_Tn = mean_of_pairs(products_TnD).squeeze(-1) * size**0.5
        gates_Tn = in_whole_vectors(torch.sigmoid, in_whole_vectors(softened, scores_Tn))
        values_T1D = self.value(embedded_TP, phase).to(torch.float32).unsqueeze(1)
        return (gates_Tn.unsqueeze(-1) * values_T1D).flatten(1).to(streams_TE.dtype)

    def _normed(self, streams_TE: Tensor, factors_E: Tensor) -> Tensor:
        """Return the streams [T, n D], each divided by its root mean square, times float32 factors."""
        by_stream = (self.facts.num_streams, -1)
        factors_nD = factors_E.unflatten(0, by_stream)
        return rms_norm(streams_TE.unflatten(-1, by_stream), factors_nD, self.norm_eps).flatten(-2)


def ngram_weights(
    arch: Arch, facts: NGrams | None, weights: Weights, deployment: Deployment
) -> NGramWeights | None:
    """Return the embeddings of n-grams of a layer, None where it has none."""
    if facts is None:
        return None

    def norm(name: str) -> Tensor:
        weight_E = dense(weights[f"ngrams.{name}.weight"])
        return weight_E.to(device=deployment.device, dtype=torch.float32) + arch.norm_offset

    parts = (dense(weights[f"ngrams.table.{idx}.weight"]) for idx in range(len(facts.part_sizes)))
    lags = facts.order - 1
    conv_EW = deployment.placed(dense(weights["ngrams.conv.weight"])).squeeze(1)
    spread_EW = conv_EW.new_zeros(len(conv_EW), facts.kept_positions)
    spread_EW[:, :: facts.order] = conv_EW
    return NGramWeights(
        facts,
        arch.vocab_size,
        arch.norm_eps,
        deployment.placed(torch.cat(tuple(parts))),
        heads_of(facts, deployment.device),
        fuse(("ngrams.key",), weights, deployment),
        fuse(("ngrams.value",), weights, deployment),
        norm("key_norm"),
        norm("query_norm"),
        norm("conv_norm"),
        torch.eye(lags, lags + 1, device=deployment.device).flip(0),
        spread_EW,
    )

"""The serving forward: a straight-line step over per-layer facts and fused projections, held to `models/decoder.py` by a golden test.

    x = embed(tokens)
    per layer:  q, k, v = qkv(norm(x));  q, k = rope(qk_norm(q, k));  x = x + o(attention(q, cache(k, v)))
                x = x + down(act(gate) * up),  gate, up = gate_up(norm(x))
    logits = head(norm(x[rows wanted]))

Decode rows and prefill rows go through the layers in two passes with their own kernels: the bits of a decode row depend on its request
alone (see `kernels/select.py`, `row_invariant`), whatever is prefilled beside it. Rows whose logits are wanted meet again at the head,
in its decode kernel.

Shapes: T rows (tokens of all sequences, one after the other), D hidden, H heads, K kv heads, C head dimension, B sequences, R rows wanted,
V vocabulary, M blocks of the longest sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.select import Op, select
from compress.models.arch import LayerShape, Rope
from compress.models.rope import cos_sin
from compress.runtime.kv_cache import KVCache
from compress.runtime.loader import LayerWeights, ModelWeights, Phase, Placed, Projection

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, H, C], k [T, K, C], v [T, K, C]) -> [T, H, C]"""


@dataclass(frozen=True)
class ForwardBatch:
    """One ragged step. The first `num_decodes` sequences bring one row each; the others a prefill chunk of `query_lens` rows.

    A context includes the sequence's own rows of this step: the last row of sequence b has position `context_lens[b] - 1`. Block tables
    are padded with block 0. `logit_rows_R` index the T rows.
    """

    tokens_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    block_table_BM: Tensor
    context_lens_B: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_decodes: int
    logit_rows_R: Tensor


class ModelRunner:
    """Weights, cache and chosen kernels; `forward` writes the cache, `score` does not touch it."""

    def __init__(self, weights: ModelWeights, cache: KVCache, *, max_model_len: int) -> None:
        arch, target = weights.arch, weights.target
        self._weights = weights
        self._arch = arch
        self._cache = cache
        self._max_model_len = max_model_len
        widest = max(arch.hidden_size, *(layer.num_heads * layer.head_dim for layer in arch.layers))
        widest_ffn = max(layer.intermediate_size for layer in arch.layers)
        self._ops = {
            "rms_norm": _placed(weights, "rms_norm", arch.hidden_size),
            "rope": _placed(weights, "rope", widest),
            "act_mul": _placed(weights, "act_mul", widest_ffn),
            "attention_decode": _placed(weights, "attention_decode", widest),
            "attention_prefill": _placed(weights, "attention_prefill", widest, phase="prefill"),
        }
        self._rms_norm = self._ops["rms_norm"].kernel.fn
        self._rope = self._ops["rope"].kernel.fn
        self._act_mul = self._ops["act_mul"].kernel.fn
        self._attention_decode = self._ops["attention_decode"].kernel.fn
        self._attention_prefill = self._ops["attention_prefill"].kernel.fn
        positions = torch.arange(max_model_len, device=target.device)
        self._rope_tables = {key: cos_sin(*key, positions, target.dtype) for key in {_rope_key(layer) for layer in arch.layers}}

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits float32 [R, V] of the rows wanted; keys and values of all rows are written to the cache."""
        hidden = []
        if batch.num_decodes:
            rows = slice(0, batch.num_decodes)
            attend = partial(self._attend_decode, batch)
            hidden.append(self._hidden(batch.tokens_T[rows], batch.positions_T[rows], attend, "decode"))
        if batch.num_decodes < len(batch.query_lens):
            rows = slice(batch.num_decodes, None)
            attend = partial(self._attend_prefill, batch)
            hidden.append(self._hidden(batch.tokens_T[rows], batch.positions_T[rows], attend, "prefill"))
        return self._logits(torch.cat(hidden)[batch.logit_rows_R], "decode")

    def score(self, tokens_BS: Tensor) -> Tensor:
        """Logits float32 [B, S, V] of whole sequences, by one ragged prefill over keys and values of this call only.

        A sequence's bits do not depend on the others of the call.

        Raises:
            UsageError: sequences longer than the model length.
        """
        num_sequences, length = tokens_BS.shape
        if length > self._max_model_len:
            raise UsageError(f"sequences of {length} tokens cannot be scored: the model length is {self._max_model_len}.")
        tokens_BS = tokens_BS.to(self._weights.target.device)
        positions = torch.arange(length, device=tokens_BS.device).repeat(num_sequences)
        hidden = self._hidden(tokens_BS.reshape(-1), positions, partial(self._attend_whole, length), "prefill")
        return self._logits(hidden, "prefill").view(num_sequences, length, -1)

    def kernel_report(self) -> list[dict[str, Any]]:
        """One row for each linear, phase and other op."""
        rows = [row for idx, layer in enumerate(self._weights.layers) for each in layer.projections for row in each.report(idx)]
        rows += self._weights.head.report(None)
        return rows + [placed.report(layer=None, linear=op) for op, placed in self._ops.items()]

    def _hidden(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, phase: Phase) -> Tensor:
        """[T, D] after the last layer, before the final norm."""
        x_TD = F.embedding(tokens_T, self._weights.embed_VD)
        cos_sins = {key: (cos[positions_T], sin[positions_T]) for key, (cos, sin) in self._rope_tables.items()}
        for layer_idx, layer in enumerate(self._weights.layers):
            x_TD = self._layer(layer_idx, layer, x_TD, cos_sins[_rope_key(layer.shape)], attend, phase)
        return x_TD

    def _layer(
        self, layer_idx: int, layer: LayerWeights, x_TD: Tensor, cos_sin_TC: tuple[Tensor, Tensor], attend: Attend, phase: Phase
    ) -> Tensor:
        shape, eps, num_rows = layer.shape, self._arch.norm_eps, x_TD.shape[0]
        heads = [shape.num_heads, shape.num_kv_heads]
        qkv = layer.qkv(self._rms_norm(x_TD, layer.attn_norm, eps), phase).view(num_rows, sum(heads) + heads[1], shape.head_dim)
        qk, v_TKC = torch.split(qkv, [sum(heads), heads[1]], dim=1)
        if layer.qk_norm is not None:
            qk = self._rms_norm(qk, layer.qk_norm, eps)
        q_THC, k_TKC = torch.split(self._rope(qk, *cos_sin_TC), heads, dim=1)
        x_TD = x_TD + layer.o(attend(layer_idx, q_THC, k_TKC, v_TKC).reshape(num_rows, -1), phase)
        gate_up = layer.gate_up(self._rms_norm(x_TD, layer.ffn_norm, eps), phase)
        return x_TD + layer.down(self._act_mul(gate_up, self._arch.activation), phase)

    def _logits(self, hidden_RD: Tensor, phase: Phase) -> Tensor:
        head: Projection = self._weights.head
        return head(self._rms_norm(hidden_RD, self._weights.norm, self._arch.norm_eps), phase).to(torch.float32)

    def _attend_decode(self, batch: ForwardBatch, layer_idx: int, q_RHC: Tensor, k_RKC: Tensor, v_RKC: Tensor) -> Tensor:
        rows, shape = slice(0, batch.num_decodes), self._arch.layers[layer_idx]
        self._cache.write_(layer_idx, batch.slot_mapping_T[rows], k_RKC, v_RKC)
        keys, values = self._cache.layer(layer_idx)
        return self._attention_decode(
            q_RHC, keys, values, batch.block_table_BM[rows], batch.context_lens_B[rows], shape.window, _scale(shape)
        )

    def _attend_prefill(self, batch: ForwardBatch, layer_idx: int, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> Tensor:
        shape = self._arch.layers[layer_idx]
        self._cache.write_(layer_idx, batch.slot_mapping_T[batch.num_decodes :], k_TKC, v_TKC)
        outputs, start = [], 0
        for sequence_idx in range(batch.num_decodes, len(batch.query_lens)):
            end, context_len = start + batch.query_lens[sequence_idx], batch.context_lens[sequence_idx]
            k_KLC, v_KLC = self._cache.gather(layer_idx, batch.block_table_BM[sequence_idx], context_len)
            outputs.append(self._attention_prefill(q_THC[start:end], k_KLC, v_KLC, shape.window, _scale(shape)))
            start = end
        return torch.cat(outputs)

    def _attend_whole(self, length: int, layer_idx: int, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> Tensor:
        shape = self._arch.layers[layer_idx]
        sequences = zip(*(torch.split(each, length) for each in (q_THC, k_TKC, v_TKC)), strict=True)
        return torch.cat(
            [self._attention_prefill(q, k.transpose(0, 1), v.transpose(0, 1), shape.window, _scale(shape)) for q, k, v in sequences]
        )


def _placed(weights: ModelWeights, op: Op, n: int, *, phase: Phase = "decode") -> Placed:
    problem = weights.target.problem(op, n=n, phase=phase)
    return Placed(select(problem), problem)


def _rope_key(shape: LayerShape) -> tuple[Rope, int]:
    return shape.rope, shape.head_dim


def _scale(shape: LayerShape) -> float:
    return shape.head_dim**-0.5

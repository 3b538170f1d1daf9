"""The serving forward: a straight-line step over per-layer facts and fused projections, held to `models/decoder.py` by a golden test.

    x = embed(tokens)
    per layer:  x = x + o(attention(q, cache)),  q = rope_store(qkv(norm(x)))
                x = x + down(act(gate) * up),    gate, up = gate_up(norm(x))
    logits = head(norm(x))

Decode rows and prefill rows are two passes, with their own kernels where a prompt has more than a few rows: the bits of a decode row
depend on its request alone (see `kernels/select.py`, `row_invariant`), whatever is prefilled beside it. Rows whose logits are wanted pass
the head in its decode kernel.

Shapes: T rows (tokens of all sequences, one after the other), D hidden, H heads, C head dimension, B blocks of the longest sequence,
R sequences, W rows wanted, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.coverage import Phase
from compress.kernels.paged import FP8_STATIC, PagedKV
from compress.kernels.rows import RawRows
from compress.kernels.select import Op, select
from compress.models.arch import LayerShape, Rope
from compress.models.rope import cos_sin
from compress.runtime.kv_cache import KVCache
from compress.runtime.loader import FEW_ROWS, LayerWeights, ModelWeights, Placed, Projection, Rows

Attend = Callable[[LayerShape, Tensor, PagedKV], Tensor]
"""(shape, q [T, H, C], the layer's pages with all keys and values written) -> [T, H, C]"""
_SCRATCH_BLOCK = 64
_PER_HEAD_OPS: tuple[Op, ...] = ("rope_store", "attention_decode", "attention_prefill")


@dataclass(frozen=True)
class PrefillBatch:
    """One ragged step of prompt chunks. A context includes the sequence's own rows: its last row has position `context_lens[r] - 1`.

    Block tables are padded with block 0. `wanted_rows` index the T rows.
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    block_table_RB: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    wanted_rows_W: Tensor


class ModelRunner:
    """Weights, cache and chosen kernels. `decode` and `prefill` write the cache, `score` does not touch it."""

    def __init__(self, weights: ModelWeights, cache: KVCache, *, max_model_len: int) -> None:
        arch, target = weights.arch, weights.target
        self._weights = weights
        self._arch = arch
        self._cache = cache
        self._max_model_len = max_model_len
        widest_ffn = max(layer.intermediate_size for layer in arch.layers)
        self._ops = {
            "rms_norm": _placed(weights, "rms_norm", arch.hidden_size),
            "act_mul": _placed(weights, "act_mul", widest_ffn),
        }
        self._rms_norm = self._ops["rms_norm"].kernel.fn
        self._act_mul = self._ops["act_mul"].kernel.fn
        self._head_ops = {
            (op, key): _placed(weights, op, key[0], key[1], scheme=cache.kv_format)
            for key in sorted({_head_key(layer) for layer in arch.layers})
            for op in _PER_HEAD_OPS
        }
        # One position more than a sequence has: a step that was launched before its predecessor's end was known may look there.
        positions = torch.arange(max_model_len + 1, device=target.device)
        self._rope_tables = {key: cos_sin(*key, positions, target.dtype) for key in {_rope_key(layer) for layer in arch.layers}}

    @property
    def embedding(self) -> Tensor:
        """[V, D], of which `decode` takes rows."""
        return self._weights.embed_VD

    @property
    def few_rows(self) -> int:
        """Rows of short prompts that `prefill` takes at a time."""
        return self._weights.target.few_rows

    @property
    def max_decode_rows(self) -> int:
        """Rows that `decode` takes at once: as many as its kernels were chosen for."""
        return max(self._weights.target.max_decode_rows, FEW_ROWS)

    def decode(
        self, x_TD: Tensor, positions_T: Tensor, slots_T: Tensor, block_table_RB: Tensor, context_lens_R: Tensor, *, q_len: int = 1
    ) -> Tensor:
        """Logits float32 [T, V] of the last `q_len` embedded rows of each sequence; nothing waits for the host, so a graph can hold it.

        A context includes them all. A row has the bits that it has with `q_len` 1.
        """

        def attend(shape: LayerShape, q_THC: Tensor, kv: PagedKV) -> Tensor:
            fn = self._head_ops["attention_decode", _head_key(shape)].kernel.fn
            return fn(q_THC, kv, block_table_RB, context_lens_R, q_len=q_len, window=shape.window, scale=_scale(shape))

        x_TD = self._hidden(x_TD, positions_T, slots_T, self._cache.layer, attend, "decode")
        return self._logits(x_TD, "decode")

    def prefill(self, batch: PrefillBatch, *, short: bool) -> Tensor:
        """Logits float32 [W, V] of the rows wanted.

        `short` prompts, `few_rows` rows at most, go through the linears as decode rows do: weight bytes bound them, and a row has the same
        bits in any company. Whether a prompt is short is the caller's rule, and must depend on nothing but the prompt.
        """
        attend = partial(self._attend_prefill, batch.block_table_RB, batch.query_lens, batch.context_lens)
        x_TD = F.embedding(batch.tokens_T, self.embedding)
        x_TD = self._hidden(x_TD, batch.positions_T, batch.slots_T, self._cache.layer, attend, "decode" if short else "prefill")
        return self._logits(x_TD[batch.wanted_rows_W], "decode")

    def score(self, tokens_BS: Tensor) -> Tensor:
        """Logits float32 [B, S, V] of whole sequences, prefilled over pages of this call only.

        A sequence's bits do not depend on the others of the call.

        Raises:
            UsageError: sequences longer than the model length.
        """
        (num_sequences, length), device = tokens_BS.shape, self._weights.target.device
        if length > self._max_model_len:
            raise UsageError(f"sequences of {length} tokens cannot be scored: the model length is {self._max_model_len}.")
        short = 0 < length <= self.few_rows
        if short and num_sequences * length > self.few_rows:
            return torch.cat([self.score(each) for each in tokens_BS.split(self.few_rows // length)])
        num_columns = -(-length // _SCRATCH_BLOCK)
        first_block = 1 + torch.arange(num_sequences, device=device).unsqueeze(1) * num_columns
        table_BN = first_block + torch.arange(num_columns, device=device)
        positions_BS = torch.arange(length, device=device).expand(num_sequences, -1)
        slots_BS = first_block * _SCRATCH_BLOCK + positions_BS
        pages = _ScratchPages(self._cache, 1 + num_sequences * num_columns)
        attend = partial(self._attend_prefill, table_BN, (length,) * num_sequences, (length,) * num_sequences)
        x_TD = F.embedding(tokens_BS.to(device).reshape(-1), self.embedding)
        x_TD = self._hidden(x_TD, positions_BS.reshape(-1), slots_BS.reshape(-1), pages.layer, attend, "decode" if short else "prefill")
        return self._logits(x_TD, "prefill").view(num_sequences, length, -1)

    def kernel_report(self) -> list[dict[str, Any]]:
        """One row for each linear, phase and other op."""
        rows = [row for idx, layer in enumerate(self._weights.layers) for each in layer.projections for row in each.report(idx)]
        rows += self._weights.head.report(None)
        rows += [placed.report(layer=None, linear=op) for op, placed in self._ops.items()]
        return rows + [placed.report(layer=None, linear=op) for (op, _), placed in self._head_ops.items()]

    def _hidden(
        self, x_TD: Tensor, positions_T: Tensor, slots_T: Tensor, pages: Callable[[int], PagedKV], attend: Attend, phase: Phase
    ) -> Tensor:
        """[T, D] after the last layer, before the final norm."""
        for layer_idx, layer in enumerate(self._weights.layers):
            x_TD = self._layer(layer, x_TD, positions_T, slots_T, pages(layer_idx), attend, phase)
        return x_TD

    def _layer(
        self, layer: LayerWeights, x_TD: Tensor, positions_T: Tensor, slots_T: Tensor, kv: PagedKV, attend: Attend, phase: Phase
    ) -> Tensor:
        qkv_TF = layer.qkv(self._normed(x_TD, layer.attn_norm, layer.qkv, phase), phase)
        x_TD = layer.o(self._attended(layer, qkv_TF, positions_T, slots_T, kv, attend), phase, residual=x_TD)
        mid_TF = layer.gate_up(self._normed(x_TD, layer.ffn_norm, layer.gate_up, phase), phase)
        if not layer.gate_up.gated(phase):
            mid_TF = self._act_mul(mid_TF, self._arch.activation, layer.down.quant)
        return layer.down(mid_TF, phase, residual=x_TD)

    def _attended(self, layer: LayerWeights, qkv_TF: Tensor, positions_T: Tensor, slots_T: Tensor, kv: PagedKV, attend: Attend) -> Tensor:
        """[T, H C]; keys and values are in the cache afterwards."""
        shape, eps = layer.shape, self._arch.norm_eps
        rope_store = self._head_ops["rope_store", _head_key(shape)].kernel.fn
        tables = self._rope_tables[_rope_key(shape)]
        q_THC = rope_store(qkv_TF, *tables, positions_T, slots_T, kv, num_heads=shape.num_heads, qk_norm=layer.qk_norm, eps=eps)
        return attend(shape, q_THC, kv).reshape(qkv_TF.shape[0], -1)

    def _logits(self, x_TD: Tensor, phase: Phase) -> Tensor:
        head = self._weights.head
        return head(self._normed(x_TD, self._weights.norm, head, phase), phase, out_dtype=torch.float32)

    def _normed(self, x_TD: Tensor, weight_D: Tensor, projection: Projection, phase: Phase) -> Rows:
        """The projection's input: left to its kernel where that prepares rows itself."""
        if projection.prepares(phase):
            return RawRows(x_TD, weight_D, self._arch.norm_eps, projection.quant)
        return self._rms_norm(x_TD, weight_D, self._arch.norm_eps, projection.quant)

    def _attend_prefill(
        self,
        block_table_RB: Tensor,
        query_lens: tuple[int, ...],
        context_lens: tuple[int, ...],
        shape: LayerShape,
        q_THC: Tensor,
        kv: PagedKV,
    ) -> Tensor:
        fn = self._head_ops["attention_prefill", _head_key(shape)].kernel.fn
        return fn(q_THC, kv, block_table_RB, query_lens, context_lens, window=shape.window, scale=_scale(shape))


class _ScratchPages:
    """Pages for one call, like the cache's; layers of one shape share them."""

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self._cache = cache
        self._num_blocks = num_blocks
        self._made: dict[tuple[int, int], PagedKV] = {}

    def layer(self, layer_idx: int) -> PagedKV:
        like = self._cache.layer(layer_idx)
        key = like.k.shape[0], like.head_dim
        made = self._made.get(key) or self._made.setdefault(key, like.empty_like(self._num_blocks, _SCRATCH_BLOCK))
        return replace(made, k_scale=like.k_scale, v_scale=like.v_scale) if like.format == FP8_STATIC else made


def _placed(weights: ModelWeights, op: Op, n: int, k: int = 0, *, scheme: str | None = None) -> Placed:
    problem = weights.target.machine.problem(op, n=n, k=k, phase="prefill" if op == "attention_prefill" else "decode", scheme=scheme)
    return Placed(select(problem), problem)


def _head_key(shape: LayerShape) -> tuple[int, int]:
    """Head dimension, and query heads per KV head: what attention kernels are chosen by."""
    return shape.head_dim, shape.num_heads // shape.num_kv_heads


def _rope_key(shape: LayerShape) -> tuple[Rope, int]:
    return shape.rope, shape.head_dim


def _scale(shape: LayerShape) -> float:
    return shape.head_dim**-0.5

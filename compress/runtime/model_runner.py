"""The serving forward: a straight-line step over per-layer facts and fused projections, held to `models/decoder.py` by a golden test.

    x = embed(tokens)
    x = layer(x) for each      (`layer_runner.py`)
    logits = head(norm(x))

Decode rows and prefill rows are two passes, with their own kernels where a prompt has more than a few rows: the bits of a decode row
depend on its request alone (see `kernels/select.py`, `row_invariant`), whatever is prefilled beside it. Rows whose logits are wanted pass
the head in its decode kernel.

Shapes: T rows (tokens of all sequences, one after the other), D hidden, E = several D, B blocks of the longest sequence, R sequences,
W rows wanted, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.operands.paged import FP8_STATIC, PagedKV
from compress.kernels.problem import Phase
from compress.runtime.kv_cache import KVCache
from compress.runtime.layer_runner import Attend, LayerRunner
from compress.runtime.loader import FEW_ROWS, ModelWeights

_SCRATCH_BLOCK = 64


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


@dataclass(frozen=True)
class Features:
    """Hidden states that a step leaves beside its logits: those after `depths` layers (0: the embedding), before any norm, one beside the
    other in rows [T, E]."""

    depths: tuple[int, ...]
    rows_TE: Tensor

    @staticmethod
    def empty(depths: Sequence[int], num_rows: int, embed_VD: Tensor) -> "Features":
        return Features(tuple(depths), embed_VD.new_empty(num_rows, len(depths) * embed_VD.shape[1]))

    def keep(self, depth: int, x_TD: Tensor) -> None:
        """The step is that deep now."""
        if depth in self.depths:
            start = self.depths.index(depth) * x_TD.shape[1]
            self.rows_TE[:, start : start + x_TD.shape[1]] = x_TD


class ModelRunner:
    """Weights, cache and chosen kernels. `decode` and `prefill` write the cache, `score` does not touch it."""

    def __init__(self, weights: ModelWeights, cache: KVCache, *, max_model_len: int) -> None:
        arch = weights.arch
        target = weights.target
        self._weights = weights
        self._arch = arch
        self._cache = cache
        self._max_model_len = max_model_len
        self._layers = LayerRunner(arch, target, cache.kv_format, max_model_len=max_model_len)

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
        self,
        x_TD: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        block_table_RB: Tensor,
        context_lens_R: Tensor,
        *,
        q_len: int = 1,
        features: Features | None = None,
    ) -> Tensor:
        """Logits float32 [T, V] of the last `q_len` embedded rows of each sequence; nothing waits for the host, so a graph can hold it.

        A context includes them all. A row has the bits that it has with `q_len` 1. `features` are filled in.
        """
        attend = self._layers.attend_decode(block_table_RB, context_lens_R, q_len=q_len)
        x_TD = self._hidden(x_TD, positions_T, slots_T, self._cache.layer, attend, "decode", features)
        return self._logits(x_TD, "decode")

    def prefill(self, batch: PrefillBatch, *, short: bool, features: Features | None = None) -> Tensor:
        """Logits float32 [W, V] of the rows wanted; `features` of all rows are filled in.

        `short` prompts, `few_rows` rows at most, go through the linears as decode rows do: weight bytes bound them, and a row has the same
        bits in any company. Whether a prompt is short is the caller's rule, and must depend on nothing but the prompt.
        """
        attend = self._layers.attend_prefill(batch.block_table_RB, batch.query_lens, batch.context_lens)
        x_TD = F.embedding(batch.tokens_T, self.embedding)
        phase = _prefill_phase(short)
        x_TD = self._hidden(
            x_TD, batch.positions_T, batch.slots_T, self._cache.layer, attend, phase, features
        )
        return self._logits(x_TD[batch.wanted_rows_W], "decode")

    def score(self, tokens_BS: Tensor) -> Tensor:
        """Logits float32 [B, S, V] of whole sequences, prefilled over pages of this call only.

        A sequence's bits do not depend on the others of the call.

        Raises:
            UsageError: sequences longer than the model length.
        """
        (num_sequences, length) = tokens_BS.shape
        device = self._weights.target.device
        if length > self._max_model_len:
            raise UsageError(
                f"sequences of {length} tokens cannot be scored: the model length is {self._max_model_len}."
            )
        short = 0 < length <= self.few_rows
        if short and num_sequences * length > self.few_rows:
            return torch.cat([self.score(each) for each in tokens_BS.split(self.few_rows // length)])
        num_columns = -(-length // _SCRATCH_BLOCK)
        first_block = 1 + torch.arange(num_sequences, device=device).unsqueeze(1) * num_columns
        table_BN = first_block + torch.arange(num_columns, device=device)
        positions_BS = torch.arange(length, device=device).expand(num_sequences, -1)
        slots_BS = first_block * _SCRATCH_BLOCK + positions_BS
        pages = _ScratchPages(self._cache, 1 + num_sequences * num_columns)
        attend = self._layers.attend_prefill(table_BN, (length,) * num_sequences, (length,) * num_sequences)
        x_TD = F.embedding(tokens_BS.to(device).reshape(-1), self.embedding)
        x_TD = self._hidden(
            x_TD, positions_BS.reshape(-1), slots_BS.reshape(-1), pages.layer, attend, _prefill_phase(short)
        )
        return self._logits(x_TD, "prefill").view(num_sequences, length, -1)

    def kernel_report(self) -> list[dict[str, Any]]:
        """One row for each linear, phase and other op."""
        rows = [
            row
            for idx, layer in enumerate(self._weights.layers)
            for each in layer.projections
            for row in each.report(idx)
        ]
        rows += self._weights.head.report(None)
        return rows + self._layers.kernel_report()

    def _hidden(
        self,
        x_TD: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        pages: Callable[[int], PagedKV],
        attend: Attend,
        phase: Phase,
        features: Features | None = None,
    ) -> Tensor:
        """[T, D] after the last layer, before the final norm."""
        for layer_idx, layer in enumerate(self._weights.layers):
            if features is not None:
                features.keep(layer_idx, x_TD)
            x_TD = self._layers.layer(layer, x_TD, positions_T, slots_T, pages(layer_idx), attend, phase)
        if features is not None:
            features.keep(self._arch.num_layers, x_TD)
        return x_TD

    def _logits(self, x_TD: Tensor, phase: Phase) -> Tensor:
        head = self._weights.head
        return head(
            self._layers.normed(x_TD, self._weights.norm, head, phase), phase, out_dtype=torch.float32
        )


class _ScratchPages:
    """Pages for one call, like the cache's; layers of one shape share them."""

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self._cache = cache
        self._num_blocks = num_blocks
        self._made: dict[tuple[int, int], PagedKV] = {}

    def layer(self, layer_idx: int) -> PagedKV:
        like = self._cache.layer(layer_idx)
        key = like.k.shape[0], like.head_dim
        made = self._made.get(key) or self._made.setdefault(
            key, like.empty_like(self._num_blocks, _SCRATCH_BLOCK)
        )
        return (
            replace(made, k_scale=like.k_scale, v_scale=like.v_scale) if like.format == FP8_STATIC else made
        )


def _prefill_phase(short: bool) -> Phase:
    return "decode" if short else "prefill"

"""The serving forward of a whole model. A golden test compares it with `models/decoder.py`.

    x = embed(tokens)          (+ learned positions)
    x = layer(x) for each      (`layer_runner.py`)
    logits = head(norm(x))

Decode rows and prefill rows are two passes. Long prompts have kernels of their own, so the bits of a decode
row depend on its request alone (`row_invariant` in `kernels/select.py`), whatever is prefilled in the same
step. The rows whose logits are wanted run the head in its decode kernel.

Shapes: T rows (tokens of all sequences, one after the other), D hidden, E = several D, B blocks of the
longest sequence, R sequences, W rows wanted, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.operands.paged import DENSE_FORMATS
from compress.kernels.operands.tiles import FixedLists
from compress.kernels.problem import Phase
from compress.models.hyper_connection import repeated
from compress.runtime.altup import StreamLinears
from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.chunked_attention import check_chunks
from compress.runtime.deployment import SHORT_PROMPT_ROWS
from compress.runtime.gated_residual import GatedResidualWeights
from compress.runtime.kv_cache import Kept, KVCache
from compress.runtime.layer_attention import Attend
from compress.runtime.layer_embed import parted
from compress.runtime.layer_runner import LayerRunner
from compress.runtime.layer_weights import ModelWeights
from compress.runtime.outer_weights import with_positions
from compress.runtime.prefill_graphs import PrefillGraphs
from compress.runtime.row_norms import stream_scale
from compress.runtime.scoring import scoring_pass, scratch_block_size
from compress.runtime.stream import Reader, Stream, mixer_reader

MAX_EXPANDED = 1 << 15
"""Most positions whose keys and values are computed from latents in a pass with a graph."""


class ModelRunner:
    """Runs a model over a KV cache. `decode` and `prefill` write the cache, `score` does not touch it.

    Raises:
        UsageError: attention has chunks that are no whole blocks of the cache.
    """

    def __init__(self, weights: ModelWeights, cache: KVCache, *, max_model_len: int) -> None:
        arch = weights.arch
        check_chunks(arch, cache.block_size, max_model_len)
        self._scratch_block = scratch_block_size(arch, max_model_len)
        self._weights = weights
        self._arch = arch
        self._cache = cache
        self._max_model_len = max_model_len
        self._stream_scale = stream_scale(arch)
        layers = weights.layers
        self._readers = [
            *(mixer_reader(layer) for layer in layers[1:]),
            Reader(weights.norm, weights.head, weights.hyper),
        ]
        """The linear that reads the stream after each layer."""
        self._layers = LayerRunner(arch, weights.deployment, cache.kv_format, max_model_len=max_model_len)
        self._prefills = PrefillGraphs(
            self._prefilled,
            weights.deployment.device,
            block_size=cache.block_size,
            max_model_len=max_model_len,
            max_rows=weights.deployment.max_step_tokens,
            takes_lists=self._layers.attention.takes_lists,
            rewrites=arch.has_latents or cache.kv_format not in DENSE_FORMATS.values(),
            max_positions=MAX_EXPANDED if arch.has_latents else None,
        )

    @property
    def embedding(self) -> Tensor:
        """The embedding table [V, D] of the residual stream, scaled, with those for each layer where tokens
        have them; `decode` takes rows of it."""
        return self._weights.embed_VD

    @property
    def stream_embedding(self) -> Tensor:
        """The embedding table [V, D] of the residual stream alone."""
        return self._weights.embed_VD[:, : self._arch.hidden_size]

    @property
    def kv_format(self) -> str:
        """The format of the pages of keys and values."""
        return self._cache.kv_format

    def pages(self, layer_idx: int) -> Kept:
        """Return what the cache holds of a layer, for a proposer that reads it, too."""
        return self._cache.layer(layer_idx)

    def normed(self, features_TD: Tensor) -> Tensor:
        """Return hidden states after the last layer [T, D], normed as the head reads them. The residual is
        one stream, and not scaled."""
        assert self._weights.norm is not None
        return self._layers.ops.norm(features_TD, self._weights.norm)

    @property
    def short_prompt_rows(self) -> int:
        """Number of rows of short prompts that one `prefill` takes, at most."""
        return self._weights.deployment.short_prompt_rows

    @property
    def max_decode_rows(self) -> int:
        """Number of rows that one `decode` takes, at most: as many as its kernels were selected for."""
        return max(self._weights.deployment.max_decode_rows, SHORT_PROMPT_ROWS)

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
        """Return float32 logits [T, V] of the last `q_len` rows of each sequence, whose embeddings are
        `x_TD`, rows of `embedding`.

        Context lengths count all of these rows. A row has the same bits for every `q_len`. `features` are
        filled in. Nothing waits for the host, so a CUDA graph can capture the pass.
        """
        attend = self._layers.attention.decode(
            block_table_RB, context_lens_R, q_len=q_len, block_size=self._cache.block_size
        )
        stream = self._hidden(x_TD, positions_T, slots_T, self._cache.layer, attend, "decode", features)
        return self._logits(stream, "decode")

    def prefill(self, batch: PrefillBatch, *, short: bool, features: Features | None = None) -> Tensor:
        """Return float32 logits [W, V] of the wanted rows, and fill in `features` of all rows.

        `short` batches, at most `short_prompt_rows` rows, use the decode kernels of the linears: the weight
        bytes bound their time, and a row has the same bits in any short batch.
        """
        x_TD = self._prefills.run(batch, short=short, features=features)
        return self._logits(Stream(x_TD[batch.wanted_rows_W]), "decode")

    def _prefilled(
        self, batch: PrefillBatch, short: bool, features: Features | None, lists: FixedLists | None
    ) -> Tensor:
        """Return the stream [T, D] after the last layer."""
        whole = batch.block_table_RB, batch.query_lens, batch.context_lens
        phase = _prefill_phase(short)
        attend = self._layers.attention.prefill(*whole, lists, block_size=self._cache.block_size, phase=phase)
        x_TD = F.embedding(batch.tokens_T, self.embedding)
        where = batch.positions_T, batch.slots_T, self._cache.layer
        return self._hidden(x_TD, *where, attend, phase, features, all_rows=False).x_TD

    def score(self, tokens_BS: Tensor) -> Tensor:
        """Return float32 logits [B, S, V] of whole sequences, prefilled over pages of their own.

        The bits of a sequence do not depend on the others of the call.

        Raises:
            UsageError: the sequences are longer than the model length.
        """
        (num_sequences, length) = tokens_BS.shape
        device = self._weights.deployment.device
        if length > self._max_model_len:
            raise UsageError(
                f"sequences of {length} tokens cannot be scored: the model length is {self._max_model_len}."
            )
        short = 0 < length <= self.short_prompt_rows
        if short and num_sequences * length > self.short_prompt_rows:
            return torch.cat([self.score(each) for each in tokens_BS.split(self.short_prompt_rows // length)])
        scoring = scoring_pass(
            self._layers.attention,
            self._cache,
            (length,) * num_sequences,
            block_size=self._scratch_block,
            short=short,
            device=device,
        )
        x_TD = F.embedding(tokens_BS.to(device).reshape(-1), self.embedding)
        where = scoring.positions_T, scoring.slots_T, scoring.pages
        stream = self._hidden(x_TD, *where, scoring.begin(), scoring.phase)
        return self._logits(stream, "prefill").view(num_sequences, length, -1)

    def score_rows(self, sequences: Sequence[Sequence[int]], wanted_rows: Sequence[int]) -> Tensor:
        """Return float32 logits [W, V] of the wanted rows of whole sequences, prefilled in one ragged batch
        over pages of their own; rows count over the sequences one after the other.

        Raises:
            UsageError: a sequence is longer than the model length.
        """
        device = self._weights.deployment.device
        lens = tuple(len(each) for each in sequences)
        if max(lens) > self._max_model_len:
            raise UsageError(
                f"a sequence of {max(lens)} tokens cannot be scored: the model length is "
                f"{self._max_model_len}."
            )
        scoring = scoring_pass(
            self._layers.attention,
            self._cache,
            lens,
            block_size=self._scratch_block,
            short=False,
            device=device,
        )
        tokens_T = torch.tensor([token for each in sequences for token in each], device=device)
        where = scoring.positions_T, scoring.slots_T, scoring.pages
        stream = self._hidden(
            F.embedding(tokens_T, self.embedding), *where, scoring.begin(), scoring.phase, all_rows=False
        )
        wanted_W = torch.tensor(wanted_rows, device=device)
        return self._logits(Stream(stream.x_TD[wanted_W]), "prefill")

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`: one for each linear and each phase that it serves, then the
        head, then the other ops.
        """
        rows = [row for idx, layer in enumerate(self._weights.layers) for row in layer.report(idx)]
        rows += self._weights.head.report(None)
        of_streams = (self._weights.first, self._weights.hyper)
        rows += [row for each in of_streams if isinstance(each, StreamLinears) for row in each.report()]
        if isinstance(self._weights.hyper, GatedResidualWeights):
            rows += self._weights.hyper.report(None)
        return rows + self._layers.kernel_report()

    def _hidden(
        self,
        x_TD: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        pages: Callable[[int], Kept],
        attend: Attend,
        phase: Phase,
        features: Features | None = None,
        *,
        all_rows: bool = True,
    ) -> Stream:
        """Return the residual stream after the last layer, before the final norm, of rows of `embedding`; the
        head reads `all_rows` of it, or some."""
        x_TD, inputs = parted(x_TD, self._arch)
        x_TD = with_positions(x_TD, self._weights.positions_ND, positions_T)
        first = self._weights.first
        if first is None:
            stream = Stream(repeated(self._arch.hyper, x_TD))
        else:
            stream = Stream(self._layers.ops.first_streams(x_TD, first, phase))
        for layer_idx, layer in enumerate(self._weights.layers):
            if features is not None:
                features.keep(layer_idx, stream.x_TD, self._stream_scale)
            is_last = layer_idx == self._arch.num_layers - 1
            reader = None if is_last and not all_rows else self._readers[layer_idx]
            where = positions_T, slots_T, pages(layer_idx)
            own = None if inputs is None else inputs[layer_idx]
            stream = self._layers.layer(layer, stream, *where, attend, phase, reader, input_TP=own)
        if features is not None:
            features.keep(self._arch.num_layers, stream.x_TD, self._stream_scale)
        return stream

    def logits_of_normed(self, normed_TD: Tensor) -> Tensor:
        """Return float32 logits [T, V] of hidden states that are normed already."""
        return self._layers.ops.capped(self._weights.head(normed_TD, "decode", out_dtype=torch.float32))

    def _logits(self, stream: Stream, phase: Phase) -> Tensor:
        head = self._weights.head
        rows = self._layers.ops.rows(stream, Reader(self._weights.norm, head, self._weights.hyper), phase)
        return self._layers.ops.capped(head(rows, phase, out_dtype=torch.float32))


def _prefill_phase(short: bool) -> Phase:
    return "decode" if short else "prefill"

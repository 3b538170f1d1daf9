"""A model whose layers are read from disk one at a time, for scoring what does not fit the memory.

    for each layer:  read it, and take every batch of sequences through it

So each layer is read once, whatever the number of sequences, and the streams of all sequences are held: N S D
values. The embedding is held before the layers and the head after them. The passes and the kernels are those
of `ModelRunner.score`, so logits have the same bits. Where a layer ends in a norm, the linear that reads the
stream next takes part in it, and two layers are held, or the last one and the head.

Shapes: N sequences, B of a batch, S their length, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.operands.paged import DENSE_FORMATS, FP8_STATIC
from compress.models.arch import Arch
from compress.models.arch_params import reads_tokens
from compress.models.hyper_connection import repeated
from compress.models.weights import WeightSource
from compress.runtime.engine_config import EngineConfig
from compress.runtime.hyper_weights import head_hyper
from compress.runtime.kv_cache import KVCache
from compress.runtime.layer_runner import LayerRunner
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.loader import load_layer
from compress.runtime.outer_weights import embedding, output, position_embeddings, with_positions
from compress.runtime.scoring import ScoringPass, scoring_pass, scratch_block_size
from compress.runtime.stream import Reader, Stream, mixer_reader


def why_not_streamed(arch: Arch) -> str | None:
    """Return why a model cannot be scored layer by layer, None where it can."""
    reads_more = arch.kv_sources or arch.layer_embed_size or reads_tokens(arch)
    if not reads_more and not arch.altup_streams:
        return None
    return (
        f"layers of this {arch.family} model read more than the stream (keys and values or latents of "
        "others, embeddings of their own or of n-grams, or tokens), or compute one of several, so it is not "
        "scored layer by layer: score it loaded."
    )


class StreamedModel:
    """A model on disk, with the sizes that an `Engine` of the same `config` has.

    Raises:
        UsageError: its KV cache has static scales, which only a loaded model has, it has fewer positions than
            `max_model_len`, or `why_not_streamed`.
        EnvironmentUnfit: no kernel here serves the checkpoint.
    """

    def __init__(self, source: WeightSource, *, device: torch.device, config: EngineConfig) -> None:
        if source.kv_format == FP8_STATIC:
            raise UsageError(
                f"a model whose KV cache is {FP8_STATIC} is not scored layer by layer: score it loaded."
            )
        if reason := why_not_streamed(source.arch):
            raise UsageError(reason)
        self.arch: Arch = source.arch
        self.dtype = config.dtype_for(source.arch, device)
        self._source = source
        self._device = device
        self._max_model_len = config.longest_of(source.arch)
        self._deployment = config.deployment(device, self.dtype)
        kv_format = source.kv_format or DENSE_FORMATS[self.dtype]
        block_size = config.block_size_on(device)
        self._cache = KVCache(
            source.arch,
            num_blocks=1,
            block_size=block_size,
            kv_format=kv_format,
            device=device,
            num_positions=self._max_model_len,
            dtype=self.dtype,
        )
        self._layers = LayerRunner(
            source.arch, self._deployment, kv_format, max_model_len=self._max_model_len
        )
        self._block_size = scratch_block_size(source.arch, self._max_model_len)

    def score(
        self, tokens_NS: Tensor, *, batch_size: int, done: Callable[[int], None] = lambda layer_idx: None
    ) -> Iterator[Tensor]:
        """Yield float32 logits [B, S, V] of each batch in order; `done` is called before each layer.

        Raises:
            UsageError: the sequences are longer than the model length.
        """
        length = tokens_NS.shape[1]
        if length > self._max_model_len:
            raise UsageError(
                f"sequences of {length} tokens cannot be scored: the model length is {self._max_model_len}."
            )
        with torch.inference_mode():
            batches = [each for batch in tokens_NS.split(batch_size) for each in self._at_once(batch)]
            passes = {len(each): self._pass(len(each), length) for each in batches}
            attends = [passes[len(each)].begin() for each in batches]
            streams = self._embedded([(each, passes[len(each)].positions_T) for each in batches])
            held = [load_layer(self._source, 0, self._deployment)]
            reader: Reader | None = None
            for idx in range(self.arch.num_layers):
                done(idx)
                following, reader = self._reader(idx)
                for at, each in enumerate(batches):
                    one = passes[len(each)]
                    where = one.positions_T, one.slots_T, one.pages(idx)
                    streams[at] = self._layers.layer(
                        held[0], streams[at], *where, attends[at], one.phase, reader
                    )
                held.clear()  # before the next one is read
                if idx < self.arch.num_layers - 1:
                    held.append(following or load_layer(self._source, idx + 1, self._deployment))
            head = reader or self._head()
            num_done = 0
            for batch in tokens_NS.split(batch_size):
                num_parts = len(self._at_once(batch))
                yield torch.cat(
                    [self._logits(each, head, length) for each in streams[num_done : num_done + num_parts]]
                )
                num_done += num_parts

    def _embedded(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Stream]:
        """Return the input of the first layer of batches [B, S], given the positions of their rows, too."""
        outer = self._source.outer()
        embed_VD = embedding(outer, self.arch, self._deployment)
        positions_ND = position_embeddings(outer, self.arch, self._deployment)
        streams = []
        for batch_BS, positions_T in batches:
            x_TD = F.embedding(batch_BS.to(self._device).reshape(-1), embed_VD)
            streams.append(Stream(repeated(self.arch.hyper, with_positions(x_TD, positions_ND, positions_T))))
        return streams

    def _head(self) -> Reader:
        outer = self._source.outer()
        hyper = head_hyper(self.arch, outer, self._deployment)
        return Reader(*output(outer, self.arch, self._deployment), hyper)

    def _reader(self, layer_idx: int) -> tuple[LayerWeights | None, Reader | None]:
        """Return what must be there while a layer runs: the layer after it, and what reads the stream in
        between, the head after the last one."""
        if not self.arch.ends_in_norm(self.arch.layers[layer_idx]):
            return None, None
        if layer_idx == self.arch.num_layers - 1:
            return None, self._head()
        following = load_layer(self._source, layer_idx + 1, self._deployment)
        return following, mixer_reader(following)

    def _logits(self, stream: Stream, head: Reader, length: int) -> Tensor:
        assert head.linear is not None
        rows = self._layers.ops.rows(stream, head, "prefill")
        logits_TV = self._layers.ops.capped(head.linear(rows, "prefill", out_dtype=torch.float32))
        return logits_TV.view(-1, length, logits_TV.shape[1])

    def _at_once(self, batch_BS: Tensor) -> tuple[Tensor, ...]:
        """Return a batch in the parts that go through a layer at once: short sequences on a GPU in
        parts that the decode kernels serve."""
        rows = self._deployment.short_prompt_rows
        length = batch_BS.shape[1]
        return batch_BS.split(rows // length) if self._is_short(length) else (batch_BS,)

    def _is_short(self, length: int) -> bool:
        return 0 < length <= self._deployment.short_prompt_rows

    def _pass(self, num_sequences: int, length: int) -> ScoringPass:
        return scoring_pass(
            self._layers.attention,
            self._cache,
            (length,) * num_sequences,
            block_size=self._block_size,
            short=self._is_short(length),
            device=self._device,
        )

"""A run over one rank's samples: the samples, its shards of the calibration set, and the means to compute on
them.

A calibration set is cut into at most NUM_SHARDS virtual shards of consecutive samples, and a rank owns
consecutive whole shards. Samples go through a layer in pieces of one shard. Pieces and shards do not depend
on the number of ranks, so neither does the order of summation.

Shapes: N samples of a rank, S sequence, D hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.calibrate.experts import DEFAULT_POLICY, ExpertPolicy
from compress.calibrate.memory_guard import MemoryGuard
from compress.calibrate.samples import Samples
from compress.calibrate.side_inputs import SideInputs
from compress.context import NUM_SHARDS, OneRank, Ranks
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.decoder import DecoderLayer
from compress.models.weights import Weights, build_layer

PIECE_TOKENS = 2048
"""Largest piece in tokens; a longer sample is a piece of its own. It is a part of the order of summation.
With fewer tokens a GPU waits for launches and a CPU for weights; with more a piece leaves the cache of a
CPU."""
MAX_SPREAD = 16
"""Largest multiple of `PIECE_TOKENS` that is a piece of a mixture of experts."""


@dataclass(frozen=True)
class LayerRun:
    """One rank's samples on their way through the layers, and the means to compute on them.

    `samples` are activations of the model that is compressed, `source_samples` those of the source for the
    same tokens, or None if no statistic compares the two. `shards` is shard index -> its samples, counted
    over the whole calibration set. `dtype` is that of the computation. `experts` is what becomes of the
    statistics of starved experts, `piece_tokens` the largest piece. `counted_NS`, bool, are the tokens of
    `samples` that sums over tokens count, None where all do. `side_inputs` are those of `samples`, and
    `source_side_inputs` those of `source_samples`; None where layers read the stream alone.
    """

    samples: Samples
    source_samples: Samples | None
    shards: Mapping[int, range]
    ranks: Ranks
    memory: MemoryGuard
    dtype: torch.dtype
    experts: ExpertPolicy = DEFAULT_POLICY
    piece_tokens: int = PIECE_TOKENS
    counted_NS: Tensor | None = None
    side_inputs: SideInputs | None = None
    source_side_inputs: SideInputs | None = None

    @staticmethod
    def on_one_rank(
        x_NSD: Tensor, source_NSD: Tensor | None = None, side_inputs: SideInputs | None = None
    ) -> "LayerRun":
        """Return a run over copies of these activations in this process alone."""
        samples = Samples.from_tensor(x_NSD)
        source_samples = None if source_NSD is None else Samples.from_tensor(source_NSD)
        return LayerRun(
            samples,
            source_samples,
            shards_of_rank(len(x_NSD)),
            OneRank(),
            MemoryGuard(None, samples),
            x_NSD.dtype,
            side_inputs=side_inputs,
        )

    @property
    def device(self) -> torch.device:
        return self.samples.device

    @property
    def sample_range(self) -> slice:
        """The samples of this rank among all of the calibration set."""
        return sample_range(self.shards)

    def pieces(self) -> dict[int, list[slice]]:
        """Return shard index -> its pieces in order, as slices of `samples`."""
        first = self.sample_range.start
        step = max(1, self.piece_tokens // self.samples.seq_len)
        return {
            shard_idx: [
                slice(start - first, min(start + step, shard.stop) - first)
                for start in range(shard.start, shard.stop, step)
            ]
            for shard_idx, shard in self.shards.items()
        }

    def attention(self, samples: Samples, piece: slice) -> FullAttention:
        """Return the attention of a piece of `samples`, or of `source_samples`."""
        inputs = self.source_side_inputs if samples is self.source_samples else self.side_inputs
        return FullAttention() if inputs is None else inputs.attention(piece)

    def build_layer(self, arch: Arch, layer_idx: int, weights: Weights) -> DecoderLayer:
        """Return the layer in the dtype of the computation, on the device."""
        return self.memory.retry_on_oom(
            lambda: build_layer(arch, layer_idx, weights, dtype=self.dtype, device=self.device, narrow=True),
            "building a layer",
        )


def piece_tokens_of(arch: Arch) -> int:
    """Return the largest piece for a model, in tokens.

    The experts of a layer share the tokens of a piece, and each runs operations of its own: a piece of a
    mixture is so many times longer that an expert gets about as many tokens as a dense FFN.
    """
    spread = max((1 / layer.token_frac("moe.experts.0.down") for layer in arch.layers), default=1.0)
    return PIECE_TOKENS * min(MAX_SPREAD, max(1, int(spread)))


def shards_of_rank(num_samples: int, *, rank: int = 0, num_ranks: int = 1) -> dict[int, range]:
    """Return shard index -> samples for the shards of one rank; over all ranks they are those of a single
    rank. No shard is empty."""
    edges = [num_samples * idx // NUM_SHARDS for idx in range(NUM_SHARDS + 1)]
    shards = [range(begin, end) for begin, end in zip(edges, edges[1:], strict=False) if end > begin]
    first, last = (len(shards) * each // num_ranks for each in (rank, rank + 1))
    return dict(list(enumerate(shards))[first:last])


def sample_range(shards: Mapping[int, range]) -> slice:
    """Return the samples of consecutive shards."""
    return (
        slice(min(each.start for each in shards.values()), max(each.stop for each in shards.values()))
        if shards
        else slice(0, 0)
    )

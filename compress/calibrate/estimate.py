"""Estimates for `compress plan`, from shapes alone: bytes of the layer-by-layer runner at its peak and
floating-point operations.

The peak is the activations of one rank's samples plus the largest of these, over all layers:

    outside   embedding and head, before the first layer
    observe   the layer, the sums of the present shard, half a sum for each one that waits in the merge tree,
              the copies that one product needs, and of one piece of samples the inputs of all experts, or
              scores that attention holds
    compress  the layer, the next one (read ahead), codes, one statistic of each tap, and the copies that
              rounding one stack of linears needs
    replay    the compressed layer as it runs, its codes, the next layer, and scores of one piece

On a GPU the next layer waits in host memory. On a CPU the process keeps some of the memory that small layers
freed (`streaming.py`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from compress.calibrate.arithmetic import compute_dtype
from compress.calibrate.at_once import assign_groups
from compress.calibrate.experts import expert_of
from compress.calibrate.guide import SEGMENT_ROWS, WALK_TOKENS, Guide
from compress.calibrate.layer_run import piece_tokens_of
from compress.calibrate.memory_guard import rounds_as_one
from compress.calibrate.score_bytes import score_bytes
from compress.calibrate.side_by_side import MAX_AT_ONCE, num_at_once
from compress.calibrate.side_inputs import choice_bytes
from compress.calibrate.streaming import KEPT_BYTES, keeps_freed_blocks
from compress.context import NUM_SHARDS, OneRank
from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape

STACK_COPIES = 4
"""float32 matrices of the size of the stack that GPTQ and its search of scales hold at once, with the stack
itself."""
MOMENT_COPIES = 7
"""float32 matrices of the size of the second moment that exist while it is factorised, with its mean."""
TARGET_STACK_COPIES = 9
"""Memory of a rounding target in float32 matrices of the size of the stack: it is computed in float64 from a
float32 stack."""
TARGET_MOMENT_COPIES = 7
"""Memory of a rounding target in float32 matrices of the size of the moment: two moments and a factor, in
float64, and a copy."""
LIBRARY_BYTES = {"cpu": 40_000_000, "cuda": 0}
"""Bytes that the mathematical libraries load when they first compute."""


@dataclass(frozen=True)
class Workload:
    """A task of the runner: a model, the text, the device and the number of ranks.

    `compares`: the source's activations are kept and observed, too, for a rounding target. `factorises`:
    second moments are factorised, as GPTQ does. `true_sequential`: the linear groups of a layer are
    compressed one after the other. `guided`: a guide gives output moments.
    """

    arch: Arch
    num_samples: int
    seq_len: int
    device: str
    num_ranks: int = OneRank.size
    compares: bool = False
    factorises: bool = True
    true_sequential: bool = False
    guided: bool = False

    @property
    def num_streams(self) -> int:
        """Number of sets of activations: those of the compressed model and, to compare, those of the
        source."""
        return 2 if self.compares else 1

    @property
    def value_bytes(self) -> int:
        """Bytes of one value of the computation."""
        return self._dtype.itemsize

    @property
    def in_tiles(self) -> bool:
        """Whether the device is a CPU that computes in bfloat16."""
        return self.device == "cpu" and self._dtype == torch.bfloat16

    @property
    def _dtype(self) -> torch.dtype:
        return compute_dtype(self.device, getattr(torch, self.arch.dtype))


def peak_bytes(work: Workload) -> int:
    """Return the peak of the rank that needs most, beyond the interpreter and its libraries."""
    arch = work.arch
    num_outer = arch.num_outer_params
    width = work.num_streams * (arch.stream_size + _kept_width(arch))
    if work.true_sequential:  # the values at a second tap are kept
        width += max(max(_input_sizes(arch, layer)) for layer in arch.layers)
    num_tokens = -(-work.num_samples // work.num_ranks) * work.seq_len
    layer_bytes = max(_layer_bytes(work, layer) for layer in set(arch.layers))
    kept = min(KEPT_BYTES, layer_bytes) if work.device == "cpu" and keeps_freed_blocks(arch) else 0
    return (
        LIBRARY_BYTES[work.device]
        + (width * work.value_bytes + work.num_streams * _choice_bytes(work)) * num_tokens
        + _layer_input_bytes(work, work.num_samples * work.seq_len)
        + max(2 * num_outer, layer_bytes)
        + kept
    )


def _layer_input_bytes(work: Workload, num_tokens: int) -> int:
    """Return the bytes of the embeddings for each layer of the tokens that occur, all of them different."""
    width = work.arch.num_layers * work.arch.layer_embed_size
    return min(work.arch.vocab_size, num_tokens) * width * work.value_bytes


def _kept_width(arch: Arch) -> int:
    """Return the numbers of a token that are kept for later layers: keys and values that they read."""
    return sum(arch.layers[idx].cached_numbers for idx in arch.kv_sources)


def _choice_bytes(work: Workload) -> int:
    """Return the bytes of a token that are kept of choices of keys that later layers attend to."""
    return sum(choice_bytes(work.arch, work.seq_len).values())


def host_bytes(work: Workload) -> int:
    """Return the bytes of pinned memory for a GPU: two layers, the one that is read and the one that is
    copied."""
    return (
        0
        if work.device == "cpu"
        else 2 * 2 * max(_num_params(work.arch, layer) for layer in work.arch.layers)
    )


def flops(work: Workload, *, products: float) -> tuple[float, float]:
    """Return the operations of the busiest rank over activations, and those over weights. `products` is the
    number of products of a weight with its statistic, or of equal work."""
    arch = work.arch
    tokens = work.num_samples * work.seq_len
    grams = work.num_streams * sum(
        2.0 * count * tokens * layer.token_frac(group.linears[0]) * size**2
        for layer, count in Counter(arch.layers).items()
        for group, size in zip(layer.groups, _input_sizes(arch, layer), strict=True)
    )
    replays = 0 if work.true_sequential else 1
    forward = (replays + work.num_streams) * 2.0 * arch.num_active_linear_params * tokens
    return (forward + grams) / work.num_ranks, _busiest(
        work, lambda shapes: sum(2.0 * products * rows * size**2 for rows, size in shapes)
    )


def guide_effort(work: Workload, guide: Guide) -> tuple[int, float]:
    """Return the bytes that a walk of `calibrate/guide.py` holds on the host, and the operations of all
    walks: forward, forward again and back, and the output moments of the first. One rank walks."""
    arch = work.arch
    walked = len(guide.walked(work.num_samples))
    samples = min(max(1, WALK_TOKENS // work.seq_len), walked)
    outer = 3 * 2.0 * arch.vocab_size * arch.hidden_size
    walks = (3 * 2.0 * arch.num_active_linear_params + outer) * walked * work.seq_len
    rows = [
        layer.linear_shape(name, arch.hidden_size)[0]
        for layer in arch.layers
        for name in layer.linears
        if layer.token_frac(name) == 1.0  # a guide has no moments of experts' outputs
    ]
    moments = sum(2.0 * samples * work.seq_len * size * min(size, SEGMENT_ROWS) for size in rows)
    tokens = samples * work.seq_len
    held = ((arch.num_layers + 2) * arch.stream_size + 2 * _kept_width(arch)) * tokens * work.value_bytes
    held += _choice_bytes(work) * tokens
    if arch.layer_embed_size:  # the weights of the embeddings stay for all walks
        held += 2 * arch.num_outer_params + _layer_input_bytes(work, tokens)
    return held + 10 * work.seq_len * arch.vocab_size, walks + moments


def num_columns(work: Workload) -> int:
    """Return the number of columns that the busiest rank rounds one after the other."""
    return int(_busiest(work, lambda shapes: shapes[0][1]))


def _busiest(work: Workload, cost: Callable[[list[tuple[int, int]]], float]) -> float:
    """Return the cost of the linear groups of the busiest rank, summed over all layers; with
    `true_sequential` that of all groups, since one rank compresses at a time."""
    arch = work.arch
    total = 0.0
    num_ranks = 1 if work.true_sequential else work.num_ranks
    for layer, count in Counter(arch.layers).items():
        owners = assign_groups(arch, arch.layers.index(layer), layer.groups, num_ranks)
        load = [0.0] * num_ranks
        for group in layer.groups:
            load[owners[group.tap]] += cost(
                [layer.linear_shape(name, arch.hidden_size) for name in group.linears]
            )
        total += count * max(load)
    return total


def _layer_bytes(work: Workload, layer: LayerShape) -> int:
    """Return the bytes that one layer needs in whichever step needs most, without the activations of all
    samples."""
    params = _num_params(work.arch, layer)
    on_cpu = work.device == "cpu"
    squares = [size**2 for size in _input_sizes(work.arch, layer)]
    moments = 4 * (max(squares) if work.true_sequential else sum(squares))
    cross = moments if work.compares else 0
    waiting = max(idx.bit_count() for idx in range(-(-min(NUM_SHARDS, work.num_samples) // work.num_ranks)))
    ahead = 2 * params if on_cpu else 0
    source_layer = 2 * params if work.compares and work.true_sequential else 0
    guide = _output_moment_bytes(layer, work.arch.hidden_size) if work.guided and on_cpu else 0
    observe = 2 * params + moments + cross + waiting * (moments // 2 + cross) + 4 * max(squares)
    compress = 2 * params + ahead + params + moments // 2 + cross + _rounding_bytes(work, layer)
    replay = 2 * params + params + ahead
    scores = _score_bytes(work, layer)
    observe += max(_routed_bytes(work, layer), scores)
    replay += scores
    return max(observe + source_layer + guide, compress + source_layer + guide, replay)


def _piece_samples(work: Workload) -> int:
    """Return the samples of the largest piece."""
    return min(max(1, piece_tokens_of(work.arch) // work.seq_len), -(-work.num_samples // NUM_SHARDS))


def _score_bytes(work: Workload, layer: LayerShape) -> int:
    """Return the bytes of the scores that a layer holds of one piece of samples."""
    return score_bytes(work.arch, layer, _piece_samples(work), work.seq_len, value_bytes=work.value_bytes)


def _routed_bytes(work: Workload, layer: LayerShape) -> int:
    """Return the bytes of what the taps of all experts hold of one piece of samples."""
    if layer.experts is None:
        return 0
    routed = _piece_samples(work) * work.seq_len * layer.experts.top_k
    size = layer.experts.width(work.arch.hidden_size) + layer.experts.expert_size
    return work.num_streams * routed * size * work.value_bytes


def _output_moment_bytes(layer: LayerShape, hidden_size: int) -> int:
    """Return the bytes of a layer's output moments, in bfloat16."""
    total = 0
    for group in layer.groups:
        if expert_of(group.tap) is not None:
            continue
        num_whole, rest = divmod(layer.group_shape(group, hidden_size)[0], SEGMENT_ROWS)
        total += 2 * (num_whole * SEGMENT_ROWS**2 + rest**2)
    return total


def _rounding_bytes(work: Workload, layer: LayerShape) -> int:
    """Return the bytes of one stack of linears: its copies with the moment and its factor, or those of the
    factorisation or of the rounding target with the stack. A GPU may hold several."""
    most = 0
    on_cpu = work.device == "cpu"
    at_once = MAX_AT_ONCE
    for group in layer.groups:
        shapes = [layer.linear_shape(name, work.arch.hidden_size) for name in group.linears]
        sizes = [rows * columns for rows, columns in shapes]
        stack = sum(sizes) if rounds_as_one(sum(sizes), on_cpu=on_cpu) else max(sizes)
        moment = shapes[0][1] ** 2
        copies = STACK_COPIES * stack + 2 * moment
        factorised = 2 * stack + MOMENT_COPIES * moment if work.factorises else 0
        target = TARGET_STACK_COPIES * stack + TARGET_MOMENT_COPIES * moment if work.compares else 0
        most = max(most, 4 * max(copies, factorised, target))
        at_once = min(at_once, num_at_once(stack // shapes[0][1], shapes[0][1]))
    return most if on_cpu else at_once * most


def _num_params(arch: Arch, layer: LayerShape) -> int:
    return sum(
        rows * columns
        for rows, columns in (layer.linear_shape(name, arch.hidden_size) for name in layer.linears)
    )


def _input_sizes(arch: Arch, layer: LayerShape) -> list[int]:
    """Return the number of features that each linear group of the layer reads."""
    return [layer.group_shape(group, arch.hidden_size)[1] for group in layer.groups]

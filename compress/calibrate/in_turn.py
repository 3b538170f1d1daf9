"""A layer whose linears are compressed in turn: q, k and v, then o as it reads what they make of the samples, then gate and up, then down.

    for each half of the layer:   look at the first tap,                compress the linears behind it
                                  look at the second, behind those,     compress the linear behind it
                                  x := x + that linear (what stands at the second tap)

GPTQ's "true sequential" order (arXiv 2210.17323, in its published code): a linear answers for what those before it lost in its own layer
too. Statistics that compare with the source (`SourceStat`) have its activations at the same tap, behind its own linears. Nothing runs twice
but the norms: what stands at a second tap is kept until the linear behind it is there, and the samples end behind the compressed layer, as
a replay would leave them, bit for bit.

Groups of linears wait for one another, so of several ranks only one compresses at a time; what they share is the observation.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compress.calibrate.layer_state import LayerPass, LayerState, needed_stats
from compress.calibrate.observe import Flow, Stream, meet, observe_shards
from compress.calibrate.room import Samples
from compress.models.decoder import DecoderLayer, HalfLayer
from compress.models.weights import refill_


def compress_in_turn(
    state: LayerState,
    layer: DecoderLayer,
    unchanged: DecoderLayer,
    passes: Sequence[LayerPass],
    flow: Flow,
    *,
    keys_values_stand: Callable[[], None],
) -> None:
    """Compress a layer while the samples go through it.

    Args:
        layer: that of the samples, whose linears become what the passes make of them.
        unchanged: that of the source.
        keys_values_stand: called when what gives keys and values is compressed, and the samples are still what goes into the layer.
    """
    xs = flow.samples
    of_source = flow.of_source
    for half, theirs in zip(layer.halves(), unchanged.halves(), strict=True):
        first, second = half.taps
        beside = None if of_source is None else Stream(theirs.enter, of_source)
        _compress_behind(first, state, layer, passes, flow, Stream(half.enter, xs), beside)
        if first == layer.shape.linears["attn.v"]:
            keys_values_stand()
        with flow.room.beside(xs.like(half.out.in_features)) as values:
            beside = None if of_source is None else Stream(theirs.pass_through, of_source, of_source)
            _compress_behind(second, state, layer, passes, flow, Stream(half.cross, xs, values), beside)
            for piece in itertools.chain(*flow.pieces):
                xs[piece] = flow.room.attempt(partial(_left, half, xs, values, piece), "replaying a layer")


@torch.no_grad()
def _left(half: HalfLayer, xs: Samples, values: Samples, piece: slice) -> Tensor:
    return half.leave(xs[piece], values[piece])


def _compress_behind(
    tap: str,
    state: LayerState,
    layer: DecoderLayer,
    passes: Sequence[LayerPass],
    flow: Flow,
    stream: Stream,
    source: Stream | None,
) -> None:
    """The linears behind one tap, by the rank whose turn it is, from what all ranks see there."""
    (group,) = (group for group in layer.groups() if group.tap == tap)
    owner = layer.groups().index(group) % flow.ranks.size
    kinds = needed_stats(passes)
    trees = observe_shards(stream, kinds, flow, source, state.counts)
    stats = meet(trees, [group], kinds, {tap: owner}, flow.ranks)
    part = replace(state, groups=[group] if flow.ranks.rank == owner else [], stats=stats)
    for each in passes:
        each.apply(part)
    state.adopt(flow.ranks.broadcast(state.found(group.linears), source=owner))
    for linear in group.linears:
        if linear in state.quantized:
            refill_(layer.linear(linear), state.quantized[linear])

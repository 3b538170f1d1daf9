"""The layer-by-layer runner: one layer on the device at a time, one observation feeds every pass, the compressed layer feeds the next.

    for each layer:  observe   x -> layer(x), statistics of every tap, samples in order
                     apply     each pass on the layer's float32 weights and the statistics
                     cache     if asked: scales for what the layer, as it is now, puts into a KV cache (`kv.py`)
                     store     the layer's file (a resume point: complete or absent)
                     replay    x := compressed layer (x)

or, where the linears of a layer are compressed in turn, each knowing what those before it have become, as `in_turn.py` does it.

A statistic that compares x with the source model's own activations (`SourceStat`) has the runner keep those too, for the same samples, and
take them through the layers of the source: a second store of activations, and one more pass over each layer.

The next layer is read while this one is compressed, and this one's file is written while it is replayed, so what is in memory does not
grow with the number of layers. A layer is replayed as its file holds it, so a run that was cut and resumed replays the same numbers as one
that was not, and gives the same bits. How many samples go together is fixed: the result does not depend on how many would fit at once.

With several ranks each has its own samples, all have every layer. The groups of linears are dealt out by what they cost; the statistics of
a group meet where it is compressed, the codes come back to all. Sums are made in one order wherever they are made (`stats.py`), so the
number of ranks changes no bit either.

Shapes: N samples, S sequence.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from compress.artifact.atomic import write_atomic
from compress.artifact.tensors import save_tensors
from compress.calibrate.guide import GuideFiles
from compress.calibrate.in_turn import compress_in_turn
from compress.calibrate.kv import READ, Forward, KeysValues, calibrate_cache
from compress.calibrate.layer_state import LayerPass, LayerState, Row, needed_stats
from compress.calibrate.observe import Flow, Shards, Stats, Stream, meet, observe_shards, replay_, together
from compress.calibrate.room import Room, Samples
from compress.calibrate.stats import SourceStat, StatFactory
from compress.calibrate.streaming import Ahead, Behind, return_freed_blocks
from compress.context import Context
from compress.digest import canonical_json
from compress.errors import UnsupportedFormat
from compress.models.arch import Arch, LinearGroup
from compress.models.canonical import OUTER_NAME, encoded, layer_name, load_weights, save_weights
from compress.models.decoder import DecoderLayer
from compress.models.weights import Weights, WeightSource, build_layer, dense
from compress.quant.scheme import Schemes

FINITE_CHUNK = 1 << 24
"""Numbers that are looked at at once for NaN and infinity: the look must not cost a copy of a large matrix."""


def run_sequential(
    source: WeightSource,
    tokens_NS: Tensor,
    passes: Sequence[LayerPass],
    out: Path,
    ctx: Context,
    *,
    scheme: Schemes | None,
    compute_dtype: torch.dtype,
    kv_scales: bool = False,
    guide: GuideFiles | None = None,
    pruned: Arch | None = None,
    in_turn: bool = False,
) -> list[Row]:
    """Compress every layer of `source` into the canonical store at `out`; files already there are resume points.

    Every rank of `ctx.ranks` calls this with the same arguments; rank 0 writes.

    Args:
        tokens_NS: calibration token ids [N, S].
        scheme: of each linear, to read a layer back.
        compute_dtype: of the activations; statistics are float32 whatever it is.
        kv_scales: also find and store the static scales of every layer's KV cache.
        guide: what the end of the model says; without, all tokens count the same.
        pruned: the shapes that the passes leave, where they change them; as many layers.
        in_turn: the linears of a layer are compressed one group after the other, by passes that change none outside the group.

    Returns:
        One row per linear, in execution order, and behind those of a layer one for its keys and one for its values, with `kv_scales`.
        Nothing on ranks other than 0.

    Raises:
        UnsupportedFormat: a weight of the source is NaN or infinite.
        Interrupted: at a layer boundary, when the context says so.
        RankStopped, EnvironmentUnfit: another rank failed.
        EnvironmentUnfit: the device's memory is too small, whatever gives way.
    """
    arch = source.arch
    device = torch.device(ctx.device)
    ranks = ctx.ranks
    leads = ranks.rank == 0
    last = arch.num_layers - 1
    if device.type == "cpu":
        return_freed_blocks(arch)
    shards = Shards.of(tokens_NS.shape[0], rank=ranks.rank, size=ranks.size)
    samples = _embedded(source, tokens_NS[shards.samples], out if leads else None, device, compute_dtype)
    of_source = samples.copy() if _compares(passes) else None
    room = Room(ctx.progress, *(each for each in (samples, of_source) if each is not None))
    flow = Flow(samples, of_source, shards, room, ranks)
    work = _Work(
        arch, arch if pruned is None else pruned, passes, flow, device, compute_dtype, guide, kv_scales
    )
    stored = ranks.broadcast([_is_stored(out, idx) for idx in range(arch.num_layers)])

    def read(idx: int) -> Weights:
        return (
            load_weights(out / layer_name(idx), scheme, prefix=f"layers.{idx}.")
            if stored[idx]
            else source.layer(idx)
        )

    with Ahead(read, device) as layers, Behind() as disk:
        for idx in range(arch.num_layers):
            weights: Weights = layers.take(idx)
            read_next = partial(layers.start, idx + 1) if idx < last else _nothing
            if stored[idx]:
                if of_source is not None:
                    replay_(work.built(arch, idx, source.layer(idx)), of_source, flow)
            else:
                disk.wait()
                ctx.boundary(idx, arch.num_layers, f"layer {idx} of {arch.num_layers}")
                ranks.broadcast(idx)  # nobody begins a layer that rank 0 does not begin
                state = work.state(idx, weights)
                del weights  # what a pass replaces or quantizes is kept nowhere
                compress = work.in_turn if in_turn else work.at_once
                weights, rows = compress(state, read_next)
                del state
                if leads:
                    disk.write(partial(_store, out, idx, _on_host(weights), rows))
            if idx < last and (stored[idx] or not in_turn):
                read_next()
                replay_(work.built(work.after, idx, weights), samples, flow)
            del weights  # before the next layer comes
        disk.wait()
    ctx.progress.update(arch.num_layers, arch.num_layers, "all layers")
    return (
        [row for idx in range(arch.num_layers) for row in json.loads(_rows_file(out, idx).read_bytes())]
        if leads
        else []
    )


@dataclass(frozen=True)
class _Work:
    """What is done to each layer; `after` has the shapes that are left."""

    arch: Arch
    after: Arch
    passes: Sequence[LayerPass]
    flow: Flow
    device: torch.device
    compute_dtype: torch.dtype
    guide: GuideFiles | None
    kv_scales: bool

    @property
    def stored_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.arch.dtype)
        return dtype

    def built(self, arch: Arch, idx: int, weights: Weights) -> DecoderLayer:
        build = partial(
            build_layer, arch, idx, weights, dtype=self.compute_dtype, device=self.device, narrow=True
        )
        return self.flow.room.attempt(build, "building a layer")

    def state(self, idx: int, weights: Weights) -> LayerState:
        """A layer as the passes find it, before anything is known of its inputs."""
        placed = self.flow.room.attempt(partial(_placed, weights, idx, self.device), "placing a layer")
        return LayerState.of(
            self.arch, idx, placed, None if self.guide is None else self.guide.layer(idx), self.flow
        )

    def at_once(self, state: LayerState, read_next: Callable[[], None]) -> tuple[Weights, list[Row]]:
        """What the passes of all ranks make of a layer, all from one look at it. Empties the state."""
        layer = self._layer(state)
        flow = self.flow
        kinds = needed_stats(self.passes)
        of_source = None if flow.of_source is None else Stream(layer.forward, flow.of_source, flow.of_source)
        trees = observe_shards(Stream(layer.forward, flow.samples), kinds, flow, of_source, state.counts)
        owners = deal(self.arch, state.layer_idx, layer.groups(), flow.ranks.size)
        state.stats = meet(trees, layer.groups(), kinds, owners, flow.ranks)
        state.groups = [group for group in layer.groups() if owners[group.tap] == flow.ranks.rank]
        del layer, trees, of_source
        read_next()
        for each in self.passes:
            each.apply(state)
        for rank in range(flow.ranks.size):
            state.adopt(flow.ranks.broadcast(state.found(list(state.num_rows)), source=rank))
        self._scale_cache(state)
        return state.taken(self.stored_dtype), state.all_rows()

    def in_turn(self, state: LayerState, read_next: Callable[[], None]) -> tuple[Weights, list[Row]]:
        """The same, each group of linears from a look behind those before it; the samples end behind the layer. Empties the state."""
        layer = self._layer(state)
        unchanged = self._layer(state)
        read_next()
        compress_in_turn(
            state,
            layer,
            unchanged,
            self.passes,
            self.flow,
            keys_values_stand=partial(self._scale_cache, state),
        )
        return state.taken(self.stored_dtype), state.all_rows()

    def _layer(self, state: LayerState) -> DecoderLayer:
        return self.built(self.arch, state.layer_idx, state.as_given())

    def _scale_cache(self, state: LayerState) -> None:
        """Of keys and values as they are now, while the samples are what goes into the layer."""
        if not self.kv_scales:
            return
        flow = self.flow
        weights = state.stored(self.stored_dtype, *READ)
        cached = KeysValues.of(
            self.after, state.layer_idx, weights, dtype=self.compute_dtype, device=self.device
        )

        def over_samples(layer: Forward, factories: Sequence[StatFactory]) -> Stats:
            return together(observe_shards(Stream(layer, flow.samples), factories, flow), flow.ranks)

        state.cache, state.cache_rows = calibrate_cache(cached, over_samples, stored_dtype=self.stored_dtype)


def _nothing() -> None:
    """There is no next layer."""


def _compares(passes: Sequence[LayerPass]) -> bool:
    """Whether a pass asks for the source's activations."""
    return any(isinstance(kind(), SourceStat) for kind in needed_stats(passes))


def _embedded(
    source: WeightSource, tokens_NS: Tensor, out: Path | None, device: torch.device, dtype: torch.dtype
) -> Samples:
    """The samples before the first layer; the weights outside the layers go to `out` and are not kept."""
    outer = source.outer()
    _check_finite({name: dense(value) for name, value in outer.items()}, "outer")
    if out is not None:
        save_weights(out / OUTER_NAME, outer)
    embed_VD = dense(outer["embed.weight"]).to(device)
    samples = Samples((*tokens_NS.shape, embed_VD.shape[1]), dtype, device)
    for idx, tokens_S in enumerate(tokens_NS.to(device=device, dtype=torch.int64)):
        samples[idx : idx + 1] = embed_VD[tokens_S].unsqueeze(0)
    return samples


def _placed(weights: Weights, idx: int, device: torch.device) -> dict[str, Tensor]:
    """The layer's weights on the device."""
    placed = {name: dense(value).to(device=device, non_blocking=True) for name, value in weights.items()}
    _check_finite(placed, f"layers.{idx}")
    return placed


def deal(arch: Arch, idx: int, groups: Sequence[LinearGroup], num_ranks: int) -> dict[str, int]:
    """Tap -> the rank that compresses the linears behind it: the costliest group first, each to the rank with the least to do."""
    shapes = {
        group.tap: [arch.layers[idx].linear_shape(name, arch.hidden_size) for name in group.linears]
        for group in groups
    }
    costs = {
        tap: sum(rows for rows, _ in each) * each[0][1] ** 2 + each[0][1] ** 3 for tap, each in shapes.items()
    }
    load = [0] * num_ranks
    owners = dict[str, int]()
    for tap in sorted(costs, key=lambda tap: -costs[tap]):
        owners[tap] = load.index(min(load))
        load[owners[tap]] += costs[tap]
    return owners


def _check_finite(weights: Mapping[str, Tensor], where: str) -> None:
    """Raises UnsupportedFormat: rounding would turn NaN and infinity into codes that look like any other."""
    for name, value in weights.items():
        if not all(bool(torch.isfinite(part).all()) for part in value.reshape(-1).split(FINITE_CHUNK)):
            raise UnsupportedFormat(
                f"the weight '{where}.{name}' of the model holds NaN or infinity: the checkpoint is damaged."
            )


def _on_host(weights: Weights) -> dict[str, Tensor]:
    """The tensors of a layer's file; packed on the device, before the copy."""
    return {name: tensor.to("cpu") for name, tensor in encoded(weights).items()}


def _store(out: Path, idx: int, tensors: Mapping[str, Tensor], rows: Sequence[Row]) -> None:
    """Rows first, weights second: a layer counts as stored when its weights are there."""
    write_atomic(_rows_file(out, idx), canonical_json(list(rows)))
    save_tensors(out / layer_name(idx), tensors)


def _is_stored(out: Path, idx: int) -> bool:
    return (out / layer_name(idx)).exists() and _rows_file(out, idx).exists()


def _rows_file(out: Path, idx: int) -> Path:
    return out / f"layer-{idx:05d}.json"

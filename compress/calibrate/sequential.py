"""The layer-by-layer runner: one layer on the device at a time, one observation feeds every pass, the compressed layer feeds the next.

    for each layer:  observe   x -> layer(x), statistics of every tap, samples in order
                     apply     each pass on the layer's float32 weights and the statistics
                     cache     if asked: scales for what the layer, as it is now, puts into a KV cache (`kv.py`)
                     store     the layer's file (a resume point: complete or absent)
                     replay    x := compressed layer (x)

A statistic that compares x with the source model's own activations (`SourceStat`) has the runner keep those too, for the same samples, and
take them through the layers of the source: a second store of activations, and one more pass over each layer.

The next layer is read while this one is compressed, and this one's file is written while it is replayed, so what is in memory does not
grow with the number of layers. A layer is replayed as its file holds it, so a run that was cut and resumed replays the same numbers as one
that was not, and gives the same bits. One sample is one product: the result does not depend on how many samples fit at once.

With several ranks each has its own samples, all have every layer. The groups of linears are dealt out by what they cost; the statistics of
a group meet where it is compressed, the codes come back to all. Sums are made in one order wherever they are made (`stats.py`), so the
number of ranks changes no bit either.

Shapes: N samples, S sequence.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.artifact.atomic import write_atomic
from compress.artifact.context import Context, OneRank, Ranks
from compress.artifact.tensors import save_tensors
from compress.calibrate.guide import GuideFiles, LayerGuide, OutputMoment
from compress.calibrate.kv import Forward, KeysValues, calibrate_cache
from compress.calibrate.observe import Shards, Stats, meet, observe_shards, replay_, together
from compress.calibrate.room import Room, Samples
from compress.calibrate.stats import SourceStat, Stat, StatFactory
from compress.calibrate.streaming import Ahead, Behind, return_freed_blocks
from compress.digest import canonical_json
from compress.errors import UnsupportedFormat
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, encoded, layer_name, load_weights, save_weights
from compress.models.decoder import DecoderLayer, LinearGroup, SmoothingPair
from compress.models.weights import Weights, WeightSource, build_layer, dense
from compress.quant.scheme import QuantizedWeight, Scheme, Schemes

Row = dict[str, Any]
"""One linear of the layer report, or the keys or values of a layer (`cache`): JSON values only."""
FINITE_CHUNK = 1 << 24
"""Numbers that are looked at at once for NaN and infinity: the look must not cost a copy of a large matrix."""


class FloatWeights(dict[str, Tensor]):
    """Weights kept in the dtype they came in and read as float32, so that a layer does not stand there twice as large meanwhile."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).to(torch.float32)


@dataclass
class LayerState:
    """One layer while the passes work on it.

    `weights` are read as float32, on the device, under names relative to the layer; a pass sets those it changes. A linear that a pass has
    quantized stands in `quantized` instead, and that is what is stored. `stats` is tap -> statistic name -> statistic, of the inputs the
    layer sees when everything before it is already compressed. `groups` and `stats` are those that fell to this rank; `pairs` and `weights`
    are all. What a pass does to one group goes through `room`, in case there is none. `outputs` is tap -> which rows behind it err
    together, where a guide says so.
    """

    layer_idx: int
    groups: list[LinearGroup]
    pairs: list[SmoothingPair]
    weights: dict[str, Tensor]
    stats: dict[str, dict[str, Stat]]
    ranks: Ranks = field(default_factory=OneRank)
    room: Room = field(default_factory=Room)
    outputs: Mapping[str, OutputMoment] = field(default_factory=dict)
    num_rows: Mapping[str, int] = field(default_factory=dict)
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)

    def quantize(self, linear: str, weight: QuantizedWeight) -> None:
        """What a linear is from here on; its dense weight is not kept."""
        self.quantized[linear] = weight
        self.weights.pop(f"{linear}.weight", None)

    def scheme(self, schemes: Schemes, linears: Sequence[str]) -> Scheme | None:
        """What linears over one input have, None if they stay dense."""
        found = {schemes.of(f"layers.{self.layer_idx}.{linear}") for linear in linears}
        assert len(found) == 1, f"linears over one input have several schemes: {linears}"
        return found.pop()

    def output_moment(self, linears: Sequence[str]) -> OutputMoment | None:
        """Which rows of linears that stand side by side in a group err together, if a guide says so."""
        for group in self.groups:
            if linears[0] in group.linears and group.tap in self.outputs:
                begin = sum(self.num_rows[name] for name in group.linears[: group.linears.index(linears[0])])
                return self.outputs[group.tap].of(begin, begin + sum(self.num_rows[name] for name in linears))
        return None

    def rescale_outputs(self, linear: str, scale_O: Tensor) -> None:
        """The outputs of a linear were divided by a scale, so its gradients are multiplied."""
        for group in self.groups:
            if linear in group.linears and group.tap in self.outputs:
                all_O = torch.cat([scale_O if name == linear else scale_O.new_ones(self.num_rows[name]) for name in group.linears])
                self.outputs = {**self.outputs, group.tap: self.outputs[group.tap].rescaled(all_O)}

    def row(self, linear: str) -> Row:
        return self.rows.setdefault(linear, {"layer": self.layer_idx, "linear": linear})


class LayerPass(Protocol):
    """One step of compression on one layer. `stats` names what it needs to know about the inputs of every linear group."""

    def stats(self) -> Mapping[str, StatFactory]: ...

    def apply(self, state: LayerState) -> None: ...


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

    Returns:
        One row per linear, in execution order, and behind those of a layer one for its keys and one for its values, with `kv_scales`.
        Nothing on ranks other than 0.

    Raises:
        UnsupportedFormat: a weight of the source is NaN or infinite.
        Interrupted: at a layer boundary, when the context says so.
        RankStopped, EnvironmentUnfit: another rank failed.
        EnvironmentUnfit: the device's memory is too small, whatever gives way.
    """
    arch, device, ranks = source.arch, torch.device(ctx.device), ctx.ranks
    after = arch if pruned is None else pruned
    leads = ranks.rank == 0
    if device.type == "cpu":
        return_freed_blocks()
    shards = Shards.of(tokens_NS.shape[0], rank=ranks.rank, size=ranks.size)
    samples = _embedded(source, tokens_NS[shards.samples], out if leads else None, device, compute_dtype)
    of_source = samples.copy() if _compares(passes) else None
    room = Room(ctx.progress, *(each for each in (samples, of_source) if each is not None))
    stored = ranks.broadcast([_is_stored(out, idx) for idx in range(arch.num_layers)])

    def read(idx: int) -> Weights:
        return load_weights(out / layer_name(idx), scheme, prefix=f"layers.{idx}.") if stored[idx] else source.layer(idx)

    def over_samples(layer: Forward, factories: Mapping[str, StatFactory]) -> Stats:
        return together(observe_shards(layer, samples, factories, shards, room), ranks)

    with Ahead(read, device) as layers, Behind() as disk:
        for idx in range(arch.num_layers):
            weights: Weights = layers.take(idx)
            is_last = idx + 1 == arch.num_layers
            if not stored[idx]:
                disk.wait()
                ctx.boundary(idx, arch.num_layers, f"layer {idx} of {arch.num_layers}")
                ranks.broadcast(idx)  # nobody begins a layer that rank 0 does not begin
                told = None if guide is None else guide.layer(idx)
                state = _observed(arch, idx, weights, samples, of_source, passes, shards, ranks, room, device, compute_dtype, told)
                del weights  # what a pass replaces or quantizes is kept nowhere
                if not is_last:
                    layers.start(idx + 1)
                weights, rows = _compressed(state, passes, arch)
                del state
                if kv_scales:
                    cached = KeysValues.of(after, idx, weights, dtype=compute_dtype, device=device)
                    scales, of_cache = calibrate_cache(cached, over_samples, stored_dtype=getattr(torch, arch.dtype))
                    weights, rows = {**weights, **scales}, rows + of_cache
                    del cached
                if leads:
                    disk.write(partial(_store, out, idx, _on_host(weights), rows))
            elif of_source is not None:
                replay_(_built(arch, idx, source.layer(idx), device, compute_dtype, room), of_source, room)
            if not is_last:
                layers.start(idx + 1)
                replay_(_built(after, idx, weights, device, compute_dtype, room), samples, room)
            del weights  # before the next layer comes
        disk.wait()
    ctx.progress.update(arch.num_layers, arch.num_layers, "all layers")
    return [row for idx in range(arch.num_layers) for row in json.loads(_rows_file(out, idx).read_bytes())] if leads else []


def _compares(passes: Sequence[LayerPass]) -> bool:
    """Whether a pass asks for the source's activations."""
    return any(isinstance(factory(), SourceStat) for each in passes for factory in each.stats().values())


def _embedded(source: WeightSource, tokens_NS: Tensor, out: Path | None, device: torch.device, dtype: torch.dtype) -> Samples:
    """The samples before the first layer; the weights outside the layers go to `out` and are not kept."""
    outer = source.outer()
    _check_finite({name: dense(value) for name, value in outer.items()}, "outer")
    if out is not None:
        save_weights(out / OUTER_NAME, outer)
    embed_VD = dense(outer["embed.weight"]).to(device)
    samples = Samples((*tokens_NS.shape, embed_VD.shape[1]), dtype, device)
    for idx, tokens_S in enumerate(tokens_NS.to(device=device, dtype=torch.int64)):
        samples[idx] = embed_VD[tokens_S].unsqueeze(0)
    return samples


def _placed(weights: Weights, idx: int, device: torch.device) -> dict[str, Tensor]:
    """The layer's weights on the device."""
    placed = {name: dense(value).to(device=device, non_blocking=True) for name, value in weights.items()}
    _check_finite(placed, f"layers.{idx}")
    return placed


def _observed(
    arch: Arch,
    idx: int,
    weights: Weights,
    samples: Samples,
    of_source: Samples | None,
    passes: Sequence[LayerPass],
    shards: Shards,
    ranks: Ranks,
    room: Room,
    device: torch.device,
    compute_dtype: torch.dtype,
    told: LayerGuide | None,
) -> LayerState:
    """The layer as the passes find it, with the statistics of the groups that are this rank's."""
    placed = room.attempt(partial(_placed, weights, idx, device), "placing a layer")
    layer = _built(arch, idx, placed, device, compute_dtype, room)
    factories = {name: factory for each in passes for name, factory in each.stats().items()}
    owners = deal(arch, idx, layer.groups(), ranks.size)
    trees = observe_shards(layer, samples, factories, shards, room, of_source, None if told is None else told.weights)
    stats = meet(trees, layer.groups(), list(factories), owners, ranks)
    return LayerState(
        idx,
        groups=[group for group in layer.groups() if owners[group.tap] == ranks.rank],
        pairs=layer.smoothing_pairs(),
        weights=FloatWeights(placed),
        stats=stats,
        ranks=ranks,
        room=room,
        outputs={} if told is None else told.outputs,
        num_rows={name: arch.layers[idx].linear_shape(name, arch.hidden_size)[0] for name in arch.layers[idx].linears},
    )


def _built(arch: Arch, idx: int, weights: Weights, device: torch.device, dtype: torch.dtype, room: Room) -> DecoderLayer:
    return room.attempt(partial(build_layer, arch, idx, weights, dtype=dtype, device=device, narrow=True), "building a layer")


def deal(arch: Arch, idx: int, groups: Sequence[LinearGroup], num_ranks: int) -> dict[str, int]:
    """Tap -> the rank that compresses the linears behind it: the costliest group first, each to the rank with the least to do."""
    shapes = {group.tap: [arch.layers[idx].linear_shape(name, arch.hidden_size) for name in group.linears] for group in groups}
    costs = {tap: sum(rows for rows, _ in each) * each[0][1] ** 2 + each[0][1] ** 3 for tap, each in shapes.items()}
    load, owners = [0] * num_ranks, dict[str, int]()
    for tap in sorted(costs, key=lambda tap: -costs[tap]):
        owners[tap] = load.index(min(load))
        load[owners[tap]] += costs[tap]
    return owners


def _compressed(state: LayerState, passes: Sequence[LayerPass], arch: Arch) -> tuple[Weights, list[Row]]:
    """What the passes of all ranks make of the layer, as its file will hold it, and the rows of its linears. Empties `state` of weights."""
    for each in passes:
        each.apply(state)
    for rank in range(state.ranks.size):
        quantized, rows = state.ranks.broadcast((state.quantized, state.rows), source=rank)
        state.quantized |= quantized
        state.rows |= rows
    dtype = getattr(torch, arch.dtype)
    kept = [name for name in state.weights if name.removesuffix(".weight") not in state.quantized]
    dense_weights = {name: state.weights.pop(name).to(dtype) for name in kept}
    state.weights.clear()
    quantized_weights = {f"{linear}.weight": weight for linear, weight in state.quantized.items()}
    return dense_weights | quantized_weights, [state.rows[name] for name in arch.layers[state.layer_idx].linears if name in state.rows]


def _check_finite(weights: Mapping[str, Tensor], where: str) -> None:
    """Raises UnsupportedFormat: rounding would turn NaN and infinity into codes that look like any other."""
    for name, value in weights.items():
        if not all(bool(torch.isfinite(part).all()) for part in value.reshape(-1).split(FINITE_CHUNK)):
            raise UnsupportedFormat(f"the weight '{where}.{name}' of the model holds NaN or infinity: the checkpoint is damaged.")


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

"""The layer-by-layer runner: one layer on the device at a time, one observation feeds every pass, the compressed layer feeds the next.

    for each layer:  observe   x -> layer(x), statistics of every tap, samples in order
                     apply     each pass on the layer's float32 weights and the statistics
                     cache     if asked: scales for what the layer, as it is now, puts into a KV cache (`kv.py`)
                     store     the layer's file (a resume point: complete or absent)
                     replay    x := stored layer (x)

A statistic that compares x with the source model's own activations (`SourceStat`) has the runner keep those too, for the same samples, and
take them through the layers of the source: a second store of activations, and one more pass over each layer.

The replayed layer is the one read back from its file, so a run that was cut and resumed replays the same numbers as one that was not, and
gives the same bits. One sample is one product: the result does not depend on how many samples fit at once.

Shapes: N samples, S sequence, D hidden, T tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.artifact.atomic import write_atomic
from compress.artifact.context import Context
from compress.calibrate.kv import Forward, KeysValues, calibrate_cache
from compress.calibrate.stats import MergeTree, SourceStat, Stat, StatFactory, shard_bounds
from compress.digest import canonical_json
from compress.errors import UnsupportedFormat
from compress.models.attention import FullAttention
from compress.models.canonical import OUTER_NAME, layer_name, load_weights, save_weights
from compress.models.decoder import LinearGroup, SmoothingPair
from compress.models.weights import WeightSource, build_layer, dense
from compress.quant.scheme import QuantizedWeight, Scheme

Row = dict[str, Any]
"""One linear of the layer report, or the keys or values of a layer (`cache`): JSON values only."""


@dataclass
class LayerState:
    """One layer while the passes work on it.

    `weights` are float32 on the device under names relative to the layer; a pass changes them in place. A linear that a pass has quantized
    stands in `quantized` too, and that is what is stored; so are `kv_scales`, beside the weights. `stats` is tap -> statistic name ->
    statistic, of the inputs the layer sees when everything before it is already compressed.
    """

    layer_idx: int
    groups: list[LinearGroup]
    pairs: list[SmoothingPair]
    weights: dict[str, Tensor]
    stats: dict[str, dict[str, Stat]]
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    kv_scales: dict[str, Tensor] = field(default_factory=dict)
    kv_rows: list[Row] = field(default_factory=list)

    def row(self, linear: str) -> Row:
        return self.rows.setdefault(linear, {"layer": self.layer_idx, "linear": linear})

    def stored(self, dtype: torch.dtype) -> dict[str, Tensor | QuantizedWeight]:
        """What the layer's file holds; `dtype` of what is not quantized."""
        weights = {name: self.quantized.get(name.removesuffix(".weight"), value.to(dtype)) for name, value in self.weights.items()}
        return weights | self.kv_scales


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
    scheme: Scheme | None,
    compute_dtype: torch.dtype,
    kv_scales: bool = False,
) -> list[Row]:
    """Compress every layer of `source` into the canonical store at `out`; files already there are resume points.

    Args:
        tokens_NS: calibration token ids [N, S].
        scheme: of the quantized linears, to read a layer back.
        compute_dtype: of the activations; statistics are float32 whatever it is.
        kv_scales: also find and store the static scales of every layer's KV cache.

    Returns:
        One row per linear, in execution order, and behind those of a layer one for its keys and one for its values, with `kv_scales`.

    Raises:
        UnsupportedFormat: a weight of the source is NaN or infinite.
        Interrupted: at a layer boundary, when the context says so.
    """
    arch, device, stored_dtype = source.arch, torch.device(ctx.device), getattr(torch, source.arch.dtype)
    outer = source.outer()
    _check_finite({name: dense(value) for name, value in outer.items()}, "outer")
    save_weights(out / OUTER_NAME, outer)
    embed = dense(outer["embed.weight"])
    x_NSD = torch.stack([embed[sample].to(device=device, dtype=compute_dtype) for sample in tokens_NS.to(torch.int64)])
    source_NSD = x_NSD.clone() if _compares(passes) else None
    rows: list[Row] = []
    for idx in range(arch.num_layers):
        if not _is_stored(out, idx):
            ctx.boundary(idx, arch.num_layers, f"layer {idx} of {arch.num_layers}")
            state = _compress(source, idx, x_NSD, source_NSD, passes, device, compute_dtype)
            if kv_scales:
                cached = KeysValues.of(arch, idx, state.stored(stored_dtype), dtype=compute_dtype, device=device)
                state.kv_scales, state.kv_rows = calibrate_cache(cached, partial(_observe_over, x_NSD), stored_dtype=stored_dtype)
            _store(out, stored_dtype, state)
        elif source_NSD is not None:
            _forward_(build_layer(arch, idx, source.layer(idx), dtype=compute_dtype, device=device), source_NSD)
        rows += json.loads(_rows_file(out, idx).read_bytes())
        if idx + 1 < arch.num_layers:
            weights = load_weights(out / layer_name(idx), scheme)
            _forward_(build_layer(arch, idx, weights, dtype=compute_dtype, device=device), x_NSD)
    ctx.progress.update(arch.num_layers, arch.num_layers, "all layers")
    return rows


def _compares(passes: Sequence[LayerPass]) -> bool:
    """Whether a pass asks for the source's activations."""
    return any(isinstance(factory(), SourceStat) for each in passes for factory in each.stats().values())


def _compress(
    source: WeightSource,
    idx: int,
    x_NSD: Tensor,
    source_NSD: Tensor | None,
    passes: Sequence[LayerPass],
    device: torch.device,
    compute_dtype: torch.dtype,
) -> LayerState:
    stored = source.layer(idx)
    weights = {name: dense(value).to(device=device, dtype=torch.float32) for name, value in stored.items()}
    _check_finite(weights, f"layers.{idx}")
    layer = build_layer(source.arch, idx, stored, dtype=compute_dtype, device=device)
    factories = {name: factory for each in passes for name, factory in each.stats().items()}
    state = LayerState(
        idx,
        groups=layer.groups(),
        pairs=layer.smoothing_pairs(),
        weights=weights,
        stats=observe(layer, x_NSD, factories, source_NSD) if factories else {},
    )
    for each in passes:
        each.apply(state)
    return state


def _check_finite(weights: Mapping[str, Tensor], where: str) -> None:
    """Raises UnsupportedFormat: rounding would turn NaN and infinity into codes that look like any other."""
    for name, value in weights.items():
        if not bool(torch.isfinite(value).all()):
            raise UnsupportedFormat(f"the weight '{where}.{name}' of the model holds NaN or infinity: the checkpoint is damaged.")


@torch.no_grad()
def observe(
    layer: Forward, x_NSD: Tensor, factories: Mapping[str, StatFactory], source_NSD: Tensor | None = None
) -> dict[str, dict[str, Stat]]:
    """Statistics of every tap over all samples, in the fixed order of summation. `source_NSD`, where given, is what the source model has in
    the place of x; it becomes the layer's output."""
    trees: dict[tuple[str, str], MergeTree[Stat]] = {}
    for begin, end in shard_bounds(x_NSD.shape[0]):
        shard: dict[tuple[str, str], Stat] = {}
        beside: dict[str, Tensor] = {}
        tap = _tap_into(shard, factories, beside)
        for sample in range(begin, end):
            if source_NSD is not None:
                source_NSD[sample : sample + 1] = _run(layer, source_NSD[sample : sample + 1], beside.__setitem__)
            _run(layer, x_NSD[sample : sample + 1], tap)
        for key, stat in shard.items():
            trees.setdefault(key, MergeTree()).push(stat)
    stats: dict[str, dict[str, Stat]] = {}
    for (tap_name, stat_name), tree in trees.items():
        stats.setdefault(tap_name, {})[stat_name] = tree.root()
    return stats


def _observe_over(x_NSD: Tensor, layer: Forward, factories: Mapping[str, StatFactory]) -> dict[str, dict[str, Stat]]:
    return observe(layer, x_NSD, factories)


def _tap_into(
    shard: dict[tuple[str, str], Stat], factories: Mapping[str, StatFactory], beside: Mapping[str, Tensor]
) -> Callable[[str, Tensor], None]:
    """`beside` has what the source model's linears read of the same sample, where anybody asks for it."""

    def tap(tap_name: str, x: Tensor) -> None:
        for stat_name, factory in factories.items():
            stat = shard.setdefault((tap_name, stat_name), factory())
            if isinstance(stat, SourceStat):
                stat.update_beside(x.flatten(0, -2), beside[tap_name].flatten(0, -2))
            else:
                stat.update(x.flatten(0, -2))

    return tap


@torch.no_grad()
def _forward_(layer: Forward, x_NSD: Tensor) -> None:
    for sample in range(x_NSD.shape[0]):
        x_NSD[sample : sample + 1] = _run(layer, x_NSD[sample : sample + 1], lambda name, x: None)


def _run(layer: Forward, x_1SD: Tensor, tap: Callable[[str, Tensor], None]) -> Tensor:
    return layer(x_1SD, torch.arange(x_1SD.shape[1], device=x_1SD.device), FullAttention(), tap)


def _store(out: Path, dtype: torch.dtype, state: LayerState) -> None:
    """Rows first, weights second: a layer counts as stored when its weights are there."""
    rows = [state.rows[name] for group in state.groups for name in group.linears if name in state.rows]
    write_atomic(_rows_file(out, state.layer_idx), canonical_json(rows + state.kv_rows))
    save_weights(out / layer_name(state.layer_idx), state.stored(dtype))


def _is_stored(out: Path, idx: int) -> bool:
    return (out / layer_name(idx)).exists() and _rows_file(out, idx).exists()


def _rows_file(out: Path, idx: int) -> Path:
    return out / f"layer-{idx:05d}.json"

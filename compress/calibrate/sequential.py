"""The layer-by-layer runner: one layer on the device at a time, one observation feeds every pass, the compressed layer feeds the next.

    for each layer:  observe   x -> layer(x), statistics of every tap, samples in order
                     apply     each pass on the layer's float32 weights and the statistics
                     store     the layer's file (a resume point: complete or absent)
                     replay    x := stored layer (x)

The replayed layer is the one read back from its file, so a run that was cut and resumed replays the same numbers as one that was not, and
gives the same bits. One sample is one product: the result does not depend on how many samples fit at once.

Shapes: N samples, S sequence, D hidden, T tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.artifact.atomic import write_atomic
from compress.artifact.context import Context
from compress.calibrate.stats import MergeTree, Stat, StatFactory, shard_bounds
from compress.digest import canonical_json
from compress.errors import UnsupportedFormat
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.canonical import OUTER_NAME, layer_name, load_weights, save_weights
from compress.models.decoder import DecoderLayer, LinearGroup, SmoothingPair
from compress.models.weights import WeightSource, build_layer, dense
from compress.quant.scheme import QuantizedWeight, Scheme, Schemes

Row = dict[str, Any]
"""One linear of the layer report: JSON values only."""


@dataclass
class LayerState:
    """One layer while the passes work on it.

    `weights` are float32 on the device under names relative to the layer; a pass changes them in place. A linear that a pass has quantized
    stands in `quantized` too, and that is what is stored. `stats` is tap -> statistic name -> statistic, of the inputs the layer sees when
    everything before it is already compressed.
    """

    layer_idx: int
    groups: list[LinearGroup]
    pairs: list[SmoothingPair]
    weights: dict[str, Tensor]
    stats: dict[str, dict[str, Stat]]
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)

    def scheme(self, schemes: Schemes, linears: Sequence[str]) -> Scheme | None:
        """What linears over one input have, None if they stay dense."""
        found = {schemes.of(f"layers.{self.layer_idx}.{linear}") for linear in linears}
        assert len(found) == 1, f"linears over one input have several schemes: {linears}"
        return found.pop()

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
) -> list[Row]:
    """Compress every layer of `source` into the canonical store at `out`; files already there are resume points.

    Args:
        tokens_NS: calibration token ids [N, S].
        scheme: of each linear, to read a layer back.
        compute_dtype: of the activations; statistics are float32 whatever it is.

    Returns:
        One row per linear, in execution order.

    Raises:
        UnsupportedFormat: a weight of the source is NaN or infinite.
        Interrupted: at a layer boundary, when the context says so.
    """
    arch, device = source.arch, torch.device(ctx.device)
    outer = source.outer()
    _check_finite({name: dense(value) for name, value in outer.items()}, "outer")
    save_weights(out / OUTER_NAME, outer)
    embed = dense(outer["embed.weight"])
    x_NSD = torch.stack([embed[sample].to(device=device, dtype=compute_dtype) for sample in tokens_NS.to(torch.int64)])
    rows: list[Row] = []
    for idx in range(arch.num_layers):
        if not _is_stored(out, idx):
            ctx.boundary(idx, arch.num_layers, f"layer {idx} of {arch.num_layers}")
            _store(out, arch, _compress(source, idx, x_NSD, passes, device, compute_dtype))
        rows += json.loads(_rows_file(out, idx).read_bytes())
        if idx + 1 < arch.num_layers:
            weights = load_weights(out / layer_name(idx), scheme, prefix=f"layers.{idx}.")
            _forward_(build_layer(arch, idx, weights, dtype=compute_dtype, device=device), x_NSD)
    ctx.progress.update(arch.num_layers, arch.num_layers, "all layers")
    return rows


def _compress(
    source: WeightSource, idx: int, x_NSD: Tensor, passes: Sequence[LayerPass], device: torch.device, compute_dtype: torch.dtype
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
        stats=observe(layer, x_NSD, factories) if factories else {},
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
def observe(layer: DecoderLayer, x_NSD: Tensor, factories: Mapping[str, StatFactory]) -> dict[str, dict[str, Stat]]:
    """Statistics of every tap over all samples, in the fixed order of summation."""
    trees: dict[tuple[str, str], MergeTree[Stat]] = {}
    for begin, end in shard_bounds(x_NSD.shape[0]):
        shard: dict[tuple[str, str], Stat] = {}
        tap = _tap_into(shard, factories)
        for sample in range(begin, end):
            _run(layer, x_NSD[sample : sample + 1], tap)
        for key, stat in shard.items():
            trees.setdefault(key, MergeTree()).push(stat)
    stats: dict[str, dict[str, Stat]] = {}
    for (tap_name, stat_name), tree in trees.items():
        stats.setdefault(tap_name, {})[stat_name] = tree.root()
    return stats


def _tap_into(shard: dict[tuple[str, str], Stat], factories: Mapping[str, StatFactory]) -> Callable[[str, Tensor], None]:
    def tap(tap_name: str, x: Tensor) -> None:
        for stat_name, factory in factories.items():
            shard.setdefault((tap_name, stat_name), factory()).update(x.flatten(0, -2))

    return tap


@torch.no_grad()
def _forward_(layer: DecoderLayer, x_NSD: Tensor) -> None:
    for sample in range(x_NSD.shape[0]):
        x_NSD[sample : sample + 1] = _run(layer, x_NSD[sample : sample + 1], lambda name, x: None)


def _run(layer: DecoderLayer, x_1SD: Tensor, tap: Callable[[str, Tensor], None]) -> Tensor:
    return layer(x_1SD, torch.arange(x_1SD.shape[1], device=x_1SD.device), FullAttention(), tap)


def _store(out: Path, arch: Arch, state: LayerState) -> None:
    """Rows first, weights second: a layer counts as stored when its weights are there."""
    dtype = getattr(torch, arch.dtype)
    weights: dict[str, Tensor | QuantizedWeight] = {
        name: state.quantized.get(name.removesuffix(".weight"), value.to(dtype)) for name, value in state.weights.items()
    }
    write_atomic(
        _rows_file(out, state.layer_idx),
        canonical_json([state.rows[name] for group in state.groups for name in group.linears if name in state.rows]),
    )
    save_weights(out / layer_name(state.layer_idx), weights)


def _is_stored(out: Path, idx: int) -> bool:
    return (out / layer_name(idx)).exists() and _rows_file(out, idx).exists()


def _rows_file(out: Path, idx: int) -> Path:
    return out / f"layer-{idx:05d}.json"

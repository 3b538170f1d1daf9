"""The state of a layer that passes read and change: the contract between the sequential runner and the
methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from compress.calibrate.guide import LayerGuide, OutputMoment
from compress.calibrate.layer_run import LayerRun
from compress.calibrate.stats import InputStats, Stat
from compress.models.arch import Arch
from compress.models.decoder import DecoderLayer
from compress.models.family import family_of_arch
from compress.models.linear_groups import LinearGroup
from compress.models.smoothing_pair import SmoothingPair
from compress.models.weights import Weights, rounded
from compress.quant.scheme import QuantizedWeight, Scheme, Schemes

Row = dict[str, Any]
"""One linear of the layer report, or the keys or values of a layer (`cache`): JSON values only."""
Results = tuple[dict[str, tuple[Any, ...]], dict[str, Row]]
"""Results of compressing linears, in the form that is sent between ranks: parts of their quantized weights,
and their rows, both by name."""


class FloatWeights(dict[str, Tensor]):
    """Weights stored in the dtype they were loaded in and read as float32: a float32 layer in memory would be
    twice as large."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).to(torch.float32)


@dataclass
class LayerState:
    """One layer while the passes work on it. Names are relative to the layer.

    `groups` are the linear groups that this rank compresses and `stats` the statistics of their inputs by
    tap, as the layer sees them when all layers before it are compressed. `pairs` and `weights` are complete
    on every rank; weights lie on the device, are read as float32, and a pass sets those that it changes. A
    linear that a pass has quantized is in `quantized` and no longer in `weights`. `num_rows` is linear ->
    output features. `cache` holds the scales of the layer's KV cache, `tokens` the number of tokens
    of each expert whose groups are here.
    """

    layer_idx: int
    groups: list[LinearGroup]
    pairs: list[SmoothingPair]
    weights: dict[str, Tensor]
    stats: dict[str, InputStats]
    run: LayerRun
    guide: LayerGuide = field(default_factory=lambda: LayerGuide({}, {}))
    num_rows: Mapping[str, int] = field(default_factory=dict)
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    cache: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        arch: Arch,
        layer_idx: int,
        weights: dict[str, Tensor],
        run: LayerRun,
        guide: LayerGuide | None = None,
    ) -> Self:
        """Return the state of a layer of the source before its inputs are observed."""
        with torch.device("meta"):
            pairs = DecoderLayer(arch, layer_idx).smoothing_pairs()
        if family_of_arch(arch).has_adapters:  # they read what the linears read
            pairs = []
        shape = arch.layers[layer_idx]
        rows = {name: shape.linear_shape(name, arch.hidden_size)[0] for name in shape.linears}
        state = cls(layer_idx, [], pairs, FloatWeights(weights), {}, run, num_rows=rows)
        if guide is not None:
            state.guide = guide
        return state

    def quantize(self, linear: str, weight: QuantizedWeight) -> None:
        """Set the quantized weight of a linear and drop its dense one."""
        self.quantized[linear] = weight
        self.weights.pop(f"{linear}.weight", None)

    def loaded_weights(self) -> Weights:
        """Return the dense weights in the dtype they were loaded in."""
        return dict(self.weights.items())  # `items` does not convert to float32, as reading by name does

    def results_for(self, linears: Sequence[str]) -> Results:
        """Return the results of these linears as far as this rank has them."""
        quantized = {name: _to_parts(self.quantized[name]) for name in linears if name in self.quantized}
        return quantized, {name: self.rows[name] for name in linears if name in self.rows}

    def merge_results(self, results: Results) -> None:
        """Add the results of a rank."""
        quantized, rows = results
        for linear, parts in quantized.items():
            self.quantize(linear, _from_parts(parts))
        self.rows |= rows

    def all_rows(self) -> list[Row]:
        """Return the rows of the linears in execution order, then those of the KV cache."""
        return [self.rows[name] for name in (*self.num_rows, *self.cache) if name in self.rows]

    def stored_weights(self, dtype: torch.dtype, *prefixes: str) -> Weights:
        """Return the parameters whose names begin with a prefix, as the layer's file will hold them."""
        where = f"layers.{self.layer_idx}"
        dense = {
            name: rounded(name, self.weights[name], dtype, where=where)
            for name in self.weights
            if name.startswith(prefixes)
        }
        return dense | {
            f"{linear}.weight": weight
            for linear, weight in self.quantized.items()
            if f"{linear}.weight".startswith(prefixes)
        }

    def release_weights(self, dtype: torch.dtype) -> Weights:
        """Return everything that the layer's file will hold; the state keeps no dense weight.

        Raises:
            UnsupportedFormat: as `rounded`.
        """
        where = f"layers.{self.layer_idx}"
        dense = {
            name: rounded(name, self.weights.pop(name), dtype, where=where) for name in list(self.weights)
        }
        return {
            **dense,
            **{f"{linear}.weight": weight for linear, weight in self.quantized.items()},
            **self.cache,
        }

    def scheme(self, schemes: Schemes, linears: Sequence[str]) -> Scheme | None:
        """Return the scheme that linears over one input share, None if they stay dense."""
        found = {schemes.for_linear(f"layers.{self.layer_idx}.{linear}") for linear in linears}
        assert len(found) == 1, f"linears over one input have several schemes: {linears}"
        return found.pop()

    def output_moment(self, linears: Sequence[str]) -> OutputMoment | None:
        """Return the output moment of consecutive linears of a group stacked row by row, None without a
        guide."""
        for group in self.groups:
            if linears[0] in group.linears and group.tap in self.guide.output_moments:
                begin = sum(self.num_rows[name] for name in group.linears[: group.linears.index(linears[0])])
                end = begin + sum(self.num_rows[name] for name in linears)
                return self.guide.output_moments[group.tap].rows(begin, end)
        return None

    def rescale_outputs(self, linear: str, scale_O: Tensor) -> None:
        """Update the output moments after the outputs of a linear were divided by a scale: its gradients are
        multiplied by it."""
        moments = self.guide.output_moments
        for group in self.groups:
            if linear in group.linears and group.tap in moments:
                all_O = torch.cat(
                    [
                        scale_O if name == linear else scale_O.new_ones(self.num_rows[name])
                        for name in group.linears
                    ]
                )
                rescaled = {**moments, group.tap: moments[group.tap].rescaled(all_O)}
                self.guide = replace(self.guide, output_moments=rescaled)

    def row(self, linear: str) -> Row:
        """Return the report row of a linear, to be filled; a new one if it has none."""
        if linear not in self.rows:
            self.rows[linear] = {"layer": self.layer_idx, "linear": linear}
            parts = linear.split(".")
            if parts[1:2] == ["experts"] and int(parts[2]) in self.tokens:
                self.rows[linear]["tokens"] = self.tokens[int(parts[2])]
        return self.rows[linear]


class LayerPass(Protocol):
    """One step of compression on one layer. `needs` names the statistics of the inputs of every linear group
    that it reads."""

    def needs(self) -> tuple[type[Stat], ...]: ...

    def apply(self, state: LayerState) -> None: ...


def needed_stats(passes: Sequence[LayerPass]) -> tuple[type[Stat], ...]:
    """Return the types of all statistics that some pass needs, each once."""
    return tuple(dict.fromkeys(kind for each in passes for kind in each.needs()))


def _to_parts(weight: QuantizedWeight) -> tuple[Any, ...]:
    """Return a quantized weight as it is sent between ranks."""
    return (
        weight.scheme.to_json(),
        weight.codes_OI,
        weight.scale_OG,
        weight.zero_point_OG,
        weight.input_scale,
        weight.global_scale,
        weight.input_zero_point,
        weight.input_global_scale,
    )


def _from_parts(parts: tuple[Any, ...]) -> QuantizedWeight:
    """Return the quantized weight of these parts."""
    scheme, *tensors = parts
    return QuantizedWeight(Scheme.from_json(scheme), *tensors)

"""What a pass is given of a layer, and what it leaves there: the contract between the sequential runner and the methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from compress.calibrate.guide import LayerGuide, OutputMoment
from compress.calibrate.observe import Flow, TokenWeights
from compress.calibrate.room import Room
from compress.calibrate.stats import InputStats, Stat
from compress.context import OneRank, Ranks
from compress.models.arch import Arch, LinearGroup
from compress.models.decoder import DecoderLayer, SmoothingPair
from compress.models.weights import Weights
from compress.quant.scheme import QuantizedWeight, Scheme, Schemes

Row = dict[str, Any]
"""One linear of the layer report, or the keys or values of a layer (`cache`): JSON values only."""


class FloatWeights(dict[str, Tensor]):
    """Weights kept in the dtype they came in and read as float32, so that a layer does not stand there twice as large meanwhile."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).to(torch.float32)


@dataclass
class LayerState:
    """One layer while the passes work on it.

    `weights` are read as float32, on the device, under names relative to the layer; a pass sets those it changes. A linear that a pass has
    quantized stands in `quantized` instead, and that is what is stored. `stats` is tap -> statistics of the inputs the
    layer sees when everything before it is already compressed. `groups` and `stats` are those that fell to this rank; `pairs` and `weights`
    are all. What a pass does to one group goes through `room`, in case there is none. Where a guide says so, `outputs` is tap -> which rows
    behind it err together, and `counts` tap -> how much each token counts. `cache` are scales of the layer's KV cache, with their rows.
    """

    layer_idx: int
    groups: list[LinearGroup]
    pairs: list[SmoothingPair]
    weights: dict[str, Tensor]
    stats: dict[str, InputStats]
    ranks: Ranks = field(default_factory=OneRank)
    room: Room = field(default_factory=Room)
    outputs: Mapping[str, OutputMoment] = field(default_factory=dict)
    num_rows: Mapping[str, int] = field(default_factory=dict)
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    counts: TokenWeights | None = None
    cache: dict[str, Tensor] = field(default_factory=dict)
    cache_rows: list[Row] = field(default_factory=list)

    @classmethod
    def of(
        cls, arch: Arch, layer_idx: int, placed: dict[str, Tensor], told: LayerGuide | None, flow: Flow
    ) -> Self:
        """A layer of the source, before anything is known of its inputs."""
        with torch.device("meta"):
            pairs = DecoderLayer(arch, layer_idx).smoothing_pairs()
        rows = {
            name: arch.layers[layer_idx].linear_shape(name, arch.hidden_size)[0]
            for name in arch.layers[layer_idx].linears
        }
        state = cls(layer_idx, [], pairs, FloatWeights(placed), {}, flow.ranks, flow.room, num_rows=rows)
        if told is not None:
            state.outputs = told.outputs
            state.counts = told.weights
        return state

    def quantize(self, linear: str, weight: QuantizedWeight) -> None:
        """What a linear is from here on; its dense weight is not kept."""
        self.quantized[linear] = weight
        self.weights.pop(f"{linear}.weight", None)

    def as_given(self) -> Weights:
        """Its parameters in the dtype they came in."""
        return dict(self.weights.items())  # which passes `FloatWeights` by

    def found(self, linears: Sequence[str]) -> tuple[dict[str, QuantizedWeight], dict[str, Row]]:
        """What this rank has made of some linears."""
        quantized = {name: self.quantized[name] for name in linears if name in self.quantized}
        return quantized, {name: self.rows[name] for name in linears if name in self.rows}

    def adopt(self, found: tuple[dict[str, QuantizedWeight], dict[str, Row]]) -> None:
        """What a rank has made of linears."""
        quantized, rows = found
        for linear, weight in quantized.items():
            self.quantize(linear, weight)
        self.rows |= rows

    def all_rows(self) -> list[Row]:
        """In execution order."""
        return [self.rows[name] for name in self.num_rows if name in self.rows] + self.cache_rows

    def stored(self, dtype: torch.dtype, *prefixes: str) -> Weights:
        """Parameters as the layer's file will hold them, those whose names begin so."""
        whole = {name: self.weights[name].to(dtype) for name in self.weights if name.startswith(prefixes)}
        return whole | {
            f"{linear}.weight": weight
            for linear, weight in self.quantized.items()
            if f"{linear}.weight".startswith(prefixes)
        }

    def taken(self, dtype: torch.dtype) -> Weights:
        """All that the layer's file will hold; no weight is left here."""
        dense_weights = {name: self.weights.pop(name).to(dtype) for name in list(self.weights)}
        return {
            **dense_weights,
            **{f"{linear}.weight": weight for linear, weight in self.quantized.items()},
            **self.cache,
        }

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
                all_O = torch.cat(
                    [
                        scale_O if name == linear else scale_O.new_ones(self.num_rows[name])
                        for name in group.linears
                    ]
                )
                self.outputs = {**self.outputs, group.tap: self.outputs[group.tap].rescaled(all_O)}

    def row(self, linear: str) -> Row:
        return self.rows.setdefault(linear, {"layer": self.layer_idx, "linear": linear})


class LayerPass(Protocol):
    """One step of compression on one layer. `needs` names the statistics of the inputs of every linear group that it reads."""

    def needs(self) -> tuple[type[Stat], ...]: ...

    def apply(self, state: LayerState) -> None: ...


def needed_stats(passes: Sequence[LayerPass]) -> tuple[type[Stat], ...]:
    """Return the types of all statistics that some pass needs, each once."""
    return tuple(dict.fromkeys(kind for each in passes for kind in each.needs()))

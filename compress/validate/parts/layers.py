"""The error that quantization left in each linear."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json
from compress.validate.parts import PARTS, Part
from compress.validate.plots import (
    CANDIDATE,
    SOURCE,
    Row,
    dots,
    log_scale,
    new_grid,
    style,
    svg,
    whole_numbers,
)

NUM_WORST = 8


@PARTS.register("layers")
@dataclass(frozen=True)
class LayersPart(Part):
    """Errors by linear.

    `rows`: {layer, linear, error_before, error_after} and, where known, damping, error_rtn, ..., and scheme
    where linears differ in it. `guided`: whether tokens were weighted in these errors. `tuning`: facts of
    training the scales, as `stages/quantize` gives them. `data_free`: no error was measured, because rounding
    read no activation.
    """

    page_order: ClassVar[int] = 110
    rows: Sequence[Mapping[str, Any]]
    guided: bool = False
    tuning: Mapping[str, Any] | None = None
    data_free: bool = False

    def as_json(self) -> Json:
        """Return the rows, what was done with the scales, and whether rounding read no activation."""
        return {
            "layers": list(self.rows),
            "guided": self.guided,
            "tuning": self.tuning,
            "data_free": self.data_free,
        }

    @staticmethod
    def values(report: Json) -> Json:
        """Return the linears with the largest error; equal ones in the order of the model."""
        rows = sorted(report.get("layers", []), key=lambda row: -float(row["error_after"]))
        return {"worst_layers": rows[:NUM_WORST]}

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return the picture of errors over depth."""
        return {"layers": layer_error_plot(report["layers"])} if "layers" in report else {}


def layer_error_plot(layers: Sequence[Row]) -> str:
    """Return one small panel a kind of linear (experts averaged): error over depth, before and after, on one
    logarithmic axis.
    """
    panels = _by_kind(layers)
    num_columns = min(4, len(panels))
    num_rows = -(-len(panels) // num_columns)
    with style():
        figure, grid = new_grid(num_rows, num_columns, height=0.55 + 1.45 * num_rows, share=True)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        for index, (axes, (kind, points)) in enumerate(zip(grid, panels, strict=False)):
            depth = [layer for layer, _, _ in points]
            before = [each for _, each, _ in points]
            after = [each for _, _, each in points]
            named = {"before": "before", "after": "after"} if index == 0 else {}
            axes.plot(depth, before, color=SOURCE, linewidth=1.3, label=named.get("before"), **dots(points))
            axes.plot(depth, after, color=CANDIDATE, linewidth=1.6, label=named.get("after"), **dots(points))
            axes.set_title(kind, loc="left", fontweight="bold")
            axes.grid(axis="y")
            whole_numbers(axes.xaxis, most=4)
            axes.tick_params(labelbottom=index + num_columns >= len(panels))
        if any(row[key] > 0 for row in layers for key in ("error_before", "error_after")):
            log_scale(grid[0], "y")
        figure.supxlabel("layer", fontsize=9.5)
        figure.supylabel("output error", fontsize=9.5)
        figure.legend(loc="outside upper right", ncols=2, handlelength=1.4)
        return svg(figure, name="layers")


def _by_kind(layers: Sequence[Row]) -> list[tuple[str, list[tuple[int, float, float]]]]:
    """Return (kind, [(layer, mean error before, mean error after)]) in order of first appearance.

    The kind is the last part of the name: `moe.experts.3.gate` is of kind `gate`.
    """
    groups: dict[str, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in layers:
        groups[str(row["linear"]).rpartition(".")[2]][int(row["layer"])].append(row)
    return [
        (
            kind,
            [
                (layer, _mean(rows, "error_before"), _mean(rows, "error_after"))
                for layer, rows in sorted(by_layer.items())
            ],
        )
        for kind, by_layer in groups.items()
    ]


def _mean(rows: Sequence[Row], key: str) -> float:
    return float(sum(row[key] for row in rows) / len(rows))

"""Removed heads, channels and layers, and why so much of each was removed.

Rounds of pruning follow one another on ever smaller models. Rows of later rounds number layers and units of
the model they found; here they are given the numbers that they have in the source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json, number
from compress.validate.parts import PARTS, Part
from compress.validate.plots import (
    CANDIDATE,
    DASHED,
    FLOOR,
    INK,
    PAPER,
    SOURCE,
    Row,
    log_scale,
    new_figure,
    style,
    svg,
    whole_numbers,
)

_AXES = {"heads": "heads alone", "ffn": "FFN alone", "depth": "depth alone"}
_UNITS = {
    "heads": "query heads",
    "kv_heads": "KV heads",
    "ffn": "FFN channels",
    "experts": "experts",
    "layers": "layers",
}


@PARTS.register("pruning")
@dataclass(frozen=True)
class PruningPart(Part):
    """Facts of `stages/prune`."""

    page_order: ClassVar[int] = 80
    facts: Mapping[str, Any]

    def as_json(self) -> Json:
        """Return the facts as they are."""
        return {"pruning": self.facts}

    @staticmethod
    def values(report: Json) -> Json:
        """Return the rows of the last round."""
        return {"pruned_layers": rows_of_source(report["pruning"]) if "pruning" in report else []}

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return the pictures that there are data for."""
        return pruning_plots(report["pruning"]) if "pruning" in report else {}

    @staticmethod
    def sentence(report: Json) -> str:
        """Return how much of the model is left."""
        if "pruning" not in report:
            return ""
        before = report["pruning"]["before"]
        after = report["pruning"]["after"]
        kept = [
            f"{number(after[name])} of {number(before[name])} {words}"
            for name, words in _UNITS.items()
            if name in before and after[name] != before[name]
        ]
        params = f"{after['params'] / 1e6:,.1f} of {before['params'] / 1e6:,.1f} million parameters"
        return f"Pruned to {', '.join(kept)}: {params}."


def pruning_plots(pruning: Row) -> dict[str, str]:
    """Return the pictures that the facts of a pruning have data for, by name."""
    plots = {}
    if (scores := unit_scores(pruning)) is not None:
        plots["pruned_heads"] = heads_plot(scores)
    rows = rows_of_source(pruning, round_idx=0)
    if channels := [row for row in rows if "shares" in row and row["linear"] == "ffn.down"]:
        plots["pruned_channels"] = channels_plot(channels)
    if (first := next((each for each in pruning["rounds"] if each["influence"]), None)) is not None:
        plots["pruned_depth"] = depth_plot(first["influence"], first["layers_kept"])
    if "target" in pruning:
        plots["pruned_target"] = budget_plot(pruning["target"])
    return plots


def rows_of_source(pruning: Row, *, round_idx: int = -1) -> list[dict[str, Any]]:
    """Return the rows of one round, each with `source_layer`, the number of its layer in the source."""
    rounds = pruning["rounds"]
    last = round_idx % len(rounds)
    layers = list(range(pruning["before"]["layers"]))
    for each in rounds[: last + 1]:
        layers = [layers[idx] for idx in each["layers_kept"]]
    return [{**row, "source_layer": layers[row["layer"]]} for row in rounds[last]["layers"]]


@dataclass(frozen=True)
class UnitScores:
    """Scores by layer of the source and unit, each over the largest of its layer; whether each unit was kept;
    the name of a `unit`.
    """

    shares: list[list[float]]
    kept: list[list[bool]]
    unit: str


def unit_scores(pruning: Row) -> UnitScores | None:
    """Return the scores of the units that attention's output reads; None where none were pruned."""
    all_layers = range(pruning["before"]["layers"])
    layers = list(all_layers)
    scores: dict[int, list[float]] = {}
    units: dict[int, list[int]] = {}
    unit = ""
    for each in pruning["rounds"]:
        layers = [layers[idx] for idx in each["layers_kept"]]
        for row in (row for row in each["layers"] if row["linear"] == "attn.o" and "kept" in row):
            layer = layers[row["layer"]]
            unit = row["unit"]
            scores.setdefault(layer, row["scores"])
            left = units.get(layer, list(range(row["num_units"])))
            units[layer] = [left[idx] for idx in row["kept"]]
    if not scores:
        return None
    num_units = max(map(len, scores.values()))
    return UnitScores(
        shares=[
            [score / (max(scores[idx]) or 1.0) for score in scores[idx]]
            if idx in scores
            else [0.0] * num_units
            for idx in all_layers
        ],
        kept=[
            [idx in layers and each in units.get(idx, ()) for each in range(num_units)] for idx in all_layers
        ],
        unit=unit,
    )


def heads_plot(scores: UnitScores) -> str:
    """Return a grid of units over layers: the darker, the larger the score; removed ones are crossed out."""
    from matplotlib.colors import to_rgba

    with style():
        figure, axes = new_figure(height=0.9 + min(3.6, 0.26 * len(scores.shares[0])))
        for layer, column in enumerate(scores.shares):
            colors = [to_rgba(CANDIDATE, 0.12 + 0.88 * share) for share in column]
            heights = [1.0] * len(column)
            axes.bar(
                [layer + 0.5] * len(column),
                heights,
                bottom=range(len(column)),
                width=1.0,
                color=colors,
                edgecolor=PAPER,
                linewidth=1.2,
            )
        removed = [
            (layer + 0.5, idx + 0.5)
            for layer, column in enumerate(scores.kept)
            for idx, is_kept in enumerate(column)
            if not is_kept
        ]
        crosses: dict[str, Any] = {"color": INK, "markersize": 7, "markeredgewidth": 1.3}
        axes.plot([x for x, _ in removed], [y for _, y in removed], "x", **crosses)
        axes.set_xlabel("layer")
        axes.set_ylabel("KV group" if scores.unit == "kv_group" else "query head")
        for axis, size in ((axes.xaxis, len(scores.shares)), (axes.yaxis, len(scores.shares[0]))):
            step = -(-size // 16)
            shown = range(0, size, step)
            axis.set_ticks([each + 0.5 for each in shown], [str(each) for each in shown])
        axes.set_xlim(0, len(scores.shares))
        axes.set_ylim(0, len(scores.shares[0]))
        axes.tick_params(length=0)
        return svg(figure, name="pruned_heads")


def channels_plot(rows: Sequence[Row]) -> str:
    """Return one line a layer, light near the input: the share of all scores that the channels with the least
    of them have.
    """
    with style():
        figure, axes = new_figure(height=2.7)
        for idx, row in enumerate(rows):
            percents = [100 * each / (len(row["shares"]) - 1) for each in range(len(row["shares"]))]
            label = f"layer {row['source_layer']}" if idx in (0, len(rows) - 1) else None
            opacity = 0.25 + 0.75 * idx / max(len(rows) - 1, 1)
            shares = [100 * each for each in row["shares"]]
            axes.plot(percents, shares, color=CANDIDATE, alpha=opacity, linewidth=1.3, label=label)
        removed = 100 * (1 - rows[0]["num_kept"] / rows[0]["num_units"])
        axes.axvline(removed, color=FLOOR, linewidth=1.3, linestyle=DASHED, label="removed to here")
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 100)
        axes.grid()
        axes.set_xlabel("channels from the least score on, %")
        axes.set_ylabel("share of all scores, %")
        figure.legend(loc="outside upper left", ncols=3, handlelength=1.4)
        return svg(figure, name="pruned_channels")


def depth_plot(influence: Sequence[float], kept: Sequence[int]) -> str:
    """Return the influence of each layer; grey ones were removed."""
    with style():
        figure, axes = new_figure(height=2.0)
        colors = [CANDIDATE if idx in kept else SOURCE for idx in range(len(influence))]
        axes.bar(range(len(influence)), influence, width=0.8, color=colors)
        whole_numbers(axes.xaxis, most=12)
        axes.grid(axis="y")
        axes.set_xlabel("layer")
        axes.set_ylabel("influence")
        return svg(figure, name="pruned_depth")


def budget_plot(target: Mapping[str, Any]) -> str:
    """Return predicted KL over cost: the best combinations, each axis alone as measured, the budget, and the
    choice.
    """
    with style():
        figure, axes = new_figure(height=2.9)
        lossy = [each for each in target["frontier"] if each["kl"] > 0]
        axes.plot(
            [each["cost"] * 100 for each in lossy],
            [each["kl"] for each in lossy],
            color=SOURCE,
            linewidth=1.4,
            label="best combinations",
        )
        for (axis, label), marker in zip(_AXES.items(), "osv", strict=True):
            points = [each for each in target["measured"] if each["axis"] == axis and each["kl"] > 0]
            if points:
                costs = [each["cost"] * 100 for each in points]
                losses = [each["kl"] for each in points]
                axes.plot(costs, losses, marker, color=INK, markersize=5, label=label)
        axes.axvline(target["limit"] * 100, color=FLOOR, linewidth=1.1, linestyle=DASHED, label="budget")
        chosen = target["chosen"]
        if chosen["kl"] > 0:
            axes.plot(chosen["cost"] * 100, chosen["kl"], "D", color=CANDIDATE, markersize=7, label="chosen")
        log_scale(axes, "y")
        axes.margins(x=0.06, y=0.12)
        axes.grid()
        axes.set_xlabel(
            "time of a decode step, % of the source"
            if target["cost"] == "time"
            else "parameters, % of the source"
        )
        axes.set_ylabel("KL, nats a token")
        figure.legend(loc="outside upper left", ncols=3, handlelength=1.2, columnspacing=1.3)
        return svg(figure, name="pruned_target")

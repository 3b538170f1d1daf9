"""The report's pictures of pruning: heads by layer, how unequal channels are, what layers do, and size or speed against predicted loss.

Rounds follow one another on ever smaller models, so what a later one says of layers and units is put back to where they were in the source.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator, NullLocator

from compress.validate.plots import _STYLE, CANDIDATE, FAINT, FLOOR, INK, SOURCE, Row, _figure, _svg

_DEPTH = LinearSegmentedColormap.from_list("depth", [SOURCE, CANDIDATE])
_AXES = {"heads": "heads alone", "ffn": "FFN alone", "depth": "depth alone"}


def pruning_plots(pruning: Row) -> dict[str, str]:
    """Those that there is something to show in."""
    plots = {}
    if grid := _heads(pruning):
        plots["pruned_heads"] = heads_plot(*grid)
    if channels := [
        row for row in rows_of_source(pruning, round_idx=0) if "shares" in row and row["linear"] == "ffn.down"
    ]:
        plots["pruned_channels"] = channels_plot(channels)
    if (first := next((each for each in pruning["rounds"] if each["influence"]), None)) is not None:
        plots["pruned_depth"] = depth_plot(first["influence"], first["layers_kept"])
    if "target" in pruning:
        plots["pruned_target"] = target_plot(pruning["target"])
    return plots


def rows_of_source(pruning: Row, *, round_idx: int = -1) -> list[dict[str, Any]]:
    """Rows of a round, each with the `source_layer` that it speaks of."""
    rounds = pruning["rounds"]
    layers = list(range(pruning["before"]["layers"]))
    for each in rounds[: len(rounds) + round_idx + 1 if round_idx < 0 else round_idx + 1]:
        layers = [layers[idx] for idx in each["layers_kept"]]
    return [{**row, "source_layer": layers[row["layer"]]} for row in rounds[round_idx]["layers"]]


def _heads(pruning: Row) -> tuple[list[list[float]], list[list[bool]], str] | None:
    """Of every layer of the source and every unit the score, as a share of the layer's largest, and whether it stays; what a unit is."""
    layers = list(range(pruning["before"]["layers"]))
    scores: dict[int, list[float]] = {}
    units: dict[int, list[int]] = {}
    unit = ""
    for each in pruning["rounds"]:
        layers = [layers[idx] for idx in each["layers_kept"]]
        for row in (row for row in each["layers"] if row["linear"] == "attn.o" and "kept" in row):
            layer = layers[row["layer"]]
            unit = row["unit"]
            scores.setdefault(layer, row["scores"])
            known = units.get(layer, list(range(row["num_units"])))
            units[layer] = [known[idx] for idx in row["kept"]]
    if not scores:
        return None
    num_units = max(map(len, scores.values()))
    shares = [
        [score / (max(scores[idx]) or 1.0) for score in scores[idx]] if idx in scores else [0.0] * num_units
        for idx in _all(pruning)
    ]
    kept = [
        [idx in layers and each in units.get(idx, ()) for each in range(num_units)] for idx in _all(pruning)
    ]
    return shares, kept, unit


def _all(pruning: Row) -> range:
    return range(pruning["before"]["layers"])


def heads_plot(shares: Sequence[Sequence[float]], kept: Sequence[Sequence[bool]], unit: str) -> str:
    """Layers along, units up."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(height=0.9 + min(3.6, 0.26 * len(shares[0])))
        colors = LinearSegmentedColormap.from_list("share", [FAINT, CANDIDATE])
        axes.pcolormesh(
            [list(each) for each in zip(*shares, strict=True)],
            cmap=colors,
            vmin=0,
            vmax=1,
            edgecolors="white",
            linewidth=1.2,
        )
        gone = [
            (layer + 0.5, idx + 0.5)
            for layer, column in enumerate(kept)
            for idx, stays in enumerate(column)
            if not stays
        ]
        axes.plot(
            [x for x, _ in gone], [y for _, y in gone], "x", color=INK, markersize=7, markeredgewidth=1.3
        )
        axes.set_xlabel("layer")
        axes.set_ylabel("KV group" if unit == "kv_group" else "query head")
        for axis, size in ((axes.xaxis, len(shares)), (axes.yaxis, len(shares[0]))):
            step = -(-size // 16)
            axis.set_ticks(
                [each + 0.5 for each in range(0, size, step)], [str(each) for each in range(0, size, step)]
            )
        axes.tick_params(length=0)
        return _svg(figure, salt="pruned_heads")


def channels_plot(rows: Sequence[Row]) -> str:
    """One line a layer, light ones near the input: channels from the least on, against their share of all scores."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(height=2.7)
        for idx, row in enumerate(rows):
            at = [100 * each / (len(row["shares"]) - 1) for each in range(len(row["shares"]))]
            named = f"layer {row['source_layer']}" if idx in (0, len(rows) - 1) else None
            color = _DEPTH(idx / max(len(rows) - 1, 1))
            axes.plot(at, [100 * each for each in row["shares"]], color=color, linewidth=1.3, label=named)
        gone = 100 * (1 - rows[0]["num_kept"] / rows[0]["num_units"])
        axes.axvline(gone, color=FLOOR, linewidth=1.3, linestyle=(0, (3, 3)), label="removed")
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 100)
        axes.grid()
        axes.set_xlabel("channels, least first, %")
        axes.set_ylabel("of the sum of scores, %")
        figure.legend(loc="outside upper left", ncols=3, handlelength=1.4)
        return _svg(figure, salt="pruned_channels")


def depth_plot(influence: Sequence[float], kept: Sequence[int]) -> str:
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(height=2.0)
        axes.bar(
            range(len(influence)),
            influence,
            width=0.8,
            color=[CANDIDATE if idx in kept else SOURCE for idx in range(len(influence))],
        )
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        axes.grid(axis="y")
        axes.set_xlabel("layer")
        axes.set_ylabel("influence")
        return _svg(figure, salt="pruned_depth")


def target_plot(target: Mapping[str, Any]) -> str:
    """Predicted KL over cost: the best combinations, each axis alone as it was measured, the limit, and what was chosen."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(height=2.9)
        lossy = [each for each in target["frontier"] if each["kl"] > 0]
        axes.plot(
            [each["cost"] * 100 for each in lossy],
            [each["kl"] for each in lossy],
            color=SOURCE,
            linewidth=1.4,
            label="best combinations",
        )
        for (axis, named), marker in zip(_AXES.items(), "osv", strict=True):
            points = [each for each in target["measured"] if each["axis"] == axis and each["kl"] > 0]
            if points:
                axes.plot(
                    [each["cost"] * 100 for each in points],
                    [each["kl"] for each in points],
                    marker,
                    color=INK,
                    markersize=5,
                    label=named,
                )
        axes.axvline(target["limit"] * 100, color=FLOOR, linewidth=1.1, linestyle=(0, (3, 3)), label="target")
        if target["chosen"]["kl"] > 0:
            axes.plot(
                target["chosen"]["cost"] * 100,
                target["chosen"]["kl"],
                "D",
                color=CANDIDATE,
                markersize=7,
                label="chosen",
            )
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.06, y=0.12)
        axes.grid()
        axes.set_xlabel(
            "time of a decode step, % of the source"
            if target["cost"] == "time"
            else "parameters, % of the source"
        )
        axes.set_ylabel("KL, nats a token")
        figure.legend(loc="outside upper left", ncols=6, handlelength=1.2, columnspacing=1.3)
        return _svg(figure, salt="pruned_target")

"""Pareto pictures: size, time per token and throughput against KL, with the intervals of both.

A picture holds models of one set of conditions only. The line joins the points that no other point beats in
both numbers; it joins measured values, and claims nothing where intervals overlap.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from compress.validate.compare.difference import COMPARED
from compress.validate.display import Json
from compress.validate.plots import DASHED, INK, PAPER, SHADES, SOURCE, log_scale, new_figure, style, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES = ("size_bytes", "tpot_ms_p50", "output_throughput")
"""Metrics that are drawn against KL, where they were measured."""
QUALITY = "kl_mean"
_NAMES = {
    "kl_mean": "mean KL to the source, nats",
    "tpot_ms_p50": "time per output token, ms",
    "output_throughput": "output tokens a second",
}
_LOG_RATIO = 8.0
_APART = 0.062  # of the height, between two names
_BESIDE = 0.018  # of the width, between a point and its name
_CHARACTER = 0.0115  # of the width, of a character of a name


def pareto_pictures(document: Json) -> list[Json]:
    """Return the pictures: {"metric", "labels", "hollow", "svg"}; one for each set of two or more models that
    share the conditions of both axes. `hollow`: some of its points prove nothing.
    """
    found: list[Json] = []
    for metric in AXES:
        needed = {*COMPARED[metric].conditions, *COMPARED[QUALITY].conditions}
        groups: dict[tuple[str, ...], list[Json]] = {}
        for model in document["models"]:
            if {metric, QUALITY} <= model["readings"].keys() and needed <= model["conditions"].keys():
                key = tuple(model["conditions"][name] for name in sorted(needed))
                groups.setdefault(key, []).append(model)
        for key, models in groups.items():
            if len(models) > 1:
                source = _source_of(document, dict(zip(sorted(needed), key, strict=True)), metric)
                picture = _pareto(models, source, metric, name=f"pareto-{metric}-{len(found)}")
                labels = [each["label"] for each in models]
                hollow = any(each["readings"][metric]["unproven"] for each in models)
                found.append({"metric": metric, "labels": labels, "hollow": hollow, "svg": picture})
    return found


def front(models: Sequence[Json], metric: str) -> list[Json]:
    """Return the models that no other one beats in both numbers, from low to high KL; none that prove
    nothing.
    """
    sign = 1.0 if COMPARED[metric].smaller else -1.0

    def place(model: Json) -> tuple[float, float]:
        return model["readings"][QUALITY]["value"], sign * model["readings"][metric]["value"]

    best: list[Json] = []
    for model in sorted((each for each in models if not each["readings"][metric]["unproven"]), key=place):
        if not best or place(model)[1] < place(best[-1])[1]:
            best.append(model)
    return best


def _source_of(document: Json, conditions: Json, metric: str) -> Json | None:
    for source in document["sources"]:
        own = source["conditions"]
        if metric in source["readings"] and all(own.get(name) == each for name, each in conditions.items()):
            return dict(source)
    return None


def _pareto(models: Sequence[Json], source: Json | None, metric: str, *, name: str) -> str:
    scale, unit = _unit(models, metric)
    with style():
        figure, axes = new_figure(height=3.6)
        values = [model["readings"][QUALITY]["value"] for model in models]
        lows = [model["readings"][QUALITY]["lower"] for model in models]
        logarithmic = min(lows) > 0 and max(values) > _LOG_RATIO * min(values)
        line = front(models, metric)
        axes.plot(
            [each["readings"][metric]["value"] / scale for each in line],
            [each["readings"][QUALITY]["value"] for each in line],
            color=INK,
            linewidth=1.0,
            linestyle=DASHED,
            zorder=1,
        )
        shown = [(each, SHADES[0]) for each in models]
        if source is not None and not logarithmic:
            shown.append((source, SOURCE))
        for model, color in shown:
            _point(axes, model["readings"], metric, scale=scale, color=color)
        axes.set_xlabel(_NAMES.get(metric, f"size, {unit}"))
        axes.set_ylabel(_NAMES[QUALITY])
        axes.grid()
        axes.margins(x=0.16, y=0.12)
        if logarithmic:
            log_scale(axes, "y")
        else:
            axes.set_ylim(bottom=0 if source is None else None)
        figure.draw_without_rendering()  # places of points are known only then
        _name_points(axes, [each for each, _ in shown], metric, scale=scale)
        return svg(figure, name=name)


def _unit(models: Sequence[Json], metric: str) -> tuple[float, str]:
    if metric != "size_bytes":
        return 1.0, ""
    largest = max(model["readings"][metric]["value"] for model in models)
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB")


def _point(axes: "Axes", readings: Json, metric: str, *, scale: float, color: str) -> None:
    x = readings[metric]
    y = readings[QUALITY]
    axes.errorbar(
        [x["value"] / scale],
        [y["value"]],
        xerr=_ends(x, scale),
        yerr=_ends(y, 1.0),
        fmt="o",
        markersize=6,
        color=color,
        ecolor=color,
        elinewidth=1.2,
        capsize=2.5,
        markerfacecolor=PAPER if x["unproven"] else color,
        zorder=2,
    )


def _ends(reading: Json, scale: float) -> list[list[float]]:
    value = reading["value"]
    ends = max(value - reading["lower"], 0.0), max(reading["upper"] - value, 0.0)
    return [[each / scale] for each in ends]


def _name_points(axes: "Axes", models: Sequence[Json], metric: str, *, scale: float) -> None:
    """Write the name of each point next to it; names that would overlap move down or up."""
    to_axes = axes.transData + axes.transAxes.inverted()
    places: list[tuple[float, float, Any]] = []
    for model in models:
        readings = model["readings"]
        x, y = to_axes.transform((readings[metric]["value"] / scale, readings[QUALITY]["value"]))
        places.append((float(x), float(y), model))
    written = [(y - 0.005, x - 0.012, x + 0.012) for x, y, _ in places]  # the points themselves
    for x, y, model in sorted(places, key=lambda each: each[:2]):
        left = x > 0.72
        width = _CHARACTER * len(model["label"])
        start = x - _BESIDE - width if left else x + _BESIDE
        tries = [y + 0.02 + step for step in (0.0, -0.095, _APART, -0.095 - _APART, 2 * _APART)]
        height = next((each for each in tries if _is_free(each, start, start + width, written)), tries[0])
        written.append((height, start, start + width))
        axes.annotate(
            model["label"],
            (x, height),
            xycoords="axes fraction",
            xytext=(-8 if left else 8, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="bottom",
            fontsize=8.5,
        )


def _is_free(height: float, start: float, end: float, written: Sequence[tuple[float, float, float]]) -> bool:
    return not any(
        abs(height - other) < _APART and start < its_end and its_start < end
        for other, its_start, its_end in written
    )

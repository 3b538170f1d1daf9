"""Palette, style and output of the report's figures: inline SVG in the light or dark colours of the page.

Figures are drawn by matplotlib's SVG backend through `Figure` objects, without pyplot's state: the same data
give the same bytes. Grey is the source (or before), blue the candidate (or after), amber the hardware's
floor, a limit or a mark. Colours are written as CSS variables, with the light colour for a page that defines
none. Text stays text (the page's own font, searchable); ids that nothing refers to are dropped, and the rest
differ from figure to figure, so that two figures on one page do not share clip paths.

matplotlib takes half a second to import, so that it is imported when the first figure is drawn.
"""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from compress.validate.display import power_of_ten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

SOURCE = "#a8b1bc"
CANDIDATE = "#2f6f9f"
FLOOR = "#c98a1b"
INK = "#3a4450"
PAPER = "#ffffff"
_FAINT = "#e3e7ec"
_EDGE = "#c3cad2"
_TICK = "#6b7683"
SHADES = ("#2f6f9f", "#6fa3c7", "#c98a1b", "#8f9aa7", "#3a4450")
"""Colours of lines that are of one kind."""
KINDS = ("#2f6f9f", "#6fa3c7", "#b9d2e4", "#8f9aa7", "#c9cfd6", "#dfe3e8")
"""Colours of stacked bars."""
_VARIABLES = {
    SOURCE: "source",
    CANDIDATE: "candidate",
    FLOOR: "floor",
    INK: "ink",
    PAPER: "paper",
    _FAINT: "faint",
    _EDGE: "edge",
    _TICK: "tick",
    "#6fa3c7": "second",
    "#b9d2e4": "third",
    "#8f9aa7": "fourth",
    "#c9cfd6": "fifth",
    "#dfe3e8": "sixth",
}
"""Colour of the light page -> the CSS variable `--plot-<name>` that `report.html.j2` defines for light and
dark pages.
"""
_WIDTH = 7.4  # inches; the page scales it
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.edgecolor": _EDGE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "xtick.color": _TICK,
    "ytick.color": _TICK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": _FAINT,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}
DASHED: tuple[int, tuple[int, int]] = (0, (3, 3))


@contextmanager
def style() -> Iterator[None]:
    """Apply the report's style within the block."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def new_figure(*, height: float) -> "tuple[Figure, Axes]":
    """Return a figure of the report's width and `height` in inches, and its axes."""
    figure, axes = new_grid(1, 1, height=height)
    return figure, axes[0]


def new_grid(
    num_rows: int, num_columns: int, *, height: float, share: bool = False
) -> "tuple[Figure, list[Axes]]":
    """Return a figure with a grid of axes, row by row; with `share` they have the same scales."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, sharex=share, sharey=share, squeeze=False)
    return figure, list(grid.flat)


def log_scale(axes: "Axes", name: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, after its data are drawn: labels at powers of ten, where few are in view also
    at 2 and 5 times those.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis = axes.xaxis if name == "x" else axes.yaxis
    (axes.set_xscale if name == "x" else axes.set_yscale)("log")
    low, high = axis.get_view_interval()
    few = high < 40 * low
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12 if few else 6))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _logarithmic_label(value)))


def _logarithmic_label(value: float) -> str:
    exponent = round(math.log10(value))
    if -4 < exponent < 4 or not math.isclose(value, 10.0**exponent):
        return f"{value:g}"
    return power_of_ten(exponent)


def whole_numbers(axis: "Axis", *, most: int = 9) -> None:
    """Put the ticks of an axis at no more than `most` whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=True))


def token_counts(axis: "Axis") -> None:
    """Label an axis with counts of tokens, such as 200 k."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: token_count(value)))


def token_count(value: float) -> str:
    """Return a count with its unit: 1.5 M, 200 k, 80."""
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g}"


def svg(figure: "Figure", *, name: str) -> str:
    """Return the figure as an SVG element of class `name`, which also keeps its ids apart from those of other
    figures.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(
            stream, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var(--plot-{variable}, {color})")
    return text.replace("<svg ", f'<svg role="img" class="plot {name}" ', 1).strip()


def dots(points: Sequence[object]) -> dict[str, Any]:
    """Return the style of a line's dots: a line of one or two points would not be seen without them."""
    return {"marker": "o", "markersize": 3.0 if len(points) > 12 else 4.0}

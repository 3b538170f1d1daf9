"""The report's picture of a distillation: how far the student is from its teacher, and what the text costs it, over tokens of training."""

from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.ticker import FuncFormatter

from compress.validate.plots import _STYLE, CANDIDATE, FLOOR, SOURCE, _figure, _svg


def recovery_plot(distillation: Mapping[str, Any]) -> str:
    """Held-out KL on the left axis; bits per byte on the right one, with the teacher's as a line."""
    looks = [row for row in distillation["curve"] if "kl" in row]
    tokens = [row["tokens"] for row in looks]
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(height=2.7)
        axes.plot(
            tokens,
            [row["kl"] for row in looks],
            color=CANDIDATE,
            linewidth=1.6,
            marker="o",
            markersize=3,
            label="KL to the teacher",
        )
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
        axes.set_xlabel("tokens of training")
        axes.set_ylabel("held-out KL, nats")
        axes.grid(axis="y")
        bits = axes.twinx()
        bits.plot(
            tokens,
            [row["bits_per_byte"] for row in looks],
            color=SOURCE,
            linewidth=1.6,
            label="bits per byte",
        )
        bits.axhline(
            distillation["teacher"]["bits_per_byte"],
            color=FLOOR,
            linewidth=1.1,
            linestyle=(0, (3, 3)),
            label="the teacher's",
        )
        bits.set_ylabel("bits per byte")
        bits.spines["right"].set_visible(True)
        figure.legend(loc="outside upper left", ncols=3, handlelength=1.6)
        return _svg(figure, salt="recovery")


def _tokens(value: float) -> str:
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g}"

"""Recovery by training, of dense weights and of codes: the distance of the student from its teacher, over
tokens of training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json
from compress.validate.parts import PARTS, Part
from compress.validate.plots import (
    CANDIDATE,
    DASHED,
    FLOOR,
    SOURCE,
    log_scale,
    new_figure,
    style,
    svg,
    token_counts,
)

TRAININGS = ("distillation", "recovery")
"""Entries of the document that this part may have: of dense weights, and of codes."""


@PARTS.register("recovery")
@dataclass(frozen=True)
class RecoveryPart(Part):
    """Facts of `stages/distill` and of `stages/recover`, where the recipe has them."""

    page_order: ClassVar[int] = 90
    distillation: Mapping[str, Any] | None = None
    recovery: Mapping[str, Any] | None = None

    def as_json(self) -> Json:
        """Return the facts as they are."""
        facts = {"distillation": self.distillation, "recovery": self.recovery}
        return {name: each for name, each in facts.items() if each is not None}

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return the picture of each training."""
        return {name: recovery_plot(report[name], name) for name in TRAININGS if name in report}


def recovery_plot(training: Mapping[str, Any], name: str) -> str:
    """Return the held-out KL on the left axis, and on the right one bits per byte with the teacher's as a
    line.
    """
    looks = [row for row in training["curve"] if "kl" in row]
    tokens = [row["tokens"] for row in looks]
    with style():
        figure, axes = new_figure(height=2.7)
        axes.plot(
            tokens,
            [row["kl"] for row in looks],
            color=CANDIDATE,
            linewidth=1.6,
            marker="o",
            markersize=3,
            label="KL to the teacher",
        )
        log_scale(axes, "y")
        token_counts(axes.xaxis)
        axes.set_xlabel("tokens of training")
        axes.set_ylabel("held-out KL, nats")
        axes.grid(axis="y")
        bits = axes.twinx()
        student = [row["bits_per_byte"] for row in looks]
        bits.plot(tokens, student, color=SOURCE, linewidth=1.6, label="bits per byte")
        teacher = training["teacher"]["bits_per_byte"]
        bits.axhline(
            teacher, color=FLOOR, linewidth=1.1, linestyle=DASHED, label="bits per byte of the teacher"
        )
        bits.set_ylabel("bits per byte")
        bits.spines["right"].set_visible(True)
        figure.legend(loc="outside upper left", ncols=3, handlelength=1.6)
        return svg(figure, name=name)

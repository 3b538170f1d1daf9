"""Recovery by training: the distance of the student from its teacher, over tokens of training."""

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


@PARTS.register("recovery")
@dataclass(frozen=True)
class RecoveryPart(Part):
    """Facts of `stages/distill`."""

    page_order: ClassVar[int] = 90
    facts: Mapping[str, Any]

    def as_json(self) -> Json:
        """Return the facts as they are."""
        return {"distillation": self.facts}

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return the picture of the training."""
        return {"recovery": recovery_plot(report["distillation"])} if "distillation" in report else {}


def recovery_plot(distillation: Mapping[str, Any]) -> str:
    """Return the held-out KL on the left axis, and on the right one bits per byte with the teacher's as a
    line.
    """
    looks = [row for row in distillation["curve"] if "kl" in row]
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
        teacher = distillation["teacher"]["bits_per_byte"]
        bits.axhline(
            teacher, color=FLOOR, linewidth=1.1, linestyle=DASHED, label="bits per byte of the teacher"
        )
        bits.set_ylabel("bits per byte")
        bits.spines["right"].set_visible(True)
        figure.legend(loc="outside upper left", ncols=3, handlelength=1.6)
        return svg(figure, name="recovery")

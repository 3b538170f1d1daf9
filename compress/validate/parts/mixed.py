"""Why each linear group has its scheme: predicted loss against cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json
from compress.validate.parts import PARTS, Part
from compress.validate.plots import (
    CANDIDATE,
    DASHED,
    FLOOR,
    INK,
    SOURCE,
    Row,
    log_scale,
    new_figure,
    style,
    svg,
)


@PARTS.register("mixed")
@dataclass(frozen=True)
class MixedPart(Part):
    """Facts of the choice among schemes, from the quantize stage."""

    page_order: ClassVar[int] = 100
    facts: Mapping[str, Any]

    def as_json(self) -> Json:
        """Return the facts as they are."""
        return {"mixed": self.facts}

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return the picture of predicted loss against cost."""
        return {"mixed": mixed_plot(report["mixed"])} if "mixed" in report else {}


def mixed_plot(mixed: Row) -> str:
    """Return predicted KL over cost: the frontier, each scheme for all linears, the budget and the choice."""
    with style():
        figure, axes = new_figure(height=2.9)
        lossy = [each for each in mixed["frontier"] if each["kl"] > 0]
        axes.plot(
            [each["cost"] * 100 for each in lossy],
            [each["kl"] for each in lossy],
            color=SOURCE,
            linewidth=1.4,
            label="best mixes",
        )
        axes.axvline(mixed["limit"] * 100, color=FLOOR, linewidth=1.1, linestyle=DASHED, label="budget")
        uniform = {name: each for name, each in mixed["uniform"].items() if each["kl"] > 0}
        for index, (name, each) in enumerate(uniform.items()):
            point = (each["cost"] * 100, each["kl"])
            label = "one scheme for all" if index == 0 else None
            axes.plot(*point, "o", color=INK, markersize=4.5, label=label)
            axes.annotate(name, point, xytext=(6, 3), textcoords="offset points", fontsize=8.5)
        chosen = mixed["chosen"]
        if chosen["kl"] > 0:
            axes.plot(chosen["cost"] * 100, chosen["kl"], "D", color=CANDIDATE, markersize=7, label="chosen")
        log_scale(axes, "y")
        axes.margins(x=0.1, y=0.12)
        axes.grid()
        axes.set_xlabel(f"{mixed['cost']} of the layers' linears, % of 16 bits")
        axes.set_ylabel("predicted KL, nats a token")
        figure.legend(loc="outside upper left", ncols=4, handlelength=1.4, columnspacing=1.6)
        return svg(figure, name="mixed")

"""Facts of the artifact, and its size against the source's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json, byte_size, percent
from compress.validate.parts import PARTS, Part
from compress.validate.plots import KINDS, PAPER, Row, new_figure, style, svg


@PARTS.register("artifact")
@dataclass(frozen=True)
class ArtifactPart(Part):
    """`digest`, `source`, `source_digest`, `scheme`, ... and `sizes`: rows {kind, source_bytes,
    candidate_bytes}.
    """

    page_order: ClassVar[int] = 130
    facts: Mapping[str, Any]

    def as_json(self) -> Json:
        """Return the facts as they are."""
        return {"artifact": self.facts}

    @staticmethod
    def values(report: Json) -> Json:
        """Return the bytes of both sides."""
        return {"totals": totals(report)}

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return the bars of bytes by kind of tensor."""
        sizes = report.get("artifact", {}).get("sizes")
        return {"size": size_plot(sizes)} if sizes else {}

    @staticmethod
    def sentence(report: Json) -> str:
        """Return the size."""
        total = totals(report)
        if total is None:
            return ""
        share = percent(total["candidate"] / total["source"])
        return f"{byte_size(total['candidate'])} instead of {byte_size(total['source'])} ({share})."


def totals(report: Json) -> dict[str, int] | None:
    """Return the bytes of `source` and `candidate`; None where sizes are not in the report."""
    sizes = report.get("artifact", {}).get("sizes")
    if not sizes:
        return None
    return {side: sum(row[f"{side}_bytes"] for row in sizes) for side in ("source", "candidate")}


def size_plot(sizes: Sequence[Row]) -> str:
    """Return bytes of source and candidate, stacked by kind of tensor."""
    largest = max(sum(row[f"{side}_bytes"] for row in sizes) for side in ("source", "candidate"))
    unit, scale = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    with style():
        figure, axes = new_figure(height=1.55)
        starts = [0.0, 0.0]
        for index, row in enumerate(sizes):
            widths = [row["source_bytes"] / scale, row["candidate_bytes"] / scale]
            axes.barh(
                [0, 1],
                widths,
                left=starts,
                height=0.66,
                color=KINDS[index % len(KINDS)],
                edgecolor=PAPER,
                linewidth=0.8,
                label=row["kind"],
            )
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for y, total in enumerate(starts):
            axes.annotate(
                f"{total:#.3g}".rstrip(".") + f" {unit}",
                (total, y),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontweight="bold",
            )
        axes.set_yticks([0, 1], ["source", "candidate"])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(axis="x")
        axes.set_xlabel(unit)
        figure.legend(
            loc="outside upper left", ncols=6, handlelength=1.0, handleheight=1.0, columnspacing=1.6
        )
        return svg(figure, name="size")

"""How far the candidate is from its source on the evaluation text."""

from dataclasses import dataclass
from typing import ClassVar

from compress.validate.accuracy import Accuracy
from compress.validate.display import Json, interval, markdown_table, number, percent
from compress.validate.parts import PARTS, Part
from compress.validate.plots import (
    CANDIDATE,
    DASHED,
    FLOOR,
    INK,
    PAPER,
    Row,
    log_scale,
    new_figure,
    style,
    svg,
)


@PARTS.register("accuracy")
@dataclass(frozen=True)
class AccuracyPart(Part):
    """The perplexity of both models, and the KL and the agreement between them."""

    page_order: ClassVar[int] = 20
    accuracy: Accuracy

    def as_json(self) -> Json:
        """Return the measured numbers with their intervals."""
        return {"accuracy": self.accuracy.as_json()}

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return the histogram of the KL of single tokens."""
        return {"kl": kl_plot(report["accuracy"])} if "accuracy" in report else {}

    @staticmethod
    def card(report: Json) -> list[str]:
        """Return the table of perplexity, KL and agreement, and how they were measured."""
        if "accuracy" not in report:
            return []
        found = report["accuracy"]
        rows = [
            [
                "Perplexity",
                number(found["ppl_source"]["value"], 5),
                number(found["ppl_candidate"]["value"], 5),
                f"× {number(found['ppl_ratio']['value'], 5)} {interval(found['ppl_ratio'], 5)}",
            ],
            [
                "Bits per byte",
                number(found["bits_per_byte_source"]["value"], 4),
                number(found["bits_per_byte"]["value"], 4),
                "",
            ],
            ["KL to the source, mean", "0", number(found["kl_mean"]["value"]), interval(found["kl_mean"], 3)],
            ["KL to the source, p99", "0", number(found["kl_p99"]["value"]), interval(found["kl_p99"], 3)],
            ["Top-1 agreement", "100 %", percent(found["top1"]["value"], 2), interval(found["top1"], 4)],
        ]
        note = (
            f"Measured on {number(found['num_tokens'])} tokens in {number(found['num_windows'])} windows of "
            f"{number(found['window_size'])}; perplexity convention {found['convention']}; intervals at "
            f"{percent(found['confidence'], 0)}, over windows."
        )
        return ["## Recovery", markdown_table(["", "source", "this model", "change or interval"], rows), note]


def kl_plot(accuracy: Row) -> str:
    """Return the share of tokens in each bin of KL, on a logarithmic axis, with mean and tail marked."""
    edges = accuracy["kl_bin_edges"]
    counts = accuracy["kl_bin_counts"]
    shares = [count / accuracy["num_tokens"] * 100 for count in counts]
    used = [index for index, count in enumerate(counts) if count]
    with style():
        figure, axes = new_figure(height=2.6)
        axes.stairs(shares, edges, fill=True, color=CANDIDATE, alpha=0.85)
        axes.set_xscale("log")
        axes.set_xlim(edges[max(used[0] - 1, 0)], edges[min(used[-1] + 2, len(edges) - 1)])
        axes.set_ylim(0, max(shares) * 1.3)
        axes.grid(axis="y")
        log_scale(axes, "x")
        marks = [(name, accuracy[f"kl_{key}"]["value"]) for name, key in _MARKS.items()]
        for rank, (name, value) in enumerate(marks):
            side = -1 if rank % 2 == 0 else 1
            if value <= edges[0]:
                continue
            axes.axvline(
                value,
                color=FLOOR if name == "mean" else INK,
                linewidth=1.1,
                linestyle="-" if name == "mean" else DASHED,
            )
            axes.annotate(
                f"{name} {value:.2g}",
                (value, 0.97 - 0.115 * (rank // 2)),
                xycoords=("data", "axes fraction"),
                xytext=(5 * side, 0),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                va="top",
                bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.2},
            )
        axes.set_xlabel("KL(source ‖ candidate) of one token, nats")
        axes.set_ylabel("tokens, %")
        return svg(figure, name="kl")


_MARKS = {"median": "p50", "mean": "mean", "p99": "p99", "p99.9": "p999"}

"""Speculation on text: tokens a step, speed-up, and whether the tokens are those of plain decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from compress.validate.display import Json, markdown_table, markdown_text, number, percent
from compress.validate.parts import PARTS, Part
from compress.validate.plots import (
    CANDIDATE,
    FLOOR,
    INK,
    SHADES,
    SOURCE,
    Row,
    log_scale,
    new_figure,
    new_grid,
    style,
    svg,
    token_counts,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = (0, (3, 2))


@PARTS.register("speculation")
@dataclass(frozen=True)
class SpeculationPart(Part):
    """Conditions, the rows of `validate/speculation.py`, and `draft`: how the draft was made, or None."""

    page_order: ClassVar[int] = 50
    facts: Mapping[str, Any]

    def as_json(self) -> Json:
        """Return the facts as they are."""
        return {"speculation": self.facts}

    def warnings(self) -> list[str]:
        """Return a warning where speculation changed tokens that it must not change, and one where its
        speed-up proves nothing.
        """
        found = []
        differ = self.facts["num_compared"] - self.facts["num_equal"]
        if differ > 0:
            found.append(
                f"Speculation changed {differ} of {self.facts['num_compared']} continuations that it must "
                "not change."
            )
        reasons = dict.fromkeys(row["instability"] for row in self.facts["speed"] if row.get("unstable"))
        if reasons:
            found.append(
                f"Some speed-ups of speculation are unstable and prove nothing here ({'; '.join(reasons)}). "
                "Measure again on a quiet machine."
            )
        return found

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return the picture of acceptance and speed-up, and that of the draft's training where it has a
        curve.
        """
        if "speculation" not in report:
            return {}
        facts = report["speculation"]
        curve = (facts.get("draft") or {}).get("curve", [])
        plots = {"speculation": speculation_plot(facts["acceptance"], facts["speed"])}
        if any("kl" in row for row in curve):
            plots["draft"] = draft_plot(curve)
        return plots

    @staticmethod
    def card(report: Json) -> list[str]:
        """Return one row a proposer, at the first temperature and batch size; the acceptance length is over
        all prompts.
        """
        if "speculation" not in report:
            return []
        facts = report["speculation"]
        first = facts["speed"][0]
        acceptance = {(row["proposer"], row["temperature"]): row for row in reversed(facts["acceptance"])}
        rows = []
        for row in facts["speed"]:
            if (row["temperature"], row["batch_size"]) == (first["temperature"], first["batch_size"]):
                found = acceptance[row["proposer"], row["temperature"]]
                lower = number(found["acceptance_length_lower"])
                upper = number(found["acceptance_length_upper"])
                kept = " ".join(percent(rate, 0) for rate in found["acceptance_rates"])
                speedup = f"× {number(row['speedup'])}" + (" (unstable)" if row.get("unstable") else "")
                rows.append(
                    [
                        markdown_text(row["proposer"]),
                        f"{number(found['acceptance_length'])} [{lower}, {upper}]",
                        kept,
                        speedup,
                    ]
                )
        note = (
            f"{facts['k']} tokens proposed a step, temperature {first['temperature']:g}, batch "
            f"{first['batch_size']}, prompts from "
            f"{markdown_text(', '.join(facts['data']))}. {facts['num_equal']} of {facts['num_compared']} "
            "continuations that must be those of plain decoding are."
        )
        head = ["proposer", "tokens a step", "kept, by position", "speed-up"]
        return ["## Speculation", markdown_table(head, rows), note]


def speculation_plot(acceptance: Sequence[Row], speed: Sequence[Row]) -> str:
    """Return two panels at the first temperature.

    Left: the share of steps that keep the proposal of each position; the first proposer by category, the
    others over all prompts. Right: the speed-up by batch size, measured and predicted.
    """
    first = acceptance[0]["proposer"]
    temperature = acceptance[0]["temperature"]
    with style():
        figure, (left, right) = new_grid(1, 2, height=2.7)
        _acceptance(left, [row for row in acceptance if row["temperature"] == temperature], first)
        _speed(right, [row for row in speed if row["temperature"] == temperature], first)
        return svg(figure, name="speculation")


def _acceptance(axes: "Axes", rows: Sequence[Row], first: str) -> None:
    own = [row for row in rows if row["proposer"] == first]
    shown = (own[1:] or own) + [
        row for row in rows if row["proposer"] != first and row["category"] == rows[0]["category"]
    ]
    for row, color in zip(shown, SHADES * len(shown), strict=False):
        rates = [rate * 100 for rate in row["acceptance_rates"]]
        is_first = row["proposer"] == first
        style_of_line: dict[str, Any] = (
            {"color": color} if is_first else {"color": SOURCE, "linestyle": _DASHES}
        )
        label = f"{first}, {row['category']}" if is_first else row["proposer"]
        positions = range(1, len(rates) + 1)
        axes.plot(positions, rates, marker="o", markersize=4, linewidth=1.6, label=label, **style_of_line)
    whole_numbers(axes.xaxis)
    axes.set_ylim(0, 100)
    axes.grid(axis="y")
    axes.set_xlabel("position of the proposed token")
    axes.set_ylabel("steps that keep it, %")
    axes.legend(loc="upper right", fontsize=8.5)


def _speed(axes: "Axes", rows: Sequence[Row], first: str) -> None:
    sizes = sorted({row["batch_size"] for row in rows})
    for name in dict.fromkeys(row["proposer"] for row in rows):
        own = sorted((row for row in rows if row["proposer"] == name), key=lambda row: int(row["batch_size"]))
        places = [sizes.index(row["batch_size"]) for row in own]
        color = CANDIDATE if name == first else SOURCE
        speedups = [row["speedup"] for row in own]
        axes.plot(places, speedups, marker="o", markersize=4, linewidth=1.6, color=color, label=name)
        lower = [row["speedup_lower"] for row in own]
        upper = [row["speedup_upper"] for row in own]
        axes.vlines(places, lower, upper, color=color, linewidth=1.1)
        if all(row["predicted_speedup"] is not None for row in own):
            promised = [row["predicted_speedup"] for row in own]
            axes.plot(places, promised, "x", color=INK, markersize=6, label="predicted")
    axes.axhline(1.0, color=FLOOR, linewidth=1.1, label="plain decoding")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12, y=0.15)
    axes.grid(axis="y")
    axes.set_xlabel("batch size")
    axes.set_ylabel("times as fast")
    axes.legend(loc="best", fontsize=8.5)


def draft_plot(curve: Sequence[Row]) -> str:
    """Return the held-out KL to the target model over training, and on the right axis the acceptance length
    that follows from it.
    """
    looks = [row for row in curve if "kl" in row]
    tokens = [row["tokens"] for row in looks]
    line: dict[str, Any] = {"linewidth": 1.6, "marker": "o", "markersize": 3}
    with style():
        figure, axes = new_figure(height=2.5)
        axes.plot(tokens, [row["kl"] for row in looks], color=SOURCE, label="KL to the target model", **line)
        log_scale(axes, "y")
        token_counts(axes.xaxis)
        axes.set_xlabel("tokens of training")
        axes.set_ylabel("held-out KL, nats")
        axes.grid(axis="y")
        if all("acceptance_length" in row for row in looks):
            lengths = axes.twinx()
            values = [row["acceptance_length"] for row in looks]
            lengths.plot(tokens, values, color=CANDIDATE, label="expected acceptance length", **line)
            lengths.set_ylabel("tokens a step")
            lengths.spines["right"].set_visible(True)
        figure.legend(loc="outside upper left", ncols=2, handlelength=1.6)
        return svg(figure, name="draft")

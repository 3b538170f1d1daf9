"""How source and candidate do at long context: perplexity by position, and a fact that is to be found
again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json, markdown_table, number, percent
from compress.validate.parts import PARTS, Part
from compress.validate.plots import CANDIDATE, DASHED, FLOOR, INK, SOURCE, new_figure, style, svg


@PARTS.register("long_context")
@dataclass(frozen=True)
class LongContextPart(Part):
    """Facts of `stages/validate/generation.py`: conditions, `positions` by model, and rows of the
    `needle`."""

    page_order: ClassVar[int] = 26
    facts: Mapping[str, Any]

    def as_json(self) -> Json:
        """Return the facts as they are."""
        return {"long_context": self.facts}

    @staticmethod
    def values(report: Json) -> Json:
        """Return the models and the needle's rows by model, length and depth, for the template."""
        found = report.get("long_context", {})
        needle = found.get("needle", [])
        cells = {(row["model"], row["length"], row["depth"]): row for row in needle}
        return {
            "needle_models": list(dict.fromkeys(row["model"] for row in needle)),
            "needle_places": list(dict.fromkeys((row["length"], row["depth"]) for row in needle)),
            "needle_cells": cells,
        }

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return the ratio of perplexities over positions."""
        return (
            {"positions": ratio_plot(report["long_context"]["positions"])} if "long_context" in report else {}
        )

    @staticmethod
    def card(report: Json) -> list[str]:
        """Return a table of the first and last positions, and of facts found again."""
        if "long_context" not in report:
            return []
        found = report["long_context"]
        body = []
        for each in found["positions"]:
            first = each["rows"][0]
            last = each["rows"][-1]
            body.append(
                [
                    f"{each['model']}, KV cache {each['kv_format']}",
                    f"× {number(first['ppl_ratio']['value'], 4)}",
                    f"× {number(last['ppl_ratio']['value'], 4)}",
                    found_text(found["needle"], each["model"]),
                ]
            )
        head = ["model", "perplexity, first positions", "perplexity, last positions", "facts found"]
        source = found_text(found["needle"], "source")
        note = (
            f"{number(found['num_windows'])} windows of {number(found['seq_len'])} tokens; perplexity "
            "as a multiple of "
            f"the source's" + (f", which finds {source} of the facts." if found["needle"] else ".")
        )
        return ["## Long context", markdown_table(head, body), note]


def found_text(rows: Sequence[Json], model: str) -> str:
    """Return the share of facts that a model found again, over all lengths and depths."""
    own = [row["found"] for row in rows if row["model"] == model]
    return percent(sum(own) / len(own), 0) if own else "–"


def ratio_plot(positions: Sequence[dict[str, Any]]) -> str:
    """Return the ratio of perplexities with its interval over positions, one line a model."""
    with style():
        figure, axes = new_figure(height=2.3)
        for each, colour in zip(positions, (CANDIDATE, SOURCE, FLOOR, INK) * 3, strict=False):
            middles = [(row["start"] + row["stop"] - 1) / 2 for row in each["rows"]]
            ratios = [row["ppl_ratio"] for row in each["rows"]]
            axes.fill_between(
                middles,
                [ratio["lower"] for ratio in ratios],
                [ratio["upper"] for ratio in ratios],
                color=colour,
                alpha=0.18,
                linewidth=0,
            )
            axes.plot(
                middles,
                [ratio["value"] for ratio in ratios],
                "o-",
                color=colour,
                markersize=3.5,
                label=each["model"],
            )
        axes.axhline(1, color=INK, linewidth=0.9, linestyle=DASHED)
        axes.grid(axis="y")
        axes.set_xlabel("position in the context")
        axes.set_ylabel("perplexity, × source")
        figure.legend(loc="outside upper left", ncols=3, handlelength=1.6)
        return svg(figure, name="positions")

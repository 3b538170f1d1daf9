"""Texts that source and candidate made of the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json, markdown_table, number
from compress.validate.generation.texts import GenerationRow
from compress.validate.parts import PARTS, Part
from compress.validate.plots import CANDIDATE, SOURCE, new_figure, style, svg


@PARTS.register("generation")
@dataclass(frozen=True)
class GenerationPart(Part):
    """One row for greedy and one for sampled texts, and what was asked for."""

    page_order: ClassVar[int] = 24
    rows: Sequence[GenerationRow]
    conditions: Mapping[str, Any]

    def as_json(self) -> Json:
        """Return the rows and the conditions."""
        return {"generation": {**self.conditions, "rows": [row.as_json() for row in self.rows]}}

    @staticmethod
    def values(report: Json) -> Json:
        """Return the function that writes a shift with its sign, for the template."""
        del report
        return {"shift": shift}

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return how many texts are still the same after how many tokens."""
        return {"generation": same_plot(report["generation"]["rows"])} if "generation" in report else {}

    @staticmethod
    def card(report: Json) -> list[str]:
        """Return the table of both ways of choosing tokens."""
        if "generation" not in report:
            return []
        found = report["generation"]
        body = [
            [
                row["mode"],
                f"{row['num_same']} of {row['num_prompts']}",
                number(row["common_p50"]),
                shift(row["length_shift"]["value"]),
                shift(row["repeated_shift"]["value"] * 100),
            ]
            for row in found["rows"]
        ]
        head = ["tokens", "same texts", "common tokens, median", "length, tokens", "repeated 4-grams, points"]
        note = (
            f"Texts of at most {number(found['max_tokens'])} tokens beside those of the source; sampled "
            "ones at "
            f"temperature {found['temperature']:g} with the same seeds. Changes are this model's less "
            "the source's."
        )
        return ["## Generated texts", markdown_table(head, body), note]


def shift(value: float) -> str:
    """Return a change with its sign."""
    shown = number(abs(value))
    return shown if value == 0 else f"{'−' if value < 0 else '+'}{shown}"


def same_plot(rows: Sequence[dict[str, Any]]) -> str:
    """Return the share of prompts whose texts are still the same, over tokens."""
    with style():
        figure, axes = new_figure(height=2.2)
        for row, colour in zip(rows, (CANDIDATE, SOURCE), strict=False):
            tokens = [0, *row["same_tokens"]]
            shares = [100.0, *(each * 100 for each in row["same_frac"])]
            axes.step(tokens, shares, where="post", color=colour, linewidth=1.7, label=row["mode"])
        axes.set_ylim(0, 103)
        axes.set_xlim(left=0)
        axes.grid(axis="y")
        axes.set_xlabel("generated tokens")
        axes.set_ylabel("texts still the same, %")
        figure.legend(loc="outside upper left", ncols=2, handlelength=1.6)
        return svg(figure, name="generation")

"""The choice of linears of a model that was quantized by tensor name, and what measured it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json, byte_size, markdown_table, markdown_text, number
from compress.validate.parts import PARTS, Part


@PARTS.register("by_name")
@dataclass(frozen=True)
class ByNamePart(Part):
    """Numbers of matrices and bytes as `stages/quantize_by_name` states them: `quantized`, `dense` (reason ->
    number), `linear_bytes`, `code_bytes`, `source_bytes`, `written_bytes`; and the program that measured."""

    page_order: ClassVar[int] = 15
    facts: Mapping[str, Any]
    measured_with: str

    def as_json(self) -> Json:
        """Return the facts and the program."""
        return {"by_name": {**self.facts, "measured_with": self.measured_with}}

    def warnings(self) -> list[str]:
        """Return the sentence that limits what this report proves."""
        return [
            "Quantized by the names of its tensors and not validated on the bundled runtime: accuracy was "
            f"measured through {self.measured_with}, latency was not measured."
        ]

    @staticmethod
    def card(report: Json) -> list[str]:
        """Return the table of what is quantized and what is not."""
        if "by_name" not in report:
            return []
        facts = report["by_name"]
        rows = [["quantized", number(facts["quantized"])]]
        rows += [
            [f"dense: {markdown_text(reason)}", number(count)] for reason, count in facts["dense"].items()
        ]
        note = (
            "Linears were found by the names and shapes of their tensors: "
            f"{byte_size(facts['linear_bytes'])} became {byte_size(facts['code_bytes'])}. All other tensors "
            "are those of the source."
        )
        return ["## What is quantized", markdown_table(["matrices", "number"], rows), note]

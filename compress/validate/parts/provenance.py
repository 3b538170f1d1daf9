"""Provenance of the numbers: artifact, calibration data, environment and recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json, label, markdown_text, number
from compress.validate.parts import PARTS, Part

MADE = {
    "shape": "calibrated on",
    "training_shape": "trained on",
    "recovery_shape": "given codes that were trained on",
    "draft_shape": "given a draft that was trained on",
}
"""Fact -> what was done with the text of that shape."""


@PARTS.register("provenance")
@dataclass(frozen=True)
class ProvenancePart(Part):
    """Facts to print.

    `calibration`: `overlap` states the check of calibration against evaluation text. `environment`:
    `machine.environment_facts`. `recipe`: at least `digest`; `text` is shown as it is.
    """

    page_order: ClassVar[int] = 140
    recipe: Mapping[str, Any] | None = None
    calibration: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None

    def as_json(self) -> Json:
        """Return the facts as they are."""
        return {"recipe": self.recipe, "calibration": self.calibration, "environment": self.environment}

    def warnings(self) -> list[str]:
        """Return a warning for each text of another shape than the evaluation text's: chat against plain."""
        facts = self.calibration or {}
        judged = facts.get("evaluation_shape")
        return [
            f"The model was {MADE[name]} {facts[name]} and is judged by {judged}: the numbers say little "
            "about the text that it was made for. Name data cards of one shape."
            for name in MADE
            if facts.get(name, judged) != judged
        ]

    @staticmethod
    def card(report: Json) -> list[str]:
        """Return the facts of the calibration data."""
        lines = [
            f"- {label(name)}: {number(value) if isinstance(value, int) else markdown_text(str(value))}"
            for name, value in report.get("calibration", {}).items()
            if value is not None
        ]
        return ["## Calibration data", "\n".join(lines)] if lines else []

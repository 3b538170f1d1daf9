"""How many calibration tokens the experts of each layer saw."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.calibrate.expert_tokens import expert_summary, unseen_warning
from compress.validate.display import Json, markdown_sentence, markdown_table, number, ranges
from compress.validate.parts import PARTS, Part

NUM_IN_CARD = 8


@PARTS.register("experts")
@dataclass(frozen=True)
class ExpertsPart(Part):
    """The facts of `calibrate/expert_tokens.py`."""

    page_order: ClassVar[int] = 105
    facts: Mapping[str, Any]

    def as_json(self) -> Json:
        """Return the facts as they are."""
        return {"experts": self.facts}

    def warnings(self) -> list[str]:
        """Return a warning about the experts without a token."""
        found = unseen_warning(self.facts)
        return [] if found is None else [found]

    @staticmethod
    def values(report: Json) -> Json:
        """Return the summary and the rows of the table."""
        if "experts" not in report:
            return {}
        facts = report["experts"]
        layers = [{**row, "unseen": ranges(row["without_tokens"])} for row in facts["layers"]]
        return {"expert_summary": expert_summary(facts), "expert_layers": layers}

    @staticmethod
    def card(report: Json) -> list[str]:
        """Return the layers whose experts saw the fewest tokens."""
        if "experts" not in report:
            return []
        facts = report["experts"]
        worst = sorted(facts["layers"], key=lambda row: (row["fewest"], -row["starved"], row["layer"]))
        rows = [
            [
                str(row["layer"]),
                number(row["num_experts"]),
                number(row["fewest"]),
                number(row["median"]),
                number(row["starved"]),
                ranges(row["without_tokens"]) or "–",
            ]
            for row in worst[:NUM_IN_CARD]
        ]
        head = ["layer", "experts", "fewest", "median", f"below {facts['min_tokens']}", "without a token"]
        note = f"Calibration tokens of the experts: {markdown_sentence(expert_summary(facts))}."
        if len(facts["layers"]) > NUM_IN_CARD:
            note += f" The {NUM_IN_CARD} layers with the fewest:"
        return ["## Experts", note, markdown_table(head, rows)]

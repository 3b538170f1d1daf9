"""The time of a request by phase, against the floor that bytes and arithmetic set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from compress.validate.display import Json
from compress.validate.parts import PARTS, Part
from compress.validate.roofline import RooflineRow


@PARTS.register("roofline")
@dataclass(frozen=True)
class RooflinePart(Part):
    """Prefill and decode of the candidate at each batch size."""

    page_order: ClassVar[int] = 60
    rows: Sequence[RooflineRow]

    def as_json(self) -> Json:
        """Return the rows."""
        return {"roofline": [row.as_json() for row in self.rows]}

    @staticmethod
    def values(report: Json) -> Json:
        """Return the batch sizes at which the candidate's times prove nothing."""
        rows = report.get("latency", {}).get("candidate", [])
        return {"unstable_sizes": [row["batch_size"] for row in rows if row.get("unstable")]}

"""Size, accuracy and speed after each stage of the recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json
from compress.validate.parts import PARTS, Part


@PARTS.register("journey")
@dataclass(frozen=True)
class JourneyPart(Part):
    """One row for each model on the way from the source to the candidate.

    Rows: {stage, size_bytes} and, where known, kl_source, kl_before (to the row above), top1, ppl,
    batch_size, tpot_ms, note.
    """

    page_order: ClassVar[int] = 30
    rows: Sequence[Mapping[str, Any]]

    def as_json(self) -> Json:
        """Return the rows."""
        return {"stages": list(self.rows)}

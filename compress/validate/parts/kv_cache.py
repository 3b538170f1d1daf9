"""How well a quantized KV cache holds keys and values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json
from compress.validate.parts import PARTS, Part

NUM_WORST = 8


@PARTS.register("kv_cache")
@dataclass(frozen=True)
class KVCachePart(Part):
    """`format`, and where scales were calibrated `layers` and a `warning` or None.

    Rows of `layers`: {layer, cache, amax, scale, saturated_frac, flushed_frac, worst_head, error,
    error_token_head}.
    """

    page_order: ClassVar[int] = 120
    facts: Mapping[str, Any]

    def as_json(self) -> Json:
        """Return the facts as they are."""
        return {"kv_cache": self.facts}

    def warnings(self) -> list[str]:
        """Return the calibration's warning."""
        return [self.facts["warning"]] if self.facts.get("warning") else []

    @staticmethod
    def values(report: Json) -> Json:
        """Return the keys or values with the largest error under a calibrated scale."""
        rows = report.get("kv_cache", {}).get("layers", [])
        return {"worst_caches": sorted(rows, key=lambda row: -float(row["error"]))[:NUM_WORST]}

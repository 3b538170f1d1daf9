"""The kernels that served the candidate, and why faster ones did not."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json, ranges
from compress.validate.parts import PARTS, Part


@PARTS.register("kernels")
@dataclass(frozen=True)
class KernelsPart(Part):
    """The rows of the engine's `kernel_report()`."""

    page_order: ClassVar[int] = 70
    rows: Sequence[Mapping[str, Any]]

    def as_json(self) -> Json:
        """Return the rows."""
        return {"kernels": list(self.rows)}

    @staticmethod
    def values(report: Json) -> Json:
        """Return rows with equal layers joined, refusals by reason, and whether quantized linears ran
        dequantized.
        """
        rows = report.get("kernels", [])
        return {
            "joined": joined(rows),
            "refusals": refusals(rows),
            "dequantized": any("dequantized" in row.get("kernel", "") for row in rows),
        }


def joined(rows: Sequence[Json]) -> list[Json]:
    """Return the rows with equal layers joined: 32 layers of one shape are one line, with `layers` such as
    `0–31`.
    """
    layers_of: dict[str, list[int]] = {}
    row_of: dict[str, Json] = {}
    for row in rows:
        key = json.dumps({name: value for name, value in row.items() if name != "layer"}, sort_keys=True)
        row_of[key] = row
        layers_of.setdefault(key, []).extend([row["layer"]] if row["layer"] is not None else [])
    return [{**row, "layers": ranges(layers_of[key])} for key, row in row_of.items()]


def refusals(rows: Sequence[Json]) -> list[tuple[str, list[str]]]:
    """Return why faster kernels refused where the reference kernel served: each reason with the kernels that
    gave it.
    """
    kernels_of: dict[str, set[str]] = {}
    for row in rows:
        if row["kernel"].startswith("reference"):
            for kernel, reason in row["refused"].items():
                kernels_of.setdefault(reason, set()).add(kernel)
    return [(reason, sorted(kernels)) for reason, kernels in kernels_of.items()]

"""The verdict, and each gate with what was compared."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from compress.validate.display import Json, label, markdown_sentence, number
from compress.validate.gates import GateResult
from compress.validate.parts import PARTS, Part


@PARTS.register("gates")
@dataclass(frozen=True)
class GatesPart(Part):
    """The results of all gates."""

    page_order: ClassVar[int] = 10
    results: Sequence[GateResult] = ()

    def as_json(self) -> Json:
        """Return the verdict and the rows of the gates."""
        return {"verdict": verdict(self.results), "gates": [asdict(each) for each in self.results]}

    @staticmethod
    def sentence(report: Json) -> str:
        """Return the verdict."""
        found = report["verdict"]
        if found["passed"] is None:
            return "No gate was set for it."
        if found["passed"]:
            return f"Every gate of its recipe holds ({found['num_decided']} of {found['num_decided']})."
        return "**It failed its gates:** " + markdown_sentence(" ".join(found["reasons"]))


def verdict(results: Sequence[GateResult]) -> Json:
    """Return whether all gates passed, and the reasons of those that did not.

    `passed` is None when no gate applied: then nothing was promised and nothing may be concluded.
    """
    decided = [each for each in results if each.passed is not None]
    reasons = [_reason(each) for each in decided if not each.passed]
    return {
        "passed": None if not decided else not reasons,
        "reasons": reasons,
        "num_decided": len(decided),
        "num_not_applicable": len(results) - len(decided),
    }


def _reason(result: GateResult) -> str:
    name = label(result.name)
    if result.value is None or result.bound is None:
        return f"{name}: {result.note}."
    relation = "above" if result.relation == "<=" else "below"
    note = f" ({result.note})" if result.note else ""
    return (
        f"{name} is {number(result.value, 4)}, its bound {number(result.bound, 4)} is {relation} the limit "
        f"{result.limit:g}{note}."
    )

"""The scoring of models one after the other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json
from compress.validate.parts import PARTS, Part


@PARTS.register("scoring")
@dataclass(frozen=True)
class ScoringPart(Part):
    """Facts: `streamed`, `top_k` (None: exact), `kept_bytes`, and `kl_mean_lower`, `kl_mean`."""

    page_order: ClassVar[int] = 55
    facts: Mapping[str, Any]

    def as_json(self) -> Json:
        """Return the facts as they are."""
        return {"scoring": dict(self.facts)}

    @staticmethod
    def values(report: Json) -> Json:
        """Return the facts in words."""
        return {"scoring_text": scoring_text(report["scoring"])} if "scoring" in report else {}

    @staticmethod
    def card(report: Json) -> list[str]:
        """Return the facts in words."""
        return [scoring_text(report["scoring"])] if "scoring" in report else []


def scoring_text(facts: Mapping[str, Any]) -> str:
    """Return how the models were scored, as sentences."""
    way = "its layers read from disk one at a time" if facts["streamed"] else "alone in memory"
    text = f"Source and candidate were scored one after the other, the source {way}."
    if facts["top_k"] is None:
        return f"{text} All of its logits were kept, so the numbers are those of both models side by side."
    return (
        f"{text} Its {facts['top_k']:,} likeliest tokens of each position were kept, and some drawn from the "
        f"others. Perplexity and top-1 agreement are exact; the mean KL, {facts['kl_mean']:.4g}, is an "
        f"unbiased estimate, of which {facts['kl_mean_lower']:.4g} is exact and a lower bound."
    )

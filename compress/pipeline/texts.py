"""The texts that a recipe reads, for its provenance: which card each stage names, and the digest of what was
read of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.artifact.manifest import Artifact
from compress.data.card import Card, load_card
from compress.digest import digest_file
from compress.pipeline.evidence import REPORT_NAME, read_report
from compress.pipeline.steps import Step


@dataclass(frozen=True)
class Text:
    """One body of text that a stage reads: its card as the recipe names it, with the digest of the card's
    file (None for one of the package), and what the card states of it.
    """

    stage: str
    card: str
    card_digest: str | None
    title: str
    license: str
    source: str
    dataset: str | None
    revision: str | None


def texts_of(steps: Sequence[Step]) -> tuple[Text, ...]:
    """Return the texts of all stages, of a mix each card of it. Files of cards are read, and no text.

    Raises:
        RecipeError, UsageError: a card cannot be read.
    """
    return tuple(
        _text(step.stage.kind, card)
        for step in steps
        if isinstance(name := getattr(step.spec, "data", None), str)
        for card, _ in load_card(name).parts()
    )


def texts_read(texts: Sequence[Text], made: Mapping[str, Artifact]) -> list[dict[str, Any]]:
    """Return the texts as JSON, with what the artifacts of the stages state of each: `text_digest` of the
    text, `tokens_digest` of its windows as token ids, and the commit that was read of a dataset.
    """
    found = []
    for text in texts:
        read: Mapping[str, Any] = {}
        if text.stage in made:
            named = (each for each in _stated(made[text.stage]) if each.get("title") == text.title)
            read = next(named, {})
        found.append(
            asdict(text)
            | {
                "revision": read.get("revision") or text.revision,
                "text_digest": read.get("text_digest"),
                "tokens_digest": read.get("digest"),
            }
        )
    return found


def _text(stage: str, card: Card) -> Text:
    builtin = card.ref.startswith("builtin://")
    facts = card.facts
    return Text(
        stage,
        card.ref,
        None if builtin else digest_file(Path(card.ref)),
        facts["title"],
        facts["license"],
        facts["source"],
        facts.get("dataset"),
        facts.get("revision"),
    )


def _stated(artifact: Artifact) -> Iterator[Mapping[str, Any]]:
    """Yield what the artifact of a stage states of texts, by title."""
    facts = artifact.manifest.facts
    yield facts
    yield from facts.get("cards", ())
    for name in ("distillation", "recovery", "draft"):
        yield facts.get(name, {}).get("data", {})
    if any(each.path == REPORT_NAME for each in artifact.manifest.files):
        report = read_report(artifact.file(REPORT_NAME))
        used = report.get("calibration", {}) if isinstance(report, dict) else {}
        yield {"title": used.get("evaluation_data"), "digest": used.get("evaluation_digest")}

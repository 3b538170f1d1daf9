"""Any number of validated models as one JSON document: readings, conditions that differ, and all pairs.

{"objectives", "batch_size", "models": [{"label", "form", "digest", "source", "conditions", "readings"}],
 "sources": [the same of each source], "conditions": [{"name", "groups": [{"words", "labels"}]}],
 "pairs": [{"one", "other", "winner", "differences", "left_out"}], "warnings": [...]}
"""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from compress.errors import UsageError
from compress.validate.compare.difference import TASKS
from compress.validate.compare.dominance import OBJECTIVES, compare_pair
from compress.validate.compare.evidence import Evidence
from compress.validate.display import Json

_DIFFERS = {
    "source": "The models were compared with different sources, so their KL and top-1 are not compared.",
    "text": "The models were scored on different evaluation tokens, so their accuracy is not compared.",
    "machine": "The models were timed on different machines, so their times are not compared.",
    "latency": "The models were timed with requests of different shapes, so their times are not compared.",
    "load": "The models served different loads, so their throughput is not compared.",
}


def compare_document(
    models: Sequence[Evidence],
    sources: Sequence[Evidence] = (),
    *,
    objectives: Sequence[str] | None = None,
) -> Json:
    """Return the document of models with labels that differ; `sources` are listed too and compared with no
    model. By default all that was measured among `OBJECTIVES` and all tasks decide.

    Raises:
        UsageError: fewer than two models, or two of one label.
    """
    labels = [each.label for each in models]
    if len(labels) < 2:
        raise UsageError("a comparison needs at least two models; name one more.")
    if doubled := [label for label in labels if labels.count(label) > 1]:
        raise UsageError(f"two models are called {doubled[0]}; name each of them once.")
    tasks = list(dict.fromkeys(name for each in models for name in each.readings if name.startswith(TASKS)))
    objectives = [*OBJECTIVES, *tasks] if objectives is None else objectives
    groups = [_groups(name, models) for name in (*_DIFFERS, *tasks)]
    return {
        "objectives": list(objectives),
        "models": [_row(each) for each in models],
        "sources": [_row(each) for each in sources],
        "conditions": [each for each in groups if each["groups"]],
        "pairs": [asdict(compare_pair(one, other, objectives)) for one, other in combinations(models, 2)],
        "warnings": _warnings(models, groups),
    }


def _row(model: Evidence) -> Json:
    return {
        "label": model.label,
        "form": model.form,
        "digest": model.digest,
        "source": model.source,
        "conditions": dict(model.conditions),
        "readings": {
            name: {**asdict(reading.estimate), "unproven": reading.unproven}
            for name, reading in model.readings.items()
        },
    }


def _groups(name: str, models: Sequence[Evidence]) -> dict[str, Any]:
    """Return the models by their condition of that name; models that do not state it are in no group."""
    groups: dict[str, list[str]] = {}
    for model in models:
        if name in model.conditions:
            groups.setdefault(model.conditions[name], []).append(model.label)
    named = {each.conditions["source"]: each.source for each in models} if name == "source" else {}
    shown = [{"words": named.get(words, words), "labels": own} for words, own in groups.items()]
    return {"name": name, "groups": shown}


def _warnings(models: Sequence[Evidence], groups: Sequence[Json]) -> list[str]:
    found = [
        _DIFFERS.get(each["name"], f"The models answered different items of {each['name']}.")
        for each in groups
        if len(each["groups"]) > 1
    ]
    unstable = [each.label for each in models if any(reading.unproven for reading in each.readings.values())]
    if unstable:
        found.append(
            f"Times of {', '.join(unstable)} are unstable, so they decide nothing; their reports give the "
            "reasons. Measure again on a quiet machine."
        )
    return found

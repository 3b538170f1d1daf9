"""The JSON document of a benchmark, from which its page is drawn too."""

from collections.abc import Mapping, Sequence
from typing import Any

from compress.validate.load.compare import LoadRow
from compress.validate.load.page import load_text


def load_document(rows: Sequence[LoadRow], *, seed: int, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return rows, samples of engines, warnings, and the facts of this machine."""
    shown = [each.as_json() for each in rows]
    return {
        "title": ", ".join(dict.fromkeys(each.model for each in rows)),
        "seed": seed,
        "date": rows[0].date,
        "warnings": [warning for each in rows for warning in load_warnings(each)],
        "rows": shown,
        "series": [
            {"target": each.target, "load": load_text(row), "samples": list(each.series)}
            for each, row in zip(rows, shown, strict=True)
        ],
        "environment": dict(environment),
    }


def load_warnings(row: LoadRow) -> list[str]:
    """Return sentences on what the numbers of a row do not show."""
    name = f"{row.target}, {load_text(row.as_json())}"
    found = []
    if row.instability:
        found.append(f"{name}: unstable, proves nothing here: {row.instability}.")
    if failed := row.median("failed"):
        found.append(
            f"{name}: {failed} of {row.conditions['num_prompts']} requests failed, the first because "
            f"{row.median('errors')[0]}"
        )
    if row.median("inferred_chunks"):
        found.append(
            f"{name}: the server does not state how many tokens a chunk has. They were divided evenly "
            "over the chunks of a request."
        )
    return found

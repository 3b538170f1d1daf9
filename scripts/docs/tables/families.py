"""The table of the models that the decoder reads."""

import importlib
import json

from scripts.docs.markdown import table
from scripts.docs.result_files import ROOT

EXAMPLES = 4
"""Checkpoints that a row names, at most."""


def families() -> str:
    """Return the table: one row for each family, with checkpoints whose configs are known to be read."""
    from compress.models.family import FAMILIES

    known: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tests" / "golden" / "configs").glob("*.json")):
        for row in json.loads(file.read_text(encoding="utf-8")):
            if "refused" not in row:
                known.setdefault(row["config"]["model_type"], []).append(row["name"])
    rows = []
    for name in FAMILIES.names():
        family = FAMILIES.get(name)
        text = (
            importlib.import_module(f"compress.models.archs.{name.lower().replace('-', '_')}").__doc__ or ""
        )
        names = known.get(name, [])
        spread = names[:: max(1, len(names) // EXAMPLES)][:EXAMPLES]
        what = " ".join(text.split()).removesuffix(".")
        rows.append((f"`{name}`", f"`{family.architecture}`", what, ", ".join(spread)))
    return table(["`model_type`", "class", "what it is", "for example"], rows)


def num_known() -> tuple[int, int]:
    """Return how many known configs there are, and how many of them are read, without those that were put
    together from defaults."""
    rows = [
        row
        for file in (ROOT / "tests" / "golden" / "configs").glob("*.json")
        for row in json.loads(file.read_text(encoding="utf-8"))
        if not row.get("assumed")
    ]
    return len(rows), sum("refused" not in row for row in rows)

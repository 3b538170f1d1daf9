"""Refusals of a `config.json` that names no architecture, or one that is not read."""

import difflib
from collections.abc import Sequence

from compress.errors import UnsupportedArch

TABLE = "docs/models.md"
"""The page with the table of all architectures that are read."""
BY_NAME = (
    "If transformers loads this model, a stage {kind: quantize_by_name, scheme: FP8_DYNAMIC} quantizes its "
    "linears by the names of their tensors, rounded to nearest."
)
"""Hint for a model that the decoder does not support."""
_NUM_NEAREST = 3


def unknown_architecture(model_type: str, classes: Sequence[str], known: Sequence[str]) -> UnsupportedArch:
    """Return the refusal of an architecture that is not one of the `known` ones, with the nearest of them by
    spelling."""
    named = f"'{model_type:.80}' ({', '.join(classes) or 'no class named'})"
    return UnsupportedArch(
        f"architecture {named} is not supported; {len(known)} architectures are read"
        f"{_nearest(model_type[:80], known)} (their table is in {TABLE}).",
        hint=BY_NAME,
    )


def no_architecture(known: Sequence[str]) -> UnsupportedArch:
    """Return the refusal of a config that names no architecture."""
    return UnsupportedArch(
        "config.json has no model_type, the field that names the architecture; state the one that the "
        f"checkpoint was made for, one of the {len(known)} in the table of {TABLE}."
    )


def _nearest(model_type: str, known: Sequence[str]) -> str:
    """Return a clause that names the architectures nearest by spelling, nothing where none is near."""
    names = [f"'{name}'" for name in difflib.get_close_matches(model_type, known, n=_NUM_NEAREST)]
    if not names:
        return ""
    *others, last = names
    joined = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return f", of which {joined} spelled most like it"

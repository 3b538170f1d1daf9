"""Every number that a recipe can hold has a smallest and a largest value, so that planning ends and a slip of
the keyboard is refused where it is.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from compress.data.card import BuiltinCard, HuggingFaceCard, LocalCard
from compress.recipe import recipe_schema
from compress.stages import STAGES

UNBOUNDED = {
    "where": "a value that rows of data are compared with; nothing is computed from it",
    "variables": "a value that a chat template reads; nothing else is computed from it",
    "Matrix": "a value of an axis goes to keys of the recipe, which have bounds",
    "gates": "a limit that a measured value is compared with; any number is a limit",
}
"""Keys of numbers without bounds, and why."""
SCHEMA = recipe_schema({kind: stage.spec for kind, stage in STAGES.items()})
CARDS = {card.__name__: card.model_json_schema() for card in (BuiltinCard, LocalCard, HuggingFaceCard)}


def numbers(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the path and the schema of every number in a JSON schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number") and "const" not in schema and "enum" not in schema:
            yield path, schema
        for key, value in schema.items():
            yield from numbers(value, (*path, key))
    elif isinstance(schema, list):
        for value in schema:
            yield from numbers(value, path)


FOUND = [*numbers(SCHEMA), *numbers(CARDS)]


def test_numbers_are_found() -> None:
    names = {part for path, _ in FOUND for part in path}
    assert {"num_samples", "seq_len", "batch_size", "seed", "limit", "num_ratios", "sweeps"} <= names
    assert len(FOUND) > 60


@pytest.mark.parametrize(("path", "schema"), FOUND, ids=["/".join(path) for path, _ in FOUND])
def test_a_number_has_bounds_or_a_reason(path: tuple[str, ...], schema: dict[str, Any]) -> None:
    if UNBOUNDED.keys() & set(path):
        return
    assert {"minimum", "exclusiveMinimum"} & schema.keys()
    assert {"maximum", "exclusiveMaximum"} & schema.keys()

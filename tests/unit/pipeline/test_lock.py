"""The lock of a recipe: read again, it asks for what the recipe asked for, and leaves nothing to a default
that may change.
"""

from pathlib import Path
from typing import Any

import pytest

from compress.pipeline.steps import Step, build_steps, lock_of
from compress.recipe import dump_yaml, parse_recipe
from compress.registry.model_source import ModelSource

SOURCE = ModelSource(Path("model"), "reference", None, "sha256:0")


def asked(steps: list[Step]) -> list[tuple[str, dict[str, Any]]]:
    """Kinds and specs, as cache keys have them."""
    return [(step.stage.kind, step.spec.model_dump(mode="json", serialize_as_any=True)) for step in steps]


@pytest.mark.parametrize(
    "stages",
    [
        "[{kind: quantize, preset: balanced}, {kind: export}, {kind: validate}]",
        "[{kind: quantize, preset: balanced, refine: null, target: null}]",
        "[{kind: quantize, smooth: {kind: awq}, overrides: {'layers.0.*': dense}, kv_cache: fp8}, {kind: "
        "validate, latency: null}]",
        "[{kind: quantize, scheme: {kind: mixed, schemes: [W4A16_G128, dense], budget: {size_ratio: 0.4}}}]",
    ],
)
def test_a_lock_asks_for_what_the_recipe_asked_for(stages: str) -> None:
    recipe = parse_recipe(
        f"{{version: 1, model: 'builtin://reference', seed: 5, stages: {stages}}}", file="recipe.yaml"
    )
    steps = build_steps(recipe)
    locked = parse_recipe(dump_yaml(lock_of(recipe, steps, SOURCE)), file="recipe.lock.yaml")
    assert asked(build_steps(locked)) == asked(steps)
    assert (locked.model, locked.seed, locked.push) == (recipe.model, recipe.seed, recipe.push)


def test_a_null_that_was_written_stays_written() -> None:
    stages = "[{kind: quantize, preset: balanced, refine: null}, {kind: validate, latency: null}]"
    recipe = parse_recipe(
        f"{{version: 1, model: 'builtin://reference', stages: {stages}}}", file="recipe.yaml"
    )
    lock = {stage["kind"]: stage for stage in lock_of(recipe, build_steps(recipe), SOURCE)["stages"]}
    assert lock["quantize"]["refine"] is None
    assert lock["validate"]["latency"] is None
    assert "preset" not in lock["quantize"]

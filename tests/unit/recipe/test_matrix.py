"""Matrices of recipes: which cases there are, what each of them holds, and where errors point."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import RecipeError
from compress.recipe import MAX_CASES, dump_yaml, load_cases, load_recipe, parse_cases, parse_recipe

RECIPE = """\
version: 1
model: builtin://reference
seed: $(matrix.seed)
matrix:
  seed: [3, 4]
  scheme: [W4A16_G128, FP8_DYNAMIC]
stages:
  - {kind: quantize, scheme: $(matrix.scheme)}
  - kind: export
push: {to: layout://registry, name: a-$(matrix.scheme)-$(matrix.seed), aliases: [$(matrix.scheme)]}
"""


def cases(text: str) -> list[Any]:
    return parse_cases(text, file="r.yaml")


def test_a_case_is_the_recipe_that_a_person_would_write_by_hand() -> None:
    found = cases(RECIPE)
    assert [each.case.name for each in found] == [
        "3-W4A16_G128",
        "3-FP8_DYNAMIC",
        "4-W4A16_G128",
        "4-FP8_DYNAMIC",
    ]
    head, _, rest = RECIPE.partition("matrix:\n")
    stages = "stages:" + rest.partition("stages:")[2]
    for each in found:
        by_hand = head + stages
        for axis, value in each.case.values.items():
            by_hand = by_hand.replace(f"$(matrix.{axis})", str(value))
        expected = parse_recipe(by_hand, file="r.yaml")
        assert (each.model, each.seed, each.push) == (expected.model, expected.seed, expected.push)
        assert [(one.kind, one.raw) for one in each.stages] == [
            (one.kind, one.raw) for one in expected.stages
        ]


scalars = st.one_of(
    st.text("abcXYZ019._", min_size=1, max_size=6),
    st.integers(-99, 99),
    st.booleans(),
    st.floats(0.25, 4, width=16),
)


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c"]),
        st.lists(scalars, min_size=1, max_size=3, unique_by=lambda value: json.dumps(value).strip('"')),
        min_size=1,
    )
)
def test_the_cases_are_the_product_of_the_axes_and_values_keep_their_type(axes: dict[str, list[Any]]) -> None:
    stage = {"kind": "x", "whole": {axis: f"$(matrix.{axis})" for axis in axes}}
    stage["joined"] = ["of " + " ".join(f"$(matrix.{axis})" for axis in axes)]
    recipe = {"version": 1, "model": "m", "matrix": axes, "stages": [stage]}
    try:
        found = cases(dump_yaml(recipe))
    except RecipeError as error:
        assert "two cases are called" in str(error)  # noqa: PT017 - names such as a-b of a and b
        return
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    wholes = [each.stages[0].raw["whole"] for each in found]
    assert json.dumps(wholes) == json.dumps(combinations)
    for each, values in zip(found, combinations, strict=True):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values.values()]
        assert each.stages[0].raw["joined"] == ["of " + " ".join(texts)]


def test_combinations_are_left_out_and_added() -> None:
    text = RECIPE.replace(
        "stages:",
        "  exclude: [{seed: 3, scheme: FP8_DYNAMIC}, {seed: 4}]\n"
        "  include: [{scheme: W8A16, seed: 9}]\nstages:",
        1,
    )
    assert [each.case.name for each in cases(text)] == ["3-W4A16_G128", "9-W8A16"]


@pytest.mark.parametrize(
    ("old", "new", "where", "words"),
    [
        ("scheme: $(matrix.scheme)", "scheme: $(matrix.shceme)", "8:22", "Did you mean 'scheme'?"),
        ("scheme: $(matrix.scheme)", "scheme: $(scheme)", "8:22", "Did you mean 'matrix.scheme'?"),
        ("kind: export", "kind: ${{ matrix.scheme }}", "9:5", "written $(matrix.axis)"),
        ("- kind: export", "- $(matrix.seed): export", "9:5", "a key cannot be a placeholder"),
        ("[3, 4]", "[3, 4]\n  kind: [rtn]", "6:3", "no value of the recipe is $(matrix.kind)"),
        ("[3, 4]", "[]", "5:3", "at least 1"),
        ("[3, 4]", "3", "5:3", "not 3"),
        ("[3, 4]", "[3, {a: 1}]", "5:13", "a text, a number or true or false"),
        ("[3, 4]", "[3, 3]", "5:13", "given twice"),
        ("[3, 4]", "[3, x]", "3:1", "In the case x-W4A16_G128 of the matrix."),
        ("[3, 4]", f"{list(range(33))}", "4:1", f"33 x 2 = 66 cases; a recipe has at most {MAX_CASES}"),
        ("stages:", "  exclude: [{sede: 3}]\nstages:", "7:14", "unknown axis 'sede'. Did you mean 'seed'?"),
        ("stages:", "  exclude: [{seed: 5}]\nstages:", "7:13", "leaves out no case"),
        ("stages:", "  exclude: [{seed: 3}, {seed: 4}]\nstages:", "4:1", "leaves out every case"),
        ("stages:", "  include: [{seed: 5}]\nstages:", "7:13", "has no value for scheme"),
        ("stages:", "  include: [{seed: 3, scheme: W4A16_G128}]\nstages:", "4:1", "two cases are called"),
        ("a-$(matrix.scheme)-", "a-", "10:31", "would push to one name"),
        ("matrix:", "matrx:", "3:1", "needs a `matrix:`"),
    ],
)  # fmt: skip
def test_an_error_points_to_its_place(old: str, new: str, where: str, words: str) -> None:
    text = RECIPE.replace(old, new, 1)
    assert text != RECIPE
    with pytest.raises(RecipeError) as caught:
        cases(text)
    assert words in str(caught.value)
    assert caught.value.where == f"r.yaml:{where}"


def test_the_places_of_a_case_are_those_of_the_file() -> None:
    entry = cases(RECIPE)[3].stages[0]
    error = entry.where.error(("scheme",), "is not right.")
    assert (
        str(error) == "r.yaml:8:22: stages[0].scheme: is not right. In the case 4-FP8_DYNAMIC of the matrix."
    )


def test_one_case_is_found_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    assert load_recipe(path, case="4-FP8_DYNAMIC") == load_cases(path)[3]
    with pytest.raises(RecipeError, match=r"one of its 4 cases .* Name it: 3-W4A16_G128, "):
        load_recipe(path)
    with pytest.raises(RecipeError, match=r"no case '4-FP8_DYN'\. Did you mean '4-FP8_DYNAMIC'"):
        load_recipe(path, case="4-FP8_DYN")
    path.write_text("version: 1\nmodel: m\nstages: [{kind: x, text: $(anything)}]\n")
    assert load_recipe(path).stages[0].raw == {"text": "$(anything)"}
    with pytest.raises(RecipeError, match="there is no case a"):
        load_recipe(path, case="a")

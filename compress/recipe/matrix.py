"""The matrix of a recipe: axes with values, and a case for each combination of them.

    matrix:
      scheme: [W4A16_G128, FP8_DYNAMIC]
      preset: [fast, balanced]
      exclude: [{scheme: FP8_DYNAMIC, preset: fast}]
    stages:
      - {kind: quantize, scheme: $(matrix.scheme), preset: $(matrix.preset)}

A value that is one placeholder becomes the value of the axis, a number a number; within a text a placeholder
becomes the value's text. All cases have the keys and the structure of the file, so every place stays where it
is.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator

from compress.errors import did_you_mean
from compress.recipe.source import KeyPath, SourceMap
from compress.recipe.spec import parse_spec

MAX_CASES = 64
"""Most cases of one recipe: each takes a run of minutes to hours."""
_MAX_NAME = 120
"""Longest name of a case, which is part of a file name; file systems take 255 bytes."""
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_PLACEHOLDER = re.compile(r"\$\(([^()]*)\)")
_OF_GITHUB = re.compile(r"\$\{\{\s*matrix\.")


def _one_value(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str | int | float):
        return check(value)
    raise ValueError(f"a value of an axis is a text, a number or true or false, not {json.dumps(value):.60}.")


Scalar = Annotated[str | int | float | bool, WrapValidator(_one_value)]
Axis = Annotated[tuple[Scalar, ...], Field(min_length=1, max_length=MAX_CASES)]
Cases = Annotated[tuple[dict[str, Scalar], ...], Field(max_length=MAX_CASES)]


class Matrix(BaseModel):
    """Axes, each a name and its values; a case for each combination, plus `include`, less `exclude`."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Axis] = Field(init=False)

    include: Cases = Field((), description="further cases, each with a value for every axis")
    exclude: Cases = Field((), description="combinations to leave out, by the values of some axes or of all")


@dataclass(frozen=True)
class Case:
    """One combination: its name, made of the values, and the value of each axis."""

    name: str
    values: Mapping[str, Scalar]


def read_cases(raw: Any, where: SourceMap) -> list[Case]:
    """Return the cases of a `matrix`, in the order of its axes; `where` holds the places of the recipe.

    Raises:
        RecipeError: an axis without values or of an odd name, a value given twice, a wrong `include` or
            `exclude`, no case, more than `MAX_CASES`, or two of one name.
    """
    if not isinstance(raw, Mapping):
        raise where.error(("matrix",), "must be a mapping of axes to lists of values.")
    places = where.under("matrix")
    matrix = parse_spec(Matrix, raw, places)
    axes = {name: values for name, values in raw.items() if name not in Matrix.model_fields}
    if not axes:
        raise where.error(("matrix",), "has no axis; write a name with its values, such as scheme: [A, B].")
    for name, values in axes.items():
        _check_axis(name, values, places)
    sizes = [len(values) for values in axes.values()]
    if (count := math.prod(sizes)) > MAX_CASES:
        shown = " x ".join(map(str, sizes))
        raise where.error(("matrix",), f"{shown} = {count} cases; a recipe has at most {MAX_CASES}.")
    cases = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    for idx, partial in enumerate(matrix.exclude):
        _check_values(partial, axes, places, ("exclude", idx))
        if not (matching := [each for each in cases if _matches(each, partial)]):
            raise places.error(("exclude", idx), "leaves out no case; its values are not of the axes.")
        cases = [each for each in cases if each not in matching]
    for idx, further in enumerate(matrix.include):
        _check_values(further, axes, places, ("include", idx))
        if missing := [name for name in axes if name not in further]:
            raise places.error(("include", idx), f"has no value for {', '.join(missing)}.")
        cases.append({name: further[name] for name in axes})
    if not cases:
        raise where.error(("matrix",), "leaves out every case.")
    if len(cases) > MAX_CASES:
        raise where.error(("matrix",), f"{len(cases)} cases; a recipe has at most {MAX_CASES}.")
    return _named(cases, where)


def fill(tree: Mapping[str, Any], case: Case, where: SourceMap) -> tuple[dict[str, Any], SourceMap]:
    """Return a recipe without its `matrix` and with the values of a case, and its places, whose errors name
    the case.

    Raises:
        RecipeError: a placeholder of no axis, or an axis that no placeholder names.
    """
    used: set[str] = set()
    rest = {key: value for key, value in tree.items() if key != "matrix"}
    filled = _filled(rest, case, where, (), used)
    for name in case.values:
        if name not in used:
            raise where.error(
                ("matrix", name),
                f"no value of the recipe is $(matrix.{name}), so its cases would be the same.",
            )
    return filled, replace(where, note=f" In the case {case.name} of the matrix.")


def refuse_placeholders(tree: Any, where: SourceMap) -> None:
    """Check that a recipe without a matrix names no axis of one.

    Raises:
        RecipeError: it does.
    """
    for path, text in _texts(tree, ()):
        if found := re.search(r"\$\(matrix\.[^()]*\)", text):
            raise where.error(path, f"{found[0]} needs a `matrix:` with that axis, and the recipe has none.")


def _check_axis(name: str, values: Sequence[Scalar], where: SourceMap) -> None:
    if not _AXIS.fullmatch(name):
        raise where.error((name,), "an axis has a name of letters, digits, '_' and '-', such as scheme.")
    seen: list[str] = []
    for idx, value in enumerate(values):
        if (text := json.dumps(value)) in seen:
            raise where.error((name, idx), f"{text} is given twice.")
        seen.append(text)


def _check_values(
    given: Mapping[str, Scalar], axes: Mapping[str, Any], where: SourceMap, path: KeyPath
) -> None:
    for name in given:
        if name not in axes:
            raise where.error((*path, name), f"unknown axis '{name}'.{did_you_mean(name, axes)}")


def _matches(case: Mapping[str, Scalar], partial: Mapping[str, Scalar]) -> bool:
    """Return whether a case has these values; 1 and true are two values, though equal in Python."""
    return all(json.dumps(case[name]) == json.dumps(value) for name, value in partial.items())


def _named(cases: Sequence[Mapping[str, Scalar]], where: SourceMap) -> list[Case]:
    named: dict[str, Case] = {}
    for values in cases:
        name = "-".join(re.sub(r"[^A-Za-z0-9._+-]", "-", _text(value)) for value in values.values())
        if len(name) > _MAX_NAME:
            raise where.error(
                ("matrix",), f"the case {name[:40]}... has a name beyond {_MAX_NAME} characters."
            )
        if name in named:
            raise where.error(
                ("matrix",), f"two cases are called {name}; give values whose texts differ more."
            )
        named[name] = Case(name, values)
    return list(named.values())


def _text(value: Scalar) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _filled(value: Any, case: Case, where: SourceMap, path: KeyPath, used: set[str]) -> Any:
    """Return a value with the placeholders in it filled in; `used` gathers the axes that they name."""
    if isinstance(value, Mapping):
        for key in value:
            if _PLACEHOLDER.search(key):
                raise where.error((*path, key), "a key cannot be a placeholder; only values differ by case.")
        return {key: _filled(inner, case, where, (*path, key), used) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, case, where, (*path, idx), used) for idx, inner in enumerate(value)]
    if not isinstance(value, str):
        return value
    if _OF_GITHUB.search(value):
        raise where.error(path, "a placeholder is written $(matrix.axis) here.")
    axis_of = {found[0]: _axis_of(found, case, where, path) for found in _PLACEHOLDER.finditer(value)}
    used.update(axis_of.values())
    if value in axis_of:
        return case.values[axis_of[value]]
    return _PLACEHOLDER.sub(lambda found: _text(case.values[axis_of[found[0]]]), value)


def _axis_of(found: "re.Match[str]", case: Case, where: SourceMap, path: KeyPath) -> str:
    """Return the axis that a placeholder names.

    Raises:
        RecipeError: it names none.
    """
    prefix, _, name = found[1].partition(".")
    if prefix != "matrix":
        near = did_you_mean(found[1], [f"matrix.{axis}" for axis in case.values])
        raise where.error(path, f"{found[0]} is no placeholder.{near}")
    if name not in case.values:
        raise where.error(path, f"unknown axis '{name}'.{did_you_mean(name, case.values)}")
    return name


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text in a value, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, (*path, key))
    elif isinstance(value, list):
        for idx, inner in enumerate(value):
            yield from _texts(inner, (*path, idx))

"""The recipes that a command names: files, and the cases of their matrices."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.errors import UsageError

if TYPE_CHECKING:
    from compress.recipe import Recipe

RecipesArgument = Annotated[
    list[Path],
    typer.Argument(metavar="RECIPE...", help="Recipe (YAML); several run as several.", show_default=False),
]
CaseOption = Annotated[
    str | None,
    typer.Option("--case", help="Only this case of the recipe's matrix.", show_default=False),
]


def one_recipe(recipes: Sequence[Path], case: str | None) -> "Recipe | None":
    """Return the recipe where the words name one, or one case of a matrix; None where they name several.

    Raises:
        UsageError: a case, and several files.
        RecipeError: it cannot be read.
    """
    from compress.recipe import load_cases, load_recipe

    if case is not None and len(recipes) > 1:
        raise UsageError("--case names a case of one recipe; give one recipe, or leave --case out.")
    if len(recipes) > 1:
        return None
    if case is not None:
        return load_recipe(recipes[0], case=case)
    cases = load_cases(recipes[0])
    return cases[0] if cases[0].case is None else None

"""References to a recipe's source model: bundled, a directory, or the Hugging Face hub."""

import re
from dataclasses import dataclass
from typing import Literal

from compress.errors import RecipeError, did_you_mean


@dataclass(frozen=True)
class ModelRef:
    """A parsed model reference. A `hf` reference without revision names a branch that moves; the caller
    resolves it.
    """

    scheme: Literal["builtin", "path", "hf"]
    name: str
    revision: str | None = None


def parse_model_ref(text: str) -> ModelRef:
    """Parse `builtin://name`, `hf://org/name[@revision]`, or a path.

    Raises:
        RecipeError: another scheme, or a name that cannot be one.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        if not text.strip():
            raise RecipeError(
                "the model reference is empty. Write builtin://reference, ./path, or hf://org/name@revision."
            )
        return ModelRef("path", text)
    if scheme == "builtin" and re.fullmatch(r"[a-z0-9][a-z0-9_-]*", rest):
        return ModelRef("builtin", rest)
    if scheme == "hf":
        name, at, revision = rest.partition("@")
        if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII) and bool(at) == bool(revision):
            return ModelRef("hf", name, revision or None)
    if scheme in ("builtin", "hf"):
        raise RecipeError(
            f"'{text}' is not a model reference. Write builtin://reference or hf://org/name@revision."
        )
    raise RecipeError(
        f"unknown scheme '{scheme}://' of a model reference.{did_you_mean(scheme, ('builtin', 'hf'))} A "
        f"path needs no scheme."
    )

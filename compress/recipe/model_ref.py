"""References to a recipe's source model: bundled, a directory, the Hugging Face hub, or an artifact of a
registry.
"""

import re
from dataclasses import dataclass
from typing import Literal

from compress.errors import RecipeError, did_you_mean

REGISTRY_SCHEMES = ("layout", "oci", "oci+http", "s3", "s3+http", "mlflow+http", "mlflow+https")
"""Schemes of the registries that a recipe takes its model from; a test compares them with the registries."""
MODELS_URI = "models:/"


@dataclass(frozen=True)
class ModelRef:
    """A parsed model reference. A `hf` reference without revision names a branch that moves, and the name of
    a `registry` reference, which is the whole of it, may have a tag that moves; the caller resolves them.
    """

    scheme: Literal["builtin", "path", "hf", "registry"]
    name: str
    revision: str | None = None


def parse_model_ref(text: str) -> ModelRef:
    """Parse `builtin://name`, `hf://org/name[@revision]`, a path, or a reference of a registry, such as
    `oci://host/path/name:tag`, `s3://bucket/prefix/name@sha256:...` or `models:/name@alias`.

    Raises:
        RecipeError: another scheme, or a name that cannot be one.
    """
    scheme, separator, rest = text.partition("://")
    if scheme in REGISTRY_SCHEMES or text.startswith(MODELS_URI):
        return ModelRef("registry", text)
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
    known = ("builtin", "hf", *REGISTRY_SCHEMES)
    raise RecipeError(
        f"unknown scheme '{scheme}://' of a model reference.{did_you_mean(scheme, known)} A path needs no "
        f"scheme."
    )

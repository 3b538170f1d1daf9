"""One YAML file: what to compress, with which stages, and where it goes. Owns the syntax and the errors, not
the meaning of any stage.
"""

from compress.recipe.matrix import MAX_CASES, Case
from compress.recipe.model_ref import ModelRef, parse_model_ref
from compress.recipe.notify import Notify, filled_in
from compress.recipe.recipe import (
    Cache,
    ChampionGates,
    Push,
    Recipe,
    SignedBy,
    SignWith,
    StageEntry,
    load_cases,
    load_recipe,
    parse_cases,
    parse_recipe,
    recipe_schema,
    unknown_kind_error,
)
from compress.recipe.source import KeyPath, Position, SourceMap, dump_yaml, read_source, read_yaml
from compress.recipe.spec import (
    MAX_BATCH,
    MAX_FACTOR,
    MAX_SAMPLES,
    MAX_SEQ_LEN,
    MAX_SIZE,
    MAX_TOKENS,
    ByKind,
    Spec,
    checked_by,
    list_to_tuple,
    parse_spec,
)

__all__ = [
    "MAX_BATCH",
    "MAX_CASES",
    "MAX_FACTOR",
    "MAX_SAMPLES",
    "MAX_SEQ_LEN",
    "MAX_SIZE",
    "MAX_TOKENS",
    "ByKind",
    "Cache",
    "Case",
    "ChampionGates",
    "KeyPath",
    "ModelRef",
    "Notify",
    "Position",
    "Push",
    "Recipe",
    "SignWith",
    "SignedBy",
    "SourceMap",
    "Spec",
    "StageEntry",
    "checked_by",
    "dump_yaml",
    "filled_in",
    "list_to_tuple",
    "load_cases",
    "load_recipe",
    "parse_cases",
    "parse_model_ref",
    "parse_recipe",
    "parse_spec",
    "read_source",
    "read_yaml",
    "recipe_schema",
    "unknown_kind_error",
]

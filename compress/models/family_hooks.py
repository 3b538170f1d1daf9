"""The functions that a table of a family may have (`family.py`), and those of families that need none."""

from collections.abc import Callable, Mapping
from typing import Any

from compress.models.arch import Arch
from compress.models.layer_shape import HeadGate, LayerShape
from compress.untrusted.fields import Fields

RareFacts = Callable[[Fields], dict[str, Any]]
"""config -> facts of an `Arch` that have a default."""
ImpliedFields = Callable[[Fields], dict[str, Any]]
"""config -> fields in the standard spelling that it implies and does not state so."""
DenseFields = Callable[[Fields, int], Mapping[str, Any]]
"""(config, the channels of a dense FFN) -> the fields that state them."""
Restated = Callable[[Arch], dict[str, Any]]
"""facts of a model -> fields of its config that depend on several of them."""
NamesByFacts = Callable[[Arch], Mapping[str, str]]
"""facts of a model -> names on disk of modules of layers that depend on them, by their canonical names."""
Notes = Callable[[Arch], str | None]
"""facts of a model -> what the class of `transformers` computes otherwise, None where it does not."""
LayerShapes = Callable[[Fields, tuple[LayerShape, ...]], tuple[LayerShape, ...]]
"""(config, the layers as most families state them) -> those that it states."""


def no_facts(config: Fields) -> dict[str, Any]:
    return {}


def nothing_implied(config: Fields) -> dict[str, Any]:
    return {}


def nothing_restated(arch: Arch) -> dict[str, Any]:
    return {}


def no_other_names(arch: Arch) -> Mapping[str, str]:
    return {}


def no_head_gate(config: Fields) -> HeadGate | None:
    return None


def as_read(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    return layers

"""Fields of a `config.json` that the table of a family does not read: some change nothing, and the others are
refused by name.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.config_facts import facts_of, is_same
from compress.models.layer_types import FULL
from compress.untrusted.fields import shown
from compress.untrusted.text import one_line

MAX_NAMED = 12
"""Most fields that one sentence names."""


@dataclass(frozen=True)
class TableFields:
    """The fields that the table of a family reads.

    Args:
        model_type: the family; its facts decide which other fields change nothing.
        names: the fields.
        fixed: field -> the only value of it that the decoder computes.
        attends_fully: whether every layer of the family sees all positions.
    """

    model_type: str
    names: Set[str]
    fixed: Mapping[str, Any]
    attends_fully: bool = False

    def check(self, config: Mapping[str, Any]) -> None:
        """Check that the fields that are not read change nothing, and that fixed ones have their value.

        Raises:
            UnsupportedArch: a field may change what the model computes; the message names it.
        """
        refused = {name: value for name, value in self._others(config) if not self._is_inert(name, value)}
        if refused:
            stated = [f"{field_name(name)} = {shown(refused[name])}" for name in sorted(refused)]
            raise UnsupportedArch(
                f"config.json of this {self.model_type} model has {listed(stated, 3)}, which may change what "
                "the model computes and which the decoder does not honour. Remove it if it is a note of "
                "another tool; otherwise this model is not supported yet."
            )
        for name, value in self.fixed.items():
            if config.get(name) is not None and not is_same(config[name], value):
                raise UnsupportedArch(
                    f"config.json says {name} = {shown(config[name])}; the decoder computes {value!r} only."
                )

    def inert_others(self, config: Mapping[str, Any]) -> list[str]:
        """Return the names of the fields that the table does not read and that change nothing, sorted."""
        return sorted(name for name, value in self._others(config) if self._is_inert(name, value))

    def without_unread(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config without the fields that neither the table nor the model reads, so that no reader
        that several families share takes one of them for its own."""
        unread = {name for name, _ in self._others(config) if facts_of(self.model_type).is_unread(name)}
        return {name: value for name, value in config.items() if name not in unread}

    def _is_inert(self, name: str, value: Any) -> bool:
        """Return whether a field of that value changes nothing: by the facts of the family, or because it
        states what the decoder computes."""
        if name == "auto_map" and value == {}:  # names no code
            return True
        if name == "layer_types" and self.attends_fully and isinstance(value, list):
            return all(kind == FULL for kind in value)
        return facts_of(self.model_type).is_inert(name, value)

    def _others(self, config: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return the fields, other than `null`, that the table does not read."""
        stated = {name: value for name, value in config.items() if value is not None}
        return [(name, value) for name, value in stated.items() if name not in self.names]


def field_name(name: str) -> str:
    """Return a field's name as a sentence shows it: on one line, of at most 80 characters."""
    return one_line(f"{name:.80}")


def listed(texts: list[str], most: int) -> str:
    """Return the first of the texts as a list in a sentence, with the number of those that it leaves out."""
    left_out = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {left_out} more" if left_out > 0 else "")

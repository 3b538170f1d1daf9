"""The end-of-sequence ids that a `config.json` states."""

from collections.abc import Mapping
from typing import Any

NO_TOKEN = -1
"""The id by which some configs state that there is no such token."""


def stated_eos(config: Mapping[str, Any]) -> Any:
    """Return the end-of-sequence id that a config states: one, a list, or None or `NO_TOKEN` for none."""
    text = config.get("text_config")
    inside = text.get("eos_token_id") if isinstance(text, Mapping) else None
    return config.get("eos_token_id", inside)

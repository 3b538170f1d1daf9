"""Configs of common models, which ship with the package so that planning needs neither the weights nor a
network.

One file a model in `configs/`, named after the model; `Instruct`, `Base` and vendor prefixes do not
change the shape.
"""

import json
import re
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"
_SAME_SHAPE = re.compile(r"^(meta-|nvidia-)?|-(instruct|base|chat|hf|it|bf16)\b", re.IGNORECASE)


def known_models() -> list[str]:
    return sorted(path.name.removesuffix(".json") for path in CONFIGS.glob("*.json"))


def known_config(name: str) -> dict[str, Any] | None:
    """Return the `config.json` of `org/Name-Instruct` or `name`; None for a model that does not ship."""
    plain = _SAME_SHAPE.sub("", name.rpartition("/")[2]).lower()
    file = CONFIGS / f"{plain}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

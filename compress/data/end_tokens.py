"""End-of-sequence tokens that a model directory names in addition to those of its `config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.errors import UnsupportedFormat
from compress.models.config_file import MAX_CONFIG_BYTES
from compress.models.config_values import eos_token_ids
from compress.untrusted.fields import Fields
from compress.untrusted.files import check_within
from compress.untrusted.parse import Malformed, read_json

_FILE = "generation_config.json"


def generation_end_ids(model_dir: Path) -> frozenset[int]:
    """Return the end-of-sequence ids that `generation_config.json` names; chat models list more there than in
    `config.json`.

    Raises:
        UnsupportedFormat: the file is not JSON.
    """
    return frozenset(
        eos_token_ids(Fields(generation_fields(model_dir), _where(model_dir), UnsupportedFormat))
    )


def generation_fields(model_dir: Path) -> Mapping[str, Any]:
    """Return `generation_config.json`, empty where there is none.

    Raises:
        UnsupportedFormat: the file is not a JSON object.
    """
    file = model_dir / _FILE
    if not file.exists():
        return {}
    check_within(model_dir, file)
    try:
        content = read_json(file, max_bytes=MAX_CONFIG_BYTES)
    except Malformed as error:
        raise UnsupportedFormat(f"{_where(model_dir)} is not a JSON object: {error}.") from None
    if not isinstance(content, Mapping):
        raise UnsupportedFormat(f"{_where(model_dir)} is not a JSON object.")
    return content


def _where(model_dir: Path) -> str:
    return f"'{model_dir / _FILE}'"

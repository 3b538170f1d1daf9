"""End-of-sequence tokens that a model directory names in addition to those of its `config.json`."""

from pathlib import Path

from compress.errors import UnsupportedFormat
from compress.models.config_file import MAX_CONFIG_BYTES
from compress.models.config_values import eos_token_ids
from compress.untrusted.fields import Fields
from compress.untrusted.files import check_within
from compress.untrusted.parse import Malformed, read_json


def generation_end_ids(model_dir: Path) -> frozenset[int]:
    """Return the end-of-sequence ids that `generation_config.json` names; chat models list more there than in
    `config.json`.

    Raises:
        UnsupportedFormat: the file is not JSON.
    """
    file = model_dir / "generation_config.json"
    if not file.exists():
        return frozenset()
    check_within(model_dir, file)
    try:
        content = read_json(file, max_bytes=MAX_CONFIG_BYTES)
    except Malformed as error:
        raise UnsupportedFormat(f"'{file}' is not a JSON object: {error}.") from None
    return frozenset(eos_token_ids(Fields(content, f"'{file}'", UnsupportedFormat)))

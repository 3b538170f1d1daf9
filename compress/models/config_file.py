"""The `config.json` of a model directory, with the quantization that older checkpoints of modelopt state in a
file of their own.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compress.artifact.manifest import note_on_run
from compress.errors import StorageError, UsageError
from compress.untrusted.files import check_within
from compress.untrusted.parse import Malformed, read_json

CONFIG_NAME = "config.json"
QUANT_CONFIG_NAME = "hf_quant_config.json"
"""File of modelopt's checkpoints; older ones state their quantization there alone."""
ADAPTER_CONFIG_NAME = "adapter_config.json"
"""File of a directory that PEFT wrote: low-rank terms of a model that lies elsewhere."""
MAX_CONFIG_BYTES = 16 << 20
_MERGE = "merge the adapter into its base model (in PEFT, merge_and_unload and save_pretrained)"
_ADAPTER_TENSORS = "base_model.model."  # how the names begin that PEFT gives


def read_config(path: Path) -> dict[str, Any]:
    """Read `config.json` of a model directory, with the quantization that `hf_quant_config.json` states where
    the former states none.

    Raises:
        UsageError: `config.json` is missing, or a file is not JSON.
        StorageError: a file is no plain one within the directory, or cannot be read.
    """
    try:
        config = _read_object(path, CONFIG_NAME)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{path} is not a model directory: it has no {CONFIG_NAME}.{_found_instead(path)}"
        ) from None
    if config.get("quantization_config") is None and (path / QUANT_CONFIG_NAME).is_file():
        stated = _read_object(path, QUANT_CONFIG_NAME)
        config["quantization_config"] = {**stated, "quant_method": "modelopt"}
    return config


def check_merged(path: Path, names: Iterable[str]) -> None:
    """Check that the tensors of a model directory are not those of an adapter, by the names that PEFT gives.

    Raises:
        UsageError: one is.
    """
    found = next((name for name in names if name.startswith(_ADAPTER_TENSORS)), None)
    if found is not None:
        raise UsageError(
            f"{path} holds the tensor '{found}' of an adapter that is not merged: {_MERGE}, and name the "
            "merged model."
        )


def adapter_note(path: Path) -> str | None:
    """Return the note on an adapter in the directory of a model, whose weights do without it; None where
    there is none."""
    if not (path / ADAPTER_CONFIG_NAME).is_file():
        return None
    return (
        f"{path} also holds {ADAPTER_CONFIG_NAME}, and its adapter is left out: where the weights beside it "
        f"do not contain it, {_MERGE}."
    )


def _found_instead(path: Path) -> str:
    """Return a sentence about what a directory without a config holds, empty where nothing is recognized."""
    if (path / ADAPTER_CONFIG_NAME).is_file():
        return f" Its {ADAPTER_CONFIG_NAME} is that of an adapter: {_MERGE}, and name the merged model."
    if (path / "snapshots").is_dir():
        return (
            " It is a repository of the Hugging Face cache: name the directory of a commit in its snapshots/,"
            " or hf://org/name."
        )
    if pickles := sorted(each.name for each in path.glob("*.bin")):
        return (
            f" Its {pickles[0]} is a pickle, which is never opened here; a model is {CONFIG_NAME} and "
            "safetensors."
        )
    return note_on_run(path)


def _read_object(path: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file of a model directory.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        UsageError, StorageError: as `read_config` states.
    """
    file = path / name
    try:
        check_within(path, file)
        config = read_json(file, max_bytes=MAX_CONFIG_BYTES, spells_constants=True)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except Malformed as error:
        raise UsageError(f"{file} is not valid JSON: {error}.") from None
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror or error}.") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file} is not a JSON object.")
    return config

"""Facts that a candidate states: by its manifest, or by its own config where another program made it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.data.tokenizer import load_tokenizer
from compress.errors import UsageError
from compress.export import FORMATS, open_checkpoint
from compress.export.conversion import scheme_of
from compress.models.config_file import read_config
from compress.models.quantization_config import quant_method
from compress.quant.model_scheme import ModelScheme


@dataclass(frozen=True)
class CandidateFacts:
    """The scheme (None: dense), the name of the checkpoint format where one is stated, and facts of the KV
    cache. `foreign`: there is no manifest, so that another program may have made the checkpoint.
    """

    scheme: ModelScheme | None
    format: str | None
    kv_cache: Mapping[str, Any]
    foreign: bool = False


def candidate_facts(path: Path) -> CandidateFacts:
    """Return the facts of an artifact by its manifest, and those of a checkpoint without one by its config.

    Raises:
        UnsupportedArch, UnsupportedFormat: a checkpoint without a manifest is not understood wholly.
    """
    if (path / MANIFEST_NAME).exists():
        manifest = open_artifact(path).manifest
        scheme = None if manifest.scheme is None else ModelScheme.from_json(manifest.scheme)
        return CandidateFacts(scheme, manifest.facts.get("format"), manifest.facts.get("kv_cache", {}))
    weights = open_checkpoint(path)
    method = quant_method(read_config(path))
    named = [name for name, each in FORMATS.items() if each.quant_method == method]
    return CandidateFacts(scheme_of(weights), named[0] if named else method, {}, foreign=True)


def check_tokenizer(source: Path, candidate: Path) -> None:
    """Check that a candidate with a tokenizer of its own gives every id the meaning that the source gives it.

    Raises:
        UsageError: an id means another text; scores on the source's tokens would mean nothing.
    """
    if not (candidate / "tokenizer.json").exists():
        return
    ours, theirs = (load_tokenizer(path)[0].get_vocab(with_added_tokens=True) for path in (source, candidate))
    wrong = sorted(word for word in ours.keys() & theirs.keys() if ours[word] != theirs[word])
    if wrong or not ours.keys() & theirs.keys():
        shown = (
            f"'{wrong[0]}' is {ours[wrong[0]]} there and {theirs[wrong[0]]} here" if wrong else "all differ"
        )
        raise UsageError(
            f"{candidate} has another tokenizer than its source {source} ({shown}): it was not made from "
            "this model. Name its own source."
        )

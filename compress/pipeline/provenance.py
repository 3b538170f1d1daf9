"""Provenance of an artifact: where, when, from what and with what it was made. It is kept outside the
artifact, which must not depend on it.

`provenance.json` has the facts; `provenance.slsa.json` (slsa.py) and `bom.cdx.json` (bom.py) are the same
facts in the forms that other tools read.
"""

import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compress
from compress.artifact.manifest import Artifact
from compress.digest import digest_file
from compress.pipeline.texts import Text, texts_read
from compress.plugins import installed_version
from compress.registry.model_source import ModelSource

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "compressed-tensors", "numpy")
_TIME = "%Y-%m-%dT%H:%M:%S%z"


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run: the recipe's file, its resolved form (pipeline.steps.lock_of), the texts that its
    stages read, and when it began.
    """

    recipe_file: Path
    resolved: Mapping[str, Any]
    texts: Sequence[Text]
    started: str
    case: str | None = None
    """The case of the recipe's matrix."""


def now() -> str:
    """Return the local time with its offset from UTC."""
    return time.strftime(_TIME)


def provenance(
    inputs: Inputs, source: ModelSource, made: Mapping[str, Artifact], *, pulled: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the document for the artifacts that the stages made; stages that were `pulled` from a cache were
    made elsewhere.
    """
    of_case = {} if inputs.case is None else {"case": inputs.case}
    uri = _uri(inputs.resolved["model"])
    return {
        "schema": 1,
        "tool": {"compress": compress.__version__},
        "libraries": {name: installed_version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": ["compress", *sys.argv[1:]],
        "started": inputs.started,
        "finished": now(),
        "recipe": {"name": inputs.recipe_file.name, "digest": digest_file(inputs.recipe_file), **of_case},
        "parameters": {
            "model": uri or source.name,
            "seed": inputs.resolved["seed"],
            "stages": inputs.resolved["stages"],
        },
        "source": {"name": source.name, "uri": uri, "revision": source.revision, "digest": source.digest},
        "texts": texts_read(inputs.texts, made),
        "artifacts": {stage: artifact.digest for stage, artifact in made.items()},
        **({"pulled": list(pulled)} if pulled else {}),
    }


def _uri(model: Any) -> str | None:
    """Return the resolved model of a recipe where it is a URI; None for a directory, whose path on this
    machine means nothing elsewhere.
    """
    ref = str(model["ref"] if isinstance(model, Mapping) else model)
    return ref if "://" in ref else None

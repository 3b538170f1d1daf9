"""Provenance of an artifact: where, when and with what it was made. It is kept outside the artifact, which
must not depend on it.
"""

import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import compress
from compress.digest import digest_file
from compress.plugins import installed_version
from compress.registry.model_source import ModelSource

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "compressed-tensors", "numpy")


def provenance(
    recipe_file: Path,
    source: ModelSource,
    digests: Mapping[str, str],
    *,
    case: str | None = None,
    pulled: Sequence[str] = (),
) -> dict[str, Any]:
    """Return where, when, with what, and from which recipe and source the artifacts were made; `case` is that
    of the recipe's matrix; stages that were `pulled` from a cache were made elsewhere.
    """
    of_case = {} if case is None else {"case": case}
    return {
        "schema": 1,
        "tool": {"compress": compress.__version__},
        "libraries": {name: installed_version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": ["compress", *sys.argv[1:]],
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "recipe": {"name": recipe_file.name, "digest": digest_file(recipe_file), **of_case},
        "source": {"name": source.name, "revision": source.revision, "digest": source.digest},
        "artifacts": dict(digests),
        **({"pulled": list(pulled)} if pulled else {}),
    }

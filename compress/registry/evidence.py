"""The seal of a directory of evidence (`evidence.json`): which files it has, and their digests.

    {"schema": 1, "files": {"report.json": "sha256:...", ...}, "digest": "sha256:..."}

`digest` is that of `files` as canonical JSON, and the digest of the evidence. Push and pull check all.
"""

import json
from pathlib import Path
from typing import Any

from compress.artifact.atomic import write_atomic
from compress.artifact.manifest import file_names
from compress.digest import digest_file, digest_json
from compress.errors import StorageError
from compress.untrusted.parse import Malformed, read_json

SEAL_NAME = "evidence.json"
_REPORT_NAME = "report.html"
_MAX_BYTES = 1 << 20


def seal_evidence(directory: Path) -> None:
    """Write the seal of all files of a directory."""
    files = _digests(directory)
    document = {"schema": 1, "files": files, "digest": digest_json(files)}
    write_atomic(directory / SEAL_NAME, (json.dumps(document, indent=1) + "\n").encode())


def sealed_names(directory: Path) -> set[str]:
    """Return the names that the seal of a directory lists, as far as it can be read."""
    try:
        document = read_json(directory / SEAL_NAME, max_bytes=_MAX_BYTES)
    except (Malformed, StorageError, OSError):
        return set()
    files = document.get("files") if isinstance(document, dict) else None
    return set(files) if isinstance(files, dict) else set()


def check_evidence(directory: Path) -> None:
    """Compare evidence with its seal. A directory with other files than a run writes needs none.

    Raises:
        StorageError: a file was changed, added or removed since the evidence was written.
    """
    path = directory / SEAL_NAME
    advice = "write the evidence again with `compress run RECIPE --from validate` or `compress validate`."
    if not path.exists():
        if (directory / _REPORT_NAME).exists():
            raise StorageError(f"{directory} has {_REPORT_NAME} and lacks {SEAL_NAME}; {advice}")
        return
    try:
        document: Any = read_json(path, max_bytes=_MAX_BYTES)
    except Malformed as error:
        raise StorageError(f"{path} is damaged ({error}); {advice}") from None
    fields = document if isinstance(document, dict) else {}
    sealed = fields.get("files")
    if fields.keys() != {"schema", "files", "digest"} or not isinstance(sealed, dict):
        raise StorageError(f"{path} is damaged: it is not a seal of evidence; {advice}")
    if fields["schema"] != 1:
        raise StorageError(f"{path} has schema {fields['schema']}, and 1 is read here; {advice}")
    if digest_json(sealed) != fields["digest"]:
        raise StorageError(f"{path} is damaged: its list of files does not have its digest; {advice}")
    found = _digests(directory)
    for name in sorted(sealed.keys() | found.keys()):
        if name not in found:
            raise StorageError(f"{directory} lacks '{name}', which its {SEAL_NAME} lists; {advice}")
        if name not in sealed:
            raise StorageError(f"{directory} has '{name}', which its {SEAL_NAME} does not list; {advice}")
        if found[name] != sealed[name]:
            raise StorageError(f"{directory / name} has changed since the evidence was written; {advice}")


def _digests(directory: Path) -> dict[str, str]:
    return {name: digest_file(directory / name) for name in file_names(directory) if name != SEAL_NAME}

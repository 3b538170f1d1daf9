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
_MAX_BYTES = 1 << 20


def seal_evidence(directory: Path) -> str:
    """Write the seal of all files of a directory and return the digest of the evidence."""
    files = _digests(directory)
    digest = digest_json(files)
    document = {"schema": 1, "files": files, "digest": digest}
    write_atomic(directory / SEAL_NAME, (json.dumps(document, indent=1) + "\n").encode())
    return digest


def check_evidence(directory: Path) -> str | None:
    """Return the digest of the evidence in a directory, None where it has no seal.

    Raises:
        StorageError: a file was changed, added or removed since the evidence was written.
    """
    path = directory / SEAL_NAME
    if not path.exists():
        return None
    advice = "write the evidence again with `compress run RECIPE --from validate` or `compress validate`."
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
    return str(fields["digest"])


def _digests(directory: Path) -> dict[str, str]:
    return {name: digest_file(directory / name) for name in file_names(directory) if name != SEAL_NAME}

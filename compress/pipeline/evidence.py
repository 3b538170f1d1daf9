"""The evidence of a model that a person names: a report, a directory of evidence or of a run, an artifact of
a run, or a registry reference with evidence attached.
"""

import tempfile
from pathlib import Path
from typing import Any

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.errors import UsageError
from compress.registry.evidence import check_evidence
from compress.registry.protocol import REGISTRIES
from compress.registry.transfer import pull_evidence
from compress.untrusted.parse import Malformed, read_json

REPORT_NAME = "report.json"
EVIDENCE_FOLDER = "evidence"
_MAX_REPORT_BYTES = 256 << 20


def read_report(file: Path) -> Any:
    """Return the JSON of a report; what lies in it is not checked.

    Raises:
        UsageError: it is not JSON.
        StorageError: it cannot be read.
    """
    try:
        return read_json(file, max_bytes=_MAX_REPORT_BYTES)
    except Malformed as error:
        raise UsageError(f"{file} is not JSON: {error}.") from None


def read_evidence_of(ref: str) -> Any | None:
    """Return the report of a model, after its directory was compared with its seal; None where there is a
    model and no evidence of it.

    Raises:
        UsageError: there is nothing of that name, or it is neither evidence nor a model.
        StorageError: evidence was changed since it was written, or cannot be read.
    """
    scheme, separator, _ = ref.partition("://")
    if separator and scheme in REGISTRIES.names():
        with tempfile.TemporaryDirectory() as scratch:
            return read_report(pull_evidence(ref, Path(scratch) / EVIDENCE_FOLDER) / REPORT_NAME)
    if separator:
        return None
    path = Path(ref)
    if path.is_file():
        return read_report(path)
    if not path.is_dir():
        raise UsageError(f"{path} does not exist (looked from {Path.cwd()}).")
    for directory in (path, path / EVIDENCE_FOLDER):
        if (directory / REPORT_NAME).is_file():
            check_evidence(directory)
            return read_report(directory / REPORT_NAME)
    return _evidence_beside(path) if (path / MANIFEST_NAME).is_file() else None


def _evidence_beside(artifact: Path) -> Any | None:
    """Return the report of the run that an artifact lies in (`<run>/artifacts/<stage>`), where it is about
    this artifact."""
    directory = artifact.absolute().parent.parent / EVIDENCE_FOLDER
    if not (directory / REPORT_NAME).is_file():
        return None
    check_evidence(directory)
    report = read_report(directory / REPORT_NAME)
    about = report.get("artifact") if isinstance(report, dict) else None
    digest = open_artifact(artifact).digest
    return report if isinstance(about, dict) and about.get("digest") == digest else None

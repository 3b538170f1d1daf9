"""The directory of one recipe's runs: the lock, the evidence, the log, and links to the artifacts in the workspace.

recipe.lock.yaml   the recipe with everything resolved      evidence/     report.html report.json README.md provenance.json
run.log            one line per stage and run               artifacts/    a link per stage
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.artifact.atomic import write_atomic
from compress.artifact.manifest import MANIFEST_NAME, Artifact

LOCK_NAME = "recipe.lock.yaml"
_LOCK_HEADER = "# Written by `compress run`: the recipe with every default and moving name resolved. `compress resume` runs it.\n"


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def lock(self) -> Path:
        return self.path / LOCK_NAME

    @property
    def evidence(self) -> Path:
        return self.path / "evidence"

    @property
    def report(self) -> Path:
        return self.evidence / "report.html"

    def write_lock(self, document: Mapping[str, Any]) -> None:
        from compress.recipe import dump_yaml

        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.lock, (_LOCK_HEADER + dump_yaml(dict(document))).encode())

    def write_evidence(self, artifact: Artifact, provenance: Mapping[str, Any]) -> None:
        """Copy what validation wrote and add where, when and with what it was measured."""
        self.evidence.mkdir(parents=True, exist_ok=True)
        for record in artifact.manifest.files:
            if record.path != MANIFEST_NAME:
                write_atomic(self.evidence / record.path, artifact.file(record.path).read_bytes())
        document = json.dumps(dict(provenance), indent=1, ensure_ascii=False) + "\n"
        write_atomic(self.evidence / "provenance.json", document.encode())

    def link(self, kind: str, artifact: Artifact) -> Path:
        """Point `artifacts/<kind>` to an artifact of the workspace, in one step."""
        folder = self.path / "artifacts"
        folder.mkdir(parents=True, exist_ok=True)
        link, fresh = folder / kind, folder / f".{kind}.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(os.path.relpath(artifact.path, folder))
        os.replace(fresh, link)
        return link

    def log(self, line: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with (self.path / "run.log").open("a", encoding="utf-8") as stream:
            stream.write(f"{stamp} {line}\n")

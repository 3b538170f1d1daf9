"""The directory of one recipe's runs: the lock, the evidence, the log, and links to the artifacts in the
workspace.

recipe.lock.yaml   the recipe with everything resolved
evidence/          report.html, report.json, README.md, provenance.json, provenance.slsa.json, bom.cdx.json
run.log            one line for each stage and run
artifacts/         a link for each stage, and next to it the signature of what was pushed
published.json     where the last push put the artifact, by digest, and by commit on a hub
workspace          a link to the workspace of the last run, where `compress resume` goes on
run.lock           held by the run that is active, and its process
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.artifact.atomic import write_atomic
from compress.artifact.lock import locked
from compress.artifact.manifest import LINKS_NAME, Artifact, file_names
from compress.artifact.seal import STORE
from compress.artifact.workspace import Workspace
from compress.digest import digest_bytes
from compress.errors import LockHeld, StorageError
from compress.registry.evidence import SEAL_NAME, check_evidence, seal_evidence, sealed_names
from compress.stages import STAGES
from compress.untrusted.files import append_text, read_bytes, read_text
from compress.untrusted.parse import Malformed, read_json
from compress.untrusted.text import one_line

LOCK_NAME = "recipe.lock.yaml"
EVIDENCE_NAMES = frozenset({"report.html", "report.json", "README.md"})
"""Files of evidence that may be there without their seal, where a kill came between."""
PROVENANCE_NAME = "provenance.json"
SLSA_NAME = "provenance.slsa.json"
BOM_NAME = "bom.cdx.json"
_WRITTEN_NAMES = frozenset({PROVENANCE_NAME, SLSA_NAME, BOM_NAME, SEAL_NAME})
"""Files of evidence that no stage makes, written for the run."""
_LOCK_HEADER = (
    "# Written by `compress run`: the recipe with every default and moving name resolved. "
    "`compress resume` runs it.\n"
)
_LOCK_MODEL = "# Its model has the digest "
_LOCK_END = b"# The text above has the digest "
_MAX_LOCK_BYTES = 1 << 20


def _lock_end(body: bytes) -> bytes:
    return _LOCK_END + digest_bytes(body).encode() + b"\n"


@dataclass(frozen=True)
class RunDir:
    """The directory of one recipe's runs."""

    path: Path

    @classmethod
    def for_recipe(
        cls, recipe_file: Path, case: str | None = None, *, parent: Path = Path("runs")
    ) -> "RunDir":
        """Return the default directory of a recipe: `runs/<name of the file>`, with `-<case>` for a case of
        its matrix.
        """
        name = recipe_file.name.removesuffix(".yaml").removesuffix(".yml")
        return cls(parent / (name if case is None else f"{name}-{case}"))

    @property
    def lock(self) -> Path:
        return self.path / LOCK_NAME

    @property
    def evidence(self) -> Path:
        return self.path / "evidence"

    @property
    def report(self) -> Path:
        return self.evidence / "report.html"

    @property
    def workspace(self) -> Path | None:
        """The workspace of the last run; None when it is gone or there was no run."""
        link = self.path / "workspace"
        return Path(os.path.relpath(link.resolve())) if link.is_dir() else None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Be the only run of this directory while the block runs.

        Raises:
            LockHeld: another one is active; the message names its process.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / "run.lock"
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(file))
            except BlockingIOError as error:
                who = read_text(file, max_bytes=1 << 12).strip() or "another process"
                raise LockHeld(
                    f"the run directory {self.path} is in use by {one_line(who)}; wait for that run to end "
                    f"or stop it, or give this run another --run-dir."
                ) from error
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
            yield
            file.write_text("")

    def write_lock(self, document: Mapping[str, Any], *, model_digest: str) -> None:
        from compress.recipe import dump_yaml

        self.path.mkdir(parents=True, exist_ok=True)
        body = f"{_LOCK_HEADER}{_LOCK_MODEL}{model_digest}\n{dump_yaml(dict(document))}".encode()
        write_atomic(self.lock, body + _lock_end(body))

    def check_lock(self) -> None:
        """Check that the lock is as a run wrote it.

        Raises:
            StorageError: it is not.
        """
        content = read_bytes(self.lock, max_bytes=_MAX_LOCK_BYTES)
        body, _, _ = content.rpartition(_LOCK_END)
        if content != body + _lock_end(body):
            raise StorageError(
                f"{self.lock} has changed since it was written, so it does not say what was run. Run the "
                "recipe itself again with `compress run`."
            )

    def check_model(self, digest: str) -> None:
        """Check that the model is the one that the lock was written for.

        Raises:
            StorageError: it has another digest. A lock of an earlier version states none.
        """
        text = read_text(self.lock, max_bytes=_MAX_LOCK_BYTES)
        stated = [line for line in text.splitlines() if line.startswith(_LOCK_MODEL)]
        if stated and stated[0] != _LOCK_MODEL + digest:
            before = stated[0].removeprefix(_LOCK_MODEL)
            raise StorageError(
                f"the model has changed since {self.lock} was written: its digest is {digest} and was "
                f"{before}. Restore the model, or run the recipe itself again with `compress run`."
            )

    def check(self) -> None:
        """Check, before any work, that what a run will write replaces nothing of somebody else's.

        Raises:
            StorageError: the directory of evidence is a link, or has a file that no run wrote; or something
                has the name of a directory or link that a run makes.
        """
        if self.evidence.is_symlink():
            raise StorageError(f"{self.evidence} is a link; remove it, so that a directory can be made.")
        for place in (self.evidence, self.path / LINKS_NAME):
            if os.path.lexists(place) and not place.is_dir():
                raise StorageError(f"{place} is no directory; move it elsewhere, so that one can be made.")
        for kind in STAGES.names():
            _check_free(self.link_of(kind))
        if self.evidence.is_dir():
            self._leftover_evidence()

    def write_evidence(self, artifact: Artifact, documents: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy what validation wrote, add the JSON documents of the run by their names, and seal all of it.

        Raises:
            StorageError: a file of the artifact has changed, or there is one that no run wrote.
        """
        self.evidence.mkdir(parents=True, exist_ok=True)
        self.check()
        for name in self._leftover_evidence() - {record.path for record in artifact.manifest.files}:
            (self.evidence / name).unlink()
        for record in artifact.manifest.files:
            data = read_bytes(artifact.file(record.path), max_bytes=record.size_bytes)
            if digest_bytes(data) != record.digest:
                raise StorageError(
                    f"{artifact.file(record.path)} has changed since it was stored; run the recipe again."
                )
            write_atomic(self.evidence / record.path, data)
        for name in _WRITTEN_NAMES - documents.keys() - {SEAL_NAME}:
            (self.evidence / name).unlink(missing_ok=True)
        for name, document in documents.items():
            text = json.dumps(dict(document), indent=1, ensure_ascii=False) + "\n"
            write_atomic(self.evidence / name, text.encode())
        seal_evidence(self.evidence)

    def write_published(self, document: Mapping[str, Any]) -> None:
        """Write where a push put the artifact. The evidence is sealed and pushed before the commit exists, so
        it cannot hold this.
        """
        text = json.dumps({"schema": 1, **document}, indent=1, ensure_ascii=False) + "\n"
        write_atomic(self.path / "published.json", text.encode())

    def _leftover_evidence(self) -> set[str]:
        """Return the files of the directory of evidence, all of them of an earlier run."""
        names = set(file_names(self.evidence)) - _WRITTEN_NAMES
        known = sealed_names(self.evidence) | EVIDENCE_NAMES
        for name in sorted(names - known):
            if not name.endswith(".tmp"):  # what a killed run was writing
                raise StorageError(
                    f"{self.evidence / name} is not part of the evidence; move it elsewhere, because all of "
                    "that directory is pushed."
                )
        return names

    def linked(self, root: Path) -> set[str]:
        """Return the keys of the results in a workspace that this directory links."""
        store = (root / STORE).resolve()
        links = (self.path / LINKS_NAME).glob("*") if (self.path / LINKS_NAME).is_dir() else ()
        targets = [link.resolve() for link in links]
        return {target.name for target in targets if target.parent == store}

    def link_of(self, kind: str) -> Path:
        """Return the place of the link to the artifact that a stage made."""
        return self.path / LINKS_NAME / kind

    def link(self, kind: str, artifact: Artifact) -> None:
        """Point `artifacts/<kind>` to an artifact of the workspace."""
        _point(self.link_of(kind), artifact.path)

    def link_workspace(self, root: Path) -> None:
        """Link the workspace, where a resumed run finds what is built, and register this directory there, so
        that nothing which it links is collected. A workspace that lies there itself needs no link.

        Raises:
            StorageError: another directory lies there.
        """
        link = self.path / "workspace"
        if link.is_symlink() or link.resolve() != root.resolve():
            _check_free(link)
            _point(link, root)
        Workspace(root).register_run(self.path)

    def provenance_of(self, digests: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the provenance in this directory, if it is about these artifacts, as it was sealed and of
        the form that is written now.
        """
        try:
            check_evidence(self.evidence)
            document = read_json(self.evidence / PROVENANCE_NAME)
        except (OSError, Malformed, StorageError):  # none yet, or damaged: it is written anew
            return None
        if not isinstance(document, dict) or document.get("artifacts") != dict(digests):
            return None
        return document if "texts" in document else None

    def log(self, line: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        append_text(self.path / "run.log", f"{stamp} {one_line(line)}\n")


def _check_free(link: Path) -> None:
    """Raise StorageError where a directory, which a rename cannot replace, has the name of a link."""
    if link.is_dir() and not link.is_symlink():
        raise StorageError(f"{link} is a directory; move it elsewhere, because the run makes a link there.")


def _point(link: Path, target: Path) -> None:
    """Set a relative link in one step. Both ends are resolved first: a path through another link has another
    parent than it spells.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))
    os.replace(fresh, link)

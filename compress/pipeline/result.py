"""The result of one job of the pipeline: the artifact, the gates, where the report is, what was pushed, and
the exit code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compress.artifact.manifest import Artifact
from compress.errors import GateFailed
from compress.pipeline.run import RunResult
from compress.pipeline.run_dir import RunDir
from compress.registry.transfer import PushResult
from compress.stages import Port

Status = Literal["done", "unchanged", "stopped", "gate_failed"]


@dataclass(frozen=True)
class Result:
    """The outcome of running a recipe.

    `status`: "done"; "unchanged" where `if_changed` found nothing to do; "stopped" after the stage named by
    `until`; "gate_failed" where the artifact is kept and was not pushed. `path` is the directory of the
    artifact, None where the recipe made none. `run` has every stage's artifact, `run_dir` the report and the
    lock file of this recipe.
    """

    status: Status
    path: Path | None
    run: RunResult
    run_dir: RunDir
    pushed: PushResult | None
    seconds: float

    @property
    def artifact(self) -> Artifact | None:
        """The checkpoint, or the quantized weights where nothing was exported; None where there is neither."""
        return self.run.latest(Port.CHECKPOINT) or self.run.latest(Port.QUANTIZED)

    @property
    def digest(self) -> str | None:
        """The artifact's digest, `sha256:<hex>`."""
        return None if self.artifact is None else self.artifact.digest

    @property
    def size_bytes(self) -> int | None:
        """Bytes of all the artifact's files."""
        return None if self.artifact is None else self.artifact.size_bytes

    @property
    def gates(self) -> list[dict[str, Any]]:
        """The gates as validation decided them: name, relation, limit, value, bound, note, and passed (None
        where there is no evidence).
        """
        return self.run.gates

    @property
    def warnings(self) -> list[str]:
        """Warnings of validation, one sentence each."""
        return self.run.warnings

    @property
    def report(self) -> Path | None:
        """The file report.html of this run, with report.json in the same directory; None without a `validate`
        stage.
        """
        has_report = self.run.latest(Port.EVIDENCE) is not None and self.run_dir.report.is_file()
        return self.run_dir.report if has_report else None

    @property
    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        """The facts in the manifest of each stage's artifact, by stage: errors of layers, sizes, settings."""
        return {each.kind: each.artifact.manifest.facts for each in self.run.steps}

    @property
    def exit_code(self) -> int:
        """The exit code of `compress run`: 0, or 3 where a gate failed."""
        return GateFailed.exit_code if self.status == "gate_failed" else 0

    def as_json(self) -> dict[str, Any]:
        """Return the document that `compress run --json` prints."""
        source = self.run.source
        pushed = self.pushed
        artifact = {"digest": self.digest, "path": str(self.path), "size_bytes": self.size_bytes}
        return {
            "status": self.status,
            "artifact": artifact if self.artifact is not None else None,
            "source": {"name": source.name, "revision": source.revision, "digest": source.digest},
            "stages": [
                {
                    "kind": each.kind,
                    "cached": each.cached,
                    "seconds": round(each.seconds, 3),
                    "digest": each.artifact.digest,
                }
                for each in self.run.steps
            ],
            "gates": self.gates,
            "report": None if self.report is None else str(self.report),
            "pushed": None
            if pushed is None
            else {"name": pushed.name, "tags": list(pushed.tags), "manifest": pushed.manifest_digest},
            "seconds": round(self.seconds, 3),
        }


def result_of(
    status: Status, run: RunResult, run_dir: RunDir, *, pushed: PushResult | None, seconds: float
) -> Result:
    """Return the result whose artifact is where the workspace keeps it."""
    artifact = run.latest(Port.CHECKPOINT) or run.latest(Port.QUANTIZED)
    return Result(status, None if artifact is None else artifact.path, run, run_dir, pushed, seconds)

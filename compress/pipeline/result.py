"""The result of one job of the pipeline: the artifact, the gates, where the report is, what was pushed, and
the exit code.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from compress.artifact.manifest import Artifact
from compress.errors import GateFailed, UsageError
from compress.pipeline.promote import Challenge
from compress.pipeline.run import RunResult
from compress.pipeline.run_dir import RunDir
from compress.registry.transfer import PushResult
from compress.stages import Port

Status = Literal["done", "unchanged", "stopped", "gate_failed"]


@dataclass(frozen=True)
class Result:
    """The outcome of running a recipe.

    `status`: "done"; "unchanged" where `if_changed` found nothing to do; "stopped" after the stage named by
    `until`; "gate_failed" where the artifact is kept and was not pushed. `run` has every stage's artifact,
    `run_dir` the report and the lock file of this recipe; `copy` is where the artifact was copied to, if
    anywhere. `champion` is the outcome against what an alias held, where the recipe's push has such gates.
    """

    status: Status
    run: RunResult
    run_dir: RunDir
    pushed: PushResult | None
    seconds: float
    copy: Path | None = None
    champion: Challenge | None = None

    @property
    def made(self) -> Artifact | None:
        """The checkpoint, or the quantized weights without an export; None where there is neither."""
        return self.run.latest(Port.CHECKPOINT) or self.run.latest(Port.QUANTIZED)

    @property
    def artifact(self) -> Artifact:
        """The artifact in the workspace: the checkpoint, or the quantized weights without an export.

        Raises:
            UsageError: the run ended before there was one.
        """
        if self.made is None:
            raise UsageError(
                f"this run ({self.status}) made no artifact: its recipe neither quantizes nor exports, or it "
                "stopped before."
            )
        return self.made

    @property
    def path(self) -> Path:
        """The directory of the artifact: the copy, where there is one. Raises UsageError as `artifact`."""
        return self.copy or self.artifact.path

    @property
    def digest(self) -> str:
        """The artifact's digest, `sha256:<hex>`. Raises UsageError as `artifact`."""
        return self.artifact.digest

    @property
    def size_bytes(self) -> int:
        """Bytes of all the artifact's files. Raises UsageError as `artifact`."""
        return self.artifact.size_bytes

    @property
    def gates(self) -> list[dict[str, Any]]:
        """The gates as validation and the comparison with a champion decided them: name, relation, limit,
        value, bound, note, and passed (None where there is no evidence).
        """
        champion = [] if self.champion is None else [asdict(each) for each in self.champion.gates]
        return [*self.run.gates, *champion]

    @property
    def warnings(self) -> list[str]:
        """Warnings of validation, or of the checkpoint where nothing was measured, one sentence each."""
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
        made = self.made
        return {
            "status": self.status,
            "artifact": None
            if made is None
            else {"digest": made.digest, "path": str(self.path), "size_bytes": made.size_bytes},
            "source": {"name": source.name, "revision": source.revision, "digest": source.digest},
            "stages": [
                {
                    "kind": each.kind,
                    "cached": each.cached,
                    "pulled": each.pulled,
                    "seconds": round(each.seconds, 3),
                    "digest": each.artifact.digest,
                }
                for each in self.run.steps
            ],
            "gates": self.gates,
            **({} if self.champion is None else {"champion": _champion_json(self.champion)}),
            "report": None if self.report is None else str(self.report),
            "pushed": None
            if pushed is None
            else {"name": pushed.name, "tags": list(pushed.tags), "manifest": pushed.manifest_digest},
            "seconds": round(self.seconds, 3),
        }


def _champion_json(found: Challenge) -> dict[str, Any]:
    return {"alias": found.alias, "manifest": found.champion, "reason": found.reason}

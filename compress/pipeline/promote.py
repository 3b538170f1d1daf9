"""The push of a candidate against a champion: what an alias of the registry holds now decides whether the
candidate is pushed, and an alias that moves is moved under the condition that it did not move meanwhile.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compress.artifact.manifest import Artifact
from compress.errors import UsageError
from compress.pipeline.evidence import EVIDENCE_FOLDER, REPORT_NAME, read_report
from compress.recipe import ChampionGates
from compress.registry import stored, transfer
from compress.registry.image import Descriptor
from compress.registry.promotion import check_guarded, holder, promote
from compress.registry.protocol import Registry, open_registry
from compress.registry.ref import Ref, compose_ref
from compress.registry.signatures import KEPT, Signatures
from compress.validate.compare.champion import champion_gates
from compress.validate.compare.evidence import read_evidence
from compress.validate.gates import GateResult

DEFAULT_LIMITS: Mapping[str, float] = {"kl_increase": 0.0}


@dataclass(frozen=True)
class Place:
    """The place that an artifact is pushed to: the URL of a registry, a name in it, and aliases."""

    registry: str
    name: str
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class Challenge:
    """The outcome of a push against a champion. `pushed` is None where a gate failed: then nothing moved.

    `champion` is the digest of the manifest that held the alias; None where nothing did.
    """

    alias: str
    champion: str | None
    gates: tuple[GateResult, ...]
    reason: str
    pushed: transfer.PushResult | None

    @property
    def failed(self) -> list[GateResult]:
        """The gates that do not hold."""
        return [each for each in self.gates if not each.passed]


def challenge(
    artifact: Artifact,
    gates: ChampionGates,
    place: Place,
    *,
    evidence: Path | None,
    sign: Signatures = KEPT,
) -> Challenge:
    """Push an artifact if it is as good as the champion, by its evidence and the newest of the champion;
    `sign` is that of `push`.

    Raises:
        UsageError: there is no evidence of one of them, or the registry cannot guard an alias.
        LockHeld: another job moved the alias meanwhile; nothing was moved here.
        StorageError: the registry cannot be written.
    """
    registry = open_registry(place.registry).repository(place.name)
    alias = gates.against_alias
    check_guarded(registry, place.registry)
    ref = compose_ref(place.registry, place.name, alias)
    if evidence is None or not (evidence / REPORT_NAME).is_file():
        raise UsageError(
            f"{ref} is to be challenged, and there is no evidence of the candidate: give the directory of "
            f"evidence that has the {REPORT_NAME} of its validation."
        )
    report = read_report(evidence / REPORT_NAME)
    candidate = read_evidence(report, "the candidate")
    if candidate.digest != artifact.digest:
        raise UsageError(
            f"{evidence / REPORT_NAME} is about {candidate.digest}, and this artifact is {artifact.digest}; "
            "validate this one first."
        )
    held = holder(registry, place.name, alias)
    results: list[GateResult] = []
    if held is None:
        reason = f"nothing held {alias} before"
    elif stored.artifact_of(ref.pinned(held.digest)) == artifact.digest:
        reason = f"{alias} holds this artifact already"
    else:
        champion = read_evidence(_champion_report(ref, held), f"what {alias} holds")
        limits = gates.limits or DEFAULT_LIMITS
        results = champion_gates(candidate, champion, limits, alias=alias)
        reason = "; ".join(_words(each) for each in results)
    found = Challenge(alias, None if held is None else held.digest, tuple(results), reason, None)
    if found.failed:
        return found
    pushed = _push(registry, artifact, found, place, evidence=evidence, sign=sign)
    return Challenge(alias, found.champion, found.gates, reason, pushed)


def _push(
    registry: Registry,
    artifact: Artifact,
    found: Challenge,
    place: Place,
    *,
    evidence: Path,
    sign: Signatures,
) -> transfer.PushResult:
    def move(tags: tuple[str, ...], manifest: Descriptor) -> None:
        promote(
            registry,
            place.name,
            tags,
            manifest,
            alias=found.alias,
            expected=found.champion,
            reason=found.reason,
        )

    return transfer.push(
        registry,
        artifact,
        name=place.name,
        aliases=place.aliases,
        evidence=evidence,
        sign=sign,
        move=move,
    )


def _champion_report(ref: Ref, held: Descriptor) -> object:
    try:
        with tempfile.TemporaryDirectory() as scratch:
            directory = transfer.pull_evidence(ref.pinned(held.digest), Path(scratch) / EVIDENCE_FOLDER)
            return read_report(directory / REPORT_NAME)
    except UsageError as error:
        raise UsageError(
            f"{ref} holds an artifact that cannot be challenged: {error} `compress validate {ref} --against "
            "SOURCE --attach` measures it here and attaches the evidence."
        ) from None


def _words(result: GateResult) -> str:
    if result.value is None or result.bound is None:
        return f"{result.name}: {result.note}"
    return f"{result.name} {result.value:.4g}, bound {result.bound:.4g}, limit {result.limit:g}"

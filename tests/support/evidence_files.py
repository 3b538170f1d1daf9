"""Reports of validated models with chosen numbers, as `compress validate` writes them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.registry.evidence import seal_evidence
from compress.validate.accuracy import measure_accuracy
from compress.validate.parts import Part
from compress.validate.parts.accuracy import AccuracyPart
from compress.validate.parts.artifact import ArtifactPart
from compress.validate.parts.latency import LatencyPart
from compress.validate.parts.provenance import ProvenancePart
from compress.validate.report import build_report
from tests.support.report_parts import latency_row

MACHINE = {"device": "a processor", "device_key": "cpu", "threads": 2}
SOURCE_BYTES = 8_000_000


def digest_of(name: str) -> str:
    return f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"


def report(
    name: str,
    *,
    noise: float,
    size_bytes: int = 2_000_000,
    tpot_ms: float | None = 2.0,
    instability: str = "",
    text: str = "text",
    machine: dict[str, Any] | None = None,
    digest: str | None = None,
    num_windows: int = 12,
    task: tuple[float, float, int] | None = None,
) -> dict[str, Any]:
    """Return the report of a model whose logits differ from its source's by that much noise; another `text`
    means other tokens. `task`: share of right answers, half its interval, number of items.
    """
    seed = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
    generator = torch.Generator().manual_seed(0)
    source_VV = 2 * torch.randn(40, 40, generator=generator)
    noise_VV = torch.randn(40, 40, generator=torch.Generator().manual_seed(1))
    tokens_NS = torch.randint(40, (num_windows, 30), generator=torch.Generator().manual_seed(seed))
    accuracy = measure_accuracy(
        lambda tokens: source_VV[tokens],
        lambda tokens: (source_VV + noise * noise_VV)[tokens],
        tokens_NS,
        num_bytes=900,
    )
    sizes = [{"kind": "ffn", "source_bytes": SOURCE_BYTES, "candidate_bytes": size_bytes}]
    facts = {
        "digest": digest or digest_of(name),
        "source": "builtin://any",
        "source_digest": digest_of("source"),
        "scheme": "W4A16_G128",
        "sizes": sizes,
    }
    parts: list[Part] = [
        AccuracyPart(accuracy),
        ArtifactPart(facts),
        ProvenancePart(
            calibration={"evaluation_data": text, "evaluation_digest": digest_of(text)},
            environment=MACHINE if machine is None else machine,
        ),
    ]
    if tpot_ms is not None:
        rows = [latency_row(batch_size, tpot_ms, instability=instability) for batch_size in (1, 4)]
        parts.append(LatencyPart([latency_row(1, 4.0)], rows))
    document = build_report(title=name, parts=parts)
    if task is not None:
        document["tasks"] = {"confidence": 0.95, "rows": [_task_row(*task)]}
    return document


def _task_row(share: float, width: float, num_items: int) -> dict[str, Any]:
    """Return the row of a task `mine` with that share right of 0.8, within `width` on both sides."""
    drop = 0.8 - share
    return {
        "name": "mine",
        "metric": "accuracy",
        "num_items": num_items,
        "source": 0.8,
        "candidate": share,
        "drop": {"value": drop, "lower": drop - width, "upper": drop + width},
        "facts": {"kind": "jsonl", "digest": digest_of("items")},
    }


def write_evidence(path: Path, document: dict[str, Any]) -> Path:
    """Write a sealed directory of evidence with that report."""
    path.mkdir(parents=True)
    (path / "report.json").write_text(json.dumps(document))
    (path / "report.html").write_text("<!doctype html>")
    seal_evidence(path)
    return path


def windows(document: dict[str, Any], name: str) -> Any:
    return np.array(document["accuracy"]["windows"][name])

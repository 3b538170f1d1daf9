"""The outcome of a run as metrics, for the textfile collector of Prometheus' node_exporter.

The collector reads `*.prom` of one directory whenever it is asked, so the file is replaced in one step. One
file holds one recipe. The time of the last success is carried over from the file before, which is not
trusted: it counts only where it is a number of the past.

Text format 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/): `\\`, `"` and line feeds in
labels are escaped. Written here because the core installs without a Prometheus client.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from compress.artifact.atomic import write_atomic
from compress.errors import StorageError, UsageError
from compress.untrusted.files import read_text

STATUSES = ("done", "unchanged", "stopped", "gate_failed", "error")
SUCCESSES = ("done", "unchanged")
_MAX_BYTES = 1 << 20
_LAST_SUCCESS = "compress_run_last_success_timestamp_seconds"
_LOCK_S = 5.0
_HELP: Mapping[str, str] = {
    "compress_run_last_timestamp_seconds": "When the last run ended, in seconds since 1970.",
    _LAST_SUCCESS: "When a run last ended with status done or unchanged; 0 where none has.",
    "compress_run_duration_seconds": "How long the last run took.",
    "compress_run_exit_code": "Exit code of the last run.",
    "compress_run_status": "1 for the status of the last run, 0 for all others.",
    "compress_gate_value": "What a gate of the last run measured.",
    "compress_gate_bound": "The end of its confidence interval that was compared with the limit.",
    "compress_gate_limit": "The limit of a gate; relation tells on which side of it values are good.",
    "compress_gate_passed": "1 where a gate of the last run passed, 0 where it failed.",
}


def check_metrics_file(path: Path) -> None:
    """Check, before a run, that metrics can be written there.

    Raises:
        UsageError: the collector would not read the file, or its directory is not there.
    """
    if path.suffix != ".prom":
        raise UsageError(
            f"--metrics-file {path}: the collector reads files that end in .prom.", where="--metrics-file"
        )
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(
            f"--metrics-file {path}: name a file in a directory that exists; it is the one that "
            "node_exporter has as --collector.textfile.directory.",
            where="--metrics-file",
        )


def write_metrics(
    path: Path, document: Mapping[str, Any], *, recipe: str, seconds: float, now_s: float
) -> None:
    """Replace the file by the metrics of a run: its JSON document, how long it took, and when it ended.

    Raises:
        StorageError: another process holds the file.
        OSError: it cannot be written.
    """
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=_LOCK_S):
            before_s = last_success(path, recipe, now_s=now_s)
            text = metrics_text(document, recipe=recipe, seconds=seconds, now_s=now_s, before_s=before_s)
            write_atomic(path, text.encode())
    except Timeout:
        raise StorageError(f"another process holds {path}.", where=path) from None


def metrics_text(
    document: Mapping[str, Any], *, recipe: str, seconds: float, now_s: float, before_s: float
) -> str:
    """Return the metrics of a run as text; `before_s` is the time of the success before it, or 0."""
    status = document["status"]
    rows: dict[str, list[tuple[Mapping[str, str], float]]] = {
        "compress_run_last_timestamp_seconds": [({}, now_s)],
        _LAST_SUCCESS: [({}, now_s if status in SUCCESSES else before_s)],
        "compress_run_duration_seconds": [({}, seconds)],
        "compress_run_exit_code": [({}, document["exit_code"])],
        "compress_run_status": [({"status": each}, float(each == status)) for each in STATUSES],
    }
    for name, labels, value in _gate_rows(document.get("gates", ())):
        rows.setdefault(name, []).append((labels, value))
    lines = []
    for name, samples in rows.items():
        lines += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels({'recipe': recipe, **more})} {value!r}" for more, value in samples]
    return "\n".join(lines) + "\n"


def last_success(path: Path, recipe: str, *, now_s: float) -> float:
    """Return the time of the last success that the file holds for a recipe; 0 where there is none."""
    with contextlib.suppress(StorageError, OSError):
        start = f"{_LAST_SUCCESS}{_labels({'recipe': recipe})} "
        for line in read_text(path, max_bytes=_MAX_BYTES).splitlines():
            number = line.removeprefix(start)
            if line.startswith(start) and re.fullmatch(r"[0-9.e+]{1,40}", number):
                with contextlib.suppress(ValueError):
                    return float(number) if 0 <= float(number) <= now_s else 0.0
    return 0.0


def _gate_rows(gates: Any) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yield a sample for each number that a gate has; a gate without evidence has its limit alone."""
    for gate in gates:
        labels = {"gate": str(gate["name"])}
        for key in ("value", "bound"):
            if gate[key] is not None and math.isfinite(gate[key]):
                yield f"compress_gate_{key}", labels, float(gate[key])
        yield "compress_gate_limit", labels | {"relation": str(gate["relation"])}, float(gate["limit"])
        if gate["passed"] is not None:
            yield "compress_gate_passed", labels, float(gate["passed"])


def _labels(labels: Mapping[str, str]) -> str:
    shown = (
        '{}="{}"'.format(name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for name, value in labels.items()
    )
    return "{" + ",".join(shown) + "}"

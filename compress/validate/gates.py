"""Gates: limits that a candidate must keep before it may be published.

A metric knows which side of its limit is good; the end of its confidence interval that lies on the bad side is what is compared, so
"passed" means that the data rule out (at the interval's confidence) a broken limit, not that a lucky sample fell below it. A gate on time
names the device that it was written for and does not apply on another. A gate whose number was not measured fails: no evidence is no
permission.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compress.errors import UsageError, did_you_mean
from compress.validate.stats import Estimate

Relation = Literal["<=", ">="]


@dataclass(frozen=True)
class Metric:
    """What a gate may name: the relation that a good value has to its limit, and whether it is a property of a device."""

    relation: Relation
    per_device: bool = False


METRICS: Mapping[str, Metric] = {
    "ppl_ratio": Metric("<="),
    "bits_per_byte": Metric("<="),
    "kl_mean": Metric("<="),
    "kl_p99": Metric("<="),
    "kl_p999": Metric("<="),
    "kl_max": Metric("<="),
    "top1": Metric(">="),
    "size_ratio": Metric("<="),
    "ttft_ms_p50": Metric("<=", per_device=True),
    "ttft_ms_p95": Metric("<=", per_device=True),
    "tpot_ms_p50": Metric("<=", per_device=True),
    "tpot_ms_p95": Metric("<=", per_device=True),
    "tpot_ms_p99": Metric("<=", per_device=True),
    "itl_ms_p99": Metric("<=", per_device=True),
    "output_tokens_per_s": Metric(">=", per_device=True),
    "floor_frac": Metric(">=", per_device=True),
    "acceptance_length": Metric(">="),
    "speedup": Metric(">=", per_device=True),
}
_DEVICE_KEY = re.compile(r"cpu|cuda-sm\d{2,3}")


@dataclass(frozen=True)
class Gate:
    """One limit; `name` is a metric, or `<stage>.<metric>` for a number taken after an earlier stage."""

    name: str
    limit: float
    device: str | None  # None: anywhere

    @property
    def metric(self) -> Metric:
        return METRICS[self.name.rpartition(".")[2]]


@dataclass(frozen=True)
class GateResult:
    """`passed` is None where the gate does not apply; `bound` is the end of the interval that was compared."""

    name: str
    relation: Relation
    limit: float
    value: float | None
    bound: float | None
    passed: bool | None
    note: str


def parse_gates(raw: Mapping[str, Any], *, stages: Collection[str] = ()) -> tuple[Gate, ...]:
    """Gates of a recipe, checked before anything runs: `{ppl_ratio: 1.25, tpot_ms_p50: {cuda-sm90: 2.0, cpu: 30}}`.

    Raises:
        UsageError: an unknown metric, stage or device, a limit that is not a number, or a limit in time that does not say on which device.
    """
    gates: list[Gate] = []
    for name, limit in raw.items():
        stage, _, metric_name = name.rpartition(".")
        if metric_name not in METRICS:
            raise UsageError(
                f"gate '{name}': unknown metric '{metric_name}'.{did_you_mean(metric_name, METRICS)}"
            )
        if stage and stage not in stages:
            raise UsageError(
                f"gate '{name}': no stage '{stage}' measures anything before this gate.{did_you_mean(stage, stages)}"
            )
        if not METRICS[metric_name].per_device:
            gates.append(Gate(name, _number(name, limit), None))
            continue
        if not isinstance(limit, Mapping):
            raise UsageError(
                f"gate '{name}' depends on the device: write which one it is for, such as {name}: {{cuda-sm90: {limit}}}."
            )
        for device, device_limit in limit.items():
            if not _DEVICE_KEY.fullmatch(str(device)):
                raise UsageError(
                    f"gate '{name}': '{device}' is not a device; write cpu or cuda-sm<compute capability>, such as cuda-sm90."
                )
            gates.append(Gate(name, _number(name, device_limit), str(device)))
    return tuple(gates)


def evaluate(gates: Collection[Gate], metrics: Mapping[str, Estimate], *, device: str) -> list[GateResult]:
    """Compare every gate with what was measured on `device` (a key such as `cpu` or `cuda-sm90`)."""
    return [_evaluate(gate, metrics.get(gate.name), device=device) for gate in gates]


def _evaluate(gate: Gate, estimate: Estimate | None, *, device: str) -> GateResult:
    relation = gate.metric.relation
    if gate.device is not None and gate.device != device:
        return GateResult(
            gate.name, relation, gate.limit, None, None, None, f"not applicable here: for {gate.device}"
        )
    if estimate is None:
        return GateResult(gate.name, relation, gate.limit, None, None, False, "not measured")
    bound, within = (
        (estimate.upper, estimate.upper <= gate.limit)
        if relation == "<="
        else (estimate.lower, estimate.lower >= gate.limit)
    )
    point_within = estimate.value <= gate.limit if relation == "<=" else estimate.value >= gate.limit
    note = (
        "within the limit, but not with confidence: more data may decide it"
        if point_within and not within
        else ""
    )
    return GateResult(gate.name, relation, gate.limit, estimate.value, bound, within, note)


def _number(name: str, limit: object) -> float:
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
        raise UsageError(f"gate '{name}': the limit must be a number, not {limit!r}.")
    return float(limit)

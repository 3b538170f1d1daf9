"""Gates: limits that a candidate must keep before it may be published.

Each metric has a side of its limit that is good. What is compared with the limit is the end of the metric's
confidence interval on the bad side, so that "passed" means that the data rule out (at the interval's
confidence) a broken limit, not that a lucky sample was within it. A limit in time names the device that it
was written for and does not apply on another. No evidence is no permission: a gate whose number was not
measured fails, and so does one whose number was measured and proves nothing.
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
    """A number that gates may name: the relation that a good value has to its limit, and whether it depends
    on the device.
    """

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
    "ttft_ms_p99": Metric("<=", per_device=True),
    "tpot_ms_p50": Metric("<=", per_device=True),
    "tpot_ms_p95": Metric("<=", per_device=True),
    "tpot_ms_p99": Metric("<=", per_device=True),
    "itl_ms_p99": Metric("<=", per_device=True),
    "output_tokens_per_s": Metric(">=", per_device=True),
    "goodput": Metric(">=", per_device=True),
    "floor_frac": Metric(">=", per_device=True),
    "acceptance_length": Metric(">="),
    "speedup": Metric(">=", per_device=True),
    "accuracy_drop": Metric("<="),
}
_DEVICE_KEY = re.compile(r"cpu|cuda-sm\d{2,3}")


@dataclass(frozen=True)
class Gate:
    """One limit; `name` is a metric, or `<stage>.<metric>` for a number taken after an earlier stage or by
    one measurement of several (`load.itl_ms_p99`), or `<group>.<member>.<metric>` where the recipe names the
    members (`tasks.mine.accuracy_drop`).

    `device` None: on every device.
    """

    name: str
    limit: float
    device: str | None

    @property
    def metric(self) -> Metric:
        """The metric that the limit is for."""
        return METRICS[self.name.rpartition(".")[2]]


@dataclass(frozen=True)
class GateResult:
    """`passed` is None where the gate does not apply; `bound` is the end of the interval that was compared.

    `value` and `bound` are None where there is no evidence; `note` has the reason.
    """

    name: str
    relation: Relation
    limit: float
    value: float | None
    bound: float | None
    passed: bool | None
    note: str


def parse_gates(
    raw: Mapping[str, Any], *, stages: Collection[str] = (), groups: Collection[str] = ()
) -> tuple[Gate, ...]:
    """Return the gates of a recipe, checked before anything runs: `{ppl_ratio: 1.25, tpot_ms_p50: {cuda-sm90:
    2.0, cpu: 30}}`. Members of `groups` are not checked here.

    Raises:
        UsageError: an unknown metric, stage or device, a limit that is not a number, or a limit in time
        without its device.
    """
    gates: list[Gate] = []
    for name, limit in raw.items():
        stage, _, metric_name = name.rpartition(".")
        if metric_name not in METRICS:
            raise UsageError(
                f"gate '{name}': unknown metric '{metric_name}'.{did_you_mean(metric_name, METRICS)}"
            )
        group, _, member = stage.partition(".")
        if stage and stage not in stages and not (member and group in groups):
            raise UsageError(
                f"gate '{name}': no stage '{stage}' measures anything before this "
                f"gate.{did_you_mean(stage, stages)}"
            )
        if not METRICS[metric_name].per_device:
            gates.append(Gate(name, _number(name, limit), None))
            continue
        if not isinstance(limit, Mapping):
            raise UsageError(
                f"gate '{name}' depends on the device: write which one it is for, such as {name}: "
                f"{{cuda-sm90: {limit}}} in a recipe, or --gate {name}@cuda-sm90={limit}."
            )
        if not limit:
            raise UsageError(f"gate '{name}' has no limit; write one, such as {name}: {{cuda-sm90: 2.0}}.")
        for device, device_limit in limit.items():
            if not _DEVICE_KEY.fullmatch(str(device)):
                raise UsageError(
                    f"gate '{name}': '{device}' is not a device; write cpu or cuda-sm<compute capability>, "
                    "such as cuda-sm90."
                )
            gates.append(Gate(name, _number(name, device_limit), str(device)))
    return tuple(gates)


def evaluate(
    gates: Collection[Gate],
    metrics: Mapping[str, Estimate],
    *,
    device: str,
    unproven: Mapping[str, str] | None = None,
) -> list[GateResult]:
    """Compare every gate with what was measured on `device` (a key such as `cpu` or `cuda-sm90`).

    Args:
        unproven: metrics whose measurement proves nothing, each with the reason in words.
    """
    reasons = {} if unproven is None else unproven
    return [_evaluate(gate, metrics.get(gate.name), reasons.get(gate.name), device) for gate in gates]


def _evaluate(gate: Gate, estimate: Estimate | None, unproven: str | None, device: str) -> GateResult:
    def undecided(passed: bool | None, note: str) -> GateResult:
        return GateResult(gate.name, gate.metric.relation, gate.limit, None, None, passed, note)

    if gate.device is not None and gate.device != device:
        return undecided(None, f"not applicable here: for {gate.device}")
    if estimate is None:
        return undecided(False, "not measured")
    if unproven is not None:
        return undecided(
            False, f"no evidence: {estimate.value:.4g} was measured, but {unproven}; measure again"
        )
    if gate.metric.relation == "<=":
        bound = estimate.upper
        within = bound <= gate.limit
        value_within = estimate.value <= gate.limit
    else:
        bound = estimate.lower
        within = bound >= gate.limit
        value_within = estimate.value >= gate.limit
    note = (
        "within the limit, but not with confidence: more data may decide it"
        if value_within and not within
        else ""
    )
    return GateResult(gate.name, gate.metric.relation, gate.limit, estimate.value, bound, within, note)


def _number(name: str, limit: object) -> float:
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
        raise UsageError(f"gate '{name}': the limit must be a number, not {limit!r}.")
    return float(limit)

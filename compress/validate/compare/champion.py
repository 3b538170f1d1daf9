"""Gates on a candidate against the champion, the model that an alias of a registry holds now.

A gate limits how much worse the candidate may be, and what is compared with the limit is the bad end of the
interval of the change (`difference.py`): with a limit of no change, the data must rule out that the candidate
is worse. Where the two were not measured on the same tokens, or not on the same machine, there is no
evidence, and no evidence is no permission.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from compress.validate.compare.difference import TASKS, difference
from compress.validate.compare.evidence import Evidence
from compress.validate.gates import GateResult
from compress.validate.stats import Estimate

DROP = ".accuracy_drop"


@dataclass(frozen=True)
class Limited:
    """A change that a gate may limit from above; `turned`: a loss, the change of the metric with its sign
    turned.
    """

    metric: str
    turned: bool = False


LIMITED: Mapping[str, Limited] = {
    "kl_increase": Limited("kl_mean"),
    "ppl_ratio": Limited("ppl"),
    "top1_drop": Limited("top1", turned=True),
    "size_ratio": Limited("size_bytes"),
    "ttft_ratio": Limited("ttft_ms_p50"),
    "tpot_ratio": Limited("tpot_ms_p50"),
}


def champion_gates(
    candidate: Evidence, champion: Evidence, limits: Mapping[str, float], *, alias: str
) -> list[GateResult]:
    """Return one result for each limit, under the name `<alias>.<limit>`."""
    return [_gate(candidate, champion, name, limit, alias=alias) for name, limit in limits.items()]


def _limited(name: str) -> Limited:
    if name.startswith(TASKS):
        return Limited(name.removesuffix(DROP), turned=True)
    return LIMITED[name]


def _gate(candidate: Evidence, champion: Evidence, name: str, limit: float, *, alias: str) -> GateResult:
    facts = _limited(name)
    found = difference(facts.metric, candidate, champion)
    label = f"{alias}.{name}"
    if found.change is None:
        note = f"no evidence: {found.reason}"
        return GateResult(label, "<=", limit, None, None, passed=False, note=note)
    change = found.change
    if facts.turned:
        change = Estimate(-change.value, -change.upper, -change.lower)
    within = change.upper <= limit
    note = "" if within or change.value > limit else "within the limit, but not with confidence"
    return GateResult(label, "<=", limit, change.value, change.upper, passed=within, note=note)

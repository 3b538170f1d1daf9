"""Dominance: a model that is nowhere worse and somewhere better than another one dominates it.

A claim needs evidence in every objective that both were measured in under the same conditions: better, or
equal in every digit. One interval of a change that holds no change, and nothing is claimed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.errors import UsageError, did_you_mean
from compress.validate.compare.difference import COMPARED, TASKS, Difference, difference, is_metric
from compress.validate.compare.evidence import Evidence

OBJECTIVES = ("size_bytes", "kl_mean", "ttft_ms_p50", "tpot_ms_p50", "output_throughput")
"""The metrics that decide by default, where they were measured."""
QUALITY = ("kl_mean", "ppl", "top1")


@dataclass(frozen=True)
class Pair:
    """Two models and their differences in all objectives. `winner` dominates the other one; None where
    nothing is claimed.

    `left_out`: objectives that decide nothing here -> the reason.
    """

    one: str
    other: str
    differences: tuple[Difference, ...]
    winner: str | None
    left_out: Mapping[str, str]


def check_objectives(names: Sequence[str]) -> tuple[str, ...]:
    """Return the objectives of a person, each once.

    Raises:
        UsageError: there is no such metric, or none of them is about accuracy.
    """
    for name in names:
        if not is_metric(name):
            raise UsageError(f"unknown objective '{name}'.{did_you_mean(name, COMPARED)}")
    if not any(map(_is_quality, names)):
        raise UsageError(
            f"the objectives {', '.join(names)} say nothing about accuracy; add one of {', '.join(QUALITY)}."
        )
    return tuple(dict.fromkeys(names))


def _is_quality(metric: str) -> bool:
    return metric in QUALITY or metric.startswith(TASKS)


def compare_pair(one: Evidence, other: Evidence, objectives: Sequence[str] = OBJECTIVES) -> Pair:
    """Return the differences of two models, and who dominates if one does.

    Without a comparison of accuracy nothing is claimed, because a smaller model is no better for that alone.
    """
    measured = [name for name in objectives if name in one.readings or name in other.readings]
    differences = tuple(difference(name, one, other) for name in measured)
    decided = {each.metric: each.verdict for each in differences if each.verdict != "incomparable"}
    left_out = {each.metric: each.reason for each in differences if each.verdict == "incomparable"}
    verdicts = set(decided.values())
    winner = None
    if "undecided" not in verdicts and any(map(_is_quality, decided)):
        if "better" in verdicts and "worse" not in verdicts:
            winner = one.label
        elif "worse" in verdicts and "better" not in verdicts:
            winner = other.label
    return Pair(one.label, other.label, differences, winner, left_out)

"""Formats what `run` and `validate` print of a report: gates, and how far the artifact is from its source."""

from collections.abc import Mapping
from typing import Any

_SHOWN = ("ppl_ratio", "kl_mean", "top1")
"""The quantities of accuracy that the terminal shows, as gates name them."""


def gate_text(gate: Mapping[str, Any]) -> str:
    """Return a gate as one line: the verdict, the limit, what was measured, and the note."""
    verdict = {True: "pass", False: "FAIL", None: "n/a"}[gate["passed"]]
    measured = "" if gate["value"] is None else f"{gate['value']:.4g}, bound {gate['bound']:.4g}"
    note = f"  {gate['note']}" if gate["note"] else ""
    return f"{verdict}  {gate['name']} {gate['relation']} {gate['limit']:g}  {measured}{note}"


def accuracy_facts(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the main quantities of accuracy of a report, each as value, lower and upper end."""
    return {name: report["accuracy"][name] for name in _SHOWN}


def accuracy_texts(facts: Mapping[str, Any]) -> list[str]:
    """Return the quantities of `accuracy_facts`, each as one line with its interval."""
    return [
        f"{name}  {each['value']:.4g}, {each['lower']:.4g} to {each['upper']:.4g}"
        for name, each in facts.items()
    ]

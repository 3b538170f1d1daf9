"""The calibration tokens that the experts of each layer saw, for the log and the report.

The router decides how many tokens of a calibration text an expert sees. An expert with few is starved
(`experts.py`), so the counts tell whether the text is enough for a mixture.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from compress.calibrate.experts import ExpertPolicy
from compress.calibrate.layer_state import Row

MAX_NAMED_LAYERS = 4
"""Layers whose experts a warning names."""


def expert_facts(rows: Sequence[Row], policy: ExpertPolicy) -> dict[str, Any]:
    """Return the counts of each layer with experts from the rows of its linears, and the policy; an empty
    dictionary if no row counts the tokens of an expert.

    A layer is {layer, num_experts, fewest, median, starved, without_tokens}: `starved` counts the experts
    below `min_tokens`, `without_tokens` has the indices of those without any.
    """
    counts: dict[int, dict[int, int]] = {}
    for row in rows:
        if "tokens" in row:
            expert = int(row["linear"].split(".")[2])
            counts.setdefault(row["layer"], {})[expert] = row["tokens"]
    if not counts:
        return {}
    return {
        "min_tokens": policy.min_tokens,
        "policy": policy.starved,
        "layers": [
            {
                "layer": layer,
                "num_experts": len(tokens),
                "fewest": min(tokens.values()),
                "median": float(median(tokens.values())),
                "starved": sum(count < policy.min_tokens for count in tokens.values()),
                "without_tokens": sorted(expert for expert, count in tokens.items() if count == 0),
            }
            for layer, tokens in sorted(counts.items())
        ],
    }


def expert_summary(facts: Mapping[str, Any]) -> str:
    """Return one line for the log: the fewest tokens of an expert and the number of starved experts."""
    layers = facts["layers"]
    starved = sum(row["starved"] for row in layers)
    total = sum(row["num_experts"] for row in layers)
    fewest = min(row["fewest"] for row in layers)
    touched = sum(row["starved"] > 0 for row in layers)
    below = f"{starved} of {total} below {facts['min_tokens']}"
    where = f" in {touched} layer{'s' if touched > 1 else ''}" if touched else ""
    return f"fewest {fewest} tokens, {below}{where}, policy {facts['policy']}"


def unseen_warning(facts: Mapping[str, Any]) -> str | None:
    """Return a warning that names the experts without a calibration token, None if every expert saw one."""
    layers = [row for row in facts["layers"] if row["without_tokens"]]
    if not layers:
        return None
    unseen = sum(len(row["without_tokens"]) for row in layers)
    total = sum(row["num_experts"] for row in facts["layers"])
    named = [
        f"layer {row['layer']}: {', '.join(map(str, row['without_tokens']))}"
        for row in layers[:MAX_NAMED_LAYERS]
    ]
    if (more := len(layers) - MAX_NAMED_LAYERS) > 0:
        named.append(f"and in {more} more layer{'s' if more > 1 else ''}")
    return (
        f"{unseen} of {total} experts saw no calibration token ({'; '.join(named)}). They were quantized "
        "on the tokens of the whole layer. Calibrate on more samples, or on text closer to what the model is "
        "used for."
    )

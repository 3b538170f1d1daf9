"""The counts of tokens that experts saw: their facts, the line of the log and the warning."""

import re
from typing import Any

import pytest

from compress.calibrate.expert_tokens import expert_facts, expert_summary, unseen_warning
from compress.calibrate.experts import ExpertPolicy


def rows_of(tokens: dict[int, list[int]]) -> list[dict[str, Any]]:
    """Rows as the runner makes them: three linears an expert, and others without a count."""
    rows: list[dict[str, Any]] = [{"layer": 0, "linear": "ffn.down"}]
    for layer, counts in tokens.items():
        rows.append({"layer": layer, "linear": "moe.shared.gate"})
        rows += [
            {"layer": layer, "linear": f"moe.experts.{expert}.{name}", "tokens": count}
            for name in ("gate", "up", "down")
            for expert, count in enumerate(counts)
        ]
    return rows


def test_each_expert_is_counted_once_a_layer() -> None:
    facts = expert_facts(rows_of({2: [5, 0, 40, 0], 1: [50, 60, 70, 9]}), ExpertPolicy(40, "keep"))
    assert facts == {
        "min_tokens": 40,
        "policy": "keep",
        "layers": [
            {"layer": 1, "num_experts": 4, "fewest": 9, "median": 55.0, "starved": 1, "without_tokens": []},
            {
                "layer": 2,
                "num_experts": 4,
                "fewest": 0,
                "median": 2.5,
                "starved": 3,
                "without_tokens": [1, 3],
            },
        ],
    }
    assert expert_summary(facts) == "fewest 0 tokens, 4 of 8 below 40 in 2 layers, policy keep"
    assert "2 of 8 experts saw no calibration token (layer 2: 1, 3)" in str(unseen_warning(facts))


def test_a_text_that_reaches_every_expert_is_not_warned_of() -> None:
    facts = expert_facts(rows_of({0: [50, 60]}), ExpertPolicy(40))
    assert expert_summary(facts) == "fewest 50 tokens, 0 of 2 below 40, policy shrink"
    assert unseen_warning(facts) is None


@pytest.mark.parametrize("num_layers", [4, 5, 48])
def test_a_warning_names_few_layers(num_layers: int) -> None:
    facts = expert_facts(rows_of({idx: [0, 9] for idx in range(num_layers)}), ExpertPolicy())
    warning = str(unseen_warning(facts))
    assert warning.startswith(f"{num_layers} of {2 * num_layers} experts")
    assert re.findall(r"layer (\d)", warning) == ["0", "1", "2", "3"]
    assert ("more layer" in warning) == (num_layers > 4)


def test_a_dense_model_has_no_facts() -> None:
    assert expert_facts([{"layer": 0, "linear": "ffn.down"}], ExpertPolicy()) == {}

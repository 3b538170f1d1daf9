"""What configs of Cohere's mixtures may leave out, and what they may not ask for."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.errors import UnsupportedArch
from compress.models.family import family_of

GOLDEN = Path(__file__).parents[2] / "golden/configs/cohere.json"
NORTH = next(row["config"] for row in json.loads(GOLDEN.read_text()) if "North-Mini" in row["name"])


def read(**changes: Any) -> Any:
    config = {**NORTH, **changes}
    return family_of(config).read_config({name: each for name, each in config.items() if each != "absent"})


@pytest.mark.parametrize("width", ["absent", None])
def test_dense_layers_are_as_wide_as_experts_where_no_width_is_stated(width: str | None) -> None:
    assert read().layers[0].intermediate_size == 3072
    assert read(prefix_dense_intermediate_size=width).layers[0].intermediate_size == 768


def test_layers_that_state_no_types_follow_two_patterns() -> None:
    arch = read(layer_types="absent", first_k_dense_replace=2, prefix_dense_sliding_window_pattern=2)
    windows = [layer.window is not None for layer in arch.layers[:7]]
    assert windows == [True, False, True, True, True, False, True]
    assert [layer.rope is not None for layer in arch.layers[:7]] == windows
    assert read(layer_types="absent").layers[0].rope is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("expert_selection_fn", "sparsemax"),
        ("shared_expert_combination_strategy", "product"),
        ("num_shared_experts", 65),
    ],
)
def test_other_mixtures_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedArch, match=field):
        read(**{field: value})


def test_shared_experts_are_no_wider_than_a_manifest_states() -> None:
    with pytest.raises(UnsupportedArch, match="shared_size"):
        read(num_shared_experts=64, intermediate_size=1 << 20)

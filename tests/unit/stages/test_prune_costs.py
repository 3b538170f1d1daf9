"""The time of a decode step that a search of widths goes by, where layers are of several kinds."""

from types import SimpleNamespace
from typing import Any

import pytest

from compress.models.delta_net import DeltaNet
from compress.stages.prune import costs
from tests.support.tiny_source import tiny_shape, tiny_source


class Stub:
    """A device that moves a byte a microsecond, and whose linears take as long as they have rows."""

    bytes_per_us = 1.0

    def linear_us(self, arch: Any, group: Any, scheme: Any, *, layer_idx: int = 0) -> tuple[float, str]:
        return float(arch.layers[layer_idx].group_shape(group, arch.hidden_size)[0]), "stub"


@pytest.mark.parametrize("first", ["attention", "delta net"])
def test_each_layer_is_priced_as_what_it_is(first: str) -> None:
    attending = tiny_shape()
    recurring = tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), rope=None)
    layers = (attending, recurring) if first == "attention" else (recurring, attending)
    arch = tiny_source(layers=layers).arch
    budget: Any = SimpleNamespace(rows=3, context=100)
    of_ffn = 2 * 88 + 56
    linears = (4 + 2 + 2) * 16 + 56 + (2 * 16 + 2 * 48) + 56 + 2 * of_ffn
    cache = 2 * (2 * 2 * 16) * 100
    states = 2 * 4 * (4 * 8 * 12)
    head = 2 * 101 * 56
    assert costs._step_us(arch, budget, Stub()) == linears + head + 3 * (cache + states)

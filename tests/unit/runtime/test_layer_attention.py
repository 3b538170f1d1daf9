"""In a decode pass, only the first layer keeps attention from starting early, and mixtures of experts of many
rows; in a prefill pass every layer does."""

from itertools import groupby
from typing import Any

import pytest
import torch

from compress.models.experts import Experts
from compress.runtime import layer_attention
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.layer_attention import LayerAttention
from compress.runtime.request import Request, SamplingParams
from tests.support.tiny_source import tiny_shape, tiny_source


@pytest.mark.parametrize(
    ("mixtures", "expected"),
    [(0, [False, True, True]), (1, [False, True, False])],
    ids=["dense", "the last layer a mixture"],
)
def test_attention_starts_early_in_all_layers_of_a_decode_pass_but_the_first(
    mixtures: int, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_attention, "EARLY_MIXTURE_ROWS", 0)
    experts = Experts(4, 2, 64)
    source = tiny_source(layers=(tiny_shape(),) * (3 - mixtures) + (tiny_shape(experts=experts),) * mixtures)
    engine = Engine(source, device=torch.device("cpu"), config=EngineConfig(max_model_len=64))
    plain = LayerAttention.queries
    calls: list[bool] = []

    def spy(self: LayerAttention, *args: Any, early: bool = False) -> torch.Tensor:
        calls.append(early)
        return plain(self, *args, early=early)

    monkeypatch.setattr(LayerAttention, "queries", spy)
    engine.generate([Request("one", (5, 6, 7), SamplingParams(3, ignore_eos=True))])
    whole_passes = [calls[at : at + 3] for at in range(0, len(calls), 3)]
    assert [each for each, _ in groupby(whole_passes)] == [[False] * 3, expected]

"""In a decode pass, only the first layer keeps attention from starting early; in a prefill pass every layer
does."""

from itertools import groupby
from typing import Any

import pytest
import torch

from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.layer_attention import LayerAttention
from compress.runtime.request import Request, SamplingParams
from tests.support.tiny_source import tiny_shape, tiny_source


def test_attention_starts_early_in_all_layers_of_a_decode_pass_but_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tiny_source(layers=(tiny_shape(),) * 3)
    engine = Engine(source, device=torch.device("cpu"), config=EngineConfig(max_model_len=64))
    plain = LayerAttention.queries
    calls: list[bool] = []

    def spy(self: LayerAttention, *args: Any, is_first: bool = True) -> torch.Tensor:
        calls.append(is_first)
        return plain(self, *args, is_first=is_first)

    monkeypatch.setattr(LayerAttention, "queries", spy)
    engine.generate([Request("one", (5, 6, 7), SamplingParams(3, ignore_eos=True))])
    whole_passes = [calls[at : at + 3] for at in range(0, len(calls), 3)]
    assert [each for each, _ in groupby(whole_passes)] == [[True, True, True], [True, False, False]]

"""Layers whose norms precede their halves are served next to layers whose norms follow them (OLMo Hybrid),
and so are layers after norms without weights."""

from typing import Any

import pytest
import torch

from compress.models.delta_net import DeltaNet
from compress.models.weights import MemorySource
from compress.runtime.engine_config import EngineConfig
from compress.runtime.streamed_model import StreamedModel
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.ways_to_serve import CPU, decoded, engine_of, ids

DELTA = tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4, doubled_beta=True), rope=None)
MODELS: dict[str, dict[str, Any]] = {
    "before and after": {
        "layers": (DELTA, tiny_shape(), DELTA, DELTA, tiny_shape(rope=None)),
        "block": "post",
        "recurrent_block": "pre",
        "recurrent_norm_eps": 0.01,
        "qk_norm": True,
        "whole_qk_norm": True,
    },
    "before, and on both sides": {
        "layers": (tiny_shape(), DELTA, tiny_shape(), DELTA),
        "block": "pre",
        "recurrent_block": "sandwich",
    },
    "without weights": {"layers": (tiny_shape(), tiny_shape()), "norm": "layer", "unit_norms": True},
}
each_model = pytest.mark.parametrize("model", MODELS)


def source_of(model: str) -> MemorySource:
    return tiny_source(**MODELS[model], max_position=2048)


@each_model
def test_scores_are_those_of_the_decoder_also_where_layers_are_read_one_by_one(model: str) -> None:
    source = source_of(model)
    tokens_BS = torch.tensor([ids(75, 8), ids(75, 9)])
    with torch.inference_mode():
        found = engine_of(source).runner.score(tokens_BS)
    assert torch.allclose(found, decoded(source, tokens_BS), rtol=1e-4, atol=1e-4)
    streamed = StreamedModel(source, device=CPU, config=EngineConfig(max_model_len=512))
    assert torch.equal(torch.cat(list(streamed.score(tokens_BS, batch_size=2))), found)


@pytest.mark.parametrize("model", ["before and after", "before, and on both sides"])
def test_blocks_are_those_of_each_kind_of_layer(model: str) -> None:
    arch = source_of(model).arch
    own = {arch.block_of(layer) for layer in arch.layers if layer.attends}
    others = {arch.block_of(layer) for layer in arch.layers if not layer.attends}
    assert (own, others) == ({MODELS[model]["block"]}, {MODELS[model]["recurrent_block"]})
    assert {arch.norms_outputs(layer) for layer in arch.layers} == {True, False}

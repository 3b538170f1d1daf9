"""Layers that attend to the keys which the indexer of an earlier layer has chosen, while a model is
calibrated layer by layer: they read the choice of that layer, for each sample its own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.calibrate.samples import Samples
from compress.calibrate.side_inputs import SideInputs, choice_bytes
from compress.models.weights import WeightSource
from tests.support.tiny_decoder import tiny_tokens
from tests.support.tiny_source import LIKE_GLM5, tiny_source
from tests.unit.calibrate.streams import check_gradients, check_streams, check_walk

CPU = torch.device("cpu")
NUM_SAMPLES = 5
SEQ_LEN = 29
FEW = tuple(
    layer
    if layer.latent.indexer is None
    else replace(layer, latent=replace(layer.latent, indexer=replace(layer.latent.indexer, top_k=6)))
    for layer in LIKE_GLM5["layers"]
)


@pytest.fixture(scope="module")
def source() -> WeightSource:
    return tiny_source(**{**LIKE_GLM5, "layers": FEW})


@pytest.fixture(scope="module", name="tokens_NS")
def calibration_tokens(source: WeightSource) -> Tensor:
    return tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)


@pytest.mark.parametrize("piece_tokens", [SEQ_LEN, 2 * SEQ_LEN])
def test_layer_after_layer_the_outputs_are_those_of_the_whole_decoder(
    piece_tokens: int, source: WeightSource, tokens_NS: Tensor
) -> None:
    check_streams(source, tokens_NS, piece_tokens)


def test_gradients_layer_by_layer_are_those_of_the_whole_graph(source: WeightSource, tmp_path: Path) -> None:
    check_gradients(source, tmp_path)


def test_a_walk_ends_in_the_stream_that_the_head_reads(
    source: WeightSource, tokens_NS: Tensor, tmp_path: Path
) -> None:
    check_walk(source, tokens_NS, tmp_path)


def test_choices_are_kept_in_bits_for_each_sample_and_of_twins_apart(
    source: WeightSource, tokens_NS: Tensor
) -> None:
    inputs = SideInputs.of(source.arch, source.outer(), tokens_NS, dtype=torch.float32, device=CPU)
    twin = inputs.twin()
    chosen = torch.rand(2, 1, SEQ_LEN, SEQ_LEN, generator=torch.Generator().manual_seed(1)) > 0.5
    inputs.attention(slice(1, 3)).choices[0] = chosen
    twin.attention(slice(1, 3)).choices[0] = ~chosen
    assert torch.equal(inputs.attention(slice(2, 3)).choices[0], chosen[1:])
    assert torch.equal(twin.attention(slice(1, 2)).choices[0], ~chosen[:1])
    assert all(isinstance(each, Samples) for each in inputs.stores)
    assert [each[:].shape for each in inputs.stores] == [(NUM_SAMPLES, SEQ_LEN, 4)]


def test_short_samples_keep_no_choice(source: WeightSource) -> None:
    assert choice_bytes(source.arch, 7) == {0: 1}
    assert choice_bytes(source.arch, 6) == {}

"""Latents that several layers read, while a model is calibrated layer by layer: they are those of the whole
decoder, or of the compressed layer, and gradients at them reach the layer that makes them.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.calibrate.side_inputs import SideInputs
from compress.calibrate.stats import SecondMoment, Stat
from compress.methods.quantize.passes import RoundPass
from compress.methods.quantize.rtn import Rtn
from compress.models.attention import FullAttention
from compress.models.canonical import layer_name, load_weights
from compress.models.weights import Weights, WeightSource, build_layer
from compress.quant.scheme import QuantizedWeight
from tests.support.tiny_decoder import tiny_tokens
from tests.support.tiny_source import LIKE_LARGE4, tiny_source
from tests.unit.calibrate.test_gradients_shared import assert_same, of_whole_graph, visited
from tests.unit.calibrate.test_side_inputs import (
    COARSE,
    Look,
    assert_near,
    compress,
    decoder_of,
    outputs_of,
    outputs_of_decoder,
    run_of,
)

CPU = torch.device("cpu")
NUM_SAMPLES = 5
SEQ_LEN = 13
LAYERS = LIKE_LARGE4["layers"]
READERS = {idx: layer.kv_source for idx, layer in enumerate(LAYERS) if layer.kv_source is not None}


@pytest.fixture(scope="module")
def source() -> WeightSource:
    return tiny_source(**LIKE_LARGE4)


@pytest.fixture(scope="module", name="tokens_NS")
def calibration_tokens(source: WeightSource) -> Tensor:
    return tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)


@pytest.mark.parametrize("piece_tokens", [1, 2 * SEQ_LEN])
def test_layer_after_layer_the_stream_is_that_of_the_whole_decoder(
    piece_tokens: int, source: WeightSource, tokens_NS: Tensor
) -> None:
    run = run_of(source, tokens_NS, piece_tokens)
    found = outputs_of(source, run)
    for x_NSD, expected_NSD in zip(found, outputs_of_decoder(decoder_of(source), tokens_NS), strict=True):
        assert_near(x_NSD, expected_NSD)
    assert run.side_inputs is not None
    assert {idx: each[:].shape[-1] for idx, each in run.side_inputs.kept.items()} == {0: 28, 2: 20}


def test_what_is_kept_are_the_latents_of_the_whole_decoder(source: WeightSource, tokens_NS: Tensor) -> None:
    run = run_of(source, tokens_NS, 2 * SEQ_LEN)
    outputs_of(source, run)
    attention = FullAttention()
    decoder_of(source).hidden(tokens_NS.long(), attention=attention)
    assert run.side_inputs is not None
    found = run.side_inputs.attention(slice(1, 4)).kept
    assert set(attention.kept) == {0, 2}
    for idx, latents in attention.kept.items():
        assert [each.shape[-1] for each in latents] == [20, LAYERS[idx].latent.rope_dim]
        for x_BSR, expected_NSR in zip(found[idx], latents, strict=True):
            torch.testing.assert_close(x_BSR, expected_NSR[1:4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kinds", [(), (SecondMoment,)], ids=["gradients", "with_moments"])
def test_gradients_layer_by_layer_are_those_of_the_whole_graph(
    kinds: tuple[type[Stat], ...], source: WeightSource, tmp_path: Path
) -> None:
    found = visited(source, tmp_path, *kinds)
    inputs, gradients = of_whole_graph(source)
    assert_same(found.gradients, gradients)
    assert_same(found.inputs, inputs)
    assert {idx for idx, name in found.gradients if name == "attn.kv_down"} == {0, 2}
    assert {idx for idx, name in found.gradients if name == "attn.kv_up"} == set(range(len(LAYERS)))


class Stored:
    """The stored linears of the layers before one, the source's from there on."""

    kv_format: str | None = None

    def __init__(self, source: WeightSource, directory: Path, layer_idx: int) -> None:
        self._source = source
        self._directory = directory
        self._end = layer_idx
        self.arch = source.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        if layer_idx >= self._end:
            return self._source.layer(layer_idx)
        stored: Weights = load_weights(self._directory / layer_name(layer_idx), COARSE)
        return dict(stored)


@pytest.mark.parametrize("true_sequential", [False, True])
def test_readers_are_calibrated_on_latents_of_the_compressed_layer(
    true_sequential: bool, source: WeightSource, tokens_NS: Tensor, tmp_path: Path
) -> None:
    look = Look()
    passes = [look, RoundPass(Rtn(), COARSE, torch.float32)]
    compress(source, tokens_NS, passes, tmp_path, scheme=COARSE, true_sequential=true_sequential)
    for idx in READERS:
        of_compressed, of_source = (
            moment_of_latents(Stored(source, tmp_path, end), tokens_NS, idx) for end in (idx, 0)
        )
        found = look.seen[idx, "kv_latent"][0].double()
        scale = float(of_compressed.abs().max())
        assert torch.allclose(found, of_compressed, rtol=1e-3, atol=1e-5 * scale), idx
        assert float((of_source - of_compressed).norm() / of_compressed.norm()) > 0.05


def moment_of_latents(weights: WeightSource, tokens_NS: Tensor, layer_idx: int) -> Tensor:
    """The mean of x x^T of what `attn.kv_up` of a layer reads in the whole decoder."""
    read = list[Tensor]()
    decoder = decoder_of(weights)
    decoder.get_submodule(f"layers.{layer_idx}.attn.kv_up").register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0].flatten(0, 1))
    )
    decoder(tokens_NS.long())
    x_TR = read[0].double()
    return x_TR.t() @ x_TR / len(x_TR)


def test_a_reader_computes_nothing_without_the_latents_of_its_source(
    source: WeightSource, tokens_NS: Tensor
) -> None:
    layer = build_layer(source.arch, 1, source.layer(1), dtype=torch.float32, device=CPU)
    x_BSD = torch.zeros(1, SEQ_LEN, source.arch.hidden_size)
    with pytest.raises(KeyError):
        layer(x_BSD, torch.arange(SEQ_LEN), FullAttention())
    inputs = SideInputs.of(source.arch, source.outer(), tokens_NS, dtype=torch.float32, device=CPU)
    assert set(inputs.kept) == {0, 2}

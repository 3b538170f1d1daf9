"""Several residual streams while a model is calibrated, scored and trained layer by layer: they are those of
the whole decoder, and gradients flow through the factors by which they are mixed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.kv import KeysValues
from compress.calibrate.stats import SecondMoment, Stat
from compress.distill.student import Shape, student_arch
from compress.errors import UnsupportedArch, UsageError
from compress.export import FORMATS, GraphFormat
from compress.methods.quantize.passes import RoundPass
from compress.methods.quantize.rtn import Rtn
from compress.models.attention import FullAttention
from compress.models.canonical import layer_name, load_weights
from compress.models.decoder import Decoder
from compress.models.eagle3 import eagle3_facts
from compress.models.experts import Experts
from compress.models.hyper_connection import HYPER_PARAMETERS, HyperConnections
from compress.models.initialise import fresh_decoder
from compress.models.tap import no_tap
from compress.models.weights import MemorySource, WeightSource, build_layer, dense, parameter_names
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.streamed_model import StreamedModel
from tests.support.tiny_decoder import tiny_tokens
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.calibrate.streams import check_gradients, check_streams
from tests.unit.calibrate.test_side_inputs import (
    COARSE,
    compress,
    decoder_of,
)

CPU = torch.device("cpu")
NUM_SAMPLES = 5
SEQ_LEN = 13
FACTS: dict[str, dict[str, Any]] = {
    "as they are": {"hyper": HyperConnections(4, 1e-6, post_eps=1e-6)},
    "mixed": {
        "hyper": HyperConnections(3, 1e-6, sinkhorn_iterations=5),
        "layers": (tiny_shape(), tiny_shape(experts=Experts(4, 2, 48, shared_size=40)), tiny_shape()),
    },
    "a mean": {"hyper": HyperConnections(2, 1e-6, sinkhorn_iterations=2, mean_head=True)},
}


@pytest.fixture(scope="module", params=FACTS)
def source(request: pytest.FixtureRequest) -> WeightSource:
    return tiny_source(**FACTS[request.param])


@pytest.fixture(scope="module", name="tokens_NS")
def calibration_tokens(source: WeightSource) -> Tensor:
    return tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)


@pytest.mark.parametrize("piece_tokens", [1, 2 * SEQ_LEN])
def test_layer_after_layer_the_streams_are_those_of_the_whole_decoder(
    piece_tokens: int, source: WeightSource, tokens_NS: Tensor
) -> None:
    check_streams(source, tokens_NS, piece_tokens)


@pytest.mark.parametrize("kinds", [(), (SecondMoment,)], ids=["gradients", "with_moments"])
def test_gradients_layer_by_layer_are_those_of_the_whole_graph(
    kinds: tuple[type[Stat], ...], source: WeightSource, tmp_path: Path
) -> None:
    if source.arch.has_experts:  # the whole graph has no gradients of experts without tokens
        source = tiny_source(hyper=source.arch.hyper)
    check_gradients(source, tmp_path, kinds)


def test_the_halves_of_a_layer_compute_the_layer(source: WeightSource) -> None:
    positions = torch.arange(SEQ_LEN)
    generator = torch.Generator().manual_seed(3)
    x_BSE = torch.randn(2, SEQ_LEN, source.arch.stream_size, generator=generator)
    for idx in range(source.arch.num_layers):
        layer = build_layer(source.arch, idx, source.layer(idx), dtype=torch.float32, device=CPU)
        y_BSE = x_BSE
        for half in layer.halves():
            y_BSE = half.pass_through(y_BSE, positions, FullAttention(), no_tap)
        assert torch.equal(y_BSE, layer(x_BSE, positions, FullAttention()))


@pytest.mark.parametrize("true_sequential", [False, True])
def test_a_quantized_model_keeps_its_factors_in_float32(
    true_sequential: bool, source: WeightSource, tokens_NS: Tensor, tmp_path: Path
) -> None:
    passes = [RoundPass(Rtn(), COARSE, torch.float32)]
    compress(source, tokens_NS, passes, tmp_path, scheme=COARSE, true_sequential=true_sequential)
    for idx in range(source.arch.num_layers):
        stored = load_weights(tmp_path / layer_name(idx), COARSE)
        own = {name: value for name, value in source.layer(idx).items() if name.endswith(HYPER_PARAMETERS)}
        assert len(own) == 6
        for name, value in own.items():
            kept = stored[name]
            assert isinstance(value, Tensor)
            assert isinstance(kept, Tensor)
            assert torch.equal(kept, value)
            assert kept.dtype == torch.float32


def test_parameters_are_counted_and_stay_float32_in_a_model_of_16_bits(source: WeightSource) -> None:
    decoder = Decoder(source.arch)
    assert source.arch.num_params == sum(each.numel() for each in decoder.parameters())
    outer, layers = parameter_names(source.arch)
    in_16_bits = MemorySource(decoder, dtype=torch.bfloat16)
    stored = [in_16_bits.outer(), *(in_16_bits.layer(idx) for idx in range(len(layers)))]
    assert [each.keys() for each in stored] == [each.keys() for each in (outer, *layers)]
    for name, value in (pair for each in stored for pair in each.items()):
        assert isinstance(value, Tensor)
        assert value.dtype == (torch.float32 if name.endswith(HYPER_PARAMETERS) else torch.bfloat16)


def test_keys_and_values_of_a_cache_are_measured_on_what_attention_reads(
    source: WeightSource, tokens_NS: Tensor
) -> None:
    seen: dict[str, Tensor] = {}
    positions = torch.arange(SEQ_LEN)
    part = KeysValues.from_weights(source.arch, 0, source.layer(0), dtype=torch.float32, device=CPU)
    layer = build_layer(source.arch, 0, source.layer(0), dtype=torch.float32, device=CPU)
    x_BSE = decoder_of(source).embedded(tokens_NS.long(), torch.arange(tokens_NS.shape[1]), FullAttention())
    part(x_BSE, positions, FullAttention(), seen.__setitem__)
    read: dict[str, Tensor] = {}
    layer(x_BSE, positions, FullAttention(), read.__setitem__)
    expected = torch.nn.functional.linear(read["attn_in"], layer.attn.v.weight)
    torch.testing.assert_close(seen["v"], expected, rtol=1e-5, atol=1e-6)


def test_factors_of_a_cache_of_16_bits_are_measured_in_float32(source: WeightSource) -> None:
    part = KeysValues.from_weights(source.arch, 0, source.layer(0), dtype=torch.bfloat16, device=CPU)
    factors = {name: each for name, each in part.layer.named_parameters() if name.startswith("attn_hyper.")}
    assert len(factors) == 3
    for name, parameter in factors.items():
        assert torch.equal(parameter, dense(source.layer(0)[name]))


def test_a_streamed_model_scores_as_the_engine(source: WeightSource, tokens_NS: Tensor) -> None:
    config = EngineConfig(max_model_len=64)
    streamed = StreamedModel(source, device=CPU, config=config)
    (scored,) = streamed.score(tokens_NS.long(), batch_size=NUM_SAMPLES)
    expected = Engine(source, device=CPU, config=config).runner.score(tokens_NS.long())
    assert torch.equal(scored, expected)


def test_a_fresh_decoder_learns_its_factors(source: WeightSource) -> None:
    decoder = fresh_decoder(source.arch, generator=torch.Generator().manual_seed(5))
    tokens_BS = tiny_tokens(source.arch, 2, SEQ_LEN).long()
    logits_TV = decoder(tokens_BS)[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits_TV, tokens_BS[:, 1:].flatten()).backward()
    for name, parameter in decoder.named_parameters():
        if name.endswith(HYPER_PARAMETERS):
            assert parameter.grad is not None
            assert bool(parameter.grad.isfinite().all())
            # the first layer reads equal streams, whose mixture does not move the norm after it
            assert "layers.0.attn" in name or bool(parameter.grad.abs().sum() > 0), name


def test_no_head_is_made_for_hidden_states_of_several_streams(source: WeightSource) -> None:
    with pytest.raises(UsageError, match=r"residual of this llama model is \d streams, and a head reads"):
        eagle3_facts(source.arch, draft_vocab_size=50)


def test_no_student_is_cut_from_several_streams() -> None:
    with pytest.raises(UsageError, match="residual of the teacher is several streams"):
        student_arch(tiny_source(**FACTS["as they are"]).arch, Shape())


def test_a_graph_of_onnx_is_refused_with_the_reason(source: WeightSource) -> None:
    form = FORMATS.get("onnx")
    assert isinstance(form, GraphFormat)
    assert "streams" in {rule.name for rule in form.broken_facts(source.arch)}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"block": "sandwich"}, "the block is 'sandwich'"),
        ({"norm": "layer"}, "norms subtract the mean"),
        ({"hyper": HyperConnections(4, 0.0, sinkhorn_iterations=3)}, "mixing has an eps of 0"),
        ({"unit_norms": True}, "have no weights"),
        ({"residual_scale": 0.5}, "have a factor"),
        ({"layer_scalar": True}, "have a factor"),
        (
            {"layers": (tiny_shape(experts=Experts(4, 2, 48, post_norm=True)),)},
            "outputs of experts are normed",
        ),
    ],
)
def test_what_is_not_computed_with_streams_is_refused(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedArch, match=f"the residual is several streams, and .*{reason}"):
        tiny_source(**{**FACTS["as they are"], **facts})

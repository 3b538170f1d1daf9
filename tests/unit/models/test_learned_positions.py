"""Learned positions, wherever the input of the first layer is computed: in the decoder, in calibration, in
serving, for drafts and for students."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.expert_scores import add_scores_, expert_scores
from compress.calibrate.residual import walk
from compress.context import Context
from compress.distill.draft_head import Target
from compress.distill.student import Shape, sliced_decoder, student_arch
from compress.errors import StorageError, UnsupportedArch
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.decoder import Decoder
from compress.models.experts import ALL_TOKENS, Experts
from compress.models.hyper_connection import HyperConnections
from compress.models.weights import POSITIONS, WeightSource, embedding_tables, parameter_names
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.outer_weights import with_positions
from compress.runtime.request import Request, SamplingParams
from compress.runtime.streamed_model import StreamedModel
from tests.support.tiny_decoder import tiny_tokens
from tests.support.tiny_source import LIKE_GEMMA4_E, tiny_shape, tiny_source
from tests.unit.calibrate.test_gradients_shared import assert_same, of_whole_graph, visited
from tests.unit.calibrate.test_side_inputs import (
    assert_near,
    decoder_of,
    outputs_of,
    outputs_of_decoder,
    run_of,
)

CPU = torch.device("cpu")
NUM_SAMPLES = 5
SEQ_LEN = 13
UNROTATED = tiny_shape(rope=None, gated=False)
FACTS: dict[str, dict[str, Any]] = {
    "from the first row": {
        "position_offset": 0,
        "layers": (UNROTATED, UNROTATED),
        "norm": "layer",
        "norm_bias": True,
        "activation": "gelu",
        "tied_head": True,
    },
    "after two rows, next to a scaled embedding": {
        "position_offset": 2,
        "embed_scale": 3.5,
        "embed_norm": True,
        "residual_scale": 0.3,
    },
    "in several streams": {
        "position_offset": 1,
        "hyper": HyperConnections(3, 1e-6, sinkhorn_iterations=4),
    },
}


@pytest.fixture(scope="module", params=FACTS)
def source(request: pytest.FixtureRequest) -> WeightSource:
    return tiny_source(**FACTS[request.param])


@pytest.fixture(scope="module", name="tokens_NS")
def calibration_tokens(source: WeightSource) -> Tensor:
    return tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN).long()


def embedded_by(decoder: Decoder, tokens_NS: Tensor) -> Tensor:
    """Return the input of the first layer by its definition."""
    arch = decoder.arch
    assert arch.position_offset is not None
    x = decoder.embed.weight[tokens_NS]
    if arch.embed_norm:
        x = x / (x.square().mean(-1, keepdim=True) + arch.norm_eps).sqrt()
    x = arch.embed_scale * x
    x = torch.stack(
        [x[:, idx] + decoder.positions.weight[idx + arch.position_offset] for idx in range(SEQ_LEN)], 1
    )
    return x if arch.hyper is None else x.repeat(1, 1, arch.hyper.num_streams)


def test_a_row_of_the_table_is_added_to_the_embedding(source: WeightSource, tokens_NS: Tensor) -> None:
    decoder = decoder_of(source)
    expected = embedded_by(decoder, tokens_NS)
    assert_near(decoder.embedded(tokens_NS, torch.arange(SEQ_LEN), FullAttention()), expected)
    assert_near(embedding_tables(source.outer()).embedded(source.arch, tokens_NS), expected)
    later = decoder.embedded(tokens_NS[:, 4:], torch.arange(4, SEQ_LEN), FullAttention())
    assert_near(later, expected[:, 4:])


def test_the_table_is_a_parameter_and_a_fact(source: WeightSource) -> None:
    arch = source.arch
    decoder = decoder_of(source)
    assert parameter_names(arch)[0][POSITIONS] == (512 + (arch.position_offset or 0), arch.hidden_size)
    assert arch.num_params == sum(each.numel() for each in decoder.parameters())
    facts, layers = arch.to_json()
    assert facts["position_offset"] == arch.position_offset
    assert Arch.from_json(facts, layers) == arch
    for wrong in (-1, 1.5, True):
        with pytest.raises(StorageError, match="position_offset"):
            Arch.from_json({**facts, "position_offset": wrong}, layers)
    assert "position_offset" not in tiny_source().arch.to_json()[0]


def test_one_next_to_embeddings_for_each_layer_is_refused() -> None:
    with pytest.raises(UnsupportedArch, match="positions have learned ones"):
        tiny_source(**LIKE_GEMMA4_E, position_offset=0)


@pytest.mark.parametrize("piece_tokens", [1, 2 * SEQ_LEN])
def test_layer_after_layer_the_stream_is_that_of_the_whole_decoder(
    piece_tokens: int, source: WeightSource, tokens_NS: Tensor, tmp_path: Path
) -> None:
    expected = outputs_of_decoder(decoder_of(source), tokens_NS)
    found = outputs_of(source, run_of(source, tokens_NS, piece_tokens))
    for x_NSD, expected_NSD in zip(found, expected, strict=True):
        assert_near(x_NSD, expected_NSD)
    ctx = Context("cpu", 0, tmp_path)
    assert_near(walk(source, tokens_NS, ctx, compute_dtype=torch.float32, task="test"), expected[-1])


def test_gradients_layer_by_layer_are_those_of_the_whole_graph(source: WeightSource, tmp_path: Path) -> None:
    found = visited(source, tmp_path)
    inputs, gradients = of_whole_graph(source)
    assert_same(found.gradients, gradients)
    assert_same(found.inputs, inputs)


def test_scores_of_experts_are_those_of_tokens_at_their_positions(tmp_path: Path) -> None:
    source = tiny_source(position_offset=2, layers=(tiny_shape(experts=Experts(4, 2, 48)),) * 2)
    tokens_NS = tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN).long()
    found = expert_scores(source, tokens_NS, Context("cpu", 0, tmp_path), compute_dtype=torch.float32)
    decoder = decoder_of(source)
    x_NSD = embedded_by(decoder, tokens_NS)
    for layer, scores_E in zip(decoder.layers, found, strict=True):
        sums, counts = torch.zeros(2, 4, dtype=torch.float64)
        taps: dict[str, Tensor] = {}
        x_NSD = layer(x_NSD, torch.arange(SEQ_LEN), FullAttention(), taps.__setitem__)
        add_scores_(layer, taps[ALL_TOKENS].flatten(0, -2), sums, counts)
        torch.testing.assert_close(scores_E, sums / counts.clamp(min=1), rtol=1e-4, atol=1e-6)


def test_a_streamed_model_scores_as_the_engine(source: WeightSource, tokens_NS: Tensor) -> None:
    config = EngineConfig(max_model_len=64)
    streamed = StreamedModel(source, device=CPU, config=config)
    (scored,) = streamed.score(tokens_NS, batch_size=NUM_SAMPLES)
    assert torch.equal(scored, Engine(source, device=CPU, config=config).runner.score(tokens_NS))
    assert_near(scored, decoder_of(source)(tokens_NS))


def test_requests_end_at_the_last_position() -> None:
    """Steps may be launched for the position after it, and rows of the table end before."""
    source = tiny_source(**{**FACTS["from the first row"], "max_position": 24})
    decoder = decoder_of(source)
    prompts = [tuple(each.tolist()) for each in (torch.arange(1, 21), torch.arange(30, 35))]
    requests = [
        Request(str(idx), prompt, SamplingParams(24 - len(prompt), ignore_eos=True))
        for idx, prompt in enumerate(prompts)
    ]
    for done in Engine(source, device=CPU).generate(requests):
        fed = torch.tensor([*done.prompt, *done.tokens])
        assert len(fed) == 24
        chosen = decoder(fed[None, :-1])[0, len(done.prompt) - 1 :].argmax(-1)
        assert chosen.tolist() == list(done.tokens)


def test_positions_outside_of_the_table_take_its_nearest_row() -> None:
    table_ND = torch.randn(3, 4)
    x_TD = torch.randn(3, 4)
    found = with_positions(x_TD, table_ND, torch.tensor([-2, 1, 3]))
    assert torch.equal(found, x_TD + table_ND)
    assert with_positions(x_TD, None, torch.tensor([1, 3])) is x_TD


def test_targets_of_drafts_have_positions_in_their_hidden_states_alone(tokens_NS: Tensor) -> None:
    """The embedding that a head reads of the next token has none."""
    decoder = decoder_of(tiny_source(**FACTS["from the first row"]))
    target = Target(decoder, (0, 2), torch.arange(50), device=CPU)
    embedded_BSD, features_BSE, _ = target.features(tokens_NS)
    assert torch.equal(embedded_BSD, decoder.embed.weight[tokens_NS])
    assert_near(features_BSE[..., : decoder.arch.hidden_size], embedded_by(decoder, tokens_NS))


def test_a_narrower_student_takes_columns_of_the_table() -> None:
    source = tiny_source(**FACTS["from the first row"])
    student = sliced_decoder(source, student_arch(source.arch, Shape(hidden=2)))
    table_PD = decoder_of(source).positions.weight
    assert torch.equal(student.positions.weight, table_PD[:, [0, source.arch.hidden_size - 1]])

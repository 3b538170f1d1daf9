"""Gated residuals and embeddings of n-grams while a model is calibrated, scored and trained layer by layer:
the streams are those of the whole decoder; and what such models refuse."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.kv import KeysValues
from compress.distill.student import Shape, student_arch
from compress.errors import StorageError, UnsupportedArch, UsageError
from compress.export import FORMATS, GraphFormat
from compress.methods.quantize.gptq import Gptq
from compress.methods.quantize.passes import RoundPass
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.canonical import layer_name, load_weights
from compress.models.decoder import Decoder
from compress.models.delta_net import DeltaNet
from compress.models.eagle3 import eagle3_facts
from compress.models.gated_residual import GatedResiduals
from compress.models.gated_residual_layer import gated_residual_linears
from compress.models.hyper_connection import HyperConnections
from compress.models.initialise import fresh_decoder
from compress.models.pruning import why_heads_stay, why_layers_stay
from compress.models.weights import WeightSource, build_layer, parameter_names
from compress.stages.quantize.schemes import outer_bytes
from tests.support.tiny_decoder import tiny_tokens
from tests.support.tiny_source import LIKE_QWEN4, NGRAMS, tiny_shape, tiny_source
from tests.unit.calibrate.streams import check_gradients, check_streams, check_walk
from tests.unit.calibrate.test_side_inputs import (
    COARSE,
    compress,
)

CPU = torch.device("cpu")
NUM_SAMPLES = 5
SEQ_LEN = 13
DELTA = DeltaNet(4, 2, 8, 12, 4)
WITH_NGRAMS = tiny_shape(recurrence=DELTA, rope=None, ngrams=NGRAMS)
PLAIN: dict[str, Any] = {"hyper": GatedResiduals(2, 8)}
FACTS: dict[str, dict[str, Any]] = {
    "streams alone": PLAIN,
    "like qwen 4": {
        **LIKE_QWEN4,
        "layers": tuple(replace(each, experts=None) for each in LIKE_QWEN4["layers"]),
    },
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


def test_gradients_layer_by_layer_are_those_of_the_whole_graph(source: WeightSource, tmp_path: Path) -> None:
    check_gradients(source, tmp_path)


def test_a_walk_ends_in_the_streams_that_the_head_reads(
    source: WeightSource, tokens_NS: Tensor, tmp_path: Path
) -> None:
    check_walk(source, tokens_NS, tmp_path)


def test_keys_and_values_of_a_cache_are_measured_on_what_attention_reads(
    source: WeightSource, tokens_NS: Tensor
) -> None:
    attending = next(idx for idx, layer in enumerate(source.arch.layers) if layer.attends)
    weights = source.layer(attending)
    positions = torch.arange(SEQ_LEN)
    part = KeysValues.from_weights(source.arch, attending, weights, dtype=torch.float32, device=CPU)
    layer = build_layer(source.arch, attending, weights, dtype=torch.float32, device=CPU)
    attention = FullAttention()
    x_BSE = torch.randn(NUM_SAMPLES, SEQ_LEN, source.arch.stream_size)
    seen: dict[str, Tensor] = {}
    part(x_BSE, positions, attention, seen.__setitem__)
    read: dict[str, Tensor] = {}
    layer(x_BSE, positions, attention, read.__setitem__)
    expected = torch.nn.functional.linear(read["attn_in"], layer.attn.v.weight)
    torch.testing.assert_close(seen["v"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FACTS)
def test_linears_of_a_layer_are_compressed_in_turn_where_the_residual_alone_is_between_its_halves(
    name: str, tmp_path: Path
) -> None:
    source = tiny_source(**FACTS[name])
    tokens_NS = tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)
    found = []
    for way in ("in turn", "at once"):
        passes = [RoundPass(Gptq(), COARSE, torch.float32)]
        out = tmp_path / way
        compress(source, tokens_NS, passes, out, scheme=COARSE, true_sequential=way == "in turn")
        found.append([load_weights(out / layer_name(idx), COARSE) for idx in range(source.arch.num_layers)])
    same = [
        torch.equal(ours["ffn.down.weight"].codes_OI, theirs["ffn.down.weight"].codes_OI)
        for ours, theirs in zip(*found, strict=True)
    ]
    assert set(same) == {source.arch.has_ngrams}


def test_parameters_are_counted_and_named(source: WeightSource) -> None:
    decoder = Decoder(source.arch)
    own = dict(decoder.named_parameters())
    assert source.arch.num_params == sum(each.numel() for each in own.values())
    outer, layers = parameter_names(source.arch)
    names = {f"layers.{idx}.{name}" for idx, each in enumerate(layers) for name in each}
    assert {*outer, *names} == own.keys()
    assert all(tuple(own[name].shape) == shape for name, shape in outer.items())
    linears = {f"{name}.weight" for name in gated_residual_linears(source.arch)}
    matrices = {name for name, each in own.items() if ".hyper." in name.replace("_hyper", ".hyper")}
    assert linears == {name for name in matrices if own[name].dim() == 2}


def test_sizes_on_disk_count_what_no_scheme_quantizes(source: WeightSource) -> None:
    arch = source.arch
    own = {name: each for name, each in Decoder(arch).named_parameters() if not name.startswith("layers.")}
    large = sum(each.numel() for name, each in own.items() if name != "norm.weight")
    for idx in range(arch.num_layers):
        layer = parameter_names(arch)[1][idx]
        large += sum(prod(shape) for name, shape in layer.items() if "_hyper." in name or "ngrams." in name)
    assert [outer_bytes(arch.replace(dtype=each), None) for each in ("bfloat16", "float32")] == [
        2 * large,
        4 * large,
    ]


def test_a_fresh_decoder_learns_every_parameter(source: WeightSource) -> None:
    decoder = fresh_decoder(source.arch, generator=torch.Generator().manual_seed(5))
    tokens_BS = tiny_tokens(source.arch, 2, SEQ_LEN).long()
    logits_TV = decoder(tokens_BS)[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits_TV, tokens_BS[:, 1:].flatten()).backward()
    for name, parameter in decoder.named_parameters():
        if ".indexer." in name:
            continue
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        if ".table." not in name:  # no token is hashed to some of these
            assert bool(parameter.grad.abs().sum() > 0), name


def test_no_head_and_no_student_is_made() -> None:
    arch = tiny_source(**PLAIN).arch
    with pytest.raises(UsageError, match="model is 2 streams, and a head reads hidden states of one"):
        eagle3_facts(arch, draft_vocab_size=50)
    with pytest.raises(UsageError, match="several streams"):
        student_arch(arch, Shape())


def test_layers_with_tables_stay_and_others_may_go() -> None:
    assert "differ by the number of tables before them" in str(
        why_layers_stay(tiny_source(**LIKE_QWEN4).arch)
    )
    assert why_layers_stay(tiny_source(**PLAIN).arch) is None
    assert why_heads_stay(tiny_source(**PLAIN).arch) is None


def test_a_graph_of_onnx_is_refused_with_the_reason() -> None:
    form = FORMATS.get("onnx")
    assert isinstance(form, GraphFormat)
    assert "streams" in {rule.name for rule in form.broken_facts(tiny_source(**PLAIN).arch)}


def test_facts_come_back_from_a_manifest() -> None:
    arch = tiny_source(**LIKE_QWEN4).arch
    facts, layers = arch.to_json()
    assert facts["hyper"] == {"num_streams": 3, "rank": 16}
    assert layers[1]["block_indexer"]["pooled"] is True
    assert [("ngrams" in each) for each in layers] == [True, False, True]
    assert Arch.from_json(facts, layers) == arch
    for name, value in (("num_streams", 1), ("rank", 0), ("num_streams", 99)):
        with pytest.raises(StorageError, match=name):
            Arch.from_json({**facts, "hyper": {**facts["hyper"], name: value}}, layers)
    for name, value in (("order", 1), ("base", 0), ("head_dim", 0), ("eos", -1)):
        wrong = {**layers[0], "ngrams": {**layers[0]["ngrams"], name: value}}
        with pytest.raises(StorageError, match=name):
            Arch.from_json(facts, [wrong, *layers[1:]])


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"block": "post"}, "the block is 'post'"),
        ({"norm": "layer"}, "norms subtract the mean"),
        ({"residual_scale": 0.5}, "have a factor"),
        ({"layer_scalar": True}, "have a factor"),
        ({"logit_scale": 0.5}, "gated residuals have none"),
        ({"plain_final_norm": True}, "gated residuals have none"),
    ],
)
def test_what_is_not_computed_with_streams_is_refused(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedArch, match=f"several streams, and .*{reason}"):
        tiny_source(**{**PLAIN, **facts})


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"layers": (WITH_NGRAMS,)}, "the residual has no gates"),
        ({"hyper": HyperConnections(3, 1e-6), "layers": (WITH_NGRAMS,)}, "the residual has no gates"),
        ({**PLAIN, "layers": (WITH_NGRAMS,)}, "streams other than the 2 of the residual"),
        ({**LIKE_QWEN4, "position_offset": 0}, "positions learned ones"),
        ({**LIKE_QWEN4, "layers": (tiny_shape(ngrams=NGRAMS),)}, "no recurrence in place of attention"),
        (
            {**LIKE_QWEN4, "layers": (replace(WITH_NGRAMS, ngrams=replace(NGRAMS, kernel_size=12)),)},
            "over 34 positions; the runtime has at most 32",
        ),
    ],
)
def test_n_grams_that_do_not_fit_a_model_are_refused(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedArch, match=reason):
        tiny_source(**facts)

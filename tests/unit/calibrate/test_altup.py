"""AltUp, LAuReL and sparse gates while a model is calibrated, scored and trained layer by layer: the streams
are those of the whole decoder; and what such models refuse."""

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
from compress.models.experts import Experts
from compress.models.hyper_connection import HyperConnections
from compress.models.initialise import fresh_decoder
from compress.models.pruning import why_channels_stay, why_heads_stay
from compress.models.weights import WeightSource, build_layer, parameter_names
from compress.runtime.engine_config import EngineConfig
from compress.runtime.streamed_model import StreamedModel
from tests.support.tiny_decoder import tiny_tokens
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.calibrate.streams import check_gradients, check_streams, check_walk
from tests.unit.calibrate.test_side_inputs import (
    COARSE,
    compress,
    decoder_of,
)

CPU = torch.device("cpu")
NUM_SAMPLES = 5
SEQ_LEN = 13
PLAIN: dict[str, Any] = {"block": "sandwich", "altup_streams": 3, "laurel_rank": 8}
FACTS: dict[str, dict[str, Any]] = {
    "streams alone": {"block": "sandwich", "altup_streams": 2},
    "a residual alone": {"block": "sandwich", "laurel_rank": 8},
    "like gemma 3n": {
        **PLAIN,
        "layer_embed_size": 8,
        "layer_embed_vocab": 60,
        "qk_norm": True,
        "v_norm": True,
        "embed_scale": 3.25,
        "logit_softcap": 3.0,
        "layers": (
            tiny_shape(window=5, gate_sparsity=0.8),
            tiny_shape(intermediate_size=64),
            tiny_shape(window=5, kv_source=0),
            tiny_shape(kv_source=1, gate_sparsity=0.5),
        ),
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
    positions = torch.arange(SEQ_LEN)
    part = KeysValues.from_weights(source.arch, 0, source.layer(0), dtype=torch.float32, device=CPU)
    layer = build_layer(source.arch, 0, source.layer(0), dtype=torch.float32, device=CPU)
    attention = FullAttention()
    x_BSE = decoder_of(source).embedded(tokens_NS.long(), torch.arange(tokens_NS.shape[1]), attention)
    seen: dict[str, Tensor] = {}
    part(x_BSE, positions, attention, seen.__setitem__)
    read: dict[str, Tensor] = {}
    layer(x_BSE, positions, attention, read.__setitem__)
    expected = torch.nn.functional.linear(read["attn_in"], layer.attn.v.weight)
    if source.arch.v_norm:
        heads = expected.unflatten(-1, (2, -1))
        expected = (heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2)
    torch.testing.assert_close(seen["v"], expected, rtol=1e-5, atol=1e-5)


def test_linears_of_a_layer_are_compressed_at_once_where_more_than_the_residual_is_between_its_halves(
    source: WeightSource, tokens_NS: Tensor, tmp_path: Path
) -> None:
    found = []
    for name in ("in turn", "at once"):
        passes = [RoundPass(Gptq(), COARSE, torch.float32)]
        out = tmp_path / name
        compress(source, tokens_NS, passes, out, scheme=COARSE, true_sequential=name == "in turn")
        found.append([load_weights(out / layer_name(idx), COARSE) for idx in range(source.arch.num_layers)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.keys() == theirs.keys()
        assert torch.equal(ours["ffn.down.weight"].codes_OI, theirs["ffn.down.weight"].codes_OI)


def test_parameters_are_counted_and_named(source: WeightSource) -> None:
    decoder = Decoder(source.arch)
    own = dict(decoder.named_parameters())
    assert source.arch.num_params == sum(each.numel() for each in own.values())
    outer, layers = parameter_names(source.arch)
    names = {f"layers.{idx}.{name}" for idx, each in enumerate(layers) for name in each}
    assert {*outer, *names} == own.keys()
    assert all(tuple(own[name].shape) == shape for name, shape in outer.items())


def test_a_fresh_decoder_learns_every_parameter(source: WeightSource) -> None:
    decoder = fresh_decoder(source.arch, generator=torch.Generator().manual_seed(5))
    tokens_BS = tiny_tokens(source.arch, 2, SEQ_LEN).long()
    logits_TV = decoder(tokens_BS)[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits_TV, tokens_BS[:, 1:].flatten()).backward()
    for name, parameter in decoder.named_parameters():
        if name.endswith("altup.output_scale") and not source.arch.layer_embed_size:
            assert parameter.grad is None  # nothing reads it
            continue
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert bool(parameter.grad.abs().sum() > 0), name


def test_tokens_beyond_the_table_have_the_embeddings_of_the_first(tmp_path: Path) -> None:
    source = tiny_source(**FACTS["like gemma 3n"])
    decoder = decoder_of(source)
    attention = FullAttention()
    decoder.embedded(torch.tensor([[0, 60, 59, 100]]), torch.arange(4), attention)
    table = decoder.layer_embeds.table.weight
    assert len(table) == 60
    plain_BSP = attention.layer_inputs[1] * 2**0.5
    projected = decoder.layer_embeds.proj(
        decoder.embed(torch.tensor([[0, 60, 59, 100]]))[..., : source.arch.hidden_size]
    ).unflatten(-1, (-1, 8))[..., 1, :]
    own = decoder.layer_embeds.norm(projected * source.arch.hidden_size**-0.5)
    for place, token in enumerate((0, 0, 59, 0)):
        expected = table[token].unflatten(-1, (-1, 8))[1] * 8**0.5
        torch.testing.assert_close((plain_BSP - own)[0, place], expected, rtol=1e-4, atol=1e-5)


def test_a_model_is_not_scored_layer_by_layer() -> None:
    source = tiny_source(**FACTS["streams alone"])
    with pytest.raises(UsageError, match="compute one of several"):
        StreamedModel(source, device=CPU, config=EngineConfig(max_model_len=64))


def test_no_head_and_no_student_is_made() -> None:
    arch = tiny_source(**FACTS["streams alone"]).arch
    with pytest.raises(UsageError, match="model is 2 streams, and a head reads hidden states of one"):
        eagle3_facts(arch, draft_vocab_size=50)
    for name in ("streams alone", "a residual alone"):
        with pytest.raises(UsageError, match="several streams, or has gates or LAuReL"):
            student_arch(tiny_source(**FACTS[name]).arch, Shape())


def test_channels_of_sparse_gates_stay_and_heads_may_go() -> None:
    sparse = tiny_source(layers=(tiny_shape(gate_sparsity=0.5), tiny_shape())).arch
    assert "sparse by the mean and the deviation of all channels" in str(why_channels_stay(sparse))
    assert why_heads_stay(sparse) is None
    assert why_channels_stay(tiny_source(**PLAIN).arch) is None


def test_a_graph_of_onnx_is_refused_with_the_reason() -> None:
    form = FORMATS.get("onnx")
    assert isinstance(form, GraphFormat)

    def rules(**facts: Any) -> set[str]:
        return {rule.name for rule in form.broken_facts(tiny_source(**facts).arch)}

    assert "streams" in rules(**FACTS["streams alone"])
    assert "laurel" in rules(**FACTS["a residual alone"])
    assert "sparse-gates" in rules(layers=(tiny_shape(gate_sparsity=0.5),))


def test_facts_come_back_from_a_manifest() -> None:
    arch = tiny_source(**FACTS["like gemma 3n"]).arch
    facts, layers = arch.to_json()
    assert (facts["altup_streams"], facts["laurel_rank"], facts["layer_embed_vocab"]) == (3, 8, 60)
    assert [each.get("gate_sparsity") for each in layers] == [0.8, None, None, 0.5]
    assert Arch.from_json(facts, layers) == arch
    plain, plain_layers = tiny_source().arch.to_json()
    assert not {"altup_streams", "laurel_rank", "layer_embed_vocab"} & plain.keys()
    assert "gate_sparsity" not in plain_layers[0]
    for name, value in (("altup_streams", 1), ("altup_streams", 99), ("laurel_rank", -1)):
        with pytest.raises(StorageError, match=name):
            Arch.from_json({**facts, name: value}, layers)
    with pytest.raises(StorageError, match="gate_sparsity"):
        Arch.from_json(facts, [{**layers[0], "gate_sparsity": 1.0}, *layers[1:]])


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"block": "pre"}, "the block is 'pre'"),
        ({"norm": "layer"}, "the norm 'layer'"),
        ({"residual_scale": 0.5}, "have a factor"),
        ({"layer_scalar": True}, "have a factor"),
        ({"norm_offset": 1.0}, "norms an offset"),
        ({"layers": (tiny_shape(experts=Experts(4, 2, 48)),)}, "has a recurrence, experts or one half"),
        ({"layers": (tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), rope=None),)}, "has a recurrence"),
    ],
)
def test_what_is_not_computed_with_streams_is_refused(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedArch, match=f"has AltUp or LAuReL, and .*{reason}"):
        tiny_source(**{**PLAIN, **facts})


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"layer_embed_vocab": 60}, "60 tokens have embeddings for each layer"),
        ({"hyper": HyperConnections(2, 1e-6), "altup_streams": 2}, "and the block is 'pre'"),
        ({"layers": (tiny_shape(gate_sparsity=0.5, ffn_cap=2.0),)}, "gates of an FFN are sparse"),
        ({"layers": (tiny_shape(gate_sparsity=0.5, experts=Experts(4, 2, 48)),)}, "gates of an FFN are"),
    ],
)
def test_facts_that_do_not_fit_one_another_are_refused(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedArch, match=reason):
        tiny_source(**facts)

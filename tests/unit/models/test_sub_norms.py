"""Norms before the last linears of a layer's halves (Sub-LN), and squares of relu as gates."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.distill.student import Shape, sliced_decoder, student_arch
from compress.errors import UnsupportedArch
from compress.export import FORMATS
from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.experts import Experts
from compress.models.family import family_of
from compress.models.ffn import activation
from compress.models.initialise import fresh_decoder
from compress.models.layer_shape import LayerShape
from compress.models.pruning import why_channels_stay, why_heads_stay, why_layers_stay
from compress.models.surgery import fold_
from compress.models.weights import MemorySource, build_decoder
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
LAYER = tiny_shape(sub_norms=True)
TOKENS = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(0))


def decoder_of(source: MemorySource) -> Decoder:
    return build_decoder(source, dtype=torch.float32, device=CPU)


def rms_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm by its definition."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def test_they_are_parameters_and_facts() -> None:
    source = tiny_source(layers=(LAYER, tiny_shape()))
    decoder = decoder_of(source)
    assert source.arch.num_params == sum(each.numel() for each in decoder.parameters())
    facts, layers = source.arch.to_json()
    assert [each.get("sub_norms") for each in layers] == [True, None]
    assert Arch.from_json(facts, layers) == source.arch
    assert [source.arch.fused_activation(each) for each in source.arch.layers] == [None, "silu"]


def test_the_input_of_down_is_normed() -> None:
    source = tiny_source(activation="relu2", layers=(LAYER,))
    ffn = decoder_of(source).layers[0].ffn
    x = torch.randn(3, source.arch.hidden_size, generator=torch.Generator().manual_seed(1))
    product = torch.relu(ffn.gate(x)) ** 2 * ffn.up(x)
    expected = rms_normed(product, ffn.sub_norm.weight, source.arch.norm_eps)
    torch.testing.assert_close(ffn.mid(x), expected)


def test_the_input_of_o_is_normed() -> None:
    source = tiny_source(layers=(LAYER,))
    layer = decoder_of(source).layers[0]
    x = torch.randn(2, 5, source.arch.hidden_size, generator=torch.Generator().manual_seed(2))
    seen = []

    def values(layer_idx: int, q: Tensor, k: Tensor, v: Tensor, **facts: Any) -> Tensor:
        seen.append(v.repeat_interleave(q.shape[2] // v.shape[2], 2))
        return seen[-1]

    heads = layer.attn.heads(x, torch.arange(5), values, layer_idx=0)
    expected = rms_normed(seen[0].flatten(2), layer.attn.sub_norm.weight, source.arch.norm_eps)
    torch.testing.assert_close(heads, expected)


@pytest.mark.parametrize(
    "layer",
    [
        tiny_shape(sub_norms=True, experts=Experts(4, 2, 48)),
        tiny_shape(sub_norms=True, only_half="mixer"),
        tiny_shape(sub_norms=True, output_gate=True),
        tiny_shape(sub_norms=True, head_gate="sigmoid"),
        tiny_shape(sub_norms=True, out_norm=True),
        tiny_shape(sub_norms=True, ffn_cap=2.0),
        tiny_shape(sub_norms=True, gate_sparsity=0.5),
        tiny_shape(sub_norms=True, scaled_ffn=True),
        tiny_shape(sub_norms=True, residual_convs=4),
        tiny_shape(sub_norms=True, keys_are_values=True),
        tiny_shape(sub_norms=True, head_dim=16, narrow_value_dim=8),
    ],
)
def test_what_the_runtime_does_not_compute_with_them_is_refused(layer: LayerShape) -> None:
    with pytest.raises(UnsupportedArch, match="layer 0: the inputs of its last linears are normed"):
        tiny_source(layers=(layer,))


def test_squares_of_relu_are_gates_with_them_alone() -> None:
    with pytest.raises(UnsupportedArch, match="a gate and the activation 'relu2'"):
        tiny_source(activation="relu2", layers=(LAYER, tiny_shape()))
    assert torch.equal(activation("relu2", torch.tensor([-2.0, 3.0])), torch.tensor([0.0, 9.0]))


def test_scales_of_channels_move_into_the_norms() -> None:
    source = tiny_source(layers=(LAYER,), norm_offset=1.0)
    decoder = decoder_of(source)
    layer = decoder.layers[0]
    before = decoder(TOKENS)
    pairs = {pair.producer: pair for pair in layer.smoothing_pairs()}
    assert {"attn.sub_norm", "ffn.sub_norm"} <= pairs.keys()
    assert not {"attn.v", "ffn.up"} & pairs.keys()
    weights = dict(layer.named_parameters())
    for name in ("attn.sub_norm", "ffn.sub_norm"):
        (linear,) = pairs[name].linears
        size = layer.linear(linear).in_features
        fold_(weights, pairs[name], torch.linspace(0.5, 2.0, size), stored_dtype=torch.float32)
    torch.testing.assert_close(decoder(TOKENS), before, rtol=1e-4, atol=1e-5)


def test_a_student_has_the_norms_of_what_it_keeps() -> None:
    family = {"model_type": "bitnet", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 80}
    config = {**family, "vocab_size": 101, "num_hidden_layers": 2, "num_key_value_heads": 2}
    arch = family_of(config).read_config(config)
    decoder = fresh_decoder(arch, generator=torch.Generator().manual_seed(3))
    source = MemorySource(decoder, dtype=torch.float32)
    for name, each in decoder.named_parameters():
        if name.endswith("sub_norm.weight"):
            each.data = torch.arange(len(each), dtype=torch.float32)
    student = sliced_decoder(source, student_arch(arch, Shape(ffn=40)))
    assert len(student.layers[0].ffn.sub_norm.weight) == 40
    kept = student.layers[0].ffn.sub_norm.weight.long()
    assert torch.equal(student.layers[0].ffn.up.weight, decoder.layers[0].ffn.up.weight[kept])
    assert torch.equal(student.layers[1].attn.sub_norm.weight, torch.arange(32.0))


def test_heads_and_channels_stay_and_layers_go() -> None:
    arch = tiny_source(layers=(LAYER, LAYER)).arch
    assert why_layers_stay(arch) is None
    assert "spans what all heads return" in str(why_heads_stay(arch))
    assert "spans all channels" in str(why_channels_stay(arch))


def test_a_graph_has_none() -> None:
    graph = FORMATS.get("onnx")
    rules = {rule.name for rule in graph.broken_facts(tiny_source(layers=(LAYER,)).arch)}  # type: ignore[attr-defined]
    assert "sub-norms" in rules

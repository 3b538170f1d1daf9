"""Norms of the stream without weights, as OLMo has them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.delta_net import DeltaNet
from compress.models.family import family_of
from compress.models.norms import UnitNorm, final_norm
from compress.models.weights import parameter_names
from tests.support.tiny_source import tiny_shape, tiny_source

CONFIG: dict[str, Any] = {
    "model_type": "olmo",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "dtype": "float32",
}


def arch_of(**changes: Any) -> Arch:
    config = {**CONFIG, **changes}
    return family_of(config).read_config(config)


def test_no_norm_is_a_parameter() -> None:
    arch = arch_of()
    names = dict(Decoder(arch).named_parameters())
    assert not [name for name in names if "norm" in name]
    assert arch.num_params == sum(each.numel() for each in names.values())
    outer, layers = parameter_names(arch)
    assert names.keys() == {*outer, *(f"layers.{idx}.{name}" for idx, of in enumerate(layers) for name in of)}
    assert Arch.from_json(*arch.to_json()) == arch


def test_a_norm_is_a_layer_norm_of_torch_times_the_scale_of_the_logits() -> None:
    arch = arch_of().replace(logit_scale=0.5)
    norm = final_norm(arch)
    assert isinstance(norm, UnitNorm)
    x = 3 + torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = 0.5 * F.layer_norm(x, (64,), eps=1e-5)
    assert torch.allclose(norm(x), expected, rtol=0, atol=64 * torch.finfo(torch.float32).eps)


def test_no_scale_of_channels_moves_into_such_a_norm() -> None:
    (layer, _) = Decoder(arch_of()).layers
    assert [pair.producer for pair in layer.smoothing_pairs()] == ["attn.v", "ffn.up"]


def test_a_model_may_clip_queries_keys_and_values() -> None:
    assert arch_of(clip_qkv=None) == arch_of().replace(config={**CONFIG, "clip_qkv": None})
    clipped = arch_of(clip_qkv=8.0)
    assert clipped.qkv_clip == 8
    assert [pair.producer for pair in Decoder(clipped).layers[0].smoothing_pairs()] == ["ffn.up"]
    with pytest.raises(UnsupportedArch, match=r"clip_qkv = 0.0"):
        arch_of(clip_qkv=0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"block": "post"},
        {"block": "parallel"},
        {"norm_offset": 1.0},
        {"norm": "layer", "norm_bias": True},
        {"layers": (tiny_shape(only_half="ffn"), tiny_shape())},
        {"layers": (tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), rope=None),)},
    ],
)
def test_other_models_have_weights_in_their_norms(changes: dict[str, Any]) -> None:
    assert tiny_source(**changes).arch.unit_norms is False
    with pytest.raises(UnsupportedArch, match=r"norms (have no|without) weights"):
        tiny_source(**changes, unit_norms=True)

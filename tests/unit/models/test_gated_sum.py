"""Gated sums, normed outputs of heads and norms around experts on latents (Muse Spark): their laws, what is
refused with them, and that they are read as they are written."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.calibrate.expert_scores import add_scores_
from compress.distill.student import Shape, student_arch
from compress.errors import StorageError, UnsupportedArch, UsageError
from compress.models.arch import Arch
from compress.models.decoder import DecoderLayer
from compress.models.experts import Experts
from compress.models.family import family_of
from compress.models.gated_sum import LEAST_SQUARE, factors_of
from compress.models.latent import Latent
from compress.models.layer_shape import Rope
from compress.models.short_conv import ShortConv
from compress.models.weights import build_decoder
from compress.untrusted.fields import Fields
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.test_gated_sums_served import FACTS, LAYERS, MIXTURE

CPU = torch.device("cpu")


def arch_of(**changes: Any) -> Arch:
    return tiny_source(**{"layers": LAYERS, **FACTS, **changes}).arch


def layer_of(idx: int) -> DecoderLayer:
    decoder = build_decoder(tiny_source(layers=LAYERS, **FACTS), dtype=torch.float32, device=CPU)
    layer = decoder.layers[idx]
    assert isinstance(layer, DecoderLayer)
    return layer


def test_squares_of_both_factors_add_up_to_one() -> None:
    """(1 - b) (1 + b) is 1 - b^2, so independent terms of a variance of 1 have a sum of a variance of 1."""
    gates = torch.linspace(-4, 1.5, 40)
    residual, output = factors_of(gates, 0.7)
    torch.testing.assert_close(residual.square() + output.square(), torch.ones(40))
    assert bool((output.diff() > 0).all())
    residual, output = factors_of(torch.tensor([50.0]), 0.7)
    assert (residual.square().item(), output.item()) == (pytest.approx(LEAST_SQUARE), 1.0)


def test_scaled_outputs_of_an_expert_add_the_same_and_score_the_same() -> None:
    layer = layer_of(1)
    x_TD = torch.randn(30, 56, generator=torch.Generator().manual_seed(3))
    scores = [torch.zeros(6, dtype=torch.float64) for _ in range(4)]
    add_scores_(layer, x_TD, *scores[:2])
    before = layer.moe(x_TD, lambda name, value: None)
    layer.moe.experts[2].down.weight.mul_(64.0)
    add_scores_(layer, x_TD, *scores[2:])
    after = layer.moe(x_TD, lambda name, value: None)
    torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-3)  # an eps of 1e-3 under small outputs
    torch.testing.assert_close(scores[2], scores[0], rtol=1e-2, atol=1e-6)
    assert bool((scores[0] > 0).any())


def test_no_scale_moves_from_values_through_a_norm() -> None:
    producers = [pair.producer for pair in layer_of(0).smoothing_pairs()]
    assert "attn.v" not in producers
    assert {"attn_norm", "ffn.up"} <= set(producers)


def test_facts_are_read_as_they_are_written() -> None:
    arch = arch_of()
    facts, layers = arch.to_json()
    assert facts["hyper"] == {"temperature": 0.4}
    assert Arch.from_json(facts, layers) == arch
    plain_facts, plain_layers = tiny_source(layers=(tiny_shape(experts=Experts(4, 2, 48)),)).arch.to_json()
    assert "hyper" not in plain_facts
    assert "out_norm" not in plain_layers[0]
    assert not {"latent_norms", "router_scale"} & plain_layers[0]["experts"].keys()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"latent_size": 0}, "latent_size"),
        ({"latent_norms": 1}, "latent_norms"),
        ({"router_scale": "2"}, "router_scale"),
        ({"router_scale": 1e9}, "router_scale"),
    ],
)
def test_facts_of_experts_that_do_not_fit_are_refused(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(StorageError, match=name):
        Experts.from_json(Fields({**MIXTURE.to_json(), **changes}, "a manifest", StorageError))


@pytest.mark.parametrize("temperature", [0, -1, "1", 1e9])
def test_a_temperature_out_of_range_is_refused(temperature: Any) -> None:
    facts, layers = arch_of().to_json()
    with pytest.raises(StorageError, match="temperature"):
        Arch.from_json({**facts, "hyper": {"temperature": temperature}}, layers)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"block": "sandwich"}, "outputs of half-layers have gates, and the block is 'sandwich'"),
        ({"norm": "layer", "norm_offset": 0.0}, "norms subtract the mean"),
        ({"residual_scale": 0.5}, "have a factor"),
        (
            {"layers": (tiny_shape(), tiny_shape(recurrence=ShortConv.of(56, 3)))},
            "some layers have one half or a recurrence",
        ),
        ({"layers": (tiny_shape(only_half="mixer"),)}, "some layers have one half or a recurrence"),
        (
            {"layers": (tiny_shape(experts=Experts(4, 2, 48, post_norm=True)),)},
            "outputs of experts are normed",
        ),
        (
            {"layers": (tiny_shape(out_norm=True, head_dim=16, narrow_value_dim=8),)},
            "what heads return is normed, and",
        ),
        (
            {
                "unit_qk_norm": False,
                "layers": (
                    tiny_shape(
                        out_norm=True,
                        num_kv_heads=4,
                        rope=Rope(1e4, rotary_dim=8),
                        latent=Latent(q_rank=0, kv_rank=24, rope_dim=8, value_dim=16, interleaved=False),
                    ),
                ),
            },
            "what heads return is normed, and",
        ),
    ],
)
def test_what_is_not_computed_with_them_is_refused(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedArch, match=reason):
        arch_of(**facts)


def test_no_student_is_cut_from_gated_sums() -> None:
    dense = arch_of(layers=(replace(LAYERS[0]),))
    with pytest.raises(UsageError, match="has gates or LAuReL"):
        student_arch(dense, Shape())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tie_word_embeddings", True),
        ("residual_gate_temperature", 0.0),
        ("mlp_layer_types", ["dense", "sparse"]),
        ("moe_hidden_size", 0),
        ("layer_rope_theta", [0, 1e4, 5.0, 0, 0]),
    ],
)
def test_a_field_that_no_decoder_here_computes_is_refused_by_its_name(name: str, value: Any) -> None:
    config = build_config(*CASES["muse_spark"]).to_dict()
    config["text_config"][name] = value
    if name == "tie_word_embeddings":
        config[name] = value
    with pytest.raises(UnsupportedArch, match=name):
        family_of(config).read_config(config)

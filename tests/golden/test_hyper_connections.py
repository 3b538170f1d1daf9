"""Hyper-connections are those of the families of `transformers` that have them."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.decoder import DecoderLayer
from compress.models.hyper_connection import (
    HyperConnection,
    HyperConnections,
    MeanOfStreams,
    coefficients,
    mixed,
    repeated,
    spread,
)
from compress.untrusted.fields import Fields
from tests.support.tiny_source import tiny_source

NORM_EPS = 1e-5
SIZE = 40
MIXED = HyperConnections(4, 1e-6, sinkhorn_iterations=20)
FAMILIES = {
    "hy_v4": (
        HyperConnections(3, 1e-4, post_factor=1.7, post_eps=1e-4),
        {"hc_magnitude": 1.7, "hc_eps": 1e-4, "hc_mult": 3},
    ),
    "deepseek_v4": (MIXED, {"hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "hc_mult": 4}),
    "glm5_next": (
        dataclasses.replace(MIXED, mean_head=True, sinkhorn_iterations=3),
        {"hc_sinkhorn_iters": 3, "hc_eps": 1e-6, "hc_mult": 4},
    ),
}


def classes_of(family: str) -> tuple[type[nn.Module], type[nn.Module]]:
    if family == "hy_v4":
        from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection, HYV4HyperHead

        return HYV4HyperConnection, HYV4HyperHead
    if family == "deepseek_v4":
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
            DeepseekV4HyperConnection,
            DeepseekV4HyperHead,
        )

        return DeepseekV4HyperConnection, DeepseekV4HyperHead
    from transformers.models.glm5_next.modeling_glm5_next import (
        Glm5NextTextHyperConnection,
        Glm5NextTextHyperHead,
    )

    return Glm5NextTextHyperConnection, Glm5NextTextHyperHead


class Config:
    """The fields that a hyper-connection of `transformers` reads."""

    def __init__(self, **fields: Any) -> None:
        self.hidden_size = SIZE
        self.rms_norm_eps = NORM_EPS
        self.__dict__.update(fields)


def filled(module: nn.Module, generator: torch.Generator) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 if parameter.dim() > 1 else noise)
    return module.requires_grad_(False)


def copied(ours: nn.Module, theirs: nn.Module, prefix: str = "") -> None:
    names = {"weight": "fn", "bias": "base", "gains": "scale"}
    ours.load_state_dict({name: theirs.get_parameter(prefix + each) for name, each in names.items()})
    ours.requires_grad_(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_half_layer_reads_and_leaves_the_streams_of_transformers(family: str) -> None:
    facts, fields = FAMILIES[family]
    generator = torch.Generator().manual_seed(3)
    theirs = filled(classes_of(family)[0](Config(**fields)), generator)  # type: ignore[call-arg]
    ours = HyperConnection(facts, SIZE, NORM_EPS)
    copied(ours, theirs)
    streams_BSnD = torch.randn(2, 7, facts.num_streams, SIZE, generator=generator)
    y_BSD = torch.randn(2, 7, SIZE, generator=generator)
    read_BSD, leave = ours.enter(streams_BSnD.flatten(2))
    if facts.sinkhorn_iterations:
        post, comb, expected_read = theirs(streams_BSnD)
        kept = comb.transpose(-1, -2) @ streams_BSnD
    else:
        post, expected_read = theirs(streams_BSnD)
        kept = streams_BSnD
    expected = post.unsqueeze(-1) * y_BSD.unsqueeze(-2) + kept
    torch.testing.assert_close(read_BSD, expected_read, rtol=0, atol=tolerance(expected_read))
    torch.testing.assert_close(leave(y_BSD), expected.flatten(2), rtol=0, atol=tolerance(expected))


def tolerance(expected: Tensor) -> float:
    """c eps sqrt(K) absmax: K products for a logit of the factors."""
    return 8 * torch.finfo(torch.float32).eps * (4 * SIZE) ** 0.5 * float(expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_joins_the_streams_as_transformers_does(family: str) -> None:
    facts, fields = FAMILIES[family]
    generator = torch.Generator().manual_seed(4)
    streams_BSnD = torch.randn(2, 7, facts.num_streams, SIZE, generator=generator)
    ours: nn.Module
    if facts.mean_head:
        theirs = classes_of(family)[1]()
        ours = MeanOfStreams(facts.num_streams)
    else:
        theirs = filled(classes_of(family)[1](Config(**fields)), generator)  # type: ignore[call-arg]
        ours = HyperConnection(facts, SIZE, NORM_EPS, of_head=True)
        copied(ours, theirs, "hc_")
    expected = theirs(streams_BSnD)
    torch.testing.assert_close(ours(streams_BSnD.flatten(2)), expected, rtol=0, atol=tolerance(expected))


def test_streams_are_mixed_by_a_matrix_whose_rows_and_columns_sum_to_1() -> None:
    facts = dataclasses.replace(MIXED, sinkhorn_iterations=100)
    logits_TM = torch.randn(5, sum(facts.sizes), generator=torch.Generator().manual_seed(5))
    factors = coefficients(facts, logits_TM, torch.zeros(24), torch.ones(3))
    assert factors.mixing is not None
    ones = torch.ones(5, 4)
    torch.testing.assert_close(factors.mixing.sum(-2), ones, rtol=0, atol=4e-6)  # eps, and rounding
    torch.testing.assert_close(factors.mixing.sum(-1), ones, rtol=0, atol=2e-5)


def test_equal_streams_stay_the_residual_of_one_stream() -> None:
    """With factors that are constant, p = 1/n and q = 1, a layer computes what one without streams does."""
    facts = HyperConnections(4, 0.0, post_factor=1.0)
    plain = tiny_source()
    arch = plain.arch.replace(hyper=facts)
    layer, alone = DecoderLayer(arch, 0), DecoderLayer(plain.arch, 0)
    weights = {name: value for name, value in plain.layer(0).items() if isinstance(value, Tensor)}
    large = 40.0  # the sigmoid of which is 1
    third = -torch.log(torch.tensor(3.0)).item()  # the sigmoid of which is 1/4
    constant = {
        "weight": torch.zeros(8, 4 * arch.hidden_size),
        "bias": torch.tensor([third] * 4 + [large] * 4),
        "gains": torch.ones(2),
    }
    for half in ("attn", "ffn"):
        weights |= {f"{half}_hyper.{leaf}": value for leaf, value in constant.items()}
    layer.load_state_dict(weights)
    alone.load_state_dict(plain.layer(0))
    x_BSD = torch.randn(1, 9, arch.hidden_size, generator=torch.Generator().manual_seed(6))
    positions = torch.arange(9)
    layer.requires_grad_(False)
    alone.requires_grad_(False)
    expected = alone(x_BSD, positions, FullAttention())
    after = layer(repeated(facts, x_BSD), positions, FullAttention()).unflatten(-1, (4, -1))
    for stream in after.unbind(-2):
        torch.testing.assert_close(stream, expected, rtol=0, atol=20 * tolerance(expected))


@pytest.mark.parametrize("facts", [MIXED, FAMILIES["hy_v4"][0]])
def test_gradients_flow_through_factors_and_streams(facts: HyperConnections) -> None:
    generator = torch.Generator().manual_seed(7)
    n = facts.num_streams
    shapes = facts.shapes(6)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(True)

    def after(streams_TE: Tensor, y_TD: Tensor, logits_TM: Tensor, bias_M: Tensor, gains: Tensor) -> Tensor:
        factors = coefficients(facts, logits_TM, bias_M, gains)
        return mixed(streams_TE, factors.pre).sum() + spread(y_TD, streams_TE, factors)

    operands = drawn(2, 6 * n), drawn(2, 6), drawn(2, *shapes["bias"]), drawn(*shapes["bias"])
    loss = after(*operands, gains=drawn(*shapes["gains"]))
    assert loss.shape == (2, 6 * n)
    gradients = torch.autograd.grad(loss.square().sum(), operands)
    assert all(bool(each.isfinite().all()) and bool(each.abs().sum() > 0) for each in gradients)


def test_facts_travel_in_a_manifest() -> None:
    for facts, _ in FAMILIES.values():
        stored = Fields(facts.to_json(), "hyper", ValueError)  # type: ignore[arg-type]
        assert HyperConnections.from_json(stored) == facts
        arch = tiny_source(hyper=facts).arch
        assert Arch.from_json(*arch.to_json()) == arch

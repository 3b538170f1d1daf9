"""A shared expert among the others: its parts are its numbers, decode rows get its output with theirs, and
what would change a number stays whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.act_mul.reference import act_mul
from compress.kernels.operands.routing import ExpertWeights
from compress.models.experts import Experts
from compress.quant.numerics import grouped, min_max_scale, round_to_nearest
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.runtime.deployment import Deployment
from compress.runtime.expert_linears import ExpertLinears
from compress.runtime.expert_loader import parts
from tests.support.random_experts import random_experts

HIDDEN = 128
SIZE = 128
ROWS = 7


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(shape: tuple[int, int], name: str | None, seed: int) -> Tensor | QuantizedWeight:
    w_OI = randn(*shape, seed=seed) * shape[1] ** -0.5
    if name is None:
        return w_OI
    scheme = SCHEMES[name]
    return round_to_nearest(w_OI, scheme, *min_max_scale(grouped(w_OI, scheme), scheme, torch.float32))


def expert(name: str | None, size: int, seed: int) -> ExpertWeights:
    gate, up = (weight((size, HIDDEN), name, seed + idx) for idx in range(2))
    return ExpertWeights(gate, up, weight((HIDDEN, size), name, seed + 2))


def wide(matrix: Tensor | QuantizedWeight) -> Tensor:
    dense = matrix if isinstance(matrix, Tensor) else matrix.dequantize(torch.float32)
    return dense.double()


def output(x_TD: Tensor, of: ExpertWeights) -> Tensor:
    """The output of an expert in float64."""
    gate, up, down = (wide(each) for each in (of.gate, of.up, of.down))
    return act_mul(torch.cat((x_TD.double() @ gate.t(), x_TD.double() @ up.t()), dim=1), "silu") @ down.t()


@pytest.mark.parametrize("name", [None, "W4A16_G128", "W4A16_G32_ASYM", "W4A16_CHANNEL", "FP8_BLOCK"])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_parts_of_a_shared_expert_add_up_to_it(name: str | None, num_parts: int) -> None:
    shared = expert(name, num_parts * SIZE, seed=100)
    cut = parts(shared, expert(name, SIZE, seed=1), num_parts)
    assert len(cut) == num_parts
    assert torch.equal(torch.cat([wide(each.gate) for each in cut]), wide(shared.gate))
    assert torch.equal(torch.cat([wide(each.up) for each in cut]), wide(shared.up))
    assert torch.equal(torch.cat([wide(each.down) for each in cut], dim=1), wide(shared.down))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("FP8_DYNAMIC", 128),  # one scale of a row's inputs for all of them
        ("INT8_DYNAMIC", 128),
        ("W4A16_G64", 96),  # a cut through a group
        ("FP8_BLOCK", 64),  # and through a block
    ],
)
def test_what_a_cut_would_change_stays_whole(name: str, size: int) -> None:
    shared = expert(name, 2 * size, seed=100)
    assert isinstance(shared.down, QuantizedWeight)
    down = QuantizedWeight(shared.down.scheme, shared.down.codes_OI[:, :size], shared.down.scale_OG)
    assert parts(shared, ExpertWeights(shared.gate, shared.up, down), 2) == []


@pytest.mark.parametrize("name", ["FP8_STATIC", "INT8_STATIC", "NVFP4_W4A4"])
def test_static_scales_of_the_others_round_no_input_of_a_shared_expert(name: str) -> None:
    one, other = random_experts(name, torch.bfloat16, hidden=SIZE, ffn=SIZE, count=2)
    assert parts(one, other, 1) == []


@pytest.mark.parametrize("name", ["W8A16", None])
def test_an_expert_of_another_scheme_stays_apart(name: str | None) -> None:
    assert parts(expert(name, SIZE, seed=100), expert("W4A16_G32", SIZE, seed=1), 1) == []


@pytest.mark.parametrize("name", [None, "W4A16_G32", "FP8_BLOCK"])
def test_decode_rows_have_the_shared_expert_among_theirs_and_prompts_have_not(name: str | None) -> None:
    facts = Experts(5, 2, SIZE, shared_size=2 * SIZE, renormalize=True)
    others = [expert(name, SIZE, seed=10 * idx) for idx in range(5)]
    shared = expert(name, facts.shared_size, seed=100)
    bound = ExpertLinears.bind(
        facts,
        randn(5, HIDDEN, seed=7),
        others,
        Deployment(torch.device("cpu"), torch.float32, max_batch_size=8, max_step_tokens=512),
        activation="silu",
        shared=parts(shared, others[0], facts.shared_parts),
    )
    x_TD, residual_TD = randn(ROWS, HIDDEN, seed=8), randn(ROWS, HIDDEN, seed=9)
    ids_TK, _ = bound.route(x_TD, "decode")
    routed, their_weights = bound.route(x_TD, "prefill")
    assert ids_TK[:, 2:].tolist() == [[5, 6]] * ROWS
    assert torch.equal(ids_TK[:, :2], routed)
    expected = residual_TD.double()
    for row, (chosen, weights) in enumerate(zip(routed.tolist(), their_weights.tolist(), strict=True)):
        for idx, factor in zip(chosen, weights, strict=True):
            expected[row] += factor * output(x_TD[row : row + 1], others[idx])[0]
    bound_of = 1 / 16 if name == "FP8_BLOCK" else 1e-5  # inputs are rounded to e4m3

    def differs(out: Tensor, from_: Tensor) -> float:
        return float((out.double() - from_).norm() / from_.norm())

    assert bound.has_shared("decode")
    assert not bound.has_shared("prefill")
    prompt = bound(x_TD, "prefill", residual=residual_TD)
    assert differs(prompt, expected) < bound_of
    decoded = bound(x_TD, "decode", residual=residual_TD)
    assert differs(decoded, expected + output(x_TD, shared)) < bound_of
    of_one = bound.bytes_read(1) - bound.bytes_read(0)
    assert abs(bound.bytes_read(5) - bound.weight_bytes) <= 1
    assert abs(bound.bytes_read(2) - (bound.weight_bytes - 3 * of_one)) <= 3


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"shared_size": 256}, 2),
        ({"shared_size": 192}, 0),
        ({}, 0),
        ({"shared_size": 128, "shared_gate": True}, 1),
        ({"shared_size": 128, "expert_bias": True}, 0),
        ({"shared_size": 128, "branch_norms": True}, 0),
        ({"shared_size": 128, "latent_size": 64}, 0),
        ({"shared_size": 128, "zero_experts": 3}, 0),
        ({"shared_size": 128, "top_k": 1, "score": "sigmoid", "weighs_input": True}, 0),
    ],
)
def test_a_shared_expert_is_some_others_where_it_reads_what_they_read(
    facts: dict[str, Any], expected: int
) -> None:
    assert Experts(**{"num_experts": 4, "top_k": 2, "expert_size": SIZE, **facts}).shared_parts == expected

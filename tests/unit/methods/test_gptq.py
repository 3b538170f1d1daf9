"""GPTQ against a textbook Optimal Brain Surgeon in float64, and against the laws its result must obey."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.calibrate.stats import InputStats, SecondMoment
from compress.errors import UsageError
from compress.methods.quantize.gptq import DAMPING_LADDER, Gptq, inverse_factor
from compress.methods.quantize.rtn import Rtn
from compress.quant.numerics import output_error
from compress.quant.scheme import QuantizedWeight, Scheme

SIZE = 96
GROUP = 32
SCHEMES = {
    "sym": Scheme("sym", 4, symmetric=True, group_size=GROUP),
    "asym": Scheme("asym", 4, symmetric=False, group_size=GROUP),
    "channel": Scheme("channel", 8, symmetric=True, group_size=None),
}
ALL_SCHEMES = SCHEMES | {
    "e4m3": Scheme("e4m3", 8, symmetric=True, group_size=None, type="float", activation="token")
}
Array = NDArray[np.float64]


def inputs(num_tokens: int = 400, size: int = SIZE, seed: int = 0) -> Tensor:
    """Correlated features of unequal size, which is where GPTQ has something to gain."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=generator) * size**-0.5 + 0.3 * torch.eye(size)
    return (
        torch.randn(num_tokens, size, generator=generator)
        @ mixing
        * torch.exp(torch.randn(size, generator=generator))
    )


def weights(out_features: int = 7, size: int = SIZE, seed: int = 1) -> Tensor:
    return 0.05 * torch.randn(out_features, size, generator=torch.Generator().manual_seed(seed))


def moment(x_TI: Tensor) -> InputStats:
    stat = SecondMoment()
    stat.update(x_TI)
    return InputStats(stat)


def textbook_codes(
    w_OI: Tensor, h_II: Tensor, weight: QuantizedWeight, *, damping: float, act_order: bool
) -> tuple[Array, Array]:
    """One column at a time; the inverse of the Hessian of the columns still free is kept explicitly and
    shrunk by elimination.

    Returns codes and, for each weight, its distance from the nearest tie in units of a code: two
    implementations may differ at a tie only.
    """
    w = w_OI.double().numpy().copy()
    h = h_II.double().numpy().copy()
    dead = h.diagonal() == 0
    w[:, dead] = 0
    h[dead, dead] = 1
    h += damping * h.diagonal().mean() * np.eye(len(h))
    inverse = np.linalg.inv(h)
    scheme = weight.scheme
    (rows, columns) = w.shape
    groups = weight.scale_OG.shape[1]
    scale = np.repeat(weight.scale_OG.double().numpy(), columns // groups, axis=1)
    zero = np.zeros_like(w)
    if weight.zero_point_OG is not None:
        zero = np.repeat(weight.zero_point_OG.double().numpy(), columns // groups, axis=1)
    order = np.argsort(-h_II.diagonal().numpy(), kind="stable") if act_order else np.arange(columns)
    codes = np.zeros((rows, columns))
    margin = np.zeros((rows, columns))
    for p in order:
        exact = w[:, p] / scale[:, p]
        codes[:, p] = np.clip(np.round(exact) + zero[:, p], scheme.min_code, scheme.max_code)
        margin[:, p] = np.abs(np.abs(exact - np.trunc(exact)) - 0.5)
        error = w[:, p] - (codes[:, p] - zero[:, p]) * scale[:, p]
        w -= np.outer(error, inverse[p] / inverse[p, p])
        inverse -= np.outer(inverse[:, p], inverse[p]) / inverse[p, p]
        inverse[p, p] = 1.0  # eliminated: it changes nothing any more
    return codes, margin


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("act_order", [False, True])
def test_codes_are_those_of_the_textbook(scheme: Scheme, act_order: bool) -> None:
    w_OI = weights()
    stats = moment(inputs())
    method = Gptq(act_order=act_order, block_size=40, scale="min_max")
    rounded = method.round(w_OI, stats, scheme, scale_dtype=torch.bfloat16)
    assert rounded.facts == {"damping": method.damping, "dead_inputs": 0}
    codes, margin = textbook_codes(
        w_OI, stats[SecondMoment].mean(), rounded.weight, damping=method.damping, act_order=act_order
    )
    # a code may differ only after a row met a near-tie, so compare the rows that stayed clear of one
    clear = margin.min(axis=1) > (2e-5 if scheme.num_bits == 4 else 1e-4)
    assert clear.sum() >= len(clear) - 2
    assert np.array_equal(rounded.weight.codes_OI.numpy()[clear], codes[clear])
    nearest = Rtn().round(w_OI, {}, scheme, scale_dtype=torch.bfloat16).weight.codes_OI
    assert (nearest.numpy() != codes).mean() > 0.1  # the comparison is not one of plain rounding


@pytest.mark.parametrize("scheme", ALL_SCHEMES.values(), ids=ALL_SCHEMES)
def test_the_block_size_does_not_decide_codes(scheme: Scheme) -> None:
    w_OI = weights(16)
    stats = moment(inputs())
    codes = [
        Gptq(block_size=block_size).round(w_OI, stats, scheme, scale_dtype=torch.bfloat16).weight.codes_OI
        for block_size in (1, 7, 32, 96, 500)
    ]
    for other in codes[1:]:
        same_rows = (other.view(torch.int8) == codes[0].view(torch.int8)).all(dim=1)
        assert (
            same_rows.float().mean() >= 0.8
        )  # float32 sums in another order flip a tie now and then, and what follows it in its row


@pytest.mark.parametrize("scheme", ALL_SCHEMES.values(), ids=ALL_SCHEMES)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("scale", ["min_max", "mse", "hessian"])
def test_the_output_error_is_below_that_of_nearest_rounding(
    scheme: Scheme, act_order: bool, scale: str
) -> None:
    w_OI = weights(32)
    stats = moment(inputs())
    h_II = stats[SecondMoment].mean()
    gptq = (
        Gptq.model_validate({"act_order": act_order, "scale": scale})
        .round(w_OI, stats, scheme, scale_dtype=torch.bfloat16)
        .weight
    )
    rtn = Rtn.model_validate({"scale": scale}).round(w_OI, stats, scheme, scale_dtype=torch.bfloat16).weight
    assert output_error(w_OI, gptq.dequantize(torch.float32), h_II) < 0.9 * output_error(
        w_OI, rtn.dequantize(torch.float32), h_II
    )
    if scale == "min_max":
        assert torch.equal(gptq.scale_OG, rtn.scale_OG)


def test_uncorrelated_inputs_of_one_size_leave_plain_rounding() -> None:
    w_OI = weights()
    scheme = SCHEMES["sym"]
    stat = moment(torch.eye(SIZE))
    codes = Gptq(scale="min_max").round(w_OI, stat, scheme, scale_dtype=torch.bfloat16).weight.codes_OI
    assert torch.equal(codes, Rtn().round(w_OI, {}, scheme, scale_dtype=torch.bfloat16).weight.codes_OI)


def test_a_permutation_of_features_within_groups_permutes_the_codes() -> None:
    w_OI = weights(16)
    x_TI = inputs()
    scheme = SCHEMES["sym"]
    generator = torch.Generator().manual_seed(4)
    shuffle = torch.cat(
        [begin + torch.randperm(GROUP, generator=generator) for begin in range(0, SIZE, GROUP)]
    )
    plain = Gptq(scale="min_max").round(w_OI, moment(x_TI), scheme, scale_dtype=torch.bfloat16).weight
    shuffled = (
        Gptq(scale="min_max")
        .round(w_OI[:, shuffle], moment(x_TI[:, shuffle]), scheme, scale_dtype=torch.bfloat16)
        .weight
    )
    assert torch.equal(shuffled.scale_OG, plain.scale_OG)
    assert (shuffled.codes_OI == plain.codes_OI[:, shuffle]).all(
        dim=1
    ).float().mean() >= 0.8  # act-order ignores where a feature stands


def test_inputs_that_never_fire_get_weight_zero_and_are_counted() -> None:
    w_OI = weights()
    x_TI = inputs()
    dead = torch.tensor([0, 5, 40, 95])
    x_TI[:, dead] = 0
    for scheme in SCHEMES.values():
        rounded = Gptq().round(w_OI, moment(x_TI), scheme, scale_dtype=torch.bfloat16)
        assert rounded.facts["dead_inputs"] == 4
        values_OI = rounded.weight.dequantize(torch.float32)
        assert torch.count_nonzero(values_OI[:, dead]) == 0
        assert torch.count_nonzero(values_OI) > 0
    silent = Gptq().round(w_OI, moment(torch.zeros(10, SIZE)), SCHEMES["sym"], scale_dtype=torch.bfloat16)
    assert torch.count_nonzero(silent.weight.dequantize()) == 0


def test_the_factor_is_that_of_the_inverse_of_the_damped_hessian() -> None:
    h_II = moment(inputs())[SecondMoment].mean()
    upper, share = inverse_factor(h_II, damping=0.02)
    assert share == 0.02
    damped = h_II.double() + 0.02 * h_II.double().diagonal().mean() * torch.eye(SIZE, dtype=torch.float64)
    condition = float(torch.linalg.cond(damped))
    product = upper.double().t() @ upper.double() @ damped
    assert torch.equal(upper, upper.triu())
    assert (product - torch.eye(SIZE)).abs().max() < 4 * torch.finfo(
        torch.float32
    ).eps * condition * SIZE**0.5


def test_fewer_tokens_than_features_need_no_more_than_the_configured_damping() -> None:
    stats = moment(inputs(num_tokens=3))
    rounded = Gptq().round(weights(), stats, SCHEMES["sym"], scale_dtype=torch.bfloat16)
    assert rounded.facts["damping"] == 0.01


def test_a_hessian_that_resists_climbs_the_ladder_and_says_so() -> None:
    """Indefinite by a hair, as float32 sums of nearly dependent features are: the smallest eigenvalue is
    -0.05 of the mean diagonal.
    """
    basis, _ = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2)))
    values = torch.ones(SIZE)
    values[0] = -0.05
    h_II = basis * values @ basis.t()
    _, share = inverse_factor((h_II + h_II.t()) / 2, damping=0.01)
    needed = 0.05 / float(values.mean())
    climbed = [0.01 * multiple for multiple in DAMPING_LADDER]
    assert share == pytest.approx(min(each for each in climbed if each > needed))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_hessian_of_broken_activations_is_an_error(poison: float) -> None:
    x_TI = inputs()
    x_TI[3, 3] = poison
    with pytest.raises(UsageError, match="NaN or infinity"):
        Gptq(scale="min_max").round(weights(), moment(x_TI), SCHEMES["sym"], scale_dtype=torch.bfloat16)


def test_the_statistics_and_the_weights_are_left_as_they_were() -> None:
    w_OI = weights()
    stats = moment(inputs())
    w_before = w_OI.clone()
    h_before = stats[SecondMoment].mean().clone()
    Gptq().round(w_OI, stats, SCHEMES["asym"], scale_dtype=torch.bfloat16)
    assert torch.equal(w_OI, w_before)
    assert torch.equal(stats[SecondMoment].mean(), h_before)

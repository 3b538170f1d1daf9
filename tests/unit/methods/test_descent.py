"""Coordinate descent against exhaustive search in float64, and against the laws of a descent."""

import dataclasses

import pytest
import torch
from torch import Tensor

from compress.calibrate.stats import InputStats, SecondMoment
from compress.errors import UsageError
from compress.methods.quantize.descent import Descent
from compress.methods.quantize.gptq import Gptq
from compress.methods.quantize.passes import RoundPass
from compress.methods.quantize.rtn import Rtn
from compress.quant.scheme import QuantizedWeight, Scheme

SIZE = 48
GROUP = 16
SCHEMES = {
    "sym": Scheme("sym", 4, symmetric=True, group_size=GROUP),
    "asym": Scheme("asym", 4, symmetric=False, group_size=GROUP),
    "channel": Scheme("channel", 8, symmetric=True, group_size=None),
    "e4m3": Scheme("e4m3", 8, symmetric=True, group_size=None, type="float", activation="token"),
}
EACH_SCHEME = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
EACH_START = pytest.mark.parametrize(
    "start", [Rtn(), Gptq(scale="min_max"), Gptq()], ids=["rtn", "gptq", "gptq-search"]
)


def moment(num_tokens: int = 200, seed: int = 0) -> SecondMoment:
    """Of correlated features of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(SIZE, SIZE, generator=generator) * SIZE**-0.5 + 0.3 * torch.eye(SIZE)
    stat = SecondMoment()
    stat.update(
        torch.randn(num_tokens, SIZE, generator=generator)
        @ mixing
        * torch.exp(0.7 * torch.randn(SIZE, generator=generator))
    )
    return stat


def weights(out_features: int = 6, seed: int = 1) -> Tensor:
    return 0.05 * torch.randn(out_features, SIZE, generator=torch.Generator().manual_seed(seed))


def damped(stat: SecondMoment, damping: float) -> Tensor:
    h_II = stat.mean().double()
    return h_II + damping * h_II.diagonal().mean() * torch.eye(len(h_II))


def loss(values_OI: Tensor, w_OI: Tensor, h_II: Tensor) -> Tensor:
    """(w - q) H (w - q)^T of every row; leading dimensions of `values_OI` are kept."""
    delta = values_OI.double() - w_OI.double()
    return ((delta @ h_II) * delta).sum(-1)


def loss_of(weight: QuantizedWeight, w_OI: Tensor, h_II: Tensor) -> Tensor:
    return loss(weight.dequantize(torch.float32), w_OI, h_II)


def all_codes(scheme: Scheme) -> Tensor:
    if scheme.type == "int":
        return torch.arange(scheme.min_code, scheme.max_code + 1).double()
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return numbers[numbers.isfinite()].unique()


def exhaustive_sweep(
    weight: QuantizedWeight, w_OI: Tensor, h_II: Tensor, *, refit: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Every scale, then every code of its group, replaced by the best of all that can be stored: no gradient,
    no closed form.

    Returns codes, scales, and per row whether a second-best choice ever came within 1e-5 of the best.
    """
    codes = weight.codes_OI.double()
    scale = weight.scale_OG.double()
    zero = torch.zeros_like(scale) if weight.zero_point_OG is None else weight.zero_point_OG.double()
    members = SIZE // scale.shape[1]
    storable = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).double()
    close_O = torch.zeros(len(codes), dtype=torch.bool)

    def wide(per_group: Tensor) -> Tensor:
        return per_group.repeat_interleave(members, dim=-1)

    for group in range(scale.shape[1]):
        columns = range(group * members, (group + 1) * members)
        for row in range(len(codes)):
            if refit:
                near_V = storable[(storable > scale[row, group] / 2) & (storable < scale[row, group] * 2)]
                tried_VG = scale[row].repeat(len(near_V), 1)
                tried_VG[:, group] = near_V
                found_V = loss((codes[row] - wide(zero[row])) * wide(tried_VG), w_OI[row], h_II)
                scale[row, group] = near_V[found_V.argmin()]
                close_O[row] |= _near_tie(found_V)
            values_V = all_codes(weight.scheme)
            for i in columns:
                tried_VI = codes[row].repeat(len(values_V), 1)
                tried_VI[:, i] = values_V
                found_V = loss((tried_VI - wide(zero[row])) * wide(scale[row]), w_OI[row], h_II)
                codes[row, i] = values_V[found_V.argmin()]
                close_O[row] |= _near_tie(found_V)
    return codes, scale, close_O


def _near_tie(loss_V: Tensor) -> Tensor:
    best, second = loss_V.sort().values[:2]
    return second - best < 1e-5 * best


@EACH_SCHEME
@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("block_size", [5, 128])
def test_a_sweep_is_the_exhaustive_one(
    scheme: Scheme, refit: bool, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.methods.quantize.descent.BLOCK_SIZE", block_size)
    stat = moment()
    w_OI = weights(12)
    start = Rtn().round(w_OI, {}, scheme, scale_dtype=torch.bfloat16).weight
    found = Descent(sweeps=1, refit=refit).refine(w_OI, start, InputStats(stat)).weight
    codes, scale, close_O = exhaustive_sweep(start, w_OI, damped(stat, 0.01), refit=refit)
    assert (~close_O).sum() >= 3  # float32 and float64 may part at a tie, and everything after it in the row
    assert torch.equal(found.codes_OI.double()[~close_O], codes[~close_O])
    assert torch.equal(found.scale_OG.double()[~close_O], scale[~close_O])
    assert (codes != start.codes_OI.double()).double().mean() > 0.1
    assert torch.equal(found.scale_OG, start.scale_OG) != refit


@EACH_SCHEME
@EACH_START
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_no_sweep_raises_the_loss_of_any_row(
    scheme: Scheme, start: Rtn | Gptq, scale_dtype: torch.dtype
) -> None:
    stats = InputStats(moment())
    w_OI = weights(40)
    h_II = damped(stats[SecondMoment], 0.01)
    weight = start.round(w_OI, stats, scheme, scale_dtype=scale_dtype).weight
    first = loss_of(weight, w_OI, h_II)
    for _ in range(4):
        before = weight
        weight = Descent(sweeps=1).refine(w_OI, weight, stats).weight
        assert bool((loss_of(weight, w_OI, h_II) <= loss_of(before, w_OI, h_II) * (1 + 1e-4)).all())
    share = float(loss_of(weight, w_OI, h_II).sum() / first.sum())
    assert share < (
        0.6 if isinstance(start, Rtn) else 1
    )  # plain rounding leaves much to gain; GPTQ, with many small steps, very little


@EACH_SCHEME
def test_sweeps_compose(scheme: Scheme) -> None:
    """Three at once, or one and two: a sweep keeps no memory but codes and scales."""
    stats = InputStats(moment())
    w_OI = weights(40)
    start = Rtn().round(w_OI, {}, scheme, scale_dtype=torch.bfloat16).weight
    together = Descent(sweeps=3).refine(w_OI, start, stats).weight
    apart = Descent(sweeps=2).refine(w_OI, Descent(sweeps=1).refine(w_OI, start, stats).weight, stats).weight
    same_O = (together.codes_OI.float() == apart.codes_OI.float()).all(1) & (
        together.scale_OG == apart.scale_OG
    ).all(1)
    assert (
        same_O.float().mean() >= 0.9
    )  # the gradient is kept up to date in one and computed anew in the other: a tie may part them


@EACH_SCHEME
def test_after_many_sweeps_no_single_code_can_be_bettered(scheme: Scheme) -> None:
    stat = moment()
    w_OI = weights(4)
    start = Rtn().round(w_OI, {}, scheme, scale_dtype=torch.bfloat16).weight
    weight = Descent(sweeps=60).refine(w_OI, start, InputStats(stat)).weight
    h_II = damped(stat, 0.01)
    codes, scale, _ = exhaustive_sweep(weight, w_OI, h_II, refit=True)
    best = dataclasses.replace(
        weight, codes_OI=codes.to(scheme.code_dtype), scale_OG=scale.to(torch.bfloat16)
    )
    assert torch.allclose(loss_of(best, w_OI, h_II), loss_of(weight, w_OI, h_II), rtol=1e-4)


@pytest.mark.parametrize(
    "scheme", [SCHEMES["sym"], SCHEMES["asym"], SCHEMES["channel"]], ids=["sym", "asym", "channel"]
)
def test_a_refit_finds_the_scale_that_made_the_weights(scheme: Scheme) -> None:
    true = Rtn().round(weights(), {}, scheme, scale_dtype=torch.bfloat16).weight
    w_OI = true.dequantize(torch.float32)
    scale_OG = true.scale_OG.clone()
    scale_OG[:, -1] *= 1.02  # too little to move a code: the codes stand, only this scale is off
    off = dataclasses.replace(true, scale_OG=scale_OG)
    stats = InputStats(moment())
    found = Descent(sweeps=1, damping=0).refine(w_OI, off, stats).weight
    if scheme.group_size is None:
        assert torch.equal(found.scale_OG, true.scale_OG)
        assert torch.equal(found.codes_OI, true.codes_OI)
    else:  # groups before the wrong one lean towards its error, and come back
        found = Descent(sweeps=30, damping=0).refine(w_OI, off, stats).weight
        h_II = damped(stats[SecondMoment], 0.0)
        assert float(loss_of(found, w_OI, h_II).sum()) < 0.2 * float(loss_of(off, w_OI, h_II).sum())


@EACH_SCHEME
def test_uncorrelated_inputs_of_one_size_leave_nearest_codes(scheme: Scheme) -> None:
    stat = SecondMoment()
    w_OI = weights()
    stat.update(torch.eye(SIZE))
    start = Rtn(scale="mse").round(w_OI, {}, scheme, scale_dtype=torch.bfloat16).weight
    refined = Descent(refit=False).refine(w_OI, start, InputStats(stat))
    assert torch.equal(refined.weight.codes_OI.float(), start.codes_OI.float())


@EACH_SCHEME
def test_inputs_that_never_fire_keep_their_codes(scheme: Scheme) -> None:
    generator = torch.Generator().manual_seed(3)
    x_TI = torch.randn(100, SIZE, generator=generator) @ (
        torch.eye(SIZE) + 0.2 * torch.randn(SIZE, SIZE, generator=generator)
    )
    dead = torch.tensor([0, 7, 20, SIZE - 1])
    x_TI[:, dead] = 0
    stat = SecondMoment()
    silent = SecondMoment()
    stat.update(x_TI)
    silent.update(torch.zeros(5, SIZE))
    w_OI = weights()
    for rounder in (Rtn(), Gptq()):
        start = rounder.round(w_OI, InputStats(stat), scheme, scale_dtype=torch.bfloat16).weight
        for damping in (0.0, 0.01):
            found = Descent(damping=damping).refine(w_OI, start, InputStats(stat))
            assert torch.equal(found.weight.codes_OI.float()[:, dead], start.codes_OI.float()[:, dead])
            assert not torch.equal(found.weight.codes_OI.float(), start.codes_OI.float())
        unmoved = Descent().refine(w_OI, start, InputStats(silent)).weight
        assert torch.equal(unmoved.codes_OI.float(), start.codes_OI.float())


def test_groups_of_zeros_stay_zeros_and_scales_stay_positive() -> None:
    for scheme in SCHEMES.values():
        w_OI = weights()
        w_OI[2] = 0
        start = Rtn().round(w_OI, {}, scheme, scale_dtype=torch.bfloat16).weight
        found = Descent(sweeps=3).refine(w_OI, start, InputStats(moment())).weight
        assert torch.count_nonzero(found.dequantize(torch.float32)[2]) == 0
        assert bool((found.scale_OG > 0).all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_hessian_of_broken_activations_is_an_error(poison: float) -> None:
    stat = SecondMoment()
    x_TI = torch.ones(4, SIZE)
    x_TI[1, 1] = poison
    stat.update(x_TI)
    start = Rtn().round(weights(), {}, SCHEMES["sym"], scale_dtype=torch.bfloat16).weight
    with pytest.raises(UsageError, match="NaN or infinity"):
        Descent().refine(weights(), start, InputStats(stat))


def test_the_pass_asks_for_what_rounder_and_refiner_need() -> None:
    with_refiner = RoundPass(Rtn(), SCHEMES["sym"], torch.bfloat16, Descent())
    assert set(with_refiner.needs()) == {SecondMoment}

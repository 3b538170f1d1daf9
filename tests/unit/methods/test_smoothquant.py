"""SmoothQuant against the paper's formula and its ends, and where it pays: integer inputs with outliers."""

import pytest
import torch
from torch import Tensor

from compress.calibrate.stats import AbsMax, InputStats
from compress.kernels.operands.rows import INT8, ActivationQuant, quantize
from compress.methods.quantize.smoothquant import SmoothQuant
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import Scheme

SIZE = 96
OUTLIERS = [3, 40, 77]
SCHEME = Scheme("W8A8", 8, symmetric=True, group_size=None, activation="token")


def inputs(seed: int = 0, *, outlier: float = 60.0) -> Tensor:
    x_TI = torch.randn(400, SIZE, generator=torch.Generator().manual_seed(seed))
    x_TI[:, OUTLIERS] *= outlier
    return x_TI


def weights(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(50, SIZE, generator=generator)
        * torch.exp(0.5 * torch.randn(SIZE, generator=generator))
        * SIZE**-0.5
    )


def statistics(x_TI: Tensor) -> InputStats:
    """Seen in two parts that are merged."""
    first = AbsMax()
    second = AbsMax()
    first.update(x_TI[:150])
    second.update(x_TI[150:])
    first.merge(second)
    return InputStats(first)


def scale_of(
    w_OI: Tensor, x_TI: Tensor, *, alpha: float = 0.5, head_repeat: tuple[int, int] = (1, 0)
) -> Tensor:
    return SmoothQuant(alpha=alpha).scale(
        w_OI, statistics(x_TI), SCHEME, scale_dtype=torch.bfloat16, head_repeat=head_repeat
    )


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.85, 1.0])
def test_the_scale_is_the_papers_up_to_a_common_factor(alpha: float) -> None:
    x_TI = inputs()
    w_OI = weights()
    paper_I = x_TI.abs().amax(0).double() ** alpha / w_OI.abs().amax(0).double() ** (1 - alpha)
    ratio_I = scale_of(w_OI, x_TI, alpha=alpha).double() / paper_I
    torch.testing.assert_close(ratio_I, ratio_I[:1].expand(SIZE), rtol=1e-5, atol=0)
    assert float(scale_of(w_OI, x_TI, alpha=alpha).log().mean()) == pytest.approx(0, abs=1e-5)


def test_the_ends_level_one_factor_and_the_middle_makes_both_alike() -> None:
    x_TI = inputs()
    w_OI = weights()
    ranges = {
        a: ((x_TI / scale).abs().amax(0), (w_OI * scale).abs().amax(0))
        for a in (0.0, 0.5, 1.0)
        for scale in [scale_of(w_OI, x_TI, alpha=a)]
    }
    level = torch.ones(SIZE)
    torch.testing.assert_close(ranges[1.0][0] / ranges[1.0][0][0], level, rtol=1e-5, atol=0)
    torch.testing.assert_close(ranges[0.0][1] / ranges[0.0][1][0], level, rtol=1e-5, atol=0)
    ratio = ranges[0.5][0] / ranges[0.5][1]
    torch.testing.assert_close(ratio / ratio[0], level, rtol=1e-5, atol=0)


def test_channels_that_say_nothing_are_left_alone() -> None:
    x_TI = inputs()
    w_OI = weights()
    x_TI[:, 5] = 0
    w_OI[:, 9] = 0
    scale_I = scale_of(w_OI, x_TI)
    assert (scale_I[5], scale_I[9]) == (1, 1)
    alive = [idx for idx in range(SIZE) if idx not in (5, 9)]
    assert torch.allclose(scale_I[alive], scale_of(w_OI[:, alive], x_TI[:, alive]))
    assert torch.equal(scale_of(w_OI, torch.zeros(200, SIZE)), torch.ones(SIZE))


def test_columns_that_read_one_channel_answer_for_the_largest_of_them() -> None:
    """Heads 0, 1, 2 share a KV head, and 3, 4, 5 another."""
    x_TI = inputs()
    w_OI = weights()
    scale_KRC = scale_of(w_OI, x_TI, head_repeat=(3, 16)).view(2, 3, 16)
    assert torch.equal(scale_KRC, scale_KRC[:, :1].expand_as(scale_KRC))
    x_KC, w_KC = (each.abs().amax(0).view(2, 3, 16).amax(1) for each in (x_TI, w_OI))
    expected_KC = (x_KC / w_KC).sqrt()
    torch.testing.assert_close(
        scale_KRC[:, 0], expected_KC / expected_KC.log().mean().exp(), rtol=1e-5, atol=0
    )


def test_a_folded_scale_moves_the_statistics_along() -> None:
    x_TI = inputs()
    scale_I = torch.linspace(0.5, 2, SIZE)
    stat = statistics(x_TI)[AbsMax]
    stat.rescale_(scale_I)
    torch.testing.assert_close(stat.per_feature(), (x_TI / scale_I).abs().amax(0))


def int8_error(x_TI: Tensor, w_OI: Tensor, scale_I: Tensor) -> float:
    """Relative squared error of the linear's outputs with both factors in int8."""
    rounded_TI = quantize(x_TI / scale_I, ActivationQuant(dtype=INT8)).dequantize(torch.float32)
    rounded_OI = nearest_weight(w_OI * scale_I, SCHEME, torch.float32).dequantize()
    exact_TO = x_TI @ w_OI.t()
    return float((rounded_TI @ rounded_OI.t() - exact_TO).square().sum() / exact_TO.square().sum())


def test_outlier_channels_cost_an_int8_linear_less() -> None:
    """On inputs that calibration did not see. An outlier sets the step of its whole token, which all other
    channels then lose in.
    """
    w_OI = weights()
    w_OI[:, OUTLIERS] *= 0.02  # as trained models have them: what is large is not what weighs most
    none = torch.ones(SIZE)
    plain, smooth = (int8_error(inputs(7), w_OI, scale_I) for scale_I in (none, scale_of(w_OI, inputs())))
    assert smooth < plain / 10

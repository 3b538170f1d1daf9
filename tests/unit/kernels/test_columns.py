"""The loops over columns as one launch, against the torch loops that define them, in triton's interpreter."""

from typing import Any

import pytest
import torch

from compress.kernels.columns import DescentBlock, fused, reference
from compress.quant.scheme import scheme_named
from tests.support.slow import slow
from tests.support.triton_interpreter import INTERPRETED

pytest.importorskip("triton")

SCHEMES = ("W4A16_G128", "W4A16_G128_ASYM", "W8A16", "FP8_DYNAMIC", "NVFP4", "MXFP4", "MXFP8")

inside = pytest.mark.skipif(not INTERPRETED, reason="in the child process")


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@inside
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("size", "num_outputs"), [(16, 3), (24, 70)])
def test_rounding_a_block(name: str, size: int, num_outputs: int) -> None:
    scheme = scheme_named(name)
    w_BO = randn(size, num_outputs, seed=0)
    factor_BB = torch.triu(randn(size, size + 5, seed=1) * 0.2)[:, :size] + 2 * torch.eye(size)
    scale_BO = (
        w_BO.abs().amax()
        / scheme.max_code
        * (0.5 + torch.rand(size, num_outputs, generator=torch.Generator().manual_seed(2)))
    )
    zero_BO = (
        None
        if scheme.symmetric
        else torch.randint(-8, 8, (size, num_outputs), generator=torch.Generator().manual_seed(3)).float()
    )
    expected_codes, expected_errors = reference.round_block(w_BO, factor_BB, scheme, scale_BO, zero_BO)
    codes, errors = fused.launch_round(w_BO, factor_BB, scheme, scale_BO, zero_BO)
    assert torch.equal(codes, expected_codes)
    assert expected_codes.unique().numel() > 8
    torch.testing.assert_close(errors, expected_errors, rtol=1e-4, atol=1e-5)


@inside
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    ("scale_dtype", "size", "num_outputs"),
    [
        *((each, 16, 3) for each in (None, torch.float32, torch.float16, torch.bfloat16)),
        slow(None, 40, 70),
        slow(torch.bfloat16, 40, 70),
    ],
)
def test_descending_a_block(name: str, scale_dtype: torch.dtype | None, size: int, num_outputs: int) -> None:
    """With scales that stay, and with scales refitted and stored; some of them are too small for float16."""
    scheme = scheme_named(name)
    x = randn(3 * size, size, seed=4)
    h_BB = x.t() @ x / (3 * size)
    scale_O = (0.5 + torch.rand(num_outputs, generator=torch.Generator().manual_seed(5))) / scheme.max_code
    scale_O[::5] *= 2.0**-22
    zero_O = (
        None
        if scheme.symmetric
        else torch.randint(-8, 8, (num_outputs,), generator=torch.Generator().manual_seed(6)).float()
    )
    codes_BO = (
        randn(size, num_outputs, seed=7)
        .mul(scheme.max_code / 2)
        .clamp(scheme.min_code, scheme.max_code)
        .to(scheme.code_dtype)
        .float()
    )
    levels_BO = codes_BO if zero_O is None else codes_BO - zero_O
    w_BO = (levels_BO + scheme.max_code / 4 * randn(size, num_outputs, seed=8)) * scale_O * 1.1
    gradient_BO = h_BB @ (levels_BO * scale_O - w_BO)
    block = DescentBlock(levels_BO, gradient_BO, h_BB, 1 / h_BB.diagonal(), scheme, scale_O, zero_O)
    refit: dict[str, Any] = {}
    if scale_dtype is not None:
        refit = {"curvature_product_BO": h_BB @ levels_BO, "scale_dtype": scale_dtype}
    expected_levels, expected_scale, expected_moves = reference.descend_block(block, **refit)
    levels, scale, moves = fused.launch_descend(block, **refit)
    assert torch.equal(levels, expected_levels)
    assert (levels != levels_BO).float().mean() > 0.3
    torch.testing.assert_close(
        scale, expected_scale, rtol=1e-5 if scale_dtype == torch.float32 else 0, atol=0
    )
    assert (scale != scale_O).float().mean() > 0.5 or not refit
    torch.testing.assert_close(
        moves / scale_O, expected_moves / scale_O, rtol=1e-5, atol=1e-4 * scheme.max_code
    )
    assert torch.equal(moves != 0, expected_moves != 0)


@inside
def test_factors_may_lie_in_memory_in_any_order() -> None:
    """On CUDA, Cholesky factors come as transposed views."""
    scheme = scheme_named("W4A16_G128")
    w_BO = randn(16, 5, seed=9)
    factor_BB = torch.triu(randn(16, 16, seed=10) * 0.2) + 2 * torch.eye(16)
    scale_BO = torch.full((16, 5), 0.2)
    codes, errors = fused.launch_round(w_BO, factor_BB, scheme, scale_BO, None)
    transposed = factor_BB.t().contiguous().t()
    assert transposed.stride() == (1, 16)
    again = fused.launch_round(w_BO, transposed, scheme, scale_BO, None)
    assert torch.equal(codes, again[0])
    assert torch.equal(errors, again[1])


@inside
def test_codes_halfway_go_to_the_even_one_and_saturate() -> None:
    w_BO = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 100.0, -100.0, 1e9]])
    scheme = scheme_named("W4A16_G128")
    ones = torch.ones(1, 8)
    codes, _ = fused.launch_round(w_BO, torch.ones(1, 1), scheme, ones, None)
    assert codes.tolist() == [[0, 2, 2, 0, -2, 7, -8, 7]]
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[torch.isfinite(grid)].sort().values
    between = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([1e9, -1e9])]).unsqueeze(0)
    fp8 = scheme_named("FP8_DYNAMIC")
    codes, _ = fused.launch_round(between, torch.ones(1, 1), fp8, torch.ones_like(between), None)
    assert torch.equal(codes, between.clamp(-448, 448).to(torch.float8_e4m3fn).float())

"""The loops over columns on a CPU: against what float64 says of each column given those before it, and
against the loops in torch.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.columns import DescentBlock, descend_block, host, reference, round_block
from compress.quant.scheme import Scheme, scheme_named

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")

CLOSE = 1e-4
"""Of a step, from halfway between two codes: there float32 may take either."""
SIZES = pytest.mark.parametrize("size", [1, 16, 100, 128])
OUTPUTS = pytest.mark.parametrize("num_outputs", [1, 24, 128, 500, 1500])
INTEGERS = pytest.mark.parametrize("name", ["W4A16_G128", "W4A16_G128_ASYM"])


def laid_out(matrix_BB: Tensor, layout: str) -> Tensor:
    """The same numbers elsewhere in memory."""
    if layout == "transposed":
        return matrix_BB.t().contiguous().t()
    if layout == "inside":
        wide = torch.full((len(matrix_BB) + 3, len(matrix_BB) + 5), torch.nan)
        wide[1:-2, 2:-3] = matrix_BB
        return wide[1:-2, 2:-3]
    return matrix_BB.contiguous()


def moment(size: int, generator: torch.Generator) -> Tensor:
    x_TB = torch.randn(3 * size, size, generator=generator)
    return x_TB.t() @ x_TB / len(x_TB) + 0.01 * torch.eye(size)


def scales(scheme: Scheme, *shape: int, generator: torch.Generator) -> Tensor:
    return (0.5 + torch.rand(shape, generator=generator)) / scheme.max_code


def zeros(scheme: Scheme, *shape: int, generator: torch.Generator) -> Tensor | None:
    return None if scheme.symmetric else torch.randint(-8, 8, shape, generator=generator).float()


def bounds(scheme: Scheme, zero: Tensor | None) -> tuple[Tensor, Tensor]:
    zero = torch.zeros(()) if zero is None else zero
    return scheme.min_code - zero, scheme.max_code - zero


def assert_nearest(levels_BO: Tensor, wanted_BO: Tensor, scheme: Scheme, zero: Tensor | None) -> Tensor:
    """Levels are whole, in range, and those nearest to what is wanted; the outputs [O] none of whose columns
    stood near halfway.
    """
    lowest, highest = bounds(scheme, zero)
    assert bool(((levels_BO >= lowest) & (levels_BO <= highest) & (levels_BO == levels_BO.round())).all())
    assert bool(((wanted_BO.clamp(lowest, highest) - levels_BO).abs() <= 0.5 + CLOSE).all())
    clear_O = (((wanted_BO - wanted_BO.floor()) - 0.5).abs() > CLOSE).all(dim=0)
    assert len(clear_O) < 100 or clear_O.double().mean() > 0.8
    return clear_O


def kept(tensors: list[Any]) -> list[Any]:
    return [each.clone() if isinstance(each, Tensor) else each for each in tensors]


def assert_kept(tensors: list[Any], before: list[Any]) -> None:
    for each, other in zip(tensors, before, strict=True):
        assert not isinstance(each, Tensor) or torch.equal(each, other)


@INTEGERS
@SIZES
@OUTPUTS
@pytest.mark.parametrize("layout", ["rows", "transposed", "inside"])
def test_rounding_takes_the_nearest_code_of_what_is_left_of_a_column(
    name: str, size: int, num_outputs: int, layout: str
) -> None:
    scheme = scheme_named(name)
    generator = torch.Generator().manual_seed(size)
    w_BO = torch.randn(size, num_outputs, generator=generator)
    factor_BB = laid_out(torch.linalg.cholesky(torch.linalg.inv(moment(size, generator)), upper=True), layout)
    scale_BO = scales(scheme, size, num_outputs, generator=generator) * 2
    zero_BO = zeros(scheme, size, num_outputs, generator=generator)
    state = [w_BO, factor_BB, scheme, scale_BO, zero_BO]
    before = kept(state)
    codes_BO, errors_BO = round_block(*state)
    assert_kept(state, before)

    levels_BO = codes_BO if zero_BO is None else codes_BO - zero_BO
    w = w_BO.double()
    factor = factor_BB.double()
    ideal_BO = torch.empty(size, num_outputs, dtype=torch.float64)
    wanted_BO = torch.empty_like(ideal_BO)
    for i in range(size):
        left_O = w[i] - factor[:i, i] @ ideal_BO[:i]
        wanted_BO[i] = left_O / scale_BO[i]
        ideal_BO[i] = (left_O - levels_BO[i].double() * scale_BO[i]) / factor[i, i]
    clear_O = assert_nearest(levels_BO, wanted_BO, scheme, zero_BO)
    torch.testing.assert_close(errors_BO.double(), ideal_BO, rtol=1e-4, atol=1e-4)

    expected_codes, expected_errors = reference.round_block(*state)
    assert torch.equal(codes_BO[:, clear_O], expected_codes[:, clear_O])
    torch.testing.assert_close(errors_BO[:, clear_O], expected_errors[:, clear_O], rtol=1e-4, atol=1e-4)


@INTEGERS
@SIZES
@OUTPUTS
@pytest.mark.parametrize(
    ("layout", "scale_dtype"),
    [("rows", None), ("transposed", torch.float32), ("inside", torch.float16), ("inside", torch.bfloat16)],
)
def test_descending_takes_the_nearest_code_to_the_bottom(
    name: str, size: int, num_outputs: int, layout: str, scale_dtype: torch.dtype | None
) -> None:
    """With scales that stay, and scales refitted and stored. A column with inv_diag 0 keeps its codes."""
    scheme = scheme_named(name)
    generator = torch.Generator().manual_seed(size)
    h_BB = laid_out(moment(size, generator), layout)
    inv_diag_B = 1 / h_BB.diagonal()
    inv_diag_B[3::10] = 0
    scale_O = scales(scheme, num_outputs, generator=generator)
    zero_O = zeros(scheme, num_outputs, generator=generator)
    levels_BO = (
        torch.randn(size, num_outputs, generator=generator)
        .mul(scheme.max_code / 2)
        .round()
        .clamp(scheme.min_code, scheme.max_code)
    )
    levels_BO -= 0 if zero_O is None else zero_O
    w_BO = (levels_BO + 2 * torch.randn(size, num_outputs, generator=generator)) * scale_O * 1.1
    gradient_BO = h_BB @ (levels_BO * scale_O - w_BO)
    block = DescentBlock(levels_BO, gradient_BO, h_BB, inv_diag_B, scheme, scale_O, zero_O)
    refit: dict[str, Any] = {}
    if scale_dtype is not None:
        refit = {"curvature_product_BO": h_BB @ levels_BO, "scale_dtype": scale_dtype}
    operands = [*vars(block).values(), *refit.values()]
    before = kept(operands)
    new_BO, new_O, moves_BO = descend_block(block, **refit)
    assert_kept(operands, before)

    old = levels_BO.double()
    new = new_BO.double()
    h = h_BB.double()
    scale = new_O.double()
    ideal_BO = new * scale - old * scale_O.double()
    g_BO = h @ (old * scale - w_BO.double())
    wanted_BO = old - inv_diag_B.double().unsqueeze(1) * (g_BO / scale + torch.tril(h, -1) @ (new - old))
    clear_O = assert_nearest(new_BO, wanted_BO, scheme, zero_O)
    torch.testing.assert_close(moves_BO.double(), ideal_BO, rtol=1e-4, atol=1e-6)
    assert torch.equal(new_BO[3::10], levels_BO[3::10])

    expected = reference.descend_block(block, **refit)
    assert torch.equal(new_O, expected[1])
    assert torch.equal(new_BO[:, clear_O], expected[0][:, clear_O])
    torch.testing.assert_close(moves_BO[:, clear_O], expected[2][:, clear_O], rtol=1e-5, atol=1e-6)
    assert size == 1 or (new_BO != levels_BO).float().mean() > 0.2


@INTEGERS
@OUTPUTS
def test_where_sums_are_exact_the_loops_agree_to_the_bit(name: str, num_outputs: int) -> None:
    """All numbers are few bits, so that no order of summation rounds, and every hundredth column stands
    halfway between two codes.
    """
    scheme = scheme_named(name)
    generator = torch.Generator().manual_seed(0)
    size = 128
    h_BB = torch.randint(-3, 4, (size, size), generator=generator).float()
    h_BB = (h_BB + h_BB.t()) / 64 + torch.eye(size)
    inv_diag_B = 2.0 ** torch.randint(-1, 1, (size,), generator=generator)
    scale_O = 2.0 ** torch.randint(-6, -2, (num_outputs,), generator=generator)
    zero_O = zeros(scheme, num_outputs, generator=generator)
    levels_BO = torch.randint(
        scheme.min_code, scheme.max_code + 1, (size, num_outputs), generator=generator
    ).float()
    levels_BO -= 0 if zero_O is None else zero_O
    g_BO = torch.randint(-100, 101, (size, num_outputs), generator=generator) / 32 * scale_O
    block = DescentBlock(levels_BO, g_BO, h_BB, inv_diag_B, scheme, scale_O, zero_O)
    found = host.descend(block)
    expected = reference.descend(block)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    wanted_BO = levels_BO - inv_diag_B.unsqueeze(1) * (
        g_BO / scale_O + torch.tril(h_BB, -1) @ (expected[0] - levels_BO)
    )
    assert num_outputs == 1 or ((wanted_BO - wanted_BO.floor()) == 0.5).float().mean() > 0.002


def test_codes_halfway_go_to_the_even_one_and_saturate() -> None:
    w_BO = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 100.0, -100.0, 1e9]])
    codes, _ = round_block(w_BO, torch.ones(1, 1), scheme_named("W4A16_G128"), torch.ones(1, 8), None)
    assert codes.tolist() == [[0, 2, 2, 0, -2, 7, -8, 7]]


def test_floats_go_through_the_loops_in_torch() -> None:
    scheme = scheme_named("FP8_DYNAMIC")
    generator = torch.Generator().manual_seed(0)
    h_BB = moment(24, generator)
    w_BO = torch.randn(24, 5, generator=generator)
    scale_O = scales(scheme, 5, generator=generator)
    rounding = w_BO, torch.linalg.cholesky(h_BB, upper=True), scheme, scale_O.expand(24, 5).contiguous(), None
    codes_BO, errors_BO = round_block(*rounding)
    assert all(map(torch.equal, (codes_BO, errors_BO), reference.round_block(*rounding)))
    assert torch.equal(codes_BO, codes_BO.to(scheme.code_dtype).float())
    gradient_BO = h_BB @ (codes_BO * scale_O - w_BO)
    block = DescentBlock(codes_BO, gradient_BO, h_BB, 1 / h_BB.diagonal(), scheme, scale_O, None)
    new_BO, _, moves_BO = descend_block(block)
    assert torch.equal(new_BO, new_BO.to(scheme.code_dtype).float())
    assert all(map(torch.equal, (new_BO, moves_BO), reference.descend(block)))

"""Kernels of the recurrence of Mamba-1 mixers: every one that runs here against a recurrence in float64, and
the bits of a sequence however it is cut, in any company, and after proposals that were not kept. In triton's
interpreter those are the GPU's kernels, too, on a GPU the same."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.recurrent_states import CHUNK, pass_bytes
from compress.kernels.operands.selective import PLACE_ROWS, ScanWeights, num_scan_places
from compress.kernels.problem import KernelDevice
from compress.kernels.recurrence import chunking
from compress.kernels.select import Kernel, candidates
from compress.models.mamba1 import Mamba1
from tests.support import recurrences
from tests.support.recurrences import assert_close, each_dtype, run, slots

SHAPES = {
    "odd": Mamba1.of(28, 12, 4, 5, conv_bias=True),
    "as Jamba": Mamba1.of(64, 16, 4, 8, conv_bias=True),
    "a wide state": Mamba1.of(18, 40, 3, 4, conv_bias=False, normed=False),
    "a wider state": Mamba1.of(18, 70, 3, 4, conv_bias=False, normed=False),
}
each_shape = pytest.mark.parametrize("mamba", SHAPES.values(), ids=SHAPES)
each_kernel = recurrences.each_kernel("selective_scan")
PADDING = 3
"""Columns after those of an operand, which no kernel reads."""


@dataclass
class Case(recurrences.Case):
    """The operands of one sequence, each as columns of a wider tensor."""

    @staticmethod
    def of(mamba: Mamba1, device: str, length: int, dtype: torch.dtype, seed: int) -> "Case":
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        channels, numbers = mamba.value_size, mamba.key_dim
        weights = ScanWeights(
            -randn(channels, numbers).exp(), (randn(channels) - 2).contiguous(), randn(channels)
        )
        rows = (randn(length, size).to(dtype) for size in (channels, channels, channels, 2 * numbers))
        return Case(mamba, weights, tuple(rows))

    def law(self) -> Tensor:
        weights: ScanWeights = self.weights
        x, gate, dt, bc = (each.double() for each in self.rows)
        dt = F.softplus(dt + weights.dt_bias_V.double())
        state = torch.zeros(self.facts.value_size, self.facts.key_dim, dtype=torch.float64, device=x.device)
        found = []
        for x_V, dt_V, b_K, c_K in zip(x, dt, *bc.chunk(2, dim=1), strict=True):
            kept = torch.exp(weights.decay_rate_VK.double() * dt_V[:, None])
            state = kept * state + torch.outer(dt_V * x_V, b_K)
            found.append(state @ c_K + weights.skip_V.double() * x_V)
        return (torch.stack(found) * gate / (1 + torch.exp(-gate))).float()


def cases(mamba: Mamba1, device: str) -> recurrences.Cases:
    return partial(Case.of, mamba, device)


@each_kernel
@each_shape
@pytest.mark.parametrize("length", [1, 11, 70])
@each_dtype
def test_outputs_are_those_of_the_formula(
    kernel: Kernel, device: str, mamba: Mamba1, dtype: torch.dtype, length: int
) -> None:
    case = Case.of(mamba, device, length, dtype, 0)
    (out,) = run(kernel, [(case, 2, 0, length)], slots(mamba, 1, device))
    assert out.dtype == dtype
    assert_close(out, case.law())


@each_kernel
def test_operands_may_be_columns_of_wider_tensors(kernel: Kernel, device: str) -> None:
    mamba = SHAPES["odd"]
    case = Case.of(mamba, device, 20, torch.float32, 0)
    (expected,) = run(kernel, [(case, 2, 0, 20)], slots(mamba, 1, device))

    def of_columns(*operands: Tensor) -> Tensor:
        rows = (F.pad(each, (0, PADDING), value=torch.nan)[:, :-PADDING] for each in operands[:4])
        out: Tensor = kernel.fn(*rows, *operands[4:])
        return out

    columns = Kernel("selective_scan", "columns", 0, 0, kernel.supports, of_columns)
    (out,) = run(columns, [(case, 2, 0, 20)], slots(mamba, 1, device))
    assert torch.equal(out, expected)


@each_kernel
@each_shape
def test_the_bits_of_a_row_are_the_same_however_its_sequence_is_cut_and_in_any_company(
    kernel: Kernel, device: str, mamba: Mamba1
) -> None:
    recurrences.check_bits(kernel, device, cases(mamba, device))


@each_kernel
@each_shape
def test_sequences_in_turn_have_the_bits_of_all_at_once(
    kernel: Kernel, device: str, mamba: Mamba1, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_inputs(*operands: object) -> Tensor:
        operands[5].inputs.zero_()  # type: ignore[attr-defined]
        out: Tensor = kernel.fn(*operands)
        return out

    zeroed = Kernel("selective_scan", "zeroed", 0, 0, kernel.supports, with_inputs)
    recurrences.check_sequences_in_turn(zeroed, device, cases(mamba, device), monkeypatch)


@each_kernel
@each_shape
def test_rows_that_are_not_kept_leave_nothing_behind(kernel: Kernel, device: str, mamba: Mamba1) -> None:
    recurrences.check_rows_not_kept(kernel, device, cases(mamba, device))


@each_kernel
@each_shape
@each_dtype
def test_prompts_in_parts_are_the_whole_prompt_and_a_decode_step_goes_on(
    kernel: Kernel, device: str, mamba: Mamba1, dtype: torch.dtype
) -> None:
    recurrences.check_prompts_in_parts(kernel, device, cases(mamba, device), dtype)


@each_kernel
@pytest.mark.parametrize("length", [1, 9, 40])
def test_channels_that_change_slowly_are_as_exact(kernel: Kernel, device: str, length: int) -> None:
    """1 + exp(dt) has few bits of exp(dt), which all that is added to a state is multiplied by."""
    mamba = SHAPES["as Jamba"]
    case = Case.of(mamba, device, length, torch.float32, 0)
    case.weights.dt_bias_V.fill_(-12)
    case.weights.skip_V.zero_()
    (out,) = run(kernel, [(case, 1, 0, length)], slots(mamba, 1, device))
    law = case.law()
    assert (out - law).abs().max() < 1e-5 * law.abs().max()


@each_kernel
@pytest.mark.parametrize("length", [18, 40])
@each_dtype
def test_a_prompt_leaves_the_states_after_its_last_positions(
    kernel: Kernel, device: str, length: int, dtype: torch.dtype
) -> None:
    recurrences.check_last_states(kernel, device, cases(SHAPES["odd"], device), length, dtype)


@each_kernel
@pytest.mark.parametrize("length", [9, 40])
def test_a_state_that_is_no_number_is_not_hidden(kernel: Kernel, device: str, length: int) -> None:
    recurrences.check_no_number_is_hidden(kernel, device, cases(SHAPES["as Jamba"], device), length)


@each_kernel
@each_shape
@pytest.mark.parametrize(("num_kept", "dtype"), [(1, torch.float16), (4, torch.float16), (4, torch.float32)])
def test_a_state_is_saved_on_the_way_and_its_sequence_goes_on_from_it_elsewhere(
    kernel: Kernel, device: str, mamba: Mamba1, num_kept: int, dtype: torch.dtype
) -> None:
    recurrences.check_saved_states(kernel, device, cases(mamba, device), num_kept, dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the order of a sum is a GPU's")
def test_a_row_of_a_large_decode_step_has_the_bits_of_a_row_alone() -> None:
    kernel = next(each for each in candidates("selective_scan") if each.name == "fused")
    recurrences.check_large_step(kernel, cases(SHAPES["as Jamba"], "cuda"))


@each_kernel
def test_a_decode_step_is_a_prefill_of_its_rows(kernel: Kernel, device: str) -> None:
    recurrences.check_decode_step(kernel, device, cases(SHAPES["odd"], device))


def test_bytes_of_a_pass_hold_the_inputs_of_its_convolution_their_factors_and_its_outputs() -> None:
    rows_TV = torch.empty(2048, 64, device="meta")
    with_factors_TF = torch.cat((rows_TV, rows_TV, rows_TV), dim=1)
    num_bytes = sum(each.numel() * each.element_size() for each in (rows_TV, with_factors_TF, rows_TV))
    assert pass_bytes(SHAPES["as Jamba"], 2048, 129) == num_bytes


def test_bytes_of_a_pass_hold_the_states_before_chunks_where_those_are_more() -> None:
    wide = Mamba1.of(64, 256, 4, 8, conv_bias=True)
    states_PKV, sums_PV = (torch.empty(2048 // PLACE_ROWS + 1, *rest, 64) for rest in ((256,), ()))
    assert pass_bytes(wide, 2048, 129) == 4 * (states_PKV.numel() + sums_PV.numel())


def test_chunks_have_places_of_their_own() -> None:
    """Sequences with more than `FEW_ROWS` rows, among shorter ones, have every chunk in another place."""
    generator = torch.Generator().manual_seed(0)
    assert chunking.FEW_ROWS >= PLACE_ROWS
    for _ in range(200):
        lens = torch.randint(1, 70, (9,), generator=generator).tolist()
        taken, start = [], 0
        for length in lens:
            if length > chunking.FEW_ROWS:
                taken += [start // PLACE_ROWS + chunk for chunk in range(-(-length // CHUNK))]
            start += length
        assert len(set(taken)) == len(taken)
        assert max(taken, default=-1) < num_scan_places(start)


@each_kernel
@each_shape
@each_dtype
def test_chunks_have_the_same_bits_wherever_a_prompt_is_cut_and_in_any_company(
    kernel: Kernel, device: str, mamba: Mamba1, dtype: torch.dtype
) -> None:
    """After whole chunks; the state before a part is that of its slot, or one that the same pass computes."""
    case, other = recurrences.pair(cases(mamba, device), 118, dtype, 5)
    states = slots(mamba, 1, device)
    (whole,) = run(kernel, [(case, 2, 0, 118)], states)
    kept = states.heads[2].clone()
    assert_close(whole, case.law())
    for cuts in ([0, 32, 118], [0, 64, 96, 118]):
        states = slots(mamba, 1, device)
        found = []
        for begin, end in zip(cuts, cuts[1:], strict=False):
            outs = run(kernel, [(other, 1, 0, 49), (case, 2, begin, end), (other, 3, 0, 17)], states)
            assert_close(outs[0], other.law()[:49])
            found.append(outs[1])
        assert torch.equal(torch.cat(found), whole)
        assert torch.equal(states.heads[2], kept)


def test_states_too_wide_for_registers_are_refused() -> None:
    kernel = next(each for each in candidates("selective_scan") if each.name == "fused")
    device = KernelDevice("cuda", 90, torch.bfloat16)
    refusals = [kernel.refusal(device.problem("selective_scan", n=n, k=64)) for n in (256, 257)]
    assert refusals[0] is None
    assert "257 numbers" in str(refusals[1])

"""Kernels of gated short convolutions: every one that runs here against the decoder's own convolution, and
the bits of a sequence however it is cut, in any company, and after proposals that were not kept. In triton's
interpreter those are the GPU's kernels, too, on a GPU the same."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.recurrent_states import (
    RecurrentStates,
    SavedState,
    Saving,
    Sequences,
    StackedStates,
)
from compress.kernels.select import Kernel, candidates
from compress.models.recurrence import Recurrence, convolution
from compress.models.short_conv import ShortConv
from tests.support import recurrences
from tests.support.recurrences import each_dtype, run, slots

SHAPES = {
    "odd": ShortConv.of(40, 3),
    "beyond a block": ShortConv.of(300, 4),
    "one position": ShortConv.of(40, 1),
}
ODD = SHAPES["odd"]
PADDING = 5
"""Columns after those of x, which no kernel reads."""
each_shape = pytest.mark.parametrize("conv", SHAPES.values(), ids=SHAPES)
Op = Callable[..., Tensor]


def padded(fn: Op) -> Op:
    """Give a kernel its rows as columns of a wider tensor."""

    def of_columns(rows_TF: Tensor, *operands: Any) -> Tensor:
        return fn(F.pad(rows_TF, (0, PADDING), value=torch.nan)[:, :-PADDING], *operands)

    return of_columns


def each_kernel(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with every kernel that runs here, each on rows that are not contiguous."""

    def in_columns(param: Any) -> Any:
        kernel, device = param.values
        return pytest.param(replace(kernel, fn=padded(kernel.fn)), device, id=param.id)

    mark = recurrences.each_kernel("short_conv")
    names, params = mark.args
    return pytest.mark.parametrize(names, list(map(in_columns, params)))(test)


@dataclass
class Case(recurrences.Case):
    """B, C and x of one sequence."""

    @staticmethod
    def of(conv: Recurrence, device: str, length: int, dtype: torch.dtype, seed: int) -> "Case":
        generator = torch.Generator().manual_seed(seed)
        weight, rows = (
            torch.randn(shape, generator=generator).to(device, dtype)
            for shape in ((conv.num_channels, conv.kernel_size), (length, 3 * conv.num_channels))
        )
        return Case(conv, weight, (rows,))

    def products(self) -> Tensor:
        """Return the products of B and x [T, F] in float32, rounded to the dtype of the rows."""
        b, _, x = self.rows[0].chunk(3, dim=1)
        return (b * x).float()

    def law(self) -> Tensor:
        rows = self.rows[0]
        mixed = convolution(self.products().unsqueeze(0), self.weights.float(), None)[0].to(rows.dtype)
        return (rows.chunk(3, dim=1)[1] * mixed).float()


def cases(conv: Recurrence, device: str) -> recurrences.Cases:
    return partial(Case.of, conv, device)


def decode(
    kernel: Kernel, parts: list[tuple[Case, int, int, int]], states: RecurrentStates
) -> tuple[Tensor, ...]:
    """Return the outputs of rows begin..end of sequences, as many of each, in one decode step; `parts` are
    (sequence, slot, begin, end)."""
    device = states.inputs.device
    slots_R, ends_R = (
        torch.tensor(each, dtype=torch.int32, device=device)
        for each in zip(*((slot, end) for _, slot, _, end in parts), strict=True)
    )
    (q_len,) = {end - begin for *_, begin, end in parts}
    rows = torch.cat([case.rows[0][begin:end] for case, _, begin, end in parts])
    out: Tensor = kernel.fn(rows, parts[0][0].weights, states, Sequences.of_decode(slots_R, ends_R, q_len))
    return out.split(q_len)


def assert_kept(states: RecurrentStates, case: Case, slot: int, positions: range) -> None:
    """Check that a slot has the products of those positions, each in its place, and what it had in others."""
    kept = states.inputs[slot]
    places = [position % len(kept) for position in positions]
    assert torch.equal(kept[places], case.products()[list(positions)])
    others = sorted({*range(len(kept))} - {*places})
    assert kept[others].isnan().all()


@each_kernel
@each_shape
@pytest.mark.parametrize("length", [1, 2, 45])
@each_dtype
def test_outputs_are_those_of_the_decoder(
    kernel: Kernel, device: str, conv: ShortConv, dtype: torch.dtype, length: int
) -> None:
    """The same numbers are rounded: what differs is the order of a sum of few in float32."""
    case = Case.of(conv, device, length, dtype, 0)
    for step in (run, decode):
        (out,) = step(kernel, [(case, 2, 0, length)], slots(conv, length, device))
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), case.law(), rtol=2e-3, atol=2e-5)
        if dtype == torch.float16:
            assert (out.float() == case.law()).float().mean() > 0.97
        if conv.kernel_size == 1:
            assert torch.equal(out.float(), case.law())


@each_kernel
@each_shape
def test_the_bits_of_a_row_are_the_same_however_its_sequence_is_cut_and_in_any_company(
    kernel: Kernel, device: str, conv: ShortConv
) -> None:
    recurrences.check_bits(kernel, device, cases(conv, device))


@each_kernel
@each_shape
@each_dtype
def test_the_bits_of_decode_rows_are_those_of_prompts(
    kernel: Kernel, device: str, conv: ShortConv, dtype: torch.dtype
) -> None:
    """Steps of one row, of several, of one sequence and of two, before and after parts of a prompt."""
    case, other = recurrences.pair(cases(conv, device), 30, dtype)
    (whole,) = run(kernel, [(case, 1, 0, 30)], slots(conv, 1, device))
    (of_other,) = run(kernel, [(other, 1, 0, 30)], slots(conv, 1, device))
    states = slots(conv, 3, device)
    cuts = (0, 1, 2, 5, 7, 17, 18, 20, 23, 29, 30)
    found, found_of_other = [], []
    for idx, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        parts = [(other, 1, begin, end), (case, 3, begin, end)]
        step = run if idx in (4, 8) else decode
        if idx % 3 == 2:  # one after another
            outs = tuple(step(kernel, [part], states)[0] for part in parts)
        else:
            outs = tuple(step(kernel, parts, states))
        found_of_other.append(outs[0])
        found.append(outs[1])
    assert torch.equal(torch.cat(found), whole)
    assert torch.equal(torch.cat(found_of_other), of_other)


@each_kernel
@each_shape
def test_rows_that_are_not_kept_leave_nothing_behind(kernel: Kernel, device: str, conv: ShortConv) -> None:
    recurrences.check_rows_not_kept(kernel, device, cases(conv, device))


@each_kernel
@each_shape
def test_proposals_of_decode_steps_that_are_not_kept_are_overwritten(
    kernel: Kernel, device: str, conv: ShortConv
) -> None:
    """Steps of as many rows as a slot has room for, of which some are kept; another sequence keeps all."""
    case, other = recurrences.pair(cases(conv, device), 24)
    whole, of_other = (run(kernel, [(each, 1, 0, 24)], slots(conv, 1, device))[0] for each in (case, other))
    wrong_rows = case.rows[0] + 1
    states = slots(conv, 4, device)
    run(kernel, [(case, 2, 0, 6), (other, 3, 0, 4)], states)
    begin, of_other_begin = 6, 4
    for kept in (1, 3, 2, 1, 4):
        right = torch.arange(24, device=device).unsqueeze(1) < begin + kept
        wrong = replace(case, rows=(torch.where(right, case.rows[0], wrong_rows),))
        parts = [(wrong, 2, begin, begin + 4), (other, 3, of_other_begin, of_other_begin + 4)]
        for _ in range(2):
            out, out_of_other = decode(kernel, parts, states)
            assert torch.equal(out[:kept], whole[begin : begin + kept])
            assert torch.equal(out_of_other, of_other[of_other_begin : of_other_begin + 4])
        begin, of_other_begin = begin + kept, of_other_begin + 4


@each_kernel
@each_dtype
def test_prompts_in_parts_are_the_whole_prompt_and_a_decode_step_goes_on(
    kernel: Kernel, device: str, dtype: torch.dtype
) -> None:
    recurrences.check_prompts_in_parts(kernel, device, cases(ODD, device), dtype)


@each_kernel
@each_shape
@pytest.mark.parametrize("length", [1, 3, 40])
def test_a_slot_keeps_the_products_of_the_last_positions_and_no_other_slot_is_written(
    kernel: Kernel, device: str, conv: ShortConv, length: int
) -> None:
    """Of prompts that are longer than a slot has places, and of shorter ones."""
    case, other = recurrences.pair(cases(conv, device), length)
    states = slots(conv, 2, device)
    num_places = 1 + conv.kernel_size
    assert states.inputs.shape[1] == num_places
    run(kernel, [(case, 3, 0, length), (other, 1, 0, length)], states)
    for each, slot in ((case, 3), (other, 1)):
        assert_kept(states, each, slot, range(max(0, length - num_places), length))
    assert states.inputs[[0, 2]].isnan().all()


@each_kernel
@each_shape
def test_a_decode_step_keeps_all_its_rows(kernel: Kernel, device: str, conv: ShortConv) -> None:
    case = Case.of(conv, device, 2, torch.float16, 0)
    states = slots(conv, 2, device)
    decode(kernel, [(case, 3, 0, 2)], states)
    assert_kept(states, case, 3, range(2))
    assert states.inputs[:3].isnan().all()


@each_kernel
@pytest.mark.parametrize("length", [18, 40])
def test_a_prompt_leaves_the_products_before_its_last_positions(
    kernel: Kernel, device: str, length: int
) -> None:
    recurrences.check_last_states(kernel, device, cases(ODD, device), length)


@each_kernel
@each_shape
def test_a_product_that_is_no_number_is_not_hidden_and_is_forgotten_after_its_positions(
    kernel: Kernel, device: str, conv: ShortConv
) -> None:
    case = Case.of(conv, device, 14, torch.float16, 0)
    states = slots(conv, 1, device)
    run(kernel, [(case, 2, 0, 5)], states)
    states.inputs.view(torch.int32).fill_(0x7FFFFFFF)
    (out,) = run(kernel, [(case, 2, 5, 14)], states)
    assert out[: conv.kernel_size - 1].isnan().all()
    torch.testing.assert_close(
        out[conv.kernel_size - 1 :].float(), case.law()[4 + conv.kernel_size :], rtol=2e-3, atol=2e-5
    )


@each_kernel
@pytest.mark.parametrize("num_kept", [1, 4])
def test_a_state_is_saved_on_the_way_and_its_sequence_goes_on_from_it_elsewhere(
    kernel: Kernel, device: str, num_kept: int
) -> None:
    recurrences.check_saved_states(kernel, device, cases(ODD, device), num_kept)


@each_kernel
@each_shape
@pytest.mark.parametrize("num_kept", [1, 3])
def test_the_bits_after_a_saved_state_are_those_after_the_tokens_before_it(
    kernel: Kernel, device: str, conv: ShortConv, num_kept: int
) -> None:
    """States saved in the first pass and in the second, of two sequences; a third saves none."""
    case, other = recurrences.pair(cases(conv, device), 44)
    whole, of_other = (run(kernel, [(each, 1, 0, 44)], slots(conv, 1, device))[0] for each in (case, other))
    saved, stack, blank = (
        StackedStates.empty(conv, 1, *counts, torch.device(device))
        for counts in ((3, 1), (4, num_kept), (4, num_kept))
    )
    for each in (saved, stack, blank):
        each.inputs.fill_(torch.nan)
    wanted_S2 = torch.zeros(4, 2, dtype=torch.int32, device=device)
    states = replace(stack.layer(0), saving=Saving(saved.inputs[0], saved.heads[0], wanted_S2))
    wanted_S2[2] = torch.tensor((32, 1))
    fresh = Case.of(conv, device, 3, torch.float32, 2)
    run(kernel, [(fresh, 3, 0, 3), (case, 2, 0, 36), (other, 1, 0, 5)], states)
    wanted_S2[2] = 0
    wanted_S2[1] = torch.tensor((37, 2))
    run(kernel, [(other, 1, 5, 40)], states)
    assert saved.inputs[:, 0].isnan().all()
    blank.restore(saved, [SavedState(3, 1, 32), SavedState(2, 2, 37)])
    for each, law, slot, begin, place in ((case, whole, 3, 32, 1), (other, of_other, 2, 37, 2)):
        before = range(begin + 1 - conv.kernel_size, begin)
        assert_kept(replace(blank.layer(0), inputs=saved.inputs[0]), each, place, before)
        step, end = (run, 44) if slot == 3 else (decode, begin + num_kept)
        (out,) = step(kernel, [(each, slot, begin, end)], blank.layer(0))
        assert torch.equal(out, law[begin:end])


@each_kernel
@each_shape
def test_a_decode_step_saves_nothing(kernel: Kernel, device: str, conv: ShortConv) -> None:
    saved = slots(conv, 1, device)
    wanted_S2 = torch.tensor([(2, 1)] * 4, dtype=torch.int32, device=device)
    states = replace(slots(conv, 2, device), saving=Saving(saved.inputs, saved.heads, wanted_S2))
    decode(kernel, [(Case.of(conv, device, 2, torch.float32, 0), 1, 0, 2)], states)
    assert saved.inputs.isnan().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the order of a sum is a GPU's")
def test_a_row_of_a_large_decode_step_has_the_bits_of_a_row_alone() -> None:
    kernel = next(each for each in candidates("short_conv") if each.name == "fused")
    recurrences.check_large_step(kernel, cases(ODD, "cuda"))


@each_kernel
@each_shape
def test_a_decode_step_is_a_prefill_of_its_rows(kernel: Kernel, device: str, conv: ShortConv) -> None:
    recurrences.check_decode_step(kernel, device, cases(conv, device))

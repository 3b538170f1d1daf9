"""What tests of the kernels of recurrences have in common: sequences with random parameters, passes over
their rows, and the properties that every kernel has.

Shapes: T rows, Z outputs of all heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.operands.recurrent_states import (
    RecurrentStates,
    SavedState,
    Saving,
    Sequences,
    StackedStates,
)
from compress.kernels.problem import KernelDevice, Op, Problem
from compress.kernels.recurrence import chunking
from compress.kernels.select import Kernel, candidates
from compress.models.recurrence import Recurrence
from tests.support.triton_interpreter import INTERPRETED

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["F32", "F16"])


@dataclass
class Case(ABC):
    """The rows of one sequence, as a kernel takes them before the parameters of a recurrence."""

    facts: Recurrence
    weights: Any
    rows: tuple[Tensor, ...]

    @abstractmethod
    def law(self) -> Tensor:
        """The outputs [T, Z] by the chunks of the decoder, in float32."""


Cases = Callable[[int, torch.dtype, int], Case]
"""Makes a sequence of so many rows in a dtype, from a seed."""


def each_kernel(op: Op) -> pytest.MarkDecorator:
    """Run a test with every kernel of an op that runs here."""

    def problem(device: str) -> Problem:
        of_device = KernelDevice.from_torch(torch.device(device), torch.float32)
        return replace(of_device, sm=90 if INTERPRETED else of_device.sm).problem(op, n=16, k=16)

    return pytest.mark.parametrize(
        ("kernel", "device"),
        [
            pytest.param(kernel, device, id=f"{kernel.name}-{device}")
            for kernel in candidates(op)
            for device in DEVICES
            if kernel.refusal(problem(device)) is None
        ],
    )


def slots(facts: Recurrence, num_kept: int, device: str) -> RecurrentStates:
    """Three slots that hold what no one should read."""
    states = RecurrentStates.empty(facts, 4, num_kept, torch.device(device))
    for each in (states.inputs, states.heads):
        each.fill_(torch.nan)
    return states


def pair(cases: Cases, length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Case, Case]:
    """Two sequences with the same parameters."""
    case, other = (cases(length, dtype, each) for each in (seed, seed + 1))
    return case, replace(other, weights=case.weights)


def run(kernel: Kernel, parts: list[tuple[Case, int, int, int]], states: RecurrentStates) -> list[Tensor]:
    """Run rows begin..end of sequences in one pass; the outputs of each. `parts` are (sequence, slot, begin,
    end)."""
    device = states.heads.device
    rows = [
        torch.cat(each)
        for each in zip(
            *([each[begin:end] for each in case.rows] for case, _, begin, end in parts), strict=True
        )
    ]
    lens = tuple(end - begin for *_, begin, end in parts)
    sequences = Sequences.of_prefill(
        torch.tensor([slot for _, slot, _, _ in parts], device=device), lens, tuple(end for *_, end in parts)
    )
    out: Tensor = kernel.fn(*rows, parts[0][0].weights, states, sequences)
    return list(out.split(lens))


def assert_close(out: Tensor, law: Tensor) -> None:
    """The norm divides by what a query finds, which may be little; half of the numbers are the measure."""
    error = (out.float() - law).abs() / law.abs().clamp_min(0.1)
    wide = out.dtype == torch.float32
    assert error.median() < (1e-5 if wide else 2e-2)
    assert error.quantile(0.99) < (1e-3 if wide else 0.3)


def check_bits(kernel: Kernel, device: str, cases: Cases) -> None:
    """The bits of a row are the same however its sequence is cut, and in any company."""
    case, other = pair(cases, 16)
    (whole,) = run(kernel, [(case, 1, 0, 16)], slots(case.facts, 1, device))
    states = slots(case.facts, 2, device)
    cuts = [0, 1, 9, 11, 12, 14, 16]
    found = []
    for idx, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        company = [(other, 3, begin, end)] if idx % 2 == 0 or begin > 9 else []
        parts = [*company, (case, 2, begin, end)]
        if begin == 9 or idx % 2:
            parts = [(case, 2, begin, end), (cases(3, torch.float32, 7), 1, 0, 3)]
        outs = run(kernel, parts, states)
        found.append(outs[[part[0] is case for part in parts].index(True)])
    assert torch.equal(torch.cat(found), whole)


def check_sequences_in_turn(kernel: Kernel, device: str, cases: Cases, patch: pytest.MonkeyPatch) -> None:
    """A launch that takes one sequence after the other finds the bits of one that takes all at once, and ends
    at the first without a row, as a graph has them after the others."""
    case, other = pair(cases, 81)
    found = []
    for most_programs in (chunking.MOST_PROGRAMS, 1):
        patch.setattr(chunking, "MOST_PROGRAMS", most_programs)
        states = slots(case.facts, 2, device)
        no_rows = [(other, 3, 1, 1)] * 3
        outs = run(kernel, [(case, 1, 0, 70), (other, 2, 0, 15), (other, 3, 0, 1), *no_rows], states)
        outs += run(kernel, [(other, 2, 15, 81), (case, 1, 70, 81), (other, 3, 1, 60), *no_rows], states)
        found.append(torch.cat([each.flatten() for each in (*outs, states.heads[1:], states.inputs[1:])]))
    assert torch.equal(*found)


def check_rows_not_kept(kernel: Kernel, device: str, cases: Cases) -> None:
    """A step of four rows of which one, two or three are kept, and one that runs twice, as before a graph is
    captured, leave nothing else behind."""
    case = cases(16, torch.float32, 0)
    (whole,) = run(kernel, [(case, 1, 0, 16)], slots(case.facts, 1, device))
    states = slots(case.facts, 5, device)
    (out,) = run(kernel, [(case, 2, 0, 5)], states)
    assert torch.equal(out, whole[:5])
    begin = 5
    for kept in (1, 3, 2, 1):
        wrong = replace(case, rows=(case.rows[0].clone(), *case.rows[1:]))
        wrong.rows[0][begin + kept : begin + 4] += 1
        for _ in range(2):
            (out,) = run(kernel, [(wrong, 2, begin, begin + 4)], states)
            assert torch.equal(out[:kept], whole[begin : begin + kept])
        begin += kept


def check_prompts_in_parts(kernel: Kernel, device: str, cases: Cases, dtype: torch.dtype) -> None:
    """Passes of a long part, of a long one with a short one of another sequence, and of single rows; the
    states between them have a place of their own."""
    case, other = pair(cases, 181, dtype, 3)
    states = slots(case.facts, 3, device)
    found = run(kernel, [(case, 2, 0, 70)], states)
    of_other, part = run(kernel, [(other, 1, 0, 15), (case, 2, 70, 179)], states)
    found += [part]
    found += run(kernel, [(case, 2, 179, 180), (other, 1, 15, 25)], states)[:1]
    found += run(kernel, [(case, 2, 180, 181)], states)
    for out, law in ((torch.cat(found), case.law()), (of_other, other.law()[:15])):
        assert_close(out, law)


def check_last_states(
    kernel: Kernel, device: str, cases: Cases, length: int, dtype: torch.dtype = torch.float32
) -> None:
    """A prompt leaves the states after its last positions: a draft model takes positions again whose tokens
    the target has replaced."""
    case = cases(length + 2, dtype, 0)
    for again in (1, 3):
        states = slots(case.facts, 4, device)
        run(kernel, [(case, 2, 0, length)], states)
        (out,) = run(kernel, [(case, 2, length - again, length + 2)], states)
        assert_close(out, case.law()[length - again :])


def check_no_number_is_hidden(kernel: Kernel, device: str, cases: Cases, length: int) -> None:
    """A state that is no number makes outputs that are none."""
    case = cases(5 + length, torch.float16, 0)
    states = slots(case.facts, 1, device)
    run(kernel, [(case, 2, 0, 5)], states)
    states.heads.view(torch.int32).fill_(0x7FFFFFFF)
    (out,) = run(kernel, [(case, 2, 5, 5 + length)], states)
    assert out.isnan().all()


def check_saved_states(
    kernel: Kernel, device: str, cases: Cases, num_kept: int, dtype: torch.dtype = torch.float32
) -> None:
    """A state is saved on the way, and its sequence goes on from it elsewhere: one sequence in two passes,
    which save after 96 and after 142 tokens; another whose pass ends there."""
    case, other = pair(cases, 150, dtype)
    saved = StackedStates.empty(case.facts, 1, 3, 1, torch.device(device))
    stack = StackedStates.empty(case.facts, 1, 4, num_kept, torch.device(device))
    for each in (saved.inputs, saved.heads, stack.inputs, stack.heads):
        each.fill_(torch.nan)
    wanted_S2 = torch.zeros(4, 2, dtype=torch.int32, device=device)
    states = replace(stack.layer(0), saving=Saving(saved.inputs[0], saved.heads[0], wanted_S2))

    def want(*wanted: tuple[int, int, int]) -> None:
        wanted_S2.zero_()
        for slot, num_tokens, place in wanted:
            wanted_S2[slot] = torch.tensor((num_tokens, place))

    want((2, 96, 1), (1, 64, 2))
    fresh = cases(40, dtype, 2)
    run(kernel, [(case, 2, 0, 110), (other, 1, 0, 64), (fresh, 3, 0, 40)], states)
    assert saved.heads[0, 0].isnan().all()
    _go_on(kernel, [(case, 96, 1), (other, 64, 2)], stack, saved)
    want((2, 142, 0))
    run(kernel, [(case, 2, 110, 150), (other, 1, 64, 101)], states)
    _go_on(kernel, [(case, 142, 0), (other, 64, 2)], stack, saved)


def _go_on(
    kernel: Kernel, found: list[tuple[Case, int, int]], stack: StackedStates, saved: StackedStates
) -> None:
    """The rest of each sequence, from the state after so many tokens that is saved in a place, is right."""
    blank = (torch.full_like(each, torch.nan) for each in (stack.inputs, stack.heads))
    other = StackedStates(stack.recurrence, *blank)
    other.restore(saved, [SavedState(3 - idx, place, count) for idx, (_, count, place) in enumerate(found)])
    parts = [(case, 3 - idx, num_tokens, 150) for idx, (case, num_tokens, _) in enumerate(found)]
    for (case, num_tokens, _), out in zip(found, run(kernel, parts, other.layer(0)), strict=True):
        assert_close(out, case.law()[num_tokens:])


def check_large_step(kernel: Kernel, cases: Cases) -> None:
    """A row of a large decode step of a GPU has the bits of a row alone."""
    case = cases(192, torch.bfloat16, 0)
    cuda = torch.device("cuda")
    ones = torch.ones(192, dtype=torch.int32, device=cuda)
    idx = torch.arange(1, 193, device=cuda)
    states = RecurrentStates.empty(case.facts, 193, 1, cuda)
    together: Any = kernel.fn(*case.rows, case.weights, states, Sequences.of_decode(idx, ones, 1))
    for row in (0, 77, 191):
        own = (each[row : row + 1] for each in case.rows)
        one = Sequences.of_decode(idx[row : row + 1], ones[:1], 1)
        alone: Any = kernel.fn(*own, case.weights, RecurrentStates.empty(case.facts, 193, 1, cuda), one)
        assert torch.equal(alone[0], together[row])


def check_decode_step(kernel: Kernel, device: str, cases: Cases) -> None:
    """A decode step is a prefill of its rows."""
    case = cases(8, torch.float32, 0)
    (whole,) = run(kernel, [(case, 1, 0, 8)], slots(case.facts, 1, device))
    states = slots(case.facts, 2, device)
    run(kernel, [(case, 1, 0, 6)], states)
    table = torch.tensor([[1, 3], [0, 0]], device=device)
    lens = torch.tensor([8, 1], device=device)
    rows = (torch.cat((each[6:8], each[:2])) for each in case.rows)
    out: Any = kernel.fn(*rows, case.weights, states, Sequences.of_decode(table[:, 0], lens, 2))
    assert torch.equal(out[:2], whole[6:])

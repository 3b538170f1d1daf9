"""Kernels of gated delta nets: every one that runs here against the decoder's own chunks, and the bits of a
sequence however it is cut, in any company, and after proposals that were not kept. In triton's interpreter
those are the GPU's kernels, too, on a GPU the same."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.delta_net import fused
from compress.kernels.operands.recurrent_states import (
    DeltaWeights,
    RecurrentStates,
    SavedState,
    Saving,
    Sequences,
    StackedStates,
)
from compress.kernels.problem import KernelDevice, Problem
from compress.kernels.select import Kernel, candidates
from compress.models.delta_net import DeltaNet, gated_delta_rule, of_length_one
from compress.models.norms import Norm
from compress.models.recurrence import convolved
from compress.runtime.deployment import SHORT_PROMPT_ROWS
from tests.support.triton_interpreter import INTERPRETED

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPES = {
    "two value heads a key head": DeltaNet(4, 2, 8, 12, 4),
    "one key head, wide keys": DeltaNet(3, 1, 24, 8, 2),
    "as Qwen3.5": DeltaNet(2, 1, 128, 128, 4),
}
each_shape = pytest.mark.parametrize("delta", SHAPES.values(), ids=SHAPES)


def _problem(device: str) -> Problem:
    of_device = KernelDevice.from_torch(torch.device(device), torch.float32)
    return replace(of_device, sm=90 if INTERPRETED else of_device.sm).problem("delta_net", n=16, k=16)


each_kernel = pytest.mark.parametrize(
    ("kernel", "device"),
    [
        pytest.param(kernel, device, id=f"{kernel.name}-{device}")
        for kernel in candidates("delta_net")
        for device in DEVICES
        if kernel.refusal(_problem(device)) is None
    ],
)


@dataclass
class Case:
    """The rows of one sequence, and the parameters of a delta net."""

    delta: DeltaNet
    weights: DeltaWeights
    x_TF: Tensor
    beta_decay_TH: Tensor

    @staticmethod
    def of(delta: DeltaNet, length: int, device: str, dtype: torch.dtype, seed: int = 0) -> "Case":
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        weights = DeltaWeights(
            randn(delta.num_channels, delta.kernel_size).to(device, dtype),
            -randn(delta.num_heads).exp().to(device),
            randn(delta.num_heads).to(device),
            (1 + 0.1 * randn(delta.value_dim)).to(device, dtype),
            1e-6,
        )
        x = randn(length, delta.num_channels + delta.value_size).to(device, dtype)
        return Case(delta, weights, x, randn(length, 2 * delta.num_heads).to(device))

    def law(self) -> Tensor:
        """The outputs [T, Z] by the chunks of the decoder, in float32."""
        delta = self.delta
        x, z = self.x_TF.float().split([delta.num_channels, delta.value_size], dim=1)
        mixed = convolved(x.unsqueeze(0), self.weights.conv_FW.float(), None)
        q, k, v = mixed.split([delta.key_size, delta.key_size, delta.value_size], dim=-1)
        repeat = delta.num_heads // delta.num_key_heads
        q, k = (
            of_length_one(each.unflatten(-1, (-1, delta.key_dim))).repeat_interleave(repeat, dim=-2)
            for each in (q, k)
        )
        beta, decay = self.beta_decay_TH.unsqueeze(0).chunk(2, dim=-1)
        out, _ = gated_delta_rule(
            q * delta.key_dim**-0.5,
            k,
            v.unflatten(-1, (-1, delta.value_dim)),
            self.weights.decay_rate_H * F.softplus(decay + self.weights.dt_bias_H),
            torch.sigmoid(beta),
        )
        norm = Norm(delta.value_dim, self.weights.norm_eps)
        norm.weight = torch.nn.Parameter(self.weights.norm_V.float())
        with torch.no_grad():
            return norm(out[0]).flatten(1) * F.silu(z)


def slots(delta: DeltaNet, num_kept: int, device: str) -> RecurrentStates:
    """Three slots that hold what no one should read."""
    states = RecurrentStates.empty(delta, 4, num_kept, torch.device(device))
    for each in (states.inputs, states.heads):
        each.fill_(torch.nan)
    return states


def run(kernel: Kernel, parts: list[tuple[Case, int, int, int]], states: RecurrentStates) -> list[Tensor]:
    """Run rows begin..end of sequences in one pass; the outputs of each. `parts` are (sequence, slot, begin,
    end)."""
    device = states.heads.device
    x = torch.cat([case.x_TF[begin:end] for case, _, begin, end in parts])
    beta_decay = torch.cat([case.beta_decay_TH[begin:end] for case, _, begin, end in parts])
    lens = tuple(end - begin for *_, begin, end in parts)
    sequences = Sequences.of_prefill(
        torch.tensor([slot for _, slot, _, _ in parts], device=device), lens, tuple(end for *_, end in parts)
    )
    out: Tensor = kernel.fn(x, beta_decay, parts[0][0].weights, states, sequences)
    return list(out.split(lens))


@each_kernel
@each_shape
@pytest.mark.parametrize("length", [11, 45])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["F32", "F16"])
def test_outputs_are_those_of_the_decoder(
    kernel: Kernel, device: str, delta: DeltaNet, dtype: torch.dtype, length: int
) -> None:
    case = Case.of(delta, length, device, dtype)
    (out,) = run(kernel, [(case, 2, 0, length)], slots(delta, 1, device))
    expected = case.law()
    # The norm divides by what a query finds, which may be little; half of the numbers are the measure.
    error = (out.float() - expected).abs() / expected.abs().clamp_min(0.1)
    assert error.median() < (1e-5 if dtype == torch.float32 else 2e-2)
    assert error.quantile(0.99) < (1e-3 if dtype == torch.float32 else 0.3)


@each_kernel
@each_shape
def test_the_bits_of_a_row_are_the_same_however_its_sequence_is_cut_and_in_any_company(
    kernel: Kernel, device: str, delta: DeltaNet
) -> None:
    case, other = (Case.of(delta, 16, device, torch.float32, seed) for seed in (0, 1))
    other.weights = case.weights
    (whole,) = run(kernel, [(case, 1, 0, 16)], slots(delta, 1, device))
    states = slots(delta, 2, device)
    cuts = [0, 1, 9, 11, 12, 14, 16]
    found = []
    for idx, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        company = [(other, 3, begin, end)] if idx % 2 == 0 or begin > 9 else []
        parts = [*company, (case, 2, begin, end)]
        if begin == 9 or idx % 2:
            parts = [(case, 2, begin, end), (Case.of(delta, 3, device, torch.float32, 7), 1, 0, 3)]
        outs = run(kernel, parts, states)
        found.append(outs[[part[0] is case for part in parts].index(True)])
    assert torch.equal(torch.cat(found), whole)


@each_kernel
@each_shape
def test_rows_that_are_not_kept_leave_nothing_behind(kernel: Kernel, device: str, delta: DeltaNet) -> None:
    """A step of four rows of which one, two or three are kept, and one that runs twice, as before a graph is
    captured."""
    case = Case.of(delta, 16, device, torch.float32)
    (whole,) = run(kernel, [(case, 1, 0, 16)], slots(delta, 1, device))
    states = slots(delta, 5, device)
    (out,) = run(kernel, [(case, 2, 0, 5)], states)
    assert torch.equal(out, whole[:5])
    begin = 5
    for kept in (1, 3, 2, 1):
        wrong = replace(case, x_TF=case.x_TF.clone())
        wrong.x_TF[begin + kept : begin + 4] += 1
        for _ in range(2):
            (out,) = run(kernel, [(wrong, 2, begin, begin + 4)], states)
            assert torch.equal(out[:kept], whole[begin : begin + kept])
        begin += kept


@each_kernel
@each_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["F32", "F16"])
def test_prompts_in_parts_are_the_whole_prompt_and_a_decode_step_goes_on(
    kernel: Kernel, device: str, delta: DeltaNet, dtype: torch.dtype
) -> None:
    """Passes of a long part, of a long one with a short one of another sequence, and of single rows; the
    states between them have a place of their own."""
    case, other = (Case.of(delta, 181, device, dtype, seed) for seed in (3, 4))
    other.weights = case.weights
    states = slots(delta, 3, device)
    found = run(kernel, [(case, 2, 0, 70)], states)
    of_other, part = run(kernel, [(other, 1, 0, 15), (case, 2, 70, 179)], states)
    found += [part]
    found += run(kernel, [(case, 2, 179, 180), (other, 1, 15, 25)], states)[:1]
    found += run(kernel, [(case, 2, 180, 181)], states)
    for out, law in ((torch.cat(found), case.law()), (of_other, other.law()[:15])):
        error = (out.float() - law).abs() / law.abs().clamp_min(0.1)
        assert error.median() < (1e-5 if dtype == torch.float32 else 2e-2)
        assert error.quantile(0.99) < (1e-3 if dtype == torch.float32 else 0.3)


@each_kernel
def test_keys_that_are_all_the_same_are_solved_for(kernel: Kernel, device: str) -> None:
    """A state that forgets little and is replaced as a whole by each row: the powers of such a system grow
    beyond float32, and its inverse has ones and nothing else."""
    delta = SHAPES["as Qwen3.5"]
    case = Case.of(delta, 130, device, torch.float32)
    case.x_TF[:, : delta.num_channels - delta.value_size] = case.x_TF[0, : delta.key_size * 2]
    case.beta_decay_TH[:, :2] = 8
    case.beta_decay_TH[:, 2:] = -12
    (out,) = run(kernel, [(case, 1, 0, 130)], slots(delta, 1, device))
    law = case.law()
    error = (out - law).abs() / law.abs().clamp_min(0.1)
    assert error.median() < 1e-5
    assert error.quantile(0.99) < 1e-3


@each_kernel
@pytest.mark.parametrize("length", [18, 40])
def test_a_prompt_leaves_the_states_after_its_last_positions(
    kernel: Kernel, device: str, length: int
) -> None:
    """A draft model takes positions again whose tokens the target has replaced."""
    delta = SHAPES["two value heads a key head"]
    case = Case.of(delta, length + 2, device, torch.float32)
    for again in (1, 3):
        states = slots(delta, 4, device)
        run(kernel, [(case, 2, 0, length)], states)
        (out,) = run(kernel, [(case, 2, length - again, length + 2)], states)
        law = case.law()[length - again :]
        error = (out - law).abs() / law.abs().clamp_min(0.1)
        assert error.median() < 1e-5
        assert error.max() < 1e-2


@each_kernel
@pytest.mark.parametrize("length", [9, 40])
def test_a_state_that_is_no_number_is_not_hidden(kernel: Kernel, device: str, length: int) -> None:
    delta = SHAPES["as Qwen3.5"]
    case = Case.of(delta, 5 + length, device, torch.float16)
    states = slots(delta, 1, device)
    run(kernel, [(case, 2, 0, 5)], states)
    states.heads.view(torch.int32).fill_(0x7FFFFFFF)
    (out,) = run(kernel, [(case, 2, 5, 5 + length)], states)
    assert out.isnan().all()


@each_kernel
@pytest.mark.parametrize(
    "delta", [*SHAPES.values(), DeltaNet(1, 1, 136, 8, 2)], ids=[*SHAPES, "in no chunks"]
)
@pytest.mark.parametrize("num_kept", [1, 4])
def test_a_state_is_saved_on_the_way_and_its_sequence_goes_on_from_it_elsewhere(
    kernel: Kernel, device: str, delta: DeltaNet, num_kept: int
) -> None:
    """One sequence in two passes, which save after 96 and after 142 tokens; another whose pass ends there."""
    case, other = (Case.of(delta, 150, device, torch.float32, seed) for seed in (0, 1))
    other.weights = case.weights
    saved = StackedStates.empty(delta, 1, 3, 1, torch.device(device))
    stack = StackedStates.empty(delta, 1, 4, num_kept, torch.device(device))
    for each in (saved.inputs, saved.heads, stack.inputs, stack.heads):
        each.fill_(torch.nan)
    wanted_S2 = torch.zeros(4, 2, dtype=torch.int32, device=device)
    states = replace(stack.layer(0), saving=Saving(saved.inputs[0], saved.heads[0], wanted_S2))

    def want(*wanted: tuple[int, int, int]) -> None:
        wanted_S2.zero_()
        for slot, num_tokens, place in wanted:
            wanted_S2[slot] = torch.tensor((num_tokens, place))

    want((2, 96, 1), (1, 64, 2))
    fresh = Case.of(delta, 40, device, torch.float32, 2)
    run(kernel, [(case, 2, 0, 110), (other, 1, 0, 64), (fresh, 3, 0, 40)], states)
    assert saved.heads[0, 0].isnan().all()
    go_on(kernel, [(case, 96, 1), (other, 64, 2)], stack, saved)
    want((2, 142, 0))
    run(kernel, [(case, 2, 110, 150), (other, 1, 64, 101)], states)
    go_on(kernel, [(case, 142, 0), (other, 64, 2)], stack, saved)


def go_on(
    kernel: Kernel, found: list[tuple[Case, int, int]], stack: StackedStates, saved: StackedStates
) -> None:
    """The rest of each sequence, from the state after so many tokens that is saved in a place, is right."""
    blank = (torch.full_like(each, torch.nan) for each in (stack.inputs, stack.heads))
    other = StackedStates(stack.recurrence, *blank)
    other.restore(saved, [SavedState(3 - idx, place, count) for idx, (_, count, place) in enumerate(found)])
    parts = [(case, 3 - idx, num_tokens, 150) for idx, (case, num_tokens, _) in enumerate(found)]
    for (case, num_tokens, _), out in zip(found, run(kernel, parts, other.layer(0)), strict=True):
        law = case.law()[num_tokens:]
        error = (out - law).abs() / law.abs().clamp_min(0.1)
        assert error.median() < 1e-5
        assert error.max() < 1e-2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the order of a sum is a GPU's")
def test_a_row_of_a_large_decode_step_has_the_bits_of_a_row_alone() -> None:
    delta = SHAPES["as Qwen3.5"]
    kernel = next(each for each in candidates("delta_net") if each.name == "fused")
    case = Case.of(delta, 192, "cuda", torch.bfloat16)
    ones = torch.ones(192, dtype=torch.int32, device="cuda")
    idx = torch.arange(1, 193, device="cuda")
    states = RecurrentStates.empty(delta, 193, 1, torch.device("cuda"))
    operands = case.x_TF, case.beta_decay_TH
    together: Any = kernel.fn(*operands, case.weights, states, Sequences.of_decode(idx, ones, 1))
    for row in (0, 77, 191):
        own = (each[row : row + 1] for each in operands)
        one = Sequences.of_decode(idx[row : row + 1], ones[:1], 1)
        alone: Any = kernel.fn(*own, case.weights, RecurrentStates.empty(delta, 193, 1, idx.device), one)
        assert torch.equal(alone[0], together[row])


def test_short_prompts_are_those_of_the_runtime() -> None:
    """In a pass of so few rows, the bits of a row may not depend on its company."""
    assert fused.SHORT_ROWS >= SHORT_PROMPT_ROWS


@each_kernel
def test_a_decode_step_is_a_prefill_of_its_rows(kernel: Kernel, device: str) -> None:
    delta = SHAPES["two value heads a key head"]
    case = Case.of(delta, 8, device, torch.float32)
    (whole,) = run(kernel, [(case, 1, 0, 8)], slots(delta, 1, device))
    states = slots(delta, 2, device)
    run(kernel, [(case, 1, 0, 6)], states)
    table = torch.tensor([[1, 3], [0, 0]], device=device)
    lens = torch.tensor([8, 1], device=device)
    x = torch.cat((case.x_TF[6:8], case.x_TF[:2]))
    beta_decay = torch.cat((case.beta_decay_TH[6:8], case.beta_decay_TH[:2]))
    sequences = Sequences.of_decode(table[:, 0], lens, 2)
    out: Any = kernel.fn(x, beta_decay, case.weights, states, sequences)
    assert torch.equal(out[:2], whole[6:])

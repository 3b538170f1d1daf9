"""Kernels of short convolutions with a residual: every one that runs here against the decoder's own, and
the bits of a sequence however it is cut, in any company, and after proposals that were not kept. In
triton's interpreter those are the GPU's kernels, too, on a GPU the same."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.kernels.operands.recurrent_states import RecurrentStates, Saving, Sequences
from compress.kernels.select import Kernel
from compress.models.residual_conv import ResidualConv, ResidualConvs
from tests.support.recurrences import each_dtype, each_kernel

STATE = ResidualConvs.of(20, 150, 4)
"""340 channels: 40 of keys and values, then twice 150."""
PARTS = {"keys and values": (0, 40), "beyond a block of channels": (40, 300)}
each_part = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
NUM_KEPT = 3
LENGTH = 70


def empty(device: str) -> RecurrentStates:
    """Return slots of numbers that no kernel may read."""
    states = RecurrentStates.empty(STATE, 6, NUM_KEPT, torch.device(device))
    states.inputs.fill_(torch.nan)
    return states


def rows_of(size: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, size, generator=generator).to(device, dtype)


def weights_of(size: int, device: str) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(9)).to(device)


def law(rows_TF: Tensor, conv_FW: Tensor) -> Tensor:
    module = ResidualConv("attn_conv", rows_TF.shape[1], 4)
    module.weight.data = conv_FW.cpu().unsqueeze(1)
    with torch.no_grad():
        return module.added(rows_TF.cpu().unsqueeze(0))[0]


def columns(rows_TF: Tensor) -> Tensor:
    """Return the same rows as columns of a wider tensor."""
    wide = torch.full((len(rows_TF), rows_TF.shape[1] + 7), torch.nan)
    wide = wide.to(rows_TF)
    wide[:, 3:-4] = rows_TF
    return wide[:, 3:-4]


def prompt(
    kernel: Kernel,
    states: RecurrentStates,
    first: int,
    parts: list[tuple[Tensor, int, int, int]],
    conv: Tensor,
) -> list[Tensor]:
    """Return the outputs of rows begin..end of sequences in one pass; `parts` are (rows, slot, begin,
    end)."""
    device = states.inputs.device
    slots_R = torch.tensor([slot for _, slot, _, _ in parts], device=device)
    lens = tuple(end - begin for *_, begin, end in parts)
    sequences = Sequences.of_prefill(slots_R, lens, tuple(end for *_, end in parts))
    rows = columns(torch.cat([rows[begin:end] for rows, _, begin, end in parts]))
    return list(kernel.fn(rows, conv, states, sequences, first_channel=first).split(lens))


def step(
    kernel: Kernel,
    states: RecurrentStates,
    first: int,
    parts: list[tuple[Tensor, int, int, int]],
    conv: Tensor,
) -> list[Tensor]:
    """Return the outputs of as many rows of each sequence in a decode step."""
    device = states.inputs.device
    slots_R, ends_R = (
        torch.tensor(each, dtype=torch.int32, device=device)
        for each in zip(*((slot, end) for _, slot, _, end in parts), strict=True)
    )
    (q_len,) = {end - begin for *_, begin, end in parts}
    rows = columns(torch.cat([rows[begin:end] for rows, _, begin, end in parts]))
    sequences = Sequences.of_decode(slots_R, ends_R, q_len)
    return list(kernel.fn(rows, conv, states, sequences, first_channel=first).split(q_len))


@each_kernel("residual_conv")
@each_part
@each_dtype
def test_outputs_are_those_of_the_decoder(
    kernel: Kernel, device: str, part: tuple[int, int], dtype: torch.dtype
) -> None:
    first, size = part
    rows = rows_of(size, dtype, device, 0)
    conv = weights_of(size, device)
    (found,) = prompt(kernel, empty(device), first, [(rows, 1, 0, LENGTH)], conv)
    assert found.dtype == dtype
    assert found.is_contiguous()
    expected = law(rows, conv).float()
    torch.testing.assert_close(found.cpu().float(), expected, rtol=8e-3, atol=2e-5)
    if dtype == torch.float32:
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


@each_kernel("residual_conv")
@each_part
def test_bits_do_not_depend_on_cuts_steps_or_company(
    kernel: Kernel, device: str, part: tuple[int, int]
) -> None:
    first, size = part
    one, other = (rows_of(size, torch.float32, device, seed) for seed in (0, 1))
    conv = weights_of(size, device)
    (whole,) = prompt(kernel, empty(device), first, [(one, 1, 0, LENGTH)], conv)
    states = empty(device)
    found = [prompt(kernel, states, first, [(other, 2, 0, 5), (one, 3, 0, 2), (other, 4, 0, 64)], conv)[1]]
    found += prompt(kernel, states, first, [(one, 3, 2, 41)], conv)
    found.append(step(kernel, states, first, [(other, 2, 5, 8), (one, 3, 41, 44)], conv)[1])
    spoiled = one.clone()
    spoiled[45:] = 77.0  # rows that are proposed, and not kept
    step(kernel, states, first, [(spoiled, 3, 44, 47), (other, 4, 64, 67)], conv)
    found[-1] = found[-1][:3]
    found.append(step(kernel, states, first, [(one, 3, 44, 45)], conv)[0])
    found.append(step(kernel, states, first, [(one, 3, 45, 46), (other, 2, 8, 9)], conv)[0])
    found.append(prompt(kernel, states, first, [(one, 3, 46, LENGTH)], conv)[0])
    assert torch.equal(torch.cat(found), whole)
    untouched = states.inputs.clone()
    untouched[..., first : first + size] = torch.nan
    assert untouched.isnan().all()  # other channels of the state are those of other convolutions
    assert states.inputs[[0, 1, 5]].isnan().all()


@each_kernel("residual_conv")
@each_part
def test_a_state_that_is_saved_is_gone_on_from(kernel: Kernel, device: str, part: tuple[int, int]) -> None:
    first, size = part
    rows = rows_of(size, torch.float32, device, 0)
    conv = weights_of(size, device)
    (whole,) = prompt(kernel, empty(device), first, [(rows, 1, 0, LENGTH)], conv)
    states = empty(device)
    saved = RecurrentStates.empty(STATE, 3, 1, torch.device(device))
    wanted_S2 = torch.zeros(6, 2, dtype=torch.int32, device=device)
    wanted_S2[2] = torch.tensor([32, 1])
    saving = Saving(saved.inputs, saved.heads, wanted_S2)
    prompt(kernel, replace(states, saving=saving), first, [(rows, 2, 0, LENGTH)], conv)
    assert not saved.inputs[[0, 2]].any()
    again = empty(device)
    for position in range(29, 32):
        inputs_F = saved.inputs[1, position % saved.inputs.shape[1]]
        again.inputs[4, position % again.inputs.shape[1]] = inputs_F
    (rest,) = prompt(kernel, again, first, [(rows, 4, 32, LENGTH)], conv)
    assert torch.equal(rest, whole[32:])

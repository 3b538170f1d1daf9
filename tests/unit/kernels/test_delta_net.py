"""Kernels of gated delta nets: every one that runs here against the decoder's own chunks, and the bits of a
sequence however it is cut, in any company, and after proposals that were not kept. In triton's interpreter
those are the GPU's kernels, too, on a GPU the same."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.delta_net import fused
from compress.kernels.operands.recurrent_states import DeltaWeights, Sequences
from compress.kernels.select import Kernel, candidates
from compress.models.delta_net import DeltaNet, gated_delta_rule, of_length_one
from compress.models.norms import Norm
from compress.models.recurrence import convolved
from compress.runtime.deployment import SHORT_PROMPT_ROWS
from tests.support import recurrences
from tests.support.recurrences import assert_close, each_dtype, run, slots
from tests.support.triton_interpreter import INTERPRETED

SHAPES = {
    "two value heads a key head": DeltaNet(4, 2, 8, 12, 4),
    "one key head, wide keys": DeltaNet(3, 1, 24, 8, 2),
    "as Qwen3.5": DeltaNet(2, 1, 128, 128, 4),
    "doubled beta": DeltaNet(4, 2, 12, 24, 4, doubled_beta=True),
    "a decay of each channel": DeltaNet(3, 3, 12, 20, 3, rank=5, by_channel=True),
    "a bounded decay of each channel": DeltaNet(3, 3, 12, 20, 3, by_channel=True, decay_bound=0.8),
}
if not INTERPRETED:
    SHAPES["bounded decays"] = DeltaNet(4, 2, 8, 12, 4, decay_bound=2.5)
    SHAPES["as Ling 3.0"] = DeltaNet(2, 2, 128, 128, 4, by_channel=True, decay_bound=5.0)
    SHAPES["as Kimi Linear"] = DeltaNet(2, 2, 128, 128, 4, rank=128, by_channel=True)
each_shape = pytest.mark.parametrize("delta", SHAPES.values(), ids=SHAPES)
each_kernel = recurrences.each_kernel("delta_net")


@dataclass
class Case(recurrences.Case):
    """Queries, keys, values and gates of one sequence, and its rows of beta and decay."""

    @staticmethod
    def of(delta: DeltaNet, device: str, length: int, dtype: torch.dtype, seed: int) -> "Case":
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        weights = DeltaWeights(
            randn(delta.num_channels, delta.kernel_size).to(device, dtype),
            -randn(delta.num_heads).exp().to(device),
            randn(delta.num_decays).to(device),
            (1 + 0.1 * randn(delta.value_dim)).to(device, dtype),
            1e-6,
            delta.beta_factor,
        )
        x = randn(length, delta.num_channels + delta.value_size).to(device, dtype)
        beta_decay = randn(length, delta.num_heads + delta.num_decays).to(device)
        return Case(delta, weights, (x, beta_decay))

    def law(self) -> Tensor:
        delta = self.facts
        x_TF, beta_decay_TH = self.rows
        x, z = x_TF.float().split([delta.num_channels, delta.value_size], dim=1)
        mixed = convolved(x.unsqueeze(0), self.weights.conv_FW.float(), None)
        q, k, v = mixed.split([delta.key_size, delta.key_size, delta.value_size], dim=-1)
        repeat = delta.num_heads // delta.num_key_heads
        q, k = (
            of_length_one(each.unflatten(-1, (-1, delta.key_dim))).repeat_interleave(repeat, dim=-2)
            for each in (q, k)
        )
        beta, decay = beta_decay_TH.unsqueeze(0).split([delta.num_heads, delta.num_decays], dim=-1)
        decay = (decay + self.weights.dt_bias_D).unflatten(-1, (delta.num_heads, -1))
        rate = self.weights.decay_rate_H.unsqueeze(-1)
        log_decay = rate * F.softplus(decay)
        if delta.decay_bound:
            log_decay = -delta.decay_bound * torch.sigmoid(rate.abs() * decay)
        out, _ = gated_delta_rule(
            q * delta.key_dim**-0.5,
            k,
            v.unflatten(-1, (-1, delta.value_dim)),
            log_decay if delta.by_channel else log_decay.squeeze(-1),
            torch.sigmoid(beta) * (2 if delta.doubled_beta else 1),
        )
        norm = Norm(delta.value_dim, self.weights.norm_eps)
        norm.weight = torch.nn.Parameter(self.weights.norm_V.float())
        with torch.no_grad():
            return norm(out[0]).flatten(1) * (torch.sigmoid(z) if delta.by_channel else F.silu(z))


def cases(delta: DeltaNet, device: str) -> recurrences.Cases:
    return partial(Case.of, delta, device)


@each_kernel
@each_shape
@pytest.mark.parametrize("length", [11, 45])
@each_dtype
def test_outputs_are_those_of_the_decoder(
    kernel: Kernel, device: str, delta: DeltaNet, dtype: torch.dtype, length: int
) -> None:
    case = Case.of(delta, device, length, dtype, 0)
    (out,) = run(kernel, [(case, 2, 0, length)], slots(delta, 1, device))
    assert_close(out, case.law())


@each_kernel
@each_shape
def test_the_bits_of_a_row_are_the_same_however_its_sequence_is_cut_and_in_any_company(
    kernel: Kernel, device: str, delta: DeltaNet
) -> None:
    recurrences.check_bits(kernel, device, cases(delta, device))


@each_kernel
@each_shape
@pytest.mark.one_in(3)
def test_sequences_in_turn_have_the_bits_of_all_at_once(
    kernel: Kernel, device: str, delta: DeltaNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    recurrences.check_sequences_in_turn(kernel, device, cases(delta, device), monkeypatch)


@each_kernel
@each_shape
def test_rows_that_are_not_kept_leave_nothing_behind(kernel: Kernel, device: str, delta: DeltaNet) -> None:
    recurrences.check_rows_not_kept(kernel, device, cases(delta, device))


@each_kernel
@each_shape
@each_dtype
@pytest.mark.one_in(3)
def test_prompts_in_parts_are_the_whole_prompt_and_a_decode_step_goes_on(
    kernel: Kernel, device: str, delta: DeltaNet, dtype: torch.dtype
) -> None:
    recurrences.check_prompts_in_parts(kernel, device, cases(delta, device), dtype)


@each_kernel
def test_keys_that_are_all_the_same_are_solved_for(kernel: Kernel, device: str) -> None:
    """A state that forgets little and is replaced as a whole by each row: the powers of such a system grow
    beyond float32, and its inverse has ones and nothing else."""
    delta = SHAPES["as Qwen3.5"]
    case = Case.of(delta, device, 130, torch.float32, 0)
    x_TF, beta_decay_TH = case.rows
    x_TF[:, : delta.num_channels - delta.value_size] = x_TF[0, : delta.key_size * 2]
    beta_decay_TH[:, :2] = 8
    beta_decay_TH[:, 2:] = -12
    (out,) = run(kernel, [(case, 1, 0, 130)], slots(delta, 1, device))
    assert_close(out, case.law())


@each_kernel
def test_channels_that_forget_at_once_and_others_that_keep_all_overflow_nothing(
    kernel: Kernel, device: str
) -> None:
    """Decays of a chunk span e^-12,000 to one: a quotient of their exponentials has no value."""
    delta = SHAPES["a decay of each channel" if INTERPRETED else "as Kimi Linear"]
    case = Case.of(delta, device, 75, torch.float32, 0)
    decays = case.rows[1][:, delta.num_heads :]
    decays.fill_(-30)
    decays[:, ::3] = 300
    (out,) = run(kernel, [(case, 1, 0, 75)], slots(delta, 1, device))
    assert out.isfinite().all()
    assert_close(out, case.law())


@each_kernel
def test_gates_apart_are_those_that_follow_queries_keys_and_values(kernel: Kernel, device: str) -> None:
    delta = SHAPES["a decay of each channel"]
    case = Case.of(delta, device, 40, torch.float32, 0)
    (whole,) = run(kernel, [(case, 1, 0, 40)], slots(delta, 1, device))
    x_TF, beta_decay = case.rows
    gate_TZ = x_TF[:, delta.num_channels :].contiguous()
    sequences = Sequences.of_prefill(torch.tensor([1], device=device), (40,), (40,))
    apart = kernel.fn(
        x_TF[:, : delta.num_channels].contiguous(),
        beta_decay,
        case.weights,
        slots(delta, 1, device),
        sequences,
        gate_TZ=gate_TZ,
    )
    assert_close(apart, whole)


@each_kernel
@pytest.mark.parametrize("length", [18, 40])
def test_a_prompt_leaves_the_states_after_its_last_positions(
    kernel: Kernel, device: str, length: int
) -> None:
    delta = SHAPES["two value heads a key head"]
    recurrences.check_last_states(kernel, device, cases(delta, device), length)


@each_kernel
@pytest.mark.parametrize("length", [9, 40])
def test_a_state_that_is_no_number_is_not_hidden(kernel: Kernel, device: str, length: int) -> None:
    recurrences.check_no_number_is_hidden(kernel, device, cases(SHAPES["as Qwen3.5"], device), length)


@each_kernel
@pytest.mark.parametrize(
    "delta", [*SHAPES.values(), DeltaNet(1, 1, 136, 8, 2)], ids=[*SHAPES, "in no chunks"]
)
@pytest.mark.parametrize("num_kept", [1, 4])
@pytest.mark.one_in(3)
def test_a_state_is_saved_on_the_way_and_its_sequence_goes_on_from_it_elsewhere(
    kernel: Kernel, device: str, delta: DeltaNet, num_kept: int
) -> None:
    recurrences.check_saved_states(kernel, device, cases(delta, device), num_kept)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the order of a sum is a GPU's")
def test_a_row_of_a_large_decode_step_has_the_bits_of_a_row_alone() -> None:
    kernel = next(each for each in candidates("delta_net") if each.name == "fused")
    recurrences.check_large_step(kernel, cases(SHAPES["as Qwen3.5"], "cuda"))


def test_short_prompts_are_those_of_the_runtime() -> None:
    """In a pass of so few rows, the bits of a row may not depend on its company."""
    assert fused.SHORT_ROWS >= SHORT_PROMPT_ROWS


@each_kernel
def test_a_decode_step_is_a_prefill_of_its_rows(kernel: Kernel, device: str) -> None:
    recurrences.check_decode_step(kernel, device, cases(SHAPES["two value heads a key head"], device))

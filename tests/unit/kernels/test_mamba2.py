"""Kernels of Mamba-2 mixers: every one that runs here against the decoder's own chunks, and the bits of a
sequence however it is cut, in any company, and after proposals that were not kept. In triton's interpreter
those are the GPU's kernels, too, on a GPU the same."""

import random
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.mamba2 import chunks, fused, outputs
from compress.kernels.operands.gpu import Gpu
from compress.kernels.operands.recurrent_states import (
    LONG_CHUNK,
    MambaWeights,
    num_places,
    pass_bytes,
    rows_of_chunks,
)
from compress.kernels.select import Kernel, candidates
from compress.models.mamba2 import Mamba2, state_space_scan
from compress.models.norms import Norm
from compress.models.recurrence import convolved
from compress.models.short_conv import ShortConv
from compress.runtime.deployment import SHORT_PROMPT_ROWS
from tests.support import recurrences
from tests.support.recurrences import assert_close, each_dtype, run, slots

SHAPES = {
    "two groups, normed each": Mamba2(4, 2, 8, 12, 4, conv_bias=True),
    "three heads of a wide state": Mamba2(3, 1, 24, 8, 2, conv_bias=False),
    "as Granite 4": Mamba2(2, 1, 128, 64, 4, conv_bias=True),
    "two groups without a norm": Mamba2(4, 2, 8, 12, 4, conv_bias=True, normed=False),
    "one position, as lightning attention": Mamba2(3, 3, 16, 16, 1, conv_bias=False, normed=False),
}
PUBLISHED = {
    **SHAPES,
    "as Nemotron Nano 2": Mamba2(4, 2, 128, 80, 4, conv_bias=True),
    "as Falcon-H1 34B": Mamba2(4, 2, 256, 128, 4, conv_bias=True, normed=False),
}
each_shape = pytest.mark.parametrize("mamba", SHAPES.values(), ids=SHAPES)
each_kernel = recurrences.each_kernel("mamba2")
PADDING = 5
"""Columns after those of dt, which no kernel reads."""


@dataclass
class Case(recurrences.Case):
    """C, B, x, gates and dt of one sequence."""

    @staticmethod
    def of(mamba: Mamba2, device: str, length: int, dtype: torch.dtype, seed: int) -> "Case":
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        heads = mamba.num_heads
        weights = MambaWeights(
            randn(mamba.num_channels, mamba.kernel_size).to(device, dtype),
            randn(mamba.num_channels).to(device, dtype) if mamba.conv_bias else None,
            -randn(heads).exp().to(device),
            (randn(heads) - 2).to(device),
            randn(heads).to(device),
            (1 + 0.1 * randn(mamba.value_size)).to(device, dtype) if mamba.normed else None,
            mamba.num_key_heads,
            1e-5,
        )
        rows = randn(length, mamba.num_channels + mamba.value_size + heads).to(device, dtype)
        return Case(mamba, weights, (F.pad(rows, (0, PADDING), value=torch.nan),))

    def law(self) -> Tensor:
        mamba = self.facts
        weights: MambaWeights = self.weights
        sizes = [mamba.num_channels, mamba.value_size, mamba.num_heads]
        inputs, gate, dt = self.rows[0][:, :-PADDING].float().split(sizes, dim=1)
        bias = None if weights.conv_bias_F is None else weights.conv_bias_F.float()
        mixed = convolved(inputs.unsqueeze(0), weights.conv_FW.float(), None, bias)
        c, b, x = mixed.split([mamba.key_size, mamba.key_size, mamba.value_size], dim=-1)
        repeat = mamba.num_heads // mamba.num_key_heads
        c, b = (each.unflatten(-1, (-1, mamba.key_dim)).repeat_interleave(repeat, dim=-2) for each in (c, b))
        x = x.unflatten(-1, (-1, mamba.value_dim))
        dt = F.softplus(dt + weights.dt_bias_H).unsqueeze(0)
        out, _ = state_space_scan(c, b, x * dt.unsqueeze(-1), weights.decay_rate_H * dt)
        out = (out + weights.skip_H.unsqueeze(-1) * x)[0].flatten(1) * F.silu(gate)
        if weights.norm_Z is None:
            return out
        groups = weights.norm_groups
        norm = Norm(mamba.value_size, weights.norm_eps, heads=groups)
        norm.weight = torch.nn.Parameter(weights.norm_Z.float())
        with torch.no_grad():
            normed: Tensor = norm(out if groups == 1 else out.unflatten(1, (groups, -1)))
        return normed.flatten(1)


def cases(mamba: Mamba2, device: str) -> recurrences.Cases:
    return partial(Case.of, mamba, device)


@each_kernel
@each_shape
@pytest.mark.parametrize("length", [11, 45])
@each_dtype
def test_outputs_are_those_of_the_decoder(
    kernel: Kernel, device: str, mamba: Mamba2, dtype: torch.dtype, length: int
) -> None:
    case = Case.of(mamba, device, length, dtype, 0)
    (out,) = run(kernel, [(case, 2, 0, length)], slots(mamba, 1, device))
    assert_close(out, case.law())


@each_kernel
def test_all_heads_are_normed_at_once_whatever_their_groups(
    kernel: Kernel, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one tile, and in more than one."""
    mamba = SHAPES["two groups, normed each"]
    case = Case.of(mamba, device, 5, torch.float32, 0)
    case.weights = replace(case.weights, norm_groups=1)
    for tile in (outputs.NORM_TILE, 32):
        monkeypatch.setattr(outputs, "NORM_TILE", tile)
        (out,) = run(kernel, [(case, 2, 0, 5)], slots(mamba, 1, device))
        assert_close(out, case.law())


@each_kernel
@each_shape
def test_the_bits_of_a_row_are_the_same_however_its_sequence_is_cut_and_in_any_company(
    kernel: Kernel, device: str, mamba: Mamba2
) -> None:
    recurrences.check_bits(kernel, device, cases(mamba, device))


@each_kernel
@each_shape
def test_sequences_in_turn_have_the_bits_of_all_at_once(
    kernel: Kernel, device: str, mamba: Mamba2, monkeypatch: pytest.MonkeyPatch
) -> None:
    recurrences.check_sequences_in_turn(kernel, device, cases(mamba, device), monkeypatch)


@each_kernel
@each_shape
def test_rows_that_are_not_kept_leave_nothing_behind(kernel: Kernel, device: str, mamba: Mamba2) -> None:
    recurrences.check_rows_not_kept(kernel, device, cases(mamba, device))


@each_kernel
@each_shape
@each_dtype
def test_prompts_in_parts_are_the_whole_prompt_and_a_decode_step_goes_on(
    kernel: Kernel, device: str, mamba: Mamba2, dtype: torch.dtype
) -> None:
    recurrences.check_prompts_in_parts(kernel, device, cases(mamba, device), dtype)


def of_chunks() -> pytest.MarkDecorator:
    """Run a test with the kernel whose chunks have the same bits, where it runs."""
    marks = each_kernel.args[1]
    return pytest.mark.parametrize(("kernel", "device"), [each for each in marks if "fused" in str(each.id)])


@of_chunks()
@pytest.mark.parametrize(
    "mamba",
    [
        Mamba2(4, 2, 16, 80, 4, conv_bias=True),
        Mamba2(3, 1, 24, 64, 2, conv_bias=False),
        Mamba2(2, 1, 256, 64, 4, conv_bias=True),
    ],
    ids=["heads of 80", "heads of 64", "states of 256"],
)
def test_chunks_have_the_same_bits_wherever_a_prompt_is_cut_and_in_any_company(
    kernel: Kernel, device: str, mamba: Mamba2
) -> None:
    """After whole chunks; the state before a part is that of its slot, or one that the same pass computes."""
    case, other = recurrences.pair(cases(mamba, device), 201, torch.float16, 5)
    states = slots(mamba, 1, device)
    (whole,) = run(kernel, [(case, 2, 0, 201)], states)
    kept = states.heads[2].clone()
    assert_close(whole, case.law())
    for cuts in ([0, 64, 201], [0, 128, 201], [0, 64, 128, 201]):
        states = slots(mamba, 1, device)
        found = []
        for begin, end in zip(cuts, cuts[1:], strict=False):
            outs = run(kernel, [(other, 1, 0, 150), (case, 2, begin, end), (other, 3, 0, 20)], states)
            assert_close(outs[0], other.law()[:150])
            found.append(outs[1])
        assert torch.equal(torch.cat(found), whole)
        assert torch.equal(states.heads[2], kept)


def test_wide_states_go_in_chunks_where_shared_memory_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for shared_kib, fits in ((99, False), (163, True), (227, True)):
        monkeypatch.setattr(chunks, "gpu_of", lambda device, kib=shared_kib: Gpu(80, 108, 1024 * kib))
        assert chunks.fit(128, torch.device("cuda"))
        assert chunks.fit(256, torch.device("cuda")) == fits


def test_bytes_of_a_pass_are_those_of_the_states_before_its_chunks() -> None:
    nano = Mamba2(128, 8, 128, 80, 4, conv_bias=True)
    assert pass_bytes(nano, 64, 8) == 0
    assert pass_bytes(nano, 2048, 1) == 33 * 128 * 80 * 128 * 4
    assert pass_bytes(nano, 2048, 129) == 65 * 128 * 80 * 128 * 4
    assert pass_bytes(ShortConv.of(64, 3), 2048, 129) == 0


def test_bits_stay_where_a_prompt_is_cut_after_whole_chunks_of_its_device() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [rows_of_chunks(True, cuda), rows_of_chunks(False, cuda)] == [64, 32]
    assert [rows_of_chunks(True, cpu), rows_of_chunks(False, cpu)] == [32, 32]


def test_states_before_chunks_have_places_of_their_own() -> None:
    rng = random.Random(0)
    for _ in range(300):
        lens = [rng.choice((0, 1, 17, 63, 64, 65, 66, 128, 129, 700)) for _ in range(rng.randint(1, 40))]
        taken: set[int] = set()
        start = 0
        for sequence, length in enumerate(lens):
            first = start // LONG_CHUNK + min(sequence, start // LONG_CHUNK)
            places = range(first, first - (-length // LONG_CHUNK)) if length > LONG_CHUNK else range(0)
            assert not taken & set(places)
            taken |= set(places)
            start += length
        assert max(taken, default=-1) < num_places(start, len(lens))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter has no products in bfloat16")
@pytest.mark.parametrize("shape", PUBLISHED)
@pytest.mark.parametrize("length", [45, 181])
def test_outputs_in_bfloat16_are_those_of_the_decoder(length: int, shape: str) -> None:
    kernel = next(each for each in candidates("mamba2") if each.name == "fused")
    mamba = PUBLISHED[shape]
    case = Case.of(mamba, "cuda", length, torch.bfloat16, 0)
    (out,) = run(kernel, [(case, 2, 0, length)], slots(mamba, 1, "cuda"))
    assert_close(out, case.law())


@each_kernel
@pytest.mark.parametrize("length", [1, 40])
def test_factors_multiply_gates_and_dt(kernel: Kernel, device: str, length: int) -> None:
    mamba = SHAPES["two groups without a norm"]
    case = Case.of(mamba, device, length, torch.float16, 0)
    weights = replace(case.weights, gate_factor=0.5, dt_factor=0.25)
    (out,) = run(kernel, [(replace(case, weights=weights), 1, 0, length)], slots(mamba, 1, device))
    first_dt = mamba.num_channels + mamba.value_size
    case.rows[0][:, mamba.num_channels : first_dt] *= 0.5
    case.rows[0][:, first_dt : first_dt + mamba.num_heads] *= 0.25
    (expected,) = run(kernel, [(case, 1, 0, length)], slots(mamba, 1, device))
    assert torch.equal(out, expected)


@each_kernel
@pytest.mark.parametrize("length", [9, 40])
def test_products_of_c_and_b_may_be_beyond_the_range_of_float16(
    kernel: Kernel, device: str, length: int
) -> None:
    mamba = SHAPES["as Granite 4"]
    case = Case.of(mamba, device, length, torch.float16, 0)
    case.rows[0][:, : 2 * mamba.key_size] = 60
    case.weights.conv_FW[: 2 * mamba.key_size] = 0.5
    (out,) = run(kernel, [(case, 1, 0, length)], slots(mamba, 1, device))
    assert_close(out, case.law())


@each_kernel
def test_heads_that_change_slowly_are_as_exact(kernel: Kernel, device: str) -> None:
    """1 + exp(dt) has few bits of exp(dt), which all that is added to a state is multiplied by."""
    mamba = SHAPES["as Granite 4"]
    case = Case.of(mamba, device, 9, torch.float32, 0)
    case.weights.dt_bias_H.fill_(-12)
    case.weights.skip_H.zero_()
    case.weights = replace(case.weights, norm_eps=1e-20)
    (out,) = run(kernel, [(case, 1, 0, 9)], slots(mamba, 1, device))
    assert_close(out, case.law())


@each_kernel
@pytest.mark.parametrize("length", [18, 40])
@each_dtype
def test_a_prompt_leaves_the_states_after_its_last_positions(
    kernel: Kernel, device: str, length: int, dtype: torch.dtype
) -> None:
    mamba = SHAPES["two groups, normed each"]
    recurrences.check_last_states(kernel, device, cases(mamba, device), length, dtype)


@each_kernel
@pytest.mark.parametrize("length", [9, 40])
def test_a_state_that_is_no_number_is_not_hidden(kernel: Kernel, device: str, length: int) -> None:
    recurrences.check_no_number_is_hidden(kernel, device, cases(SHAPES["as Granite 4"], device), length)


@each_kernel
@pytest.mark.parametrize(
    "mamba",
    [*SHAPES.values(), Mamba2(1, 1, 136, 8, 2, conv_bias=True)],
    ids=[*SHAPES, "in no chunks"],
)
@pytest.mark.parametrize(("num_kept", "dtype"), [(1, torch.float16), (4, torch.float16), (4, torch.float32)])
@pytest.mark.one_in(3)
def test_a_state_is_saved_on_the_way_and_its_sequence_goes_on_from_it_elsewhere(
    kernel: Kernel, device: str, mamba: Mamba2, num_kept: int, dtype: torch.dtype
) -> None:
    recurrences.check_saved_states(kernel, device, cases(mamba, device), num_kept, dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the order of a sum is a GPU's")
def test_a_row_of_a_large_decode_step_has_the_bits_of_a_row_alone() -> None:
    kernel = next(each for each in candidates("mamba2") if each.name == "fused")
    recurrences.check_large_step(kernel, cases(SHAPES["as Granite 4"], "cuda"))


def test_short_prompts_are_those_of_the_runtime() -> None:
    """In a pass of so few rows, the bits of a row may not depend on its company."""
    assert fused.SHORT_ROWS >= SHORT_PROMPT_ROWS


@each_kernel
def test_a_decode_step_is_a_prefill_of_its_rows(kernel: Kernel, device: str) -> None:
    recurrences.check_decode_step(kernel, device, cases(SHAPES["two groups, normed each"], device))

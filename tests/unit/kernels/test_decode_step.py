"""A decode step's own state: kernels in triton's interpreter and torch, against a plain account of sequences
and their blocks.
"""

import pytest
import torch

from compress.kernels.step import decode as decode_step
from compress.kernels.step.decode import DecodeBuffers, begin_step, end_step
from compress.kernels.step.host_memory import host_visible
from tests.support.triton_interpreter import INTERPRETED

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_COLUMNS = 6


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("sm", [80, 90])
def test_kernels_compile_for_ampere_and_hopper(sm: int) -> None:
    pytest.importorskip("triton")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {
        "HIDDEN": 4096,
        "COLUMNS": 1024,
        "TABLE_COLUMNS": 17,
        "BLOCK_SIZE": 64,
        "PADDING": 0,
        "ROWS": 128,
        "LOGPROBS": True,
        "STATE_ROWS": 64,
        "PDL": sm >= 90,
    }
    for kernel, types in (
        (decode_step._begin, ["*i64", "*bf16", "*bf16", *["*i64"] * 7]),
        (decode_step._end, ["*i64", "*fp32", *["*i64"] * 5, "*fp32", "i32"]),
    ):
        used = {name: value for name, value in constants.items() if name in kernel.arg_names}
        names = [name for name in kernel.arg_names if name not in used]
        signature = dict.fromkeys(kernel.arg_names, "constexpr") | dict(zip(names, types, strict=True))
        compiled = triton.compile(
            ASTSource(kernel, signature, used),
            target=GPUTarget("cuda", sm, 32),
            options={"launch_pdl": sm >= 90},
        )
        assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == (sm >= 90)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize("num_rows", [1, 5, 70])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_sequences_grow_through_their_blocks_and_padding_rows_stay(
    num_rows: int, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_kernel and not INTERPRETED:
        pytest.skip("kernels run in the interpreter")
    monkeypatch.setattr(decode_step, "uses_kernels", lambda device: by_kernel)
    generator = torch.Generator().manual_seed(num_rows)
    num_state_rows = num_rows + 3
    num_steps = 9
    context = torch.randint(1, 2 * BLOCK_SIZE + 1, (num_state_rows,), generator=generator)
    running = (torch.arange(num_state_rows) % 3 != 1).long()
    blocks = 1 + torch.arange(num_state_rows * NUM_COLUMNS).view(
        num_state_rows, NUM_COLUMNS
    )  # those of each row, also before it has them
    known = torch.arange(NUM_COLUMNS) * BLOCK_SIZE < context.unsqueeze(1)
    state = DecodeBuffers(
        tokens_S=zeros(num_state_rows),
        context_lens_S=context.clone(),
        running_S=running,
        block_table_SB=torch.where(known, blocks, 0),
        num_steps=zeros(1),
        next_block_S=host_visible(num_state_rows, dtype=torch.int64, device=CPU),
        host_tokens_2S=host_visible(2, num_state_rows, dtype=torch.int64, device=CPU),
        host_logprobs_2S=host_visible(2, num_state_rows, dtype=torch.float32, device=CPU),
    )
    embed = torch.randn(50, 1030, generator=generator)
    state.tokens_S.copy_(torch.randint(50, (num_state_rows,), generator=generator))
    for step in range(1, num_steps + 1):
        expected = context + running * (step - 1) - 1
        state.next_block_S.copy_(blocks.gather(1, (expected // BLOCK_SIZE).unsqueeze(1)).squeeze(1))
        state.next_block_S[expected % BLOCK_SIZE != 0] = -7  # not looked at
        state.next_block_S[expected < known.sum(dim=1) * BLOCK_SIZE] = -7  # the table has the block
        state.next_block_S[running == 0] = -7
        fed = embed[state.tokens_S[:num_rows]]
        x, positions, slots = begin_step(state, num_rows, embed, block_size=BLOCK_SIZE)
        here = (
            blocks.gather(1, (expected // BLOCK_SIZE).unsqueeze(1)).squeeze(1) * BLOCK_SIZE
            + expected % BLOCK_SIZE
        )
        assert torch.equal(x, fed)
        assert torch.equal(positions, expected[:num_rows])
        assert torch.equal(slots, here[:num_rows])
        chosen = torch.randint(50, (num_rows,), generator=generator)
        logprobs = torch.randn(num_rows, generator=generator)
        before = state.host_tokens_2S[(step + 1) % 2].clone()
        end_step(state, chosen, logprobs if step % 3 else None)
        assert torch.equal(state.tokens_S[:num_rows], chosen)
        assert torch.equal(state.host_tokens_2S[step % 2, :num_rows], chosen)
        assert torch.equal(state.host_tokens_2S[(step + 1) % 2], before)  # the step before is still there
        assert not step % 3 or torch.equal(state.host_logprobs_2S[step % 2, :num_rows], logprobs)
    served = torch.arange(num_state_rows) < num_rows
    assert torch.equal(state.context_lens_S, context + num_steps * running * served)
    grown = torch.arange(NUM_COLUMNS) * BLOCK_SIZE <= (state.context_lens_S - 1 - running * served).unsqueeze(
        1
    )
    assert torch.equal(state.block_table_SB, torch.where(grown | known, blocks, 0))

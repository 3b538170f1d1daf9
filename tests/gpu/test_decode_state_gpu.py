"""The states of plain and of speculative decode steps on a GPU: what the host reads and writes there is what
the CPU's state has.
"""

import random

import pytest
import torch

from compress.runtime.decode import DecodeState
from compress.runtime.generation import Generation
from compress.runtime.request import Request, SamplingParams
from compress.runtime.sampler import SampledTokens
from compress.runtime.speculative.state import SpeculativeState

pytestmark = pytest.mark.gpu
BLOCK_SIZE = 4


def generation(name: int, tokens: list[int], blocks: list[int], *, max_tokens: int = 1) -> Generation:
    """A request of these tokens, which may have `max_tokens` more."""
    request = Request(str(name), tuple(tokens), SamplingParams(max_tokens, ignore_eos=True))
    return Generation(request, 0.0, tokens, blocks)


def test_steps_see_the_hosts_blocks_and_the_host_their_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    num_rows = 130
    num_state_rows = 140
    embed_VD = torch.randn(1000, 1500, generator=generator)
    states = [
        DecodeState(
            max_rows=num_state_rows, max_model_len=64, block_size=BLOCK_SIZE, device=torch.device(device)
        )
        for device in ("cuda", "cpu")
    ]
    for first_len in (1, 5):  # loaded anew after an odd number of steps
        lengths = [first_len + idx % 11 for idx in range(num_rows - 2)]
        blocks = [[20 * idx + column + 1 for column in range(16)] for idx in range(num_rows)]
        generations = [
            generation(idx, [idx] * length, blocks[idx][: -(-length // BLOCK_SIZE)])
            for idx, length in enumerate(lengths)
        ]
        for state in states:
            state.load(generations)
        for step in range(1, 12):
            choice = SampledTokens(
                torch.randint(1000, (num_rows,), generator=generator),
                torch.randn(num_rows, generator=generator),
            )
            inputs = []
            for state, device in zip(states, ("cuda", "cpu"), strict=True):
                for idx, length in enumerate(lengths):
                    position = length + step - 2
                    if position % BLOCK_SIZE == 0:
                        state.set_next_block(idx, blocks[idx][position // BLOCK_SIZE])
                inputs.append([each.cpu().clone() for each in state.begin(num_rows, embed_VD.to(device))])
                assert choice.logprobs_R is not None
                state.end(SampledTokens(choice.tokens_R.to(device), choice.logprobs_R.to(device)))
            torch.cuda.synchronize()
            assert all(torch.equal(on_gpu, on_cpu) for on_gpu, on_cpu in zip(*inputs, strict=True))
            assert [length + step - 2 for length in lengths] == inputs[1][1][: len(lengths)].tolist()
            results = states[0].results[step % 2]
            assert not results.tokens.is_cuda
            assert torch.equal(results.tokens[:num_rows], choice.tokens_R)
            assert torch.equal(results.logprobs[:num_rows], choice.logprobs_R)


@pytest.mark.parametrize(("k", "num_rows"), [(1, 1), (4, 70), (7, 33)])
def test_speculative_steps_advance_and_leave_results_as_on_the_cpu(k: int, num_rows: int) -> None:
    rng = random.Random(k)
    block_size = 16
    device = {"cuda": torch.device("cuda"), "cpu": torch.device("cpu")}
    states = {
        name: SpeculativeState(
            max_rows=num_rows + 3, max_model_len=400, block_size=block_size, k=k, device=each
        )
        for name, each in device.items()
    }
    for _ in range(2):  # loaded anew after an odd number of steps
        rows = []
        for row_idx in range(num_rows):
            tokens = [rng.randrange(9) for _ in range(rng.choice([2, k + 1, 40]))]
            blocks = [1 + 30 * row_idx + column for column in range(-(-len(tokens) // block_size))]
            rows.append(generation(row_idx, tokens, blocks, max_tokens=rng.choice([1, 3, 200])))
        for state in states.values():
            state.load(rows)
        for step in range(1, 10):
            q_len = 1 if step == 4 else k + 1
            grown = {
                idx: [*row.blocks, *range(900 + 9 * step, 901 + 9 * step + idx % 3)]
                for idx, row in enumerate(rows)
                if step % 2
            }
            tokens_RQ = torch.tensor([[rng.randrange(9) for _ in range(q_len)] for _ in range(num_rows)])
            drafts_RK = torch.tensor([[rng.randrange(9) for _ in range(k)] for _ in range(num_rows)])
            same = torch.rand(num_rows, q_len - 1, generator=torch.Generator().manual_seed(step)) < 0.8
            drafts_RK[:, : q_len - 1] = torch.where(same, tokens_RQ[:, :-1], drafts_RK[:, : q_len - 1])
            accepted_R = torch.zeros(num_rows, dtype=torch.int64) if step == 6 else None
            found = []
            for name, state in states.items():
                here = device[name]
                if grown:
                    state.set_blocks(grown)
                fed = [
                    *state.fed(
                        state.last_SN[:num_rows, -1:], state.context_lens_S[:num_rows] + 0, max_rows=128
                    )
                ]
                state.propose(drafts_RK.to(here), None)
                given = None if accepted_R is None else accepted_R.to(here)
                state.end(tokens_RQ.to(here), given, torch.ones(num_rows, q_len, device=here) * step)
                if name == "cuda":
                    torch.cuda.synchronize()
                results = state.results[step % 2]
                assert not results.tokens.is_cuda
                each = [
                    *(one for part in fed for one in (part.tokens_T, part.positions_T, part.slots_T)),
                    state.buffers.rows_SC,
                    state.table_SB,
                ]
                found.append(
                    [
                        one.cpu().clone()
                        for one in (
                            *each,
                            results.tokens[:num_rows, : 2 + q_len],
                            results.logprobs[:num_rows, :q_len],
                        )
                    ]
                )
            assert all(torch.equal(on_gpu, on_cpu) for on_gpu, on_cpu in zip(*found, strict=True))

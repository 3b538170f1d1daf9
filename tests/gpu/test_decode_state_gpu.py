"""The state of decode steps on a GPU: what the host reads and writes without a transfer is what the CPU's state has."""

import pytest
import torch

from compress.runtime.decode_state import DecodeRow, DecodeState
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import Choice

pytestmark = pytest.mark.gpu
BLOCK_SIZE = 4


def test_steps_see_the_hosts_blocks_and_the_host_their_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    num_rows, num_state_rows, embed_VD = 130, 140, torch.randn(1000, 1500, generator=generator)
    states = [
        DecodeState(max_rows=num_state_rows, max_model_len=64, block_size=BLOCK_SIZE, device=torch.device(device))
        for device in ("cuda", "cpu")
    ]
    for first_len in (1, 5):  # loaded anew after an odd number of steps
        lengths = [first_len + idx % 11 for idx in range(num_rows - 2)]
        blocks = [[20 * idx + column + 1 for column in range(16)] for idx in range(num_rows)]
        rows = [
            DecodeRow(idx, length, blocks[idx][: -(-length // BLOCK_SIZE)], SamplingParams(1, ignore_eos=True))
            for idx, length in enumerate(lengths)
        ]
        for state in states:
            state.load(rows)
        for step in range(1, 12):
            choice = Choice(torch.randint(1000, (num_rows,), generator=generator), torch.randn(num_rows, generator=generator))
            inputs = []
            for state, device in zip(states, ("cuda", "cpu"), strict=True):
                for idx, length in enumerate(lengths):
                    position = length + step - 2
                    if position % BLOCK_SIZE == 0:
                        state.set_next_block(idx, blocks[idx][position // BLOCK_SIZE])
                inputs.append([each.cpu().clone() for each in state.begin(num_rows, embed_VD.to(device))])
                assert choice.logprobs_R is not None
                state.end(Choice(choice.tokens_R.to(device), choice.logprobs_R.to(device)))
            torch.cuda.synchronize()
            assert all(torch.equal(on_gpu, on_cpu) for on_gpu, on_cpu in zip(*inputs, strict=True))
            assert [length + step - 2 for length in lengths] == inputs[1][1][: len(lengths)].tolist()
            tokens_S, logprobs_S = states[0].landed(step)
            assert not tokens_S.is_cuda
            assert torch.equal(tokens_S[:num_rows], choice.tokens_R)
            assert torch.equal(logprobs_S[:num_rows], choice.logprobs_R)

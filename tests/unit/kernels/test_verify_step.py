"""What speculative steps do to their state: kernels in triton's interpreter and torch, against a plain
account of sequences.
"""

import random

import pytest
import torch

from compress.kernels.step import verify as verify_step
from compress.kernels.step.verify import VerifyBuffers, end_verify, place_rows
from tests.support.triton_interpreter import INTERPRETED

POISON = -77


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("sm", [80, 90])
def test_kernels_compile_for_ampere_and_hopper(sm: int, given: bool) -> None:
    pytest.importorskip("triton")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {
        "DRAFTS": 4,
        "GIVEN": given,
        "LOGPROBS": True,
        "LAST": 5,
        "HELD_COLUMNS": 18,
        "RESULT_COLUMNS": 7,
        "STATE_ROWS": 64,
    }
    constants |= {
        "ROWS": 32,
        "PDL": sm >= 90,
        "CONTEXT_STRIDE": 9,
        "TABLE_STRIDE": 18,
        "Q_LEN": 5,
        "BLOCK_SIZE": 64,
        "TOKENS": 128,
    }
    for kernel, types, num_warps in (
        (verify_step._end, ["*i64"] * 6 + ["*fp32", "*i64", "*fp32", "i32"], 1),
        (verify_step._place, ["*i64"] * 4 + ["i32"] * 2, 4),
    ):
        used = {name: value for name, value in constants.items() if name in kernel.arg_names}
        names = [name for name in kernel.arg_names if name not in used]
        signature = dict.fromkeys(kernel.arg_names, "constexpr") | dict(zip(names, types, strict=True))
        options = {"launch_pdl": sm >= 90, "num_warps": num_warps}
        compiled = triton.compile(
            ASTSource(kernel, signature, used), target=GPUTarget("cuda", sm, 32), options=options
        )
        assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == (sm >= 90)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize(("num_rows", "q_len"), [(1, 1), (3, 2), (17, 8), (140, 5)])
def test_tokens_are_where_their_blocks_are(
    num_rows: int, q_len: int, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_kernel and not INTERPRETED:
        pytest.skip("kernels run in the interpreter")
    monkeypatch.setattr(verify_step, "uses_kernels", lambda device: by_kernel)
    rng = random.Random(num_rows)
    block_size = 4
    last = 20
    lengths = [rng.randint(q_len, 24) for _ in range(num_rows)]
    blocks = [[rng.randrange(99) for _ in range(6)] for _ in range(num_rows)]
    rows = torch.tensor([[POISON, length, POISON] for length in lengths])  # strided, as a state's columns are
    held = torch.tensor([[POISON, *own] for own in blocks])
    positions, slots = place_rows(rows[:, 1], held[:, 1:], q_len, block_size=block_size, last_position=last)
    expected = [
        (row, position) for row, length in enumerate(lengths) for position in range(length - q_len, length)
    ]
    assert positions.tolist() == [min(position, last) for _, position in expected]
    assert slots.tolist() == [
        blocks[row][position // block_size] * block_size + position % block_size for row, position in expected
    ]


class Account:
    """A sequence as a list, and what a step makes of it."""

    def __init__(self, rng: random.Random, k: int) -> None:
        self.tokens = [rng.randrange(5) for _ in range(rng.choice([1, 2, k, k + 1, 9]))]
        self.end = len(self.tokens) + rng.choice([0, 1, 2, 30])
        self.held = len(self.tokens) + rng.choice([0, 1, 40])
        self.running = rng.random() < 0.8

    def columns(self, k: int) -> list[int]:
        last = self.tokens[-k - 1 :]
        return [*[0] * (k + 1 - len(last)), *last, len(self.tokens), int(self.running), self.end]

    def count(self, proposed: int) -> int:
        return max(0, min(proposed, self.end - 1 - len(self.tokens), self.held - len(self.tokens)))


@pytest.mark.parametrize(("k", "num_rows"), [(1, 1), (2, 5), (4, 33), (7, 70)])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_rows_advance_by_what_they_keep_and_padding_rows_stay(
    k: int, num_rows: int, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_kernel and not INTERPRETED:
        pytest.skip("kernels run in the interpreter")
    monkeypatch.setattr(verify_step, "uses_kernels", lambda device: by_kernel)
    rng = random.Random(k)
    num_state_rows = num_rows + 3
    rows = [Account(rng, k) for _ in range(num_state_rows)]
    state = VerifyBuffers(
        rows_SC=torch.tensor([[*row.columns(k), 0] for row in rows]),
        held_SX=torch.tensor([[row.held, 5, 6, 7] for row in rows]),
        proposed_S=torch.zeros(num_state_rows, dtype=torch.int64),
        drafts_SK=torch.zeros(num_state_rows, k, dtype=torch.int64),
        host_results_2SY=torch.zeros(2, num_state_rows, k + 3, dtype=torch.int64),
        host_logprobs_2SN=torch.zeros(2, num_state_rows, k + 1),
    )
    held = state.held_SX.clone()
    for step in range(1, 10):
        q_len, given = (1, False) if step % 4 == 0 else (k + 1, step % 3 == 0)
        chosen = torch.tensor([[rng.randrange(5) for _ in range(q_len)] for _ in range(num_rows)])
        wrong = torch.tensor([[rng.random() < 0.3 for _ in range(k)] for _ in range(num_state_rows)])
        state.drafts_SK.copy_(
            torch.tensor([[rng.randrange(5) for _ in range(k)] for _ in range(num_state_rows)])
        )
        if q_len > 1:
            state.drafts_SK[:num_rows] = torch.where(
                wrong[:num_rows], state.drafts_SK[:num_rows], chosen[:, :-1]
            )
        state.proposed_S.copy_(torch.tensor([rng.choice([0, 1, k, k]) for _ in rows]))
        counts = [
            min(row.count(int(meant)), q_len - 1) for row, meant in zip(rows, state.proposed_S, strict=True)
        ]
        kept = []
        for row_idx in range(num_rows):
            same = (state.drafts_SK[row_idx, : q_len - 1] == chosen[row_idx, :-1]).tolist()[: counts[row_idx]]
            kept.append(rng.randint(0, counts[row_idx]) if given else (*same, False).index(False))
        logprobs = torch.randn(num_rows, q_len)
        here = step % 2
        before = state.host_results_2SY[(step + 1) % 2].clone()
        state.host_results_2SY[here] = POISON
        state.host_logprobs_2SN[here] = POISON
        padding = state.rows_SC[[not row.running for row in rows]].clone()
        assert state.counts(num_state_rows).tolist() == [
            row.count(int(meant)) for row, meant in zip(rows, state.proposed_S, strict=True)
        ]

        end_verify(state, chosen, torch.tensor(kept) if given else None, logprobs if step % 5 else None)

        for row_idx, row in enumerate(rows):
            results = state.host_results_2SY[here, row_idx].tolist()
            if row_idx >= num_rows or not row.running:
                assert set(results) == {POISON}
                continue
            came = chosen[row_idx, : kept[row_idx] + 1].tolist()
            row.tokens += came
            assert results[:2] == [counts[row_idx], kept[row_idx]]
            assert results[2 : 2 + q_len] == chosen[row_idx].tolist()
            assert set(results[2 + q_len :]) <= {POISON}
            assert state.rows_SC[row_idx].tolist() == [*row.columns(k), step]
            if step % 5:
                assert torch.equal(state.host_logprobs_2SN[here, row_idx, :q_len], logprobs[row_idx])
        assert torch.equal(state.host_results_2SY[(step + 1) % 2], before)  # the step before is still there
        assert torch.equal(state.rows_SC[[not row.running for row in rows]], padding)
    assert torch.equal(state.held_SX, held)

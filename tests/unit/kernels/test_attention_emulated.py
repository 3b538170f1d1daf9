"""Hopper's decode attention gives the reference's values within rounding, and a row's bits do not depend on
its company: on a CPU, by `cuda_emulator.py`, with one block for each request and KV head."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from compress.kernels.attention_decode import hopper
from compress.kernels.attention_decode.chunks import attention_decode as reference_decode
from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.rows import FP8
from tests.support.cuda_emulator import needs_compiler
from tests.support.emulated_kernels import use_emulated
from tests.support.slow import slow
from tests.unit.kernels.test_experts import randn

LENS = (5, 150, 33, 16)
Q_LEN = 3
CASES = [
    ("BF16", 128, 64, 8, 2, None, torch.bfloat16),
    slow("F16", 64, 16, 7, 1, None, torch.float16),
    ("FP8_TOKEN_HEAD", 64, 16, 4, 2, 40, torch.bfloat16),
    slow("FP8_STATIC", 80, 64, 2, 2, None, torch.float16),
    slow("BF16", 96, 32, 8, 1, 20, torch.bfloat16),
]


def pages(kv_format: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> PagedKV:
    both = randn(*shape, seed=0), randn(*shape, seed=1)
    if kv_format in ("BF16", "F16"):
        return PagedKV(*(each.to(dtype) for each in both))
    static = torch.tensor(0.02)
    scales = [static if kv_format == "FP8_STATIC" else each.abs().amax(-1) / 448 for each in both]
    codes = [
        (each / (scale.unsqueeze(-1) if scale.dim() else scale)).clamp(-448, 448).to(FP8)
        for each, scale in zip(both, scales, strict=True)
    ]
    return PagedKV(*codes, *scales)


@pytest.fixture(autouse=True)
def _emulated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_emulated(monkeypatch, tmp_path_factory.getbasetemp())
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@needs_compiler
@pytest.mark.parametrize(
    ("kv_format", "head_dim", "block_size", "num_heads", "num_kv_heads", "window", "dtype"), CASES
)
def test_values_and_bits(
    kv_format: str,
    head_dim: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    blocks = 160 // block_size + 1
    order = torch.randperm(len(LENS) * blocks, generator=torch.Generator().manual_seed(2)) + 1
    table = order.view(len(LENS), blocks).to(torch.int32)
    lens = torch.tensor(LENS, dtype=torch.int32)
    kv = pages(kv_format, (num_kv_heads, 1 + table.numel(), block_size, head_dim), dtype)
    q = randn(len(LENS), Q_LEN, num_heads, head_dim, seed=3).to(dtype)
    facts = {"window": window, "scale": head_dim**-0.5}

    def attend(queries: Tensor, ends: Tensor, tables: Tensor) -> Tensor:
        q_len = queries.shape[1]
        eights = hopper.row_eights_of(q_len * num_heads // num_kv_heads)
        rows = queries.flatten(0, 1).contiguous()
        out = hopper.attend(rows, kv, tables, ends, q_len=q_len, row_eights=eights, cluster=1, **facts)
        return out.view(queries.shape)

    whole = attend(q, lens, table)
    expected = reference_decode(q.flatten(0, 1), kv, table.long(), lens.long(), q_len=Q_LEN, **facts)
    error = (whole.flatten(0, 1).double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < torch.finfo(dtype).eps
    assert torch.equal(attend(q[:, 1:2], lens - 1, table), whole[:, 1:2])
    assert torch.equal(attend(q[2:], lens[2:], table[2:].contiguous()), whole[2:])

"""Inputs of the tests of linears on a GPU, and what a captured chain of launches has to give."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.rows import QuantizedRows

REPLAYS = 20


def randn(*shape: int, seed: int) -> Tensor:
    """Return normal float32 numbers, drawn on the GPU."""
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def first_rows(x: Any, rows: int) -> Any:
    """Return the first rows of a tensor or of `QuantizedRows`, in memory of their own."""
    if isinstance(x, QuantizedRows):
        zero_T = None if x.zero_T is None else x.zero_T[:rows].contiguous()
        return QuantizedRows(x.values_TK[:rows].contiguous(), x.scale_T[:rows].contiguous(), zero_T)
    return x[:rows].contiguous()


def same_when_replayed(chain: Callable[[], Tensor]) -> None:
    """Assert that launches in a CUDA graph give the bits of launches one by one, every time; `chain` returns
    numbers of 16 bits."""
    eager = chain()
    assert bool(eager.isfinite().all())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(REPLAYS):
        captured.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.view(torch.int16), eager.view(torch.int16))

"""Pairs are sorted by expert, each in its place, and units end where an expert's do: `units.cu` on a CPU."""

from pathlib import Path

import pytest
import torch

from compress.kernels.compilers import nvrtc
from compress.kernels.experts.units import FEW, MANY, SOME, Deal, sort_pairs, source_of
from tests.support.cuda_emulator import needs_compiler
from tests.support.emulated_kernels import use_emulated


@needs_compiler
@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts", "size"),
    [
        (5, 2, 8, 8),
        (64, 8, 128, 8),
        (1, 4, 60, 8),
        (700, 6, 40, 16),
        (512, 4, 40, 8),
        (342, 6, 40, 8),
        (9, 3, 3, 32),
    ],
)
def test_units(
    num_rows: int,
    top_k: int,
    num_experts: int,
    size: int,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_emulated(monkeypatch, tmp_path_factory.getbasetemp())
    generator = torch.Generator().manual_seed(num_rows)
    popularity = torch.rand(num_rows, num_experts, generator=generator)
    popularity[:, num_experts // 2] = -1 if num_experts > top_k else 0  # nobody chooses it
    ids_TK = popularity.topk(top_k, dim=1).indices.to(torch.int32)
    units = sort_pairs(ids_TK, num_experts, size)
    expected: list[tuple[int, list[int]]] = []
    for expert in range(num_experts):
        pairs = (ids_TK.flatten() == expert).nonzero().flatten()
        expected += [(expert, part.tolist()) for part in pairs.split(size) if len(part)]
    found = [
        (int(expert), [pair for pair in pairs.tolist() if pair >= 0])
        for expert, pairs in zip(units.experts, units.pairs, strict=True)
        if expert >= 0
    ]
    assert found == expected
    assert units.experts[len(expected) :].tolist() == [-1] * (len(units.experts) - len(expected))


@pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="no libnvrtc")
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("deal", [FEW, SOME, MANY])
def test_the_kernel_compiles(deal: Deal, sm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert nvrtc.compile_cubin(source_of(128, deal), sm)[:4] == b"\x7fELF"

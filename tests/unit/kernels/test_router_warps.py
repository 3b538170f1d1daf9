"""The CUDA router of decode rows compiles for every routing, and refuses what one warp cannot choose from.
How it chooses is tested with the other routers (`test_experts.py`)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.kernels.compilers import nvrtc
from compress.kernels.problem import KernelDevice
from compress.kernels.router import warps
from compress.kernels.select import refusals, select
from compress.models.experts import Experts

ROUTINGS = (
    (Experts(128, 8, 16, renormalize=True), 2048),
    (Experts(60, 4, 16, scale=2.5), 2048),
    (Experts(32, 4, 16, score="softmax_topk"), 2880),
    (Experts(40, 8, 16), 1536),
    (
        Experts(
            160, 8, 16, score="sigmoid", renormalize=True, num_groups=8, top_groups=4, selection_bias=True
        ),
        5120,
    ),
    (Experts(384, 6, 16, score="sigmoid", selection_bias=True, biased_logits=True), 2560),
    (
        Experts(
            64,
            6,
            16,
            score="sigmoid",
            num_groups=8,
            top_groups=2,
            selection_bias=True,
            zeroes_groups=True,
        ),
        1536,
    ),
    (Experts(16, 2, 16, score="sparsemixer", jitter=0.01), 4096),
    (Experts(160, 6, 16, scale=16.0, num_groups=8, top_groups=3, group_best=1), 5120),
    (Experts(256, 6, 16, score="sqrt_softplus", renormalize=True, selection_bias=True), 4096),
    (Experts(256, 6, 16, score="sqrt_softplus", renormalize=True, table_size=300), 4096),
    (Experts(60, 4, 16, score="sigmoid", table_size=300, router_scale=0.5), 2048),
)


@pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="no libnvrtc")
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("facts", "size"), ROUTINGS, ids=lambda each: str(each)[:20])
@pytest.mark.one_in(4)
def test_the_kernel_compiles(
    facts: Experts, size: int, sm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for dtype in (torch.bfloat16, torch.float16):
        made = warps.variant_of(dtype, size, facts, sm)
        assert nvrtc.compile_cubin(made.source, sm)[:4] == b"\x7fELF"


def test_blocks_of_two_four_and_eight_are_a_cluster_on_hopper() -> None:
    def cluster(num_experts: int, sm: int = 90) -> int:
        return warps.variant_of(torch.bfloat16, 512, Experts(num_experts, 2, 16), sm).cluster

    assert [cluster(each) for each in (8, 17, 40, 60, 64, 112, 128, 129)] == [0, 2, 0, 4, 4, 0, 8, 0]
    assert cluster(128, sm=80) == 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"k": 2044}, "K = 2044 is no multiple of 8 up to 16384"),
        ({"k": 32768}, "K = 32768 is no multiple of 8 up to 16384"),
        ({"experts": 2048}, "chooses by one warp, from at most 1024 experts, not 2048"),
        ({"top_k": 33}, "chooses by one warp, from at most 32 choices, not 33"),
        ({"expert_groups": 64}, "chooses by one warp, from at most 32 groups of experts, not 64"),
        ({"phase": "prefill"}, "for decode rows; a prompt's logits are one product"),
    ],
)
def test_refusals(changed: dict[str, Any], reason: str) -> None:
    facts: dict[str, Any] = {"n": 128, "k": 2048, "experts": 128, "top_k": 8, "phase": "decode"}
    device = KernelDevice("cuda", 90, torch.bfloat16)
    assert select(device.problem("router", **facts)).name == "cuda.warps"
    assert refusals(device.problem("router", **(facts | changed)))["cuda.warps"] == reason

"""The CUDA router of decode rows compiles for every routing, and refuses what one warp cannot choose from.
How it chooses is tested with the other routers (`test_experts.py`)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.kernels.compilers import nvrtc
from compress.kernels.operands.routing import router_weights
from compress.kernels.operands.rows import RawRows
from compress.kernels.problem import KernelDevice
from compress.kernels.router import reference as router_reference
from compress.kernels.router import warps
from compress.kernels.select import refusals, select
from compress.models.experts import Experts
from tests.support.cuda_emulator import needs_compiler
from tests.support.emulated_kernels import use_emulated

ROUTINGS = (
    (Experts(128, 8, 16, renormalize=True), 2048),
    (Experts(60, 4, 16, scale=2.5), 2048),
    (Experts(32, 4, 16, score="softmax_topk"), 2880),
    (
        Experts(
            160, 8, 16, score="sigmoid", renormalize=True, num_groups=8, top_groups=4, selection_bias=True
        ),
        5120,
    ),
)


@pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="no libnvrtc")
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("facts", "size"), ROUTINGS, ids=lambda each: str(each)[:20])
def test_the_kernel_compiles(
    facts: Experts, size: int, sm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for dtype in (torch.bfloat16, torch.float16):
        made = warps.variant_of(dtype, size, facts, normed=dtype == torch.bfloat16)
        assert nvrtc.compile_cubin(made.source, sm)[:4] == b"\x7fELF"


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


@needs_compiler
@pytest.mark.parametrize(
    ("facts", "size", "num_rows"),
    [(Experts(24, 3, 16), 320, 11), (Experts(40, 4, 16, score="sigmoid"), 4400, 3)],
)
def test_raw_rows_are_normed_and_routed_as_rows_that_were_normed_before(
    facts: Experts, size: int, num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_emulated(monkeypatch, tmp_path)
    generator = torch.Generator().manual_seed(size)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x_TD, weight_D = random(num_rows, size).to(torch.bfloat16), (1 + random(size) / 8).to(torch.bfloat16)
    router = router_weights(
        random(facts.num_experts, size), None, None, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    normed_TD = torch.full_like(x_TD, torch.nan)
    ids_TK, weights_TK = warps.route(RawRows(x_TD, weight_D, 1e-5), router, facts, normed_TD=normed_TD)
    inverse_T1 = (x_TD.double().square().mean(1, keepdim=True) + 1e-5).rsqrt()
    expected_TD = (x_TD.double() * inverse_T1).to(torch.bfloat16) * weight_D
    differ_TD = normed_TD != expected_TD  # a sum in float32 may round a number to its neighbour
    assert differ_TD.float().mean() < 0.01
    torch.testing.assert_close(normed_TD, expected_TD, rtol=2.0**-6, atol=0.0)
    reference = router_reference.route(normed_TD, router, facts)
    assert torch.equal(ids_TK, reference[0])
    torch.testing.assert_close(weights_TK, reference[1], rtol=1e-4, atol=1e-5)
    again = warps.route(normed_TD, router, facts)
    assert torch.equal(ids_TK, again[0])
    assert torch.equal(weights_TK, again[1])
    assert not router.arrivals.any()
    alone_TD = torch.empty_like(x_TD[-1:])
    alone = warps.route(RawRows(x_TD[-1:], weight_D, 1e-5), router, facts, normed_TD=alone_TD)
    assert torch.equal(alone_TD, normed_TD[-1:])
    assert torch.equal(alone[0], ids_TK[-1:])
    assert torch.equal(alone[1], weights_TK[-1:])

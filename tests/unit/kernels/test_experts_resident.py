"""Experts in one launch, by blocks that stay, give the weighted sum in float64 within rounding, and a row has
the same bits in any company, whether its pairs are units or are sorted: on a CPU, by `cuda_emulator.py`, one
block after the other. They compile for every format, and refuse what leaves no room for weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.kernels.compilers import nvrtc
from compress.kernels.experts import resident
from compress.kernels.experts.packed import RESIDENT, repack
from compress.kernels.operands.gpu import Gpu
from compress.kernels.operands.matrices import MatrixFormat
from compress.kernels.problem import KernelDevice, Problem
from compress.kernels.select import refusals, select
from compress.quant.scheme import SCHEMES
from tests.support import emulated_kernels
from tests.support.cuda_emulator import needs_compiler
from tests.support.slow import slow
from tests.unit.kernels.test_experts import CPU, in_float64, layer, same_bits

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")
needs_nvrtc = pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="no libnvrtc")
FIVE_BLOCKS = Gpu(90, 5, resident.SHARED_BYTES)
FEW_ITEMS = Gpu(90, 40, resident.SHARED_BYTES)
"""More blocks than one expert's rows give work."""


def add_choices(y_PD: Tensor, weights_TK: Tensor, residual_TD: Tensor | None, out_TD: Tensor) -> None:
    """Add in the order of the choices, each product and sum rounded once."""
    total_TD = torch.zeros_like(out_TD, dtype=torch.float32)
    y_TKD = y_PD.view(*weights_TK.shape, -1)
    for k in range(weights_TK.shape[1]):
        exact_TD = total_TD.double() + y_TKD[:, k].double() * weights_TK[:, k : k + 1].double()
        total_TD = exact_TD.float()
    rounded_TD = total_TD.to(out_TD.dtype)
    out_TD.copy_(rounded_TD if residual_TD is None else residual_TD.float() + rounded_TD.float())


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.getbasetemp()
    emulated_kernels.use_emulated(monkeypatch, folder, FIVE_BLOCKS)
    monkeypatch.setattr(resident, "add_choices", add_choices)


@needs_compiler
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(
    ("name", "dtype", "sizes", "rows", "activation", "bias", "cap"),
    [
        ("FP8_BLOCK", torch.float16, (256, 128, 5, 2), 9, "silu", False, 0.25),
        ("FP8_BLOCK", torch.float16, (256, 128, 5, 2), 9, "silu", False, None),
        ("FP8_BLOCK", torch.bfloat16, (256, 128, 5, 2), 19, "silu", False, None),
        ("FP8_DYNAMIC", torch.bfloat16, (272, 144, 5, 1), 25, "silu", True, None),
        (None, torch.bfloat16, (96, 80, 3, 2), 20, "silu", False, None),
        slow("FP8_BLOCK", torch.bfloat16, (1280, 640, 9, 8), 5, "silu", False, None),
        ("FP8_DYNAMIC", torch.bfloat16, (416, 160, 9, 6), 6, "swiglu_clamped", True, None),
        slow("FP8_DYNAMIC", torch.float16, (2576, 144, 9, 3), 5, "gelu", False, None),
        (None, torch.bfloat16, (304, 208, 12, 3), 9, "gelu_pytorch_tanh", False, None),
        slow(None, torch.float16, (96, 80, 5, 1), 20, "swiglu_clamped", True, None),
        ("FP8_BLOCK", torch.bfloat16, (256, 128, 12, 9), 5, "silu", False, None),
        slow("FP8_DYNAMIC", torch.bfloat16, (272, 144, 18, 16), 5, "silu", True, None),
        slow(None, torch.bfloat16, (304, 208, 12, 10), 5, "gelu", False, None),
        ("FP8_BLOCK", torch.bfloat16, (256, 384, 5, 2), 9, "relu2", False, None),
        ("FP8_DYNAMIC", torch.bfloat16, (416, 160, 9, 6), 6, "relu2", True, None),
        (None, torch.bfloat16, (96, 208, 3, 2), 20, "relu2", True, None),
        (None, torch.bfloat16, (96, 80, 3, 2), 20, "silu", True, 0.3),
        (None, torch.bfloat16, (96, 80, 5, 2), 6, "silu_capped", False, 0.3),
    ],
)
@pytest.mark.slow
def test_experts_in_one_launch(
    name: str | None,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    rows: int,
    activation: str,
    bias: bool,
    cap: float | None,
) -> None:
    hidden, ffn, count, top_k = sizes
    given = layer(
        name,
        dtype,
        hidden=hidden,
        ffn=ffn,
        count=count,
        top_k=top_k,
        rows=rows,
        activation=activation,
        bias=bias,
        cap=cap,
    )
    packed = repack(given.experts, dtype=dtype, device=CPU)

    def decode(start: int, stop: int) -> Tensor:
        x_TD, ids_TK, weights_TK = given.rows(start, stop)
        residual_TD = given.residual_TD[start:stop]
        return resident.decode(
            x_TD, packed, ids_TK, weights_TK, activation=activation, residual_TD=residual_TD, cap=cap
        )

    out = decode(0, rows)
    expected = in_float64(given)
    eps = 1 / 32 if name is not None and SCHEMES[name].activation is not None else torch.finfo(dtype).eps
    assert float((out.double() - expected).norm() / expected.norm()) < 2 * eps
    for start, stop in ((0, 1), (1, 4), (rows - 1, rows), (0, rows)):
        assert same_bits(decode(start, stop), out[start:stop])
    assert packed.state[0] == 0, "the next launch begins with the first range"


@needs_compiler
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("name", ["FP8_DYNAMIC", None])
def test_rows_that_all_choose_one_expert_leave_blocks_without_work(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    given = layer(name, torch.bfloat16, hidden=384, ffn=256, count=2, top_k=1, rows=9)
    packed = repack(given.experts, dtype=torch.bfloat16, device=CPU)
    given.ids_TK.zero_()
    x_TD, ids_TK, weights_TK = given.rows(0, 9)
    many = resident.decode(x_TD, packed, ids_TK, weights_TK, activation="silu")
    monkeypatch.setattr(resident, "gpu_of", lambda device: FEW_ITEMS)
    few = resident.decode(x_TD, packed, ids_TK, weights_TK, activation="silu")
    assert same_bits(few, many)


@needs_nvrtc
@pytest.mark.parametrize(
    ("choices", "tokens", "activation"),
    [(0, 8, "silu"), (0, 16, "silu"), (8, 8, "silu"), (9, 8, "silu"), (0, 8, "relu2"), (6, 8, "relu2")],
)
@pytest.mark.parametrize("format", RESIDENT)
def test_every_format_compiles(format: MatrixFormat, choices: int, tokens: int, activation: str) -> None:
    variant = resident.Variant(format, torch.bfloat16, activation, choices, tokens)
    assert nvrtc.compile_cubin(variant.source, 90)[:4] == b"\x7fELF"


@needs_nvrtc
def test_a_cap_is_a_constant_of_the_kernel() -> None:
    capped = resident.Variant("fp8", torch.bfloat16, "silu", 8, 8, cap=4.5)
    assert ("CAP", 4.5) in capped.source.macros
    assert nvrtc.compile_cubin(capped.source, 90)[:4] == b"\x7fELF"
    assert not any(name == "CAP" for name, _ in replace(capped, cap=None).source.macros)


def test_few_rows_on_hopper_are_served_and_others_refused_with_a_reason() -> None:
    def problem(
        rows: int,
        sm: int,
        sizes: tuple[int, int],
        scheme: str | None,
        top_k: int = 8,
        activation: str = "silu",
    ) -> Problem:
        device = KernelDevice("cuda", sm, torch.bfloat16, decode_rows=rows)
        return device.problem(
            "experts",
            n=sizes[0],
            k=sizes[1],
            scheme=scheme,
            activation=activation,
            experts=128,
            top_k=top_k,
        )

    qwen = (2048, 768)
    for scheme in (None, "FP8_BLOCK", "FP8_DYNAMIC"):
        assert select(problem(128, 90, qwen, scheme)).name == "cuda.resident.silu"
    nemotron = problem(128, 90, (2688, 1856), None, 6, activation="relu2")
    assert select(nemotron).name == "cuda.resident.relu2"
    for posed, reason in (
        (problem(129, 90, qwen, None), "for M up to 128, of which few experts have more than two units"),
        (problem(64, 100, qwen, None), "its copies are sm_90's"),
        (problem(64, 90, qwen, "W4A16_G128"), "for weights of 16 bits and of e4m3"),
        (problem(64, 90, (4096, 14336), None, 2), "rows of 14336 numbers leave no room for weights"),
        (problem(64, 90, qwen, None, 128), "128 choices among 128 experts make more than 1024 units"),
    ):
        assert refusals(posed)["cuda.resident.silu"].startswith(reason)

"""What every kernel owes: the value of its op in float64 within rounding, rows that do not feel one another, reasons for refusals.

Runs on the CPU, and on the GPU where there is one. Fresh memory is filled with NaN, so that an element a kernel does not write is seen.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.kernels import select as select_module
from compress.kernels.select import KERNELS, OPS, Kernel, Problem, anything, candidates, refusals, select
from compress.plugins import PluginSet
from compress.quant.numerics import grouped, min_max_scale, round_to_nearest
from compress.quant.scheme import SCHEMES, QuantizedWeight

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
SHAPES = [(1024, 384), (193, 65), (7, 129), (8192, 384)]


def sm_of(device: str) -> int:
    return 0 if device == "cpu" else 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]


def problem(op: Any, device: str, dtype: str, **facts: Any) -> Problem:
    defaults = {"n": 64, "k": 64, "m_min": 1, "m_max": 8, "row_invariant": True, "scheme": dtype}
    return Problem(op=op, dtype=DTYPES[dtype], device=device, sm=sm_of(device), **{**defaults, **facts})


def usable(op: Any, **facts: Any) -> list[tuple[str, Kernel, str, str]]:
    return [
        (kernel.name, kernel, device, dtype)
        for kernel in candidates(op)
        for device in DEVICES
        for dtype in DTYPES
        if kernel.refusal(problem(op, device, dtype, **facts)) is None
    ]


def each_usable(cases: list[tuple[str, Kernel, str, str]]) -> Any:
    return pytest.mark.parametrize(
        ("kernel", "device", "dtype"), [case[1:] for case in cases], ids=["-".join((c[0], *c[2:])) for c in cases]
    )


LINEARS = {name: case for m_max in (8, 4096) for case in usable("linear", m_max=m_max) for name in [(case[0], case[2], case[3])]}


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def randn(*shape: int, device: str, dtype: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=DTYPES[dtype])


def assert_close(actual: Tensor, expected_f64: Tensor, *, depth: int, dtype: str) -> None:
    """c eps sqrt(K) absmax, plus one rounding of the result."""
    eps = torch.finfo(DTYPES[dtype]).eps
    accumulated = 4 * torch.finfo(torch.float32).eps * depth**0.5 * float(expected_f64.abs().max())
    assert actual.dtype == DTYPES[dtype]
    torch.testing.assert_close(
        actual.to(torch.float64), expected_f64, rtol=4 * eps, atol=accumulated + eps * float(expected_f64.abs().max())
    )


def same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@each_usable(list(LINEARS.values()))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_is_the_product_and_its_rows_are_independent(kernel: Kernel, device: str, dtype: str, n: int, k: int) -> None:
    assert kernel.repack is not None
    w_OI, bias_O = randn(n, k, device=device, dtype=dtype), randn(n, device=device, dtype=dtype, seed=1)
    x_TI = randn(40, k, device=device, dtype=dtype, seed=2)
    packed = kernel.repack([w_OI[:3], w_OI[3:]], dtype=DTYPES[dtype], device=torch.device(device))
    y_TO = kernel.fn(x_TI, packed, bias_O)
    assert_close(y_TO, F.linear(x_TI.double(), w_OI.double(), bias_O.double()), depth=k, dtype=dtype)
    for num_rows in range(1, 41):
        assert same_bits(kernel.fn(x_TI[:num_rows], packed, bias_O), y_TO[:num_rows])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3)).to(device)
    assert same_bits(kernel.fn(x_TI[order], packed, bias_O), y_TO[order])
    loud = x_TI.clone()
    loud[1::2] *= 1e6
    assert same_bits(kernel.fn(loud, packed, bias_O)[::2], y_TO[::2])


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m_max", [8, 4096])
def test_quantized_linear_is_the_product_with_the_dequantized_weight(scheme: Any, device: str, m_max: int) -> None:
    kernel = select(problem("linear", device, "BF16", n=193, k=256, m_max=m_max, scheme=scheme.name))
    assert kernel.repack is not None
    parts: list[QuantizedWeight] = []
    for seed, rows in ((0, 128), (1, 65)):
        w_OI = randn(rows, 256, device="cpu", dtype="BF16", seed=seed)
        parts.append(round_to_nearest(w_OI, scheme, *min_max_scale(grouped(w_OI, scheme), scheme, torch.bfloat16)))
    x_TI = randn(11, 256, device=device, dtype="BF16", seed=2)
    y_TO = kernel.fn(x_TI, kernel.repack(parts, dtype=torch.bfloat16, device=torch.device(device)), None)
    expected = x_TI.double() @ torch.cat([part.dequantize() for part in parts]).to(device).double().t()
    assert_close(y_TO, expected, depth=256, dtype="BF16")


@each_usable(usable("rms_norm"))
@pytest.mark.parametrize("size", [384, 65, 1])
def test_rms_norm(kernel: Kernel, device: str, dtype: str, size: int) -> None:
    x, weight = randn(40, size, device=device, dtype=dtype), randn(size, device=device, dtype=dtype, seed=1)
    x[3] *= 1000
    y = kernel.fn(x, weight, 1e-5)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(y, expected, depth=size, dtype=dtype)
    for num_rows in range(1, 41):
        assert same_bits(kernel.fn(x[:num_rows], weight, 1e-5), y[:num_rows])


@each_usable(usable("rope"))
def test_rope_turns_pairs_of_dimensions(kernel: Kernel, device: str, dtype: str) -> None:
    x_THC = randn(5, 3, 16, device=device, dtype=dtype)
    angles = torch.rand(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device) * 6
    cos, sin = (torch.cat((f, f), -1).to(DTYPES[dtype]) for f in (angles.cos(), angles.sin()))
    half = torch.complex(x_THC[..., :8].double(), x_THC[..., 8:].double()) * torch.complex(
        cos[:, None, :8].double(), sin[:, None, :8].double()
    )
    assert_close(kernel.fn(x_THC, cos, sin), torch.cat((half.real, half.imag), -1), depth=2, dtype=dtype)


@each_usable(usable("act_mul"))
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_act_mul(kernel: Kernel, device: str, dtype: str, name: str) -> None:
    x = randn(9, 2 * 37, device=device, dtype=dtype)
    gate, up = x.double()[:, :37], x.double()[:, 37:]
    normal = 0.5 * (1 + torch.erf(gate / 2**0.5))
    tanh = 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    share = {"silu": 1 / (1 + (-gate).exp()), "gelu": normal, "gelu_pytorch_tanh": tanh}[name]
    assert_close(kernel.fn(x, name), gate * share * up, depth=4, dtype=dtype)


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@each_usable(usable("act_mul"))
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_act_mul_of_a_row_is_the_same_among_few_and_many_rows(kernel: Kernel, device: str, dtype: str, name: str) -> None:
    x = randn(900, 2 * 83, device=device, dtype=dtype)
    y = kernel.fn(x, name)
    for start, end in ((0, 1), (899, 900), (3, 43), (100, 700)):
        assert same_bits(kernel.fn(x[start:end], name), y[start:end])


@pytest.mark.usefixtures("_threads")
@each_usable(usable("rms_norm"))
def test_rms_norm_of_a_row_is_the_same_among_few_and_many_rows(kernel: Kernel, device: str, dtype: str) -> None:
    x, weight = randn(900, 83, device=device, dtype=dtype), randn(83, device=device, dtype=dtype, seed=1)
    y = kernel.fn(x, weight, 1e-5)
    for start, end in ((0, 1), (899, 900), (3, 43), (100, 700)):
        assert same_bits(kernel.fn(x[start:end], weight, 1e-5), y[start:end])


def dense_attention(q_THC: Tensor, k_KLC: Tensor, v_KLC: Tensor, window: int | None, scale: float) -> Tensor:
    """float64; the queries are the last T positions."""
    repeat = q_THC.shape[1] // k_KLC.shape[0]
    k, v = (x.double().repeat_interleave(repeat, dim=0) for x in (k_KLC, v_KLC))
    scores = torch.einsum("thc,hlc->htl", q_THC.double(), k) * scale
    ends = torch.arange(k.shape[1] - q_THC.shape[0], k.shape[1], device=k.device).unsqueeze(1)
    keys = torch.arange(k.shape[1], device=k.device)
    seen = (keys <= ends) & (keys > ends - (window or k.shape[1] + 1))
    return torch.einsum("htl,hlc->thc", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@each_usable(usable("attention_prefill"))
@pytest.mark.parametrize(("num_queries", "length"), [(1, 1), (37, 37), (5, 200), (1, 131)])
@pytest.mark.parametrize("window", [None, 3, 64, 1000])
def test_prefill_attention(kernel: Kernel, device: str, dtype: str, num_queries: int, length: int, window: int | None) -> None:
    q = randn(num_queries, 6, 24, device=device, dtype=dtype)
    k, v = randn(2, length, 24, device=device, dtype=dtype, seed=1), randn(2, length, 24, device=device, dtype=dtype, seed=2)
    out = kernel.fn(q, k, v, window, 0.3)
    assert_close(out, dense_attention(q, k, v, window, 0.3), depth=length, dtype=dtype)
    for shift in (1, 2, 3):  # elsewhere in a ragged batch: other strides, other alignment
        wide = [
            randn(num_queries + 4, 9, 24, device=device, dtype=dtype),
            *(randn(length + 4, 5, 24, device=device, dtype=dtype) for _ in "kv"),
        ]
        moved_q, moved_k, moved_v = (
            base[shift : shift + each.shape[0], 1 : 1 + each.shape[1]].copy_(each)
            for base, each in zip(wide, (q, k.transpose(0, 1), v.transpose(0, 1)), strict=True)
        )
        assert same_bits(kernel.fn(moved_q, moved_k.transpose(0, 1), moved_v.transpose(0, 1), window, 0.3), out)


@each_usable(usable("attention_decode"))
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("window", [None, 5, 150])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 24), (4, 4, 64), (9, 3, 64), (32, 8, 128)])
def test_decode_attention_reads_its_own_blocks_and_its_rows_are_independent(
    kernel: Kernel, device: str, dtype: str, block_size: int, window: int | None, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    lengths = [1, 40, 127, 128, 129, 1500, 16, 17]
    num_blocks = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(4)) + 1).tolist()
    table = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int64, device=device)
    k_cache = randn(num_kv_heads, 1 + sum(num_blocks), block_size, head_dim, device=device, dtype=dtype, seed=1)
    v_cache = randn(num_kv_heads, 1 + sum(num_blocks), block_size, head_dim, device=device, dtype=dtype, seed=2)
    k_cache[:, 0] = v_cache[:, 0] = 0
    for row, count in enumerate(num_blocks):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    q, context_lens = randn(len(lengths), num_heads, head_dim, device=device, dtype=dtype), torch.tensor(lengths, device=device)

    out = kernel.fn(q, k_cache, v_cache, table, context_lens, window, 0.3)
    for row, length in enumerate(lengths):
        k, v = (cache[:, table[row]].flatten(1, 2)[:, :length] for cache in (k_cache, v_cache))
        assert_close(out[row : row + 1], dense_attention(q[row : row + 1], k, v, window, 0.3), depth=length, dtype=dtype)
        narrow = table[row : row + 1, : num_blocks[row]]
        alone = kernel.fn(q[row : row + 1], k_cache, v_cache, narrow, context_lens[row : row + 1], window, 0.3)
        assert same_bits(alone, out[row : row + 1])
    rows = torch.tensor([5, 2, 7, 0, 4], device=device)
    assert same_bits(kernel.fn(q[rows], k_cache, v_cache, table[rows], context_lens[rows], window, 0.3), out[rows])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_kernel_everywhere(op: Any, device: str, dtype: str) -> None:
    for m_max in (1, 8, 128, 129, 4096):
        kernel = select(problem(op, device, dtype, m_max=m_max))
        assert kernel.op == op
        assert (kernel.repack is not None) == (op == "linear")


def test_names_are_unique_and_members_stand_under_their_own_name() -> None:
    assert all(kernel.name == name and kernel.op == op for op in OPS for name, kernel in KERNELS[op].items())


def test_the_highest_rank_that_refuses_nothing_is_taken_and_refusals_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_even(asked: Problem) -> str | None:
        return "N must be even" if asked.n % 2 else None

    members: PluginSet[Kernel] = PluginSet("test kernel", "compress.kernels.rms_norm")
    for name, min_sm, rank, supports in (("plain", 0, 0, anything), ("even", 0, 2, only_even), ("hopper", 90, 3, anything)):
        members.add(name, Kernel("rms_norm", name, min_sm, rank, supports, fn=torch.neg))
    monkeypatch.setitem(select_module.KERNELS, "rms_norm", members)
    even, odd = problem("rms_norm", "cpu", "F32", n=4), problem("rms_norm", "cpu", "F32", n=5)
    assert (select(even).name, select(odd).name) == ("even", "plain")
    assert refusals(odd) == {"hopper": "needs sm_90 or newer and this device is cpu", "even": "N must be even"}


def test_a_problem_nobody_supports_names_every_reason() -> None:
    with pytest.raises(EnvironmentUnfit, match=r"scheme NVFP4, N = 64, K = 64, M = 1\.\.8 on tpu: .*reference\.dequantized\.tile4: "):
        select(Problem("linear", 64, 64, 1, 8, True, "NVFP4", torch.bfloat16, "tpu", 0))

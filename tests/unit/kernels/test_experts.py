"""A router chooses what its definition says, experts give the weighted sum in float64 within rounding, and a
row of either has the same bits in any company. The Triton kernels run in triton's interpreter, those in CUDA
by `cuda_emulator.py`."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.experts import packed as packed_experts
from compress.kernels.experts import reference, slice_tiles, slices
from compress.kernels.experts.launch import operand_of
from compress.kernels.operands import matrices
from compress.kernels.operands.gpu import Gpu
from compress.kernels.operands.routing import ExpertWeights, router_weights
from compress.kernels.operands.rows import input_quant, quantize
from compress.kernels.operands.slices import variant_of
from compress.kernels.problem import PHASES, KernelDevice, Problem
from compress.kernels.router import reference as router_reference
from compress.kernels.select import refusals, select
from compress.models.experts import SILU_CAPPED, Experts
from compress.models.layer_shape import UNGATED
from compress.models.moe import route
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.runtime.deployment import Deployment
from compress.runtime.expert_linears import ExpertLinears
from tests.support.emulated_kernels import use_emulated
from tests.support.random_experts import randn, random_experts
from tests.support.slow import slow
from tests.support.triton_interpreter import INTERPRETED, use_row_independent_products

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")

inside = pytest.mark.skipif(not INTERPRETED, reason="in the child process")
CPU = torch.device("cpu")
IN_SLICES = ("W4A", "INT8", "W8A16", "NVFP4", "MXFP4")
"""Beginnings of the schemes whose decode rows `slices.py` serves."""
FIXED = ("FP8_STATIC", "INT8_STATIC", "INT8_STATIC_ASYM", "NVFP4_W4A4")
"""Schemes whose inputs are rounded by numbers that calibration finds."""
ROUTINGS = (
    Experts(8, 2, 16, renormalize=True),
    Experts(12, 3, 16, scale=2.5),
    Experts(7, 4, 16, score="softmax_topk"),
    Experts(16, 4, 16, score="sigmoid", renormalize=True, num_groups=4, top_groups=2, selection_bias=True),
    Experts(8, 3, 16, renormalize=True, output_scale=True),
    Experts(14, 4, 16, score="sigmoid", selection_bias=True, biased_logits=True),
    Experts(16, 2, 16, score="sparsemixer", jitter=0.01),
    Experts(11, 2, 16, score="sparsemixer", jitter=0.3, scale=2.5),
    Experts(16, 4, 16, scale=16.0, num_groups=4, top_groups=2, group_best=1),
    Experts(20, 4, 16, num_groups=4, top_groups=2, group_best=1),
    Experts(
        16,
        6,
        16,
        score="sigmoid",
        num_groups=4,
        top_groups=2,
        selection_bias=True,
        zeroes_groups=True,
    ),
    Experts(24, 4, 16, score="sigmoid", renormalize=True, num_groups=4, top_groups=2, selection_bias=True),
    Experts(22, 3, 16, score="sqrt_softplus", renormalize=True, scale=1.5, selection_bias=True),
    Experts(22, 3, 16, score="sqrt_softplus", renormalize=True, scale=1.5, table_size=19),
    Experts(9, 2, 16, score="sigmoid", table_size=19),
    Experts(15, 3, 16, score="sigmoid", selection_bias=True, router_scale=0.2),
    Experts(22, 3, 16, renormalize=True, router_scale=-0.5),
)


@dataclass(frozen=True)
class Layer:
    """Experts of a layer and the rows that are given to them."""

    experts: list[ExpertWeights]
    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    residual_TD: Tensor
    activation: str
    cap: float | None = None

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x_TD[start:stop], self.ids_TK[start:stop], self.weights_TK[start:stop]


def layer(
    name: str | None,
    dtype: torch.dtype,
    *,
    hidden: int = 128,
    ffn: int = 128,
    count: int = 5,
    top_k: int = 2,
    rows: int = 7,
    activation: str = "silu",
    bias: bool = False,
    cap: float | None = None,
) -> Layer:
    """Ids leave out the last expert; the first rows all choose the same experts."""
    gated = activation not in UNGATED
    experts = random_experts(name, dtype, hidden=hidden, ffn=ffn, count=count, bias=bias, gated=gated)
    generator = torch.Generator().manual_seed(3)
    ids_TK = torch.rand(rows, count - 1, generator=generator).argsort(1)[:, :top_k].to(torch.int32)
    ids_TK[: rows // 2] = torch.arange(top_k, dtype=torch.int32)
    return Layer(
        experts,
        randn(rows, hidden, seed=1).to(dtype),
        ids_TK,
        torch.rand(rows, top_k, generator=generator),
        randn(rows, hidden, seed=2).to(dtype),
        activation,
        0.3 if cap is None and activation == SILU_CAPPED else cap,
    )


def wide(matrix: Tensor | QuantizedWeight) -> Tensor:
    dense = matrix if isinstance(matrix, Tensor) else matrix.dequantize(torch.float32)
    return dense.double()


def in_float64(given: Layer) -> Tensor:
    """The sum with weights dequantized and rows not rounded."""
    out_TD = given.residual_TD.double()
    for t, k in ((t, k) for t in range(len(given.ids_TK)) for k in range(given.ids_TK.shape[1])):
        expert = given.experts[int(given.ids_TK[t, k])]
        sums = [wide(each) @ given.x_TD[t].double() for each in expert.gate_up]
        biases = expert.gate_up_bias
        sums = [a if b is None else a + b.double() for a, b in zip(sums, biases, strict=True)]
        if given.activation == "swiglu_clamped":
            gate_F, up_F = sums[0].clamp(max=7), sums[1].clamp(-7, 7)
            mid_F = gate_F * torch.sigmoid(1.702 * gate_F) * (up_F + 1)
        elif given.activation == SILU_CAPPED:
            assert given.cap is not None
            assert (sums[0] > given.cap).any(), "a cap without a use"
            gate_F, up_F = sums[0].clamp(max=given.cap), sums[1].clamp(-given.cap, given.cap)
            mid_F = gate_F * torch.sigmoid(gate_F) * up_F
        elif given.cap is not None:
            assert (sums[0] > given.cap).any(), "a cap without a use"
            mid_F = torch.nn.functional.silu(sums[0]).clamp(max=given.cap)
            mid_F = mid_F * sums[1].clamp(-given.cap, given.cap)
        elif given.activation == "relu2":
            mid_F = sums[0].clamp(min=0) ** 2
        else:
            mid_F = reference.gated(torch.cat(sums).view(1, -1), given.activation)[0]
        y_D = wide(expert.down) @ mid_F
        y_D = y_D if expert.down_bias is None else y_D + expert.down_bias.double()
        out_TD[t] += given.weights_TK[t, k].double() * y_D
    return out_TD


def problem(phase: Any, name: str | None, dtype: torch.dtype, given: Layer, **facts: Any) -> Problem:
    sizes = {"n": given.x_TD.shape[1], "k": given.experts[0].down.shape[1], **facts}
    return KernelDevice("cpu", 89 if INTERPRETED else 0, dtype).problem(
        "experts",
        phase=phase,
        scheme=name,
        activation=given.activation,
        experts=len(given.experts),
        top_k=given.ids_TK.shape[1],
        **sizes,
    )


def same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@pytest.fixture(autouse=True)
def _emulated_kernels(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        use_emulated(monkeypatch, tmp_path_factory.getbasetemp())


def check(phase: Any, name: str | None, dtype: torch.dtype, given: Layer) -> None:
    """The kernel that is selected gives the sum; decode rows keep their bits."""
    kernel = select(problem(phase, name, dtype, given))
    in_slices = phase == "decode" and name is not None and name.startswith(IN_SLICES)
    assert kernel.name.startswith(("cuda.slices" if in_slices else "triton") if INTERPRETED else "reference")
    assert kernel.repack_experts is not None
    packed = kernel.repack_experts(given.experts, dtype=dtype, device=CPU)
    num_rows = len(given.x_TD)
    out = kernel.fn(*_call(given, packed, 0, num_rows), residual_TD=given.residual_TD, cap=given.cap)
    assert out.dtype == dtype
    expected = in_float64(given)
    # Rows of e4m3 are rounded twice, by up to 1/16 of a number, and those of e2m1 by up to 1/4; a static
    # scale of int8 is that of the largest number.
    eps = torch.finfo(dtype).eps
    if name is not None and SCHEMES[name].activation is not None:
        eps = 1 / 8 if name.endswith("W4A4") or name.startswith("INT8_STATIC") else 1 / 32
    assert float((out.double() - expected).norm() / expected.norm()) < 2 * eps
    alone = kernel.fn(*_call(given, packed, 0, num_rows), cap=given.cap)
    assert out.shape == alone.shape
    if phase == "decode":
        for start, stop in ((0, 1), (num_rows - 1, num_rows), (1, 4)):
            residual = given.residual_TD[start:stop]
            part = kernel.fn(*_call(given, packed, start, stop), residual_TD=residual, cap=given.cap)
            assert same_bits(part, out[start:stop])


def _call(given: Layer, packed: Any, start: int, stop: int) -> tuple[Any, ...]:
    x_TD, ids_TK, weights_TK = given.rows(start, stop)
    return x_TD, packed, ids_TK, weights_TK


@pytest.mark.skipif(INTERPRETED, reason="in the parent process")
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    "name", [None, "W4A16_G128", "W4A16_G32_ASYM", "FP8_BLOCK", "INT8_DYNAMIC_ASYM", *FIXED, "MXFP8"]
)
def test_reference_experts(phase: Any, name: str | None) -> None:
    check(phase, name, torch.bfloat16, layer(name, torch.bfloat16))


@pytest.mark.skipif(INTERPRETED, reason="in the parent process")
@pytest.mark.parametrize(
    "activation", ["silu", "gelu", "gelu_pytorch_tanh", "swiglu_clamped", SILU_CAPPED, "relu2"]
)
def test_reference_experts_of_odd_sizes_with_biases(activation: str) -> None:
    check(
        "decode",
        None,
        torch.float32,
        layer(None, torch.float32, hidden=37, ffn=19, activation=activation, bias=True),
    )


@pytest.mark.skipif(INTERPRETED, reason="in the parent process")
@pytest.mark.parametrize("name", [None, "W4A16_G128"])
def test_reference_experts_with_a_cap(name: str | None) -> None:
    check("decode", name, torch.bfloat16, layer(name, torch.bfloat16, cap=0.3))


@inside
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["W4A16_G128", None])
def test_triton_experts_with_a_cap(phase: Any, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four-bit weights, decode rows are computed in slices."""
    use_row_independent_products(monkeypatch)
    check(phase, name, torch.float16, layer(name, torch.float16, count=3, rows=5, cap=0.25, bias=True))


@inside
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("W4A16_G128", torch.float16),
        ("W4A16_G32_ASYM", torch.float16),
        ("FP8_BLOCK", torch.float16),
        # float16: triton's interpreter cuts off what bfloat16 has no room for, and the emulator rounds it
        slow("W4A16_CHANNEL", torch.float16),
        slow("W4A16_G64_ASYM", torch.float16),
        slow("FP8_DYNAMIC", torch.bfloat16),
        ("INT8_DYNAMIC", torch.float16),
        ("W8A16", torch.float16),
        ("NVFP4", torch.float16),
        ("FP8_STATIC", torch.float16),
        ("NVFP4_W4A4", torch.float16),
        slow("INT8_STATIC", torch.float16),
        slow("INT8_STATIC_ASYM", torch.float16),
        slow("W4A8_FP8", torch.float16),
        slow("MXFP8", torch.bfloat16),
    ],
)
def test_triton_experts(phase: Any, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    use_row_independent_products(monkeypatch)
    check(phase, name, dtype, layer(name, dtype, count=3, rows=5))


@inside
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_a_token_of_many_choices_has_the_bits_that_it_has_in_company(activation: str) -> None:
    """Alone its pairs are units of their own; those of three tokens are sorted by expert."""
    dtype = torch.float16  # which the interpreter and the emulator round alike
    given = layer(
        "W4A16_G32", dtype, hidden=96, ffn=64, count=24, top_k=19, rows=3, activation=activation, bias=True
    )
    packed = packed_experts.repack(given.experts, dtype=dtype, device=CPU)

    def decode(begin: int, end: int) -> Tensor:
        residual_TD = given.residual_TD[begin:end]
        return slices.decode(
            *_call(given, packed, begin, end), activation=activation, residual_TD=residual_TD
        )

    whole = decode(0, 3)
    for row in range(3):
        assert same_bits(decode(row, row + 1), whole[row : row + 1])


@inside
@pytest.mark.parametrize("rows", [2, 6])
def test_tiles_of_products_in_slices_change_no_bit(rows: int) -> None:
    dtype = torch.bfloat16
    given = layer("W4A16_CHANNEL", dtype, hidden=144, ffn=1296, rows=rows, top_k=3, bias=True)
    packed = packed_experts.repack(given.experts, dtype=dtype, device=torch.device("cpu"))

    def decode(first: slices.Tile, second: slices.Tile) -> Tensor:
        call = _call(given, packed, 0, rows)
        return slices.decode(*call, activation="silu", residual_TD=given.residual_TD, tiles=(first, second))

    one = slices.Tile(1, 1, 1, 1, 1)
    served = decode(one, one)
    for parts, staged in ((1, True), (2, False), (4, True), (8, False)):
        other = slices.Tile(2, 1, 2, 1, parts, staged)
        assert same_bits(decode(one, other), served)
        assert same_bits(decode(other, one), served)


@inside
@pytest.mark.parametrize(
    ("name", "hidden", "ffn"),
    [
        ("W4A16_G32_ASYM", 160, 96),
        slow("W4A16_CHANNEL_ASYM", 80, 176),
        ("FP8_DYNAMIC", 48, 80),
        ("INT8_DYNAMIC", 80, 144),
        ("W8A16", 80, 144),
        ("NVFP4", 48, 80),
        slow("W4A16_G64", 192, 320),
        slow("W4A16_G32", 416, 32),
        slow("W4A16_CHANNEL", 16, 272),
    ],
)
def test_triton_experts_of_sizes_that_are_no_whole_blocks(
    name: str, hidden: int, ffn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_row_independent_products(monkeypatch)
    given = layer(
        name,
        torch.float16,
        hidden=hidden,
        ffn=ffn,
        count=3,
        rows=5,
        activation="swiglu_clamped",
        bias=True,
    )
    for phase in ("decode", "prefill"):
        check(phase, name, torch.float16, given)


@inside
@pytest.mark.parametrize(
    ("name", "hidden", "ffn"),
    [
        ("W4A16_G32_ASYM", 160, 96),
        ("FP8_BLOCK", 128, 256),
        ("INT8_DYNAMIC", 80, 144),
        slow("FP8_DYNAMIC", 48, 80),
        slow("NVFP4", 48, 80),
        slow("W8A16", 80, 144),
    ],
)
def test_triton_experts_without_gates(
    name: str, hidden: int, ffn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_row_independent_products(monkeypatch)
    sizes = {"hidden": hidden, "ffn": ffn, "count": 3, "rows": 5}
    given = layer(name, torch.float16, **sizes, activation="relu2", bias=True)
    for phase in ("decode", "prefill"):
        check(phase, name, torch.float16, given)


@inside
@pytest.mark.parametrize(
    ("activation", "bias", "rows", "top_k"),
    [
        ("silu", False, 6, 1),
        ("swiglu_clamped", True, 5, 3),
        (SILU_CAPPED, False, 5, 2),
        ("relu2", True, 5, 2),
        slow("gelu_pytorch_tanh", False, 19, 2),
    ],
)
def test_triton_experts_of_dense_weights(
    activation: str, bias: bool, rows: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_row_independent_products(monkeypatch)
    given = layer(
        None,
        torch.float16,
        hidden=48,
        ffn=80,
        count=5,
        rows=rows,
        top_k=top_k,
        activation=activation,
        bias=bias,
    )
    for phase in ("decode", "prefill"):
        check(phase, None, torch.float16, given)


@inside
@pytest.mark.parametrize("name", [*FIXED, "INT8_DYNAMIC_ASYM", "W4A8_FP8", "MXFP4_W4A4"])
def test_rows_are_rounded_by_the_scales_of_all_experts(name: str) -> None:
    dtype = torch.float16
    given = layer(name, dtype, count=3)
    packed = packed_experts.repack(given.experts, dtype=dtype, device=CPU)
    gates = [each for expert in given.experts for each in expert.gate_up]
    for weights, quant in (
        (gates, packed.gate_up_input),
        ([expert.down for expert in given.experts], packed.down_input),
    ):
        expected = input_quant(weights, CPU)
        assert expected is not None
        rows = quantize(given.x_TD, expected)
        values, scale_T = operand_of(given.x_TD, quant, packed)
        if scale_T is None:
            assert same_bits(values, rows.dequantize(dtype))
            continue
        assert same_bits(values.view(torch.uint8), rows.values_TK.view(torch.uint8))
        assert same_bits(scale_T, rows.scale_T)


@pytest.mark.skipif(INTERPRETED, reason="in the parent process")
def test_gate_and_down_of_two_schemes_share_kernels_where_they_share_a_format() -> None:
    hopper = KernelDevice("cuda", 90, torch.bfloat16)
    for names, served in (
        ("W4A16_G128+W4A16_G64", "cuda.slices"),
        ("NVFP4+MXFP4", "cuda.slices"),
        ("FP8_DYNAMIC+INT8_DYNAMIC", "reference"),
        ("FP8_DYNAMIC+FP8_STATIC", "reference"),
        ("NVFP4+NVFP4_W4A4", "reference"),
        ("W4A16_G128+W8A16", "reference"),
        ("BF16+FP8_DYNAMIC", "reference"),
    ):
        asked = hopper.problem("experts", n=256, k=256, scheme=names, activation="silu", experts=8, top_k=2)
        assert select(asked).name.startswith(served), names


@pytest.mark.skipif(INTERPRETED, reason="in the parent process")
@pytest.mark.parametrize(("first", "second"), [("FP8_DYNAMIC", "W8A16"), ("W4A16_G128", None)])
def test_gate_and_down_of_two_schemes_are_computed_each_by_its_own(first: str, second: str | None) -> None:
    dtype = torch.float32
    one, other = (layer(name, dtype) for name in (first, second))
    mixed = replace(
        one, experts=[replace(a, down=b.down) for a, b in zip(one.experts, other.experts, strict=True)]
    )
    deployment = Deployment(CPU, dtype, max_batch_size=8, max_step_tokens=512)
    bound = ExpertLinears.bind(
        Experts(5, 2, 128), torch.zeros(5, 128), mixed.experts, deployment, activation="silu"
    )
    for phase in PHASES:
        out = bound.experts(mixed.x_TD, mixed.ids_TK, mixed.weights_TK, phase, residual=mixed.residual_TD)
        expected = in_float64(mixed)
        assert float((out.double() - expected).norm() / expected.norm()) < 1 / 16
        assert bound.kernels[phase].problem.scheme == f"{first}+{second or 'F32'}"


@inside
def test_sizes_that_no_tile_covers_are_refused_with_their_reason() -> None:
    given = layer(None, torch.float16)
    for name, sizes, reason in (
        (None, {"n": 72}, "D = 72 is no multiple of 16"),
        ("W4A16_G128", {"k": 192}, "F = 192 is no multiple of the group size 128"),
        ("FP8_BLOCK", {"n": 2880}, "D = 2880 is no multiple of the group size 128"),
        ("W4A16_G32", {"k": 48}, "F = 48 is no multiple of the group size 32"),
        ("FP8_DYNAMIC", {"k": 40}, "F = 40 is no multiple of 16"),
        ("INT8_DYNAMIC", {"k": 40}, "F = 40 is no multiple of 16"),
        ("MXFP8", {}, "float16 does not hold every power of two that is a scale"),
        ("MXFP4", {}, "float16 does not hold every power of two that is a scale"),
    ):
        why = refusals(problem("decode", name, torch.float16, given, **sizes))
        in_slices = name is not None and name.startswith(IN_SLICES)
        assert why["cuda.slices.silu" if in_slices else "triton.decode.silu"] == reason


def test_four_bit_words_hold_every_code_once() -> None:
    codes = torch.randint(-8, 8, (48, 256), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    words = matrices.w4_words(codes).to(torch.int32)
    nibbles = torch.stack([(words >> (4 * i)) & 15 for i in range(4)], dim=-2) - 8
    assert torch.equal(nibbles.transpose(1, 2).reshape(48, 256).to(torch.int8), codes)


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize("top_k", [1, 8, 10, 16])
@pytest.mark.parametrize("name", ["W4A16_G128", "W4A16_G32_ASYM", "W8A16", "NVFP4"])
def test_the_choices_of_a_row_fit_the_shared_memory_of_a_block(
    name: str, top_k: int, shared_kib: int
) -> None:
    packed = packed_experts.repack(
        layer(name, torch.bfloat16).experts, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    gpu = Gpu(80, 108, shared_kib * 1024)
    for num_rows in (1, 2, 3, 4):
        _, down = slice_tiles.tiles_of(packed, num_rows, top_k, gpu)
        assert slice_tiles.shared_bytes(packed, down, top_k) < gpu.shared_bytes
        assert top_k * down.parts <= slice_tiles.MOST_WARPS


@pytest.mark.parametrize(("shared_kib", "fits"), [(99, False), (163, True), (227, True)])
def test_pairs_of_many_choices_are_units_of_their_own_where_few_rows_fit(shared_kib: int, fits: bool) -> None:
    packed = packed_experts.repack(
        layer("W4A16_G128", torch.bfloat16).experts, dtype=torch.bfloat16, device=CPU
    )
    gpu = Gpu(90, 132, shared_kib * 1024)
    paired = [slice_tiles.is_paired(packed, rows, 22, gpu) for rows in (1, 2, 3)]
    assert paired == [fits, fits, False]
    assert not slice_tiles.is_paired(packed, 1, 33, gpu)
    if fits:
        assert slice_tiles.tiles_of(packed, 1, 22, gpu)[1] == slice_tiles.DOWN_OF_MANY


@pytest.mark.parametrize("name", ["W4A16_G128", "W8A16", "NVFP4"])
def test_fewer_warps_share_a_tile_of_up_alone_the_more_items_there_are_of_pairs(name: str) -> None:
    given = layer(name, torch.bfloat16, ffn=512, activation="relu2")
    packed = packed_experts.repack(given.experts, dtype=torch.bfloat16, device=CPU)
    tiles = [slice_tiles.tiles_of(packed, 1, 2, Gpu(90, sms, 227 * 1024))[0] for sms in (40, 16, 8, 4)]
    expected = (8, 8, 4, 2) if packed.format in matrices.IN_WORDS else (8, 8, 8, 8)
    assert tuple(tile.parts for tile in tiles) == expected
    for tile in tiles:
        variant = variant_of(
            packed.gate_up, tile, dtype=packed.dtype, activation="relu2", out_dtype=packed.dtype
        )
        assert variant.shared_bytes(32) < 99 * 1024


@pytest.mark.parametrize("num_rows", [5, 32, 33, 64])
def test_an_item_of_up_alone_has_the_tiles_of_gate_and_up_where_rows_are_many(num_rows: int) -> None:
    def gate_up(activation: str, ffn: int) -> tuple[slices.Tile, int]:
        given = layer("W4A16_G128", torch.bfloat16, ffn=ffn, activation=activation)
        packed = packed_experts.repack(given.experts, dtype=torch.bfloat16, device=CPU)
        packed = replace(packed, num_experts=32)
        tile, _ = slice_tiles.tiles_of(packed, num_rows, 2, Gpu(90, 4, 227 * 1024))
        variant = variant_of(
            packed.gate_up, tile, dtype=packed.dtype, activation=activation, out_dtype=packed.dtype
        )
        return tile, variant.shared_bytes(1)

    (up, own), (of_both, whole) = gate_up("relu2", 512), gate_up("silu", 256)
    if num_rows > slice_tiles.FEW_ROWS:
        assert (up.output_tiles, own) == (2 * of_both.output_tiles, whole)
    else:
        assert (up.output_tiles, up.blocks) == (2, 5)
        assert own < 2 * whole // of_both.output_tiles


@pytest.mark.parametrize("num_sms", [40, 43, 50, 52, 60, 80, 86, 100])
def test_all_tiles_of_few_pairs_are_under_way_at_once(num_sms: int) -> None:
    """What is left over takes as long as a whole wave."""
    given = layer("W4A16_G128", torch.bfloat16, hidden=256, ffn=512)
    packed = packed_experts.repack(given.experts, dtype=torch.bfloat16, device=CPU)
    gate_up, down = slice_tiles.tiles_of(packed, 1, 8, Gpu(90, num_sms, 227 * 1024))
    assert slice_tiles.GATE_UP_OF_PAIRS[gate_up].at_once * num_sms >= 8 * 512 // 16
    assert slice_tiles.downs_at_once(down, 8) * num_sms >= 256 // 16


@pytest.mark.parametrize(("num_sms", "at_once"), [(15, 2), (16, 1)])
def test_blocks_of_down_are_two_at_once_where_multiprocessors_are_fewer(num_sms: int, at_once: int) -> None:
    given = layer("W4A16_G128", torch.bfloat16, hidden=256, ffn=1280)
    packed = packed_experts.repack(given.experts, dtype=torch.bfloat16, device=CPU)
    _, down = slice_tiles.tiles_of(packed, 1, 8, Gpu(90, num_sms, 227 * 1024))
    assert slice_tiles.downs_at_once(down, 8) == at_once


@pytest.mark.parametrize(
    ("rows", "gate_up", "down"),
    [
        (1, slices.Tile(1, 1, 1, 3, 8), slices.Tile(1, 1, 1, 1, 4)),
        (16, slices.Tile(2, 1, 1, 4, 1), slices.Tile(2, 1, 1, 5, 1)),
        (64, slices.Tile(1, 1, 1, 6, 1), slices.Tile(2, 1, 1, 6, 1)),
    ],
)
def test_tiles_of_qwen3_30b_are_the_fastest_of_its_sweep(
    rows: int, gate_up: slices.Tile, down: slices.Tile
) -> None:
    given = layer("W4A16_G128", torch.bfloat16, hidden=2048, ffn=768)
    few = packed_experts.repack(given.experts, dtype=torch.bfloat16, device=CPU)
    of_128 = replace(few, num_experts=128)
    assert slice_tiles.tiles_of(of_128, rows, 8, Gpu(90, 132, 227 * 1024)) == (gate_up, down)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "rows", "row_tiles"),
    [(7, 5, 11, 1), (7, 5, 12, 2), (128, 8, 128, 1), (128, 8, 129, 2), (8, 2, 64, 2)],
)
def test_units_have_sixteen_rows_where_experts_have_more_than_eight(
    num_experts: int, top_k: int, rows: int, row_tiles: int
) -> None:
    given = layer("W4A16_G128", torch.bfloat16, hidden=2048, ffn=768)
    packed = packed_experts.repack(given.experts, dtype=torch.bfloat16, device=CPU)
    packed = replace(packed, num_experts=num_experts)
    tiles = slice_tiles.tiles_of(packed, rows, top_k, Gpu(90, 132, 227 * 1024))
    assert [tile.row_tiles for tile in tiles] == [row_tiles] * 2


def test_blocks_of_down_are_more_at_once_where_none_is_left_then() -> None:
    """gpt-oss-20b, whose groups of 64 have no staged tiles."""
    given = layer("W4A16_G64", torch.bfloat16, hidden=2880, ffn=2880, count=3)
    packed = packed_experts.repack(given.experts, dtype=torch.bfloat16, device=CPU)
    packed = replace(packed, num_experts=32)
    for rows, at_once in ((16, 5), (24, 6), (32, 6)):
        gate_up, down = slice_tiles.tiles_of(packed, rows, 4, Gpu(90, 132, 227 * 1024))
        assert down == slices.Tile(2, 1, 1, at_once, 1)
        assert not gate_up.staged


def table_of(facts: Experts) -> Tensor | None:
    """Return a table of different experts for each token, where one chooses."""
    if not facts.table_size:
        return None
    return randn(facts.table_size, facts.num_experts, seed=6).argsort(dim=1)[:, : facts.top_k]


@pytest.mark.parametrize("facts", ROUTINGS, ids=lambda facts: f"{facts.score}{facts.num_experts}")
def test_router(facts: Experts) -> None:
    """The kernels that are selected choose as float64 does, and a row's choice depends on the row alone."""
    x_TD = randn(9, 40, seed=1).to(torch.bfloat16)
    count = facts.num_experts
    least = -0.9 if facts.zeroes_groups else 0.0
    selection_bias = torch.linspace(least, least + 0.3, count) if facts.selection_bias else None
    bias = randn(count, seed=4) * 0.1
    output_scale = torch.linspace(0.5, 2, count) if facts.output_scale else None
    table, tokens = table_of(facts), torch.arange(9) * 2
    router = router_weights(
        randn(count, 40, seed=2), bias, selection_bias, output_scale, table, dtype=torch.bfloat16, device=CPU
    )
    logits_TE = (x_TD.double() @ router.weight_ED.double().t() + bias.double()).float() * facts.router_scale
    expected = route(facts, logits_TE, selection_bias, output_scale, None if table is None else table[tokens])
    for phase in ("decode", "prefill"):
        device = KernelDevice("cpu", 90 if INTERPRETED else 0, torch.bfloat16)
        kernel = select(device.problem("router", n=count, k=40, phase=phase, experts=count))
        ids, weights = kernel.fn(x_TD, router, facts, tokens_T=tokens)
        assert ids.dtype == torch.int32
        assert torch.equal(ids, expected.experts_TR.to(torch.int32))
        torch.testing.assert_close(weights, expected.weights_TR, rtol=1e-5, atol=1e-6)
        assert int(router.arrivals.abs().sum()) == 0
        with_shared, their_weights = kernel.fn(x_TD, router, facts, shared=3, tokens_T=tokens)
        assert with_shared.dtype == torch.int32
        assert torch.equal(with_shared[:, :-3], ids)
        if INTERPRETED:  # numpy adds up a longer row, whose other numbers are zero, in another order
            torch.testing.assert_close(their_weights[:, :-3], weights, rtol=1e-6, atol=0)
        else:
            assert same_bits(their_weights[:, :-3].contiguous(), weights)
        assert with_shared[:, -3:].tolist() == [[count, count + 1, count + 2]] * 9
        assert bool((their_weights[:, -3:] == 1).all())
        if phase == "decode":
            some_ids, some_weights = kernel.fn(x_TD[3:5], router, facts, tokens_T=tokens[3:5])
            assert torch.equal(some_ids, ids[3:5])
            assert same_bits(some_weights, weights[3:5])


def test_of_equal_logits_the_lowest_ids_are_chosen() -> None:
    facts = Experts(8, 3, 16, renormalize=True)
    router = router_weights(torch.zeros(8, 16), None, None, dtype=torch.bfloat16, device=CPU)
    ids, weights = select(
        KernelDevice("cpu", 90 if INTERPRETED else 0, torch.bfloat16).problem("router", n=8, k=16)
    ).fn(randn(2, 16, seed=0).to(torch.bfloat16), router, facts)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_groups_limit_the_choice() -> None:
    facts = Experts(6, 2, 16, score="sigmoid", num_groups=3, top_groups=1)
    logits = torch.tensor([[5.0, -9.0, 2.0, 1.0, 3.0, -1.0]])
    routing = route(facts, logits)
    assert routing.experts_TR.tolist() == [[2, 3]]  # the best expert is in a group of a worse sum
    torch.testing.assert_close(routing.weights_TR, logits[:, 2:4].sigmoid())
    by_best = route(replace(facts, group_best=1), logits)
    assert by_best.experts_TR.tolist() == [[0, 1]]  # the best expert brings the worst


def test_logits_decide_where_softmax_keeps_their_order() -> None:
    """Logits decide between scores that underflow to zero; 0.0 and -0.0 are equal."""
    logits = torch.tensor([[200.0, -0.0, 0.0, 1.0]])
    for score in ("softmax", "softmax_topk"):
        assert route(Experts(4, 3, 16, score=score), logits).experts_TR.tolist() == [[0, 3, 1]]


@pytest.mark.skipif(INTERPRETED, reason="in the parent process")
def test_experts_of_a_layer_are_bound_once_and_reported() -> None:
    given = layer(None, torch.bfloat16)
    facts = Experts(5, 2, 128, renormalize=True)
    bound = ExpertLinears.bind(
        facts,
        randn(5, 128, seed=7),
        given.experts,
        Deployment(CPU, torch.bfloat16, max_batch_size=8, max_step_tokens=512),
        activation="silu",
    )
    ids, weights = bound.route(given.x_TD, "decode")
    assert torch.equal(ids, router_reference.route(given.x_TD, bound.router, facts)[0])
    whole = bound(given.x_TD, "decode", residual=given.residual_TD)
    assert same_bits(whole, bound.experts(given.x_TD, ids, weights, "decode", residual=given.residual_TD))
    assert bound.kernels["decode"].packed is bound.kernels["prefill"].packed
    assert [row["op"] for row in bound.report(0)] == ["router", "router", "experts", "experts"]
    assert 0 < bound.bytes_read(2) < bound.bytes_read(3) <= bound.weight_bytes

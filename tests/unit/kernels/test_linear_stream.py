"""Decode linears as far as a CPU shows them: layouts, plans, refusals, and that the kernel compiles."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.kernels.compilers import nvrtc
from compress.kernels.linear import dense16, fp8, w4a16
from compress.kernels.linear.launch import ACTIVATIONS, Rounding, Variant, variant_of
from compress.kernels.linear.shape import FORMATS, Format, Shape
from compress.kernels.linear.stream import PROGRAM
from compress.kernels.linear.stream_plan import MAX_STAGES, Plan, num_parts_of, plan, plans
from compress.kernels.operands.gpu import Gpu
from compress.kernels.problem import Problem
from compress.kernels.select import candidates, select
from compress.quant.numerics import grouped, min_max_scale, round_to_nearest
from compress.quant.scheme import SCHEMES, QuantizedWeight

H200 = Gpu(90, 132, 232448)
A100 = Gpu(80, 108, 166912)
RTX3090 = Gpu(86, 82, 101376)
CPU = torch.device("cpu")
SHAPES = {  # n, k, gated
    "tiny": (64, 128, False),
    "odd": (208, 384, False),
    "qkv 8b": (6144, 4096, False),
    "gate_up 8b": (28672, 4096, True),
    "down 8b": (4096, 14336, False),
    "head": (128256, 4096, False),
    "gate_up 70b": (57344, 8192, True),
    "down 70b": (8192, 28672, False),
    "down 1b": (2048, 8192, False),
}
needs_nvrtc = pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="no libnvrtc")


def w4(name: str, rows: tuple[int, ...], k: int) -> list[QuantizedWeight]:
    weights = [torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16) for n in rows]
    scheme = SCHEMES[name]
    return [
        round_to_nearest(w, scheme, *min_max_scale(grouped(w, scheme), scheme, torch.bfloat16))
        for w in weights
    ]


def stacked(weights: list[QuantizedWeight], what: str) -> Tensor:
    return torch.cat([getattr(weight, what) for weight in weights])


@pytest.mark.parametrize("name", w4a16.MULTIPLIED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "gated"), [((48, 16), False), ((40, 3), False), ((40, 40), True), ((12, 12), True)]
)
def test_unpacking_inverts_packing(name: str, dtype: torch.dtype, rows: tuple[int, ...], gated: bool) -> None:
    weights = w4(name, rows, 384)
    packed = w4a16.repack(weights, dtype=dtype, device=CPU, gated=gated)
    codes, scale, zero = w4a16.unpack(packed)
    assert torch.equal(codes, stacked(weights, "codes_OI"))
    assert scale.shape[1] == packed.subgroups * 3
    assert torch.equal(scale, by_block(stacked(weights, "scale_OG").to(dtype), packed.subgroups))
    assert (zero is None) == packed.symmetric
    if zero is not None:
        assert torch.equal(zero, by_block(stacked(weights, "zero_point_OG"), packed.subgroups))


def by_block(values_OG: Tensor, subgroups: int) -> Tensor:
    """Repeat what a whole row shares in each of three blocks."""
    return values_OG.expand(-1, 3) if values_OG.shape[1] == 1 and subgroups == 1 else values_OG


def test_rows_are_packed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = w4("W4A16_G32_ASYM", (40, 40), 384)
    whole = w4a16.repack(weights, dtype=torch.bfloat16, device=CPU, gated=True)
    monkeypatch.setattr(w4a16, "CODES_AT_ONCE", 2 * 16 * 384)
    in_parts = w4a16.repack(weights, dtype=torch.bfloat16, device=CPU, gated=True)
    assert torch.equal(in_parts.blocks, whole.blocks)


def fragment(w_16_16: Tensor, lane: int) -> Tensor:
    """What the PTX manual (mma.m16n8k16) gives a lane of the A operand: registers 0..3, low and high half."""
    g = lane // 4
    t = lane % 4
    return torch.stack(
        [w_16_16[g + 8 * (j % 2), 2 * t + 8 * (j // 2) : 2 * t + 8 * (j // 2) + 2] for j in range(4)]
    )


def test_a_word_is_the_operand_of_one_thread() -> None:
    weights = w4("W4A16_G128", (32,), 256)
    packed = w4a16.repack(weights, dtype=torch.bfloat16, device=CPU, gated=False)
    codes = weights[0].codes_OI.to(torch.int64) + 8
    for tile, group, step, lane in [(0, 0, 0, 0), (1, 1, 7, 31), (0, 1, 3, 9), (1, 0, 4, 22)]:
        words = packed.blocks[tile, group, : w4a16.CODE_BYTES].view(torch.int32).view(2, 32, 4)
        word = int(words[step // 4, lane, step % 4]) & 0xFFFFFFFF
        held = torch.tensor([[word >> 4 * j & 15, word >> 16 + 4 * j & 15] for j in range(4)])
        at = codes[16 * tile : 16 * tile + 16, 128 * group + 16 * step : 128 * group + 16 * step + 16]
        assert torch.equal(held, fragment(at, lane))


def test_a_gated_tile_is_gate_rows_over_their_up_rows() -> None:
    rows = w4a16.tile_rows(40, gated=True)
    assert rows.shape == (3, 16)
    assert rows[1].tolist() == [*range(8, 16), *range(28, 36)]
    assert rows[2, 4:8].tolist() == [40] * 4, "padding"


def test_fp8_keeps_bytes_and_flattens_scales() -> None:
    codes = torch.randn(24, 128).to(torch.float8_e4m3fn)
    weight = QuantizedWeight(SCHEMES["FP8_STATIC"], codes, torch.rand(24, 1), input_scale=torch.tensor(0.25))
    packed = fp8.repack([weight, weight], dtype=torch.bfloat16, device=CPU, gated=True)
    assert torch.equal(packed.values.view(torch.uint8), torch.cat([codes, codes]).view(torch.uint8))
    assert torch.equal(packed.scale_O, torch.cat([weight.scale_OG, weight.scale_OG]).flatten())


def test_dense_rows_stay_in_their_order() -> None:
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    packed = dense16.repack(parts, dtype=torch.bfloat16, device=CPU, gated=True)
    assert torch.equal(packed, torch.cat(parts).to(torch.bfloat16))
    assert packed.is_contiguous()


def each_plan(gpu: Gpu) -> list[Plan]:
    return [
        found
        for weight_format in FORMATS
        for n, k, gated in SHAPES.values()
        for rows in (1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 128, 512)
        for found in (
            plan(Shape(weight_format, n, k, gated), rows, gpu),
            *plans(Shape(weight_format, n, k, gated), rows, gpu),
        )
    ]


@pytest.mark.parametrize("gpu", [H200, A100, RTX3090], ids=lambda gpu: f"sm_{gpu.sm}")
def test_plans_fit_the_device(gpu: Gpu) -> None:
    for each in each_plan(gpu):
        assert 2 <= each.stages <= MAX_STAGES
        assert each.launch.shared_bytes < gpu.shared_bytes
        assert each.launch.threads == 32 * each.tiles * each.split.parts <= 512
        assert each.launch.grid[0] % each.split.segments == 0
        assert each.split.segments <= 8, "a larger cluster is not portable"
        assert not each.wgmma or each.tiles % 4 == 0, "four warps of one instruction hold tiles of one part"


@pytest.mark.parametrize("gpu", [H200, A100, RTX3090], ids=lambda gpu: f"sm_{gpu.sm}")
@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_order_of_a_sum_does_not_depend_on_the_number_of_rows(gpu: Gpu, weight_format: Format) -> None:
    for n, k, gated in SHAPES.values():
        shape = Shape(weight_format, n, k, gated)
        found = [
            each.split
            for rows in (1, 2, 3, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 300, 512)
            for each in plans(shape, rows, gpu)
        ]
        assert {split.parts * split.segments for split in found} == {num_parts_of(shape, gpu.num_sms)}


@pytest.mark.parametrize(("n", "k", "gated"), SHAPES.values(), ids=SHAPES)
def test_tiles_are_dealt_evenly_and_all(n: int, k: int, gated: bool) -> None:
    shape = Shape("w4", n, k, gated)
    for rows in (1, 16, 64):
        for each in plans(shape, rows, H200):
            blocks = each.launch.grid[0] // each.split.segments
            bounds = [block * shape.num_tiles // blocks for block in range(blocks + 1)]
            dealt = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
            assert sum(dealt) == shape.num_tiles
            assert min(dealt) >= 1
            assert max(dealt) <= each.tiles


def test_every_multiprocessor_has_a_block_of_a_decode_step() -> None:
    for n, k, gated in ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False)):
        assert plan(Shape("w4", n, k, gated), 1, H200).launch.grid == (132, 1)


def test_no_two_blocks_share_a_multiprocessor_on_hopper() -> None:
    reserved, total = 1024, 233472  # bytes that the driver keeps of each block, and all there are
    assert all(2 * (each.launch.shared_bytes + reserved) > total for each in each_plan(H200))


def test_too_little_shared_memory_is_said() -> None:
    with pytest.raises(EnvironmentUnfit, match="4096 bytes of shared memory"):
        plan(Shape("dense16", 4096, 4096, False), 64, replace(H200, shared_bytes=4096))


def problem(**facts: object) -> Problem:
    defaults = {"n": 4096, "k": 4096, "m_min": 1, "m_max": 64, "row_invariant": True, "scheme": "W4A16_G128"}
    return Problem(
        op="linear",
        dtype=torch.bfloat16,
        device="cuda",
        sm=90,
        **{**defaults, **facts},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scheme", ["W4A16_G128", "W4A16_G128_ASYM", "FP8_DYNAMIC", "FP8_STATIC", "BF16"])
def test_decode_linears_of_a_gpu_are_streamed(scheme: str, activation: str | None) -> None:
    name = select(replace(problem(scheme=scheme, activation=activation), sm=80)).name
    assert name.startswith("stream.")
    assert name.endswith(activation or "")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"m_max": 513}, "M up to 512"),
        ({"row_invariant": False}, "for decode rows"),
        ({"k": 320}, "multiple of 128"),
        ({"dtype": torch.float32}, "bfloat16 or float16"),
        ({"activation": "silu"}, "not gated"),
        ({"scheme": "W8A16"}, "for W4A16_G128"),
        ({"sm": 75}, "needs sm_80"),
    ],
)
def test_refusals_say_why(facts: dict[str, object], reason: str) -> None:
    kernel = next(kernel for kernel in candidates("linear") if kernel.name == "stream.w4a16")
    refusal = kernel.refusal(replace(problem(), **facts))  # type: ignore[arg-type]
    assert refusal is not None
    assert reason in refusal


def test_rows_that_fill_no_tile_are_refused_where_rows_stay_as_they_are() -> None:
    kernel = next(kernel for kernel in candidates("linear") if kernel.name == "stream.dense16")
    assert kernel.refusal(problem(scheme="BF16", n=4097)) is not None
    assert kernel.refusal(problem(scheme="BF16", n=4096)) is None


def variant(
    weight_format: Format,
    dtype: torch.dtype,
    activation: str | None,
    float32_output: bool,
    *,
    token_tiles: int,
    resident: bool,
    stages: int,
    wgmma: bool = False,
    normed: bool = False,
    rounding: Rounding = "no",
) -> Variant:
    chosen = replace(
        plan(Shape(weight_format, 256, 1024, activation is not None), 1, H200),
        token_tiles=token_tiles,
        resident=resident,
        stages=stages,
        wgmma=wgmma,
    )
    made = variant_of(
        PROGRAM,
        chosen,
        Shape(weight_format, 256, 1024, activation is not None),
        dtype,
        activation,
        float32_output=float32_output,
        normed=normed,
        rounding=rounding,
    )
    return made


VARIANTS = [
    variant("w4", torch.bfloat16, None, False, token_tiles=1, resident=True, stages=7),
    variant("w4", torch.bfloat16, "silu", False, token_tiles=2, resident=True, stages=5, normed=True),
    variant("dense16", torch.float16, None, True, token_tiles=1, resident=True, stages=5, normed=True),
    variant("fp8", torch.bfloat16, None, False, token_tiles=1, resident=True, stages=7),
    variant("w4_asym", torch.float16, "silu", False, token_tiles=2, resident=True, stages=4),
    variant("fp8", torch.bfloat16, None, True, token_tiles=2, resident=False, stages=3),
    variant("dense16", torch.float16, "gelu_pytorch_tanh", False, token_tiles=8, resident=False, stages=4),
]


@needs_nvrtc
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("made", VARIANTS, ids=lambda made: f"{made.format}-{made.token_tiles}")
@pytest.mark.one_in(4)
def test_the_kernel_compiles(made: Variant, sm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert nvrtc.compile_cubin(made.source, sm)[:4] == b"\x7fELF"


@needs_nvrtc
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rounding", ["by row", "static"])
def test_rows_are_rounded_to_e4m3_on_the_way_in_on_hopper(
    rounding: Rounding, normed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = replace(VARIANTS[3], normed=normed, rounding=rounding)
    assert nvrtc.compile_cubin(made.source, 90)[:4] == b"\x7fELF"


@needs_nvrtc
def test_hopper_instructions_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for weight_format in FORMATS:
        made = variant(
            weight_format, torch.bfloat16, "silu", False, token_tiles=8, wgmma=True, resident=False, stages=3
        )
        assert nvrtc.compile_cubin(made.source, 90)


@needs_nvrtc
def test_machine_code_is_kept_and_a_torn_file_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = nvrtc.Source(
        'extern "C" __global__ void nothing(int* x) { *x = VALUE; }', "nothing", (("VALUE", 3),)
    )
    cubin = nvrtc.compile_cubin(source, 90)
    (kept,) = nvrtc.cache_directory().iterdir()
    content = kept.read_bytes()
    kept.write_bytes(content[:-7])
    assert nvrtc.compile_cubin(source, 90) == cubin
    assert kept.read_bytes() == content
    nvrtc.compile_cubin(replace(source, macros=(("VALUE", 4),)), 90)
    assert len(list(nvrtc.cache_directory().iterdir())) == 2


@needs_nvrtc
def test_what_the_compiler_says_reaches_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(EnvironmentUnfit, match='identifier "missing" is undefined'):
        nvrtc.compile_cubin(nvrtc.Source('extern "C" __global__ void broken() { missing(); }', "broken"), 90)


def test_k_is_split_where_row_tiles_are_few() -> None:
    assert num_parts_of(Shape("w4", 28672, 4096, True), 132) == 1, "enough row tiles for every multiprocessor"
    assert num_parts_of(Shape("w4", 4096, 14336, False), 132) == 8, (
        "two row tiles for each: K is split among warps"
    )
    assert num_parts_of(Shape("w4", 64, 128, False), 132) == 1, "one group cannot be split"

"""Decode linears on Hopper's warpgroup instructions as far as a CPU shows them: plans, refusals, and that the
kernel compiles.
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.kernels.compilers import nvrtc
from compress.kernels.linear import hopper
from compress.kernels.linear.hopper import PROGRAM
from compress.kernels.linear.hopper_plan import (
    MAX_STAGES,
    MAX_TILES,
    PROMPT_TILES,
    Plan,
    plan,
    plans,
    prompt_plan,
)
from compress.kernels.linear.launch import KernelWeight, rounding_of, variant_of
from compress.kernels.linear.shape import Format, Shape
from compress.kernels.operands.gpu import Gpu
from compress.kernels.operands.rows import INT8, ActivationQuant, RawRows
from compress.kernels.problem import Problem
from compress.kernels.select import refusals, select
from tests.support.slow import slow

H200 = Gpu(90, 132, 232448)
H100_PCIE = Gpu(90, 114, 232448)
SHAPES = {  # n, k, gated
    "tiny": (48, 128, False),
    "odd": (1008, 2944, False),
    "odd gated": (96, 384, True),
    "qkv 8b": (6144, 4096, False),
    "o 8b": (4096, 4096, False),
    "gate_up 8b": (28672, 4096, True),
    "down 8b": (4096, 14336, False),
    "head": (128256, 4096, False),
    "gate_up 70b": (57344, 8192, True),
    "down 70b": (8192, 28672, False),
}
WEIGHT_FORMATS: tuple[Format, ...] = (
    "dense16",
    "w4",
    "w4_asym",
    "fp8",
    "fp8_block",
    "w4a8",
    "w4a8_wide",
    "int8",
)
WEIGHTS = [
    *((each, 1) for each in WEIGHT_FORMATS),
    *((each, groups) for each in ("w4", "w4_asym") for groups in (2, 4)),
    *(("fp4", groups) for groups in (4, 8)),
    ("w8", 1),
]
"""Formats, and the scale groups in 128 columns."""
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 257, 512)
PROMPTS = [each for each in WEIGHTS if each[0] in ("w4", "w4_asym", "w4a8", "fp4")]
needs_nvrtc = pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="no libnvrtc")


def each_plan(shape: Shape, gpu: Gpu) -> list[tuple[int, Plan]]:
    return [
        (rows, found) for rows in ROWS for raw in (False, True) for found in plans(shape, rows, gpu, raw=raw)
    ]


@pytest.mark.parametrize("gpu", [H200, H100_PCIE], ids=lambda gpu: f"{gpu.num_sms}")
@pytest.mark.parametrize(("weight_format", "subgroups"), WEIGHTS)
@pytest.mark.parametrize(("n", "k", "gated"), SHAPES.values(), ids=SHAPES)
@pytest.mark.one_in(4)
def test_plans_fit_the_device_and_cover_the_product(
    n: int, k: int, gated: bool, weight_format: Format, subgroups: int, gpu: Gpu
) -> None:
    for rows, each in each_plan(Shape(weight_format, n, k, gated, subgroups), gpu):
        assert 1 <= each.window <= each.stages <= MAX_STAGES
        leaves = weight_format in ("dense16", "int8", "w8")
        assert each.stages > 1 or not leaves, "its products are left under way for a step"
        assert each.launch.shared_bytes < gpu.shared_bytes
        assert each.launch.threads <= 640
        assert 1 <= each.tiles <= MAX_TILES
        assert each.row_groups * each.k_slots <= 4
        assert each.launch.grid[0] % each.segments == 0
        assert each.token_blocks * 8 * each.token_tiles >= rows
        assert each.num_items // each.token_blocks * each.tiles * 16 >= n
        assert each.keep is None or (rows == 1 and each.keep * 8 * 128 * each.row_groups * each.k_slots >= k)
        blocks = each.launch.grid[0] // each.segments
        assert blocks == each.num_items or each.parts == 1, (
            "sums of parts lie where the ring was: one item a block"
        )


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize(("n", "k", "gated"), SHAPES.values(), ids=SHAPES)
def test_the_order_of_a_sum_does_not_depend_on_the_number_of_rows(
    n: int, k: int, gated: bool, weight_format: Format
) -> None:
    assert (
        len(
            {
                (each.tiles, each.k_slots, each.segments)
                for _, each in each_plan(Shape(weight_format, n, k, gated), H200)
            }
        )
        == 1
    )


def test_no_two_blocks_share_a_multiprocessor() -> None:
    reserved, total = 1024, 233472  # bytes that the driver keeps of each block, and all there are
    for weight_format, facts in itertools.product(WEIGHT_FORMATS, SHAPES.values()):
        assert all(
            2 * (each.launch.shared_bytes + reserved) > total
            for _, each in each_plan(Shape(weight_format, *facts), H200)
        )


def test_a_decode_step_is_dealt_to_nearly_every_multiprocessor() -> None:
    for name in ("qkv 8b", "o 8b", "gate_up 8b", "down 8b"):
        assert {plan(Shape(each, *SHAPES[name]), 1, H200).launch.grid[0] for each in WEIGHT_FORMATS} == {
            128
        }, name


def test_a_single_raw_row_is_prepared_inside_the_linear() -> None:
    shape = Shape("w4", *SHAPES["gate_up 8b"])
    assert plan(shape, 1, H200, raw=True).keep is not None
    assert plan(shape, 1, H200).keep is None
    assert plan(shape, 2, H200, raw=True).keep is None
    assert plan(Shape("fp8", 4096, 65536, False), 1, H200, raw=True).keep is None, "too long for registers"
    blocks = Shape("fp8_block", *SHAPES["gate_up 8b"])
    assert plan(blocks, 1, H200, raw=True).keep is None, "rounded in groups"


def test_the_ring_fills_while_a_launch_prepares_rows() -> None:
    def fills(weight_format: Format, name: str, rows: int = 16, *, raw: bool = True) -> bool:
        return plan(Shape(weight_format, *SHAPES[name]), rows, H200, raw=raw).fills

    assert fills("w4a8", "qkv 8b")
    assert fills("w4a8", "gate_up 8b")
    assert fills("w4", "qkv 8b")
    assert not fills("w4", "gate_up 8b"), "its rows would come later"
    assert not fills("w4a8", "gate_up 8b", raw=False), "no launch stands between it and the one before"
    assert not fills("w4a8", "qkv 8b", rows=1), "blocks prepare it themselves"


@pytest.mark.parametrize("gated", [False, True])
def test_the_copy_engine_brings_scales_in_the_order_of_their_rows(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = []
    monkeypatch.setattr(hopper, "tile_map", lambda view, tile, **_: described.append((view, tile)) or b"")
    n, k = 96, 384
    row_O = torch.arange(n, dtype=torch.uint8)
    scale_KO = row_O.float() + torch.tensor([[0.0], [100.0], [200.0]])
    weight = KernelWeight("fp8_block", row_O.unsqueeze(1).repeat(1, k), n, k, scale_KO=scale_KO)
    chosen = plan(Shape("fp8_block", n, k, gated), 1, H200)
    hopper._weight_map(weight, chosen, gated)
    hopper._scale_map(weight, chosen, gated)
    (w, w_tile), (scale, scale_tile) = described
    w_CO, scale_CO = w[..., 0].reshape(3, -1), scale.reshape(3, -1)
    assert torch.equal(scale_CO, w_CO.float() + torch.tensor([[0.0], [100.0], [200.0]]))
    assert math.prod(w_tile[:-1]) == math.prod(scale_tile) == chosen.places * chosen.tiles * 16


@needs_nvrtc
@pytest.mark.parametrize(("weight_format", "subgroups"), WEIGHTS)
@pytest.mark.parametrize("rows", [1, 9, 64, slow(128)])
@pytest.mark.parametrize("name", ["odd", slow("qkv 8b"), "gate_up 8b"])
@pytest.mark.one_in(20)
def test_the_kernel_compiles(
    name: str,
    rows: int,
    weight_format: Format,
    subgroups: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    e4m3 = weight_format in ("fp8", "w4a8", "w4a8_wide")
    quant = ActivationQuant() if e4m3 else ActivationQuant(dtype=INT8) if weight_format == "int8" else None
    raw = RawRows(torch.empty(rows, 8), torch.empty(8), 1e-5, quant)
    shape = Shape(weight_format, *SHAPES[name], subgroups)
    activation = "silu" if SHAPES[name][2] else None
    plans_of = [(plan(shape, rows, H200), None), (plan(shape, rows, H200, raw=True), raw)]
    plans_of += [(plan(shape, rows, H200), None)] if weight_format == "int8" else []
    for idx, (chosen, given) in enumerate(plans_of):
        given = given if chosen.keep else None
        variant = variant_of(
            PROGRAM,
            chosen,
            shape,
            torch.bfloat16,
            activation,
            float32_output=False,
            normed=given is not None,
            rounding=rounding_of(given),
            zero_points=idx == 2,
        )
        assert (("ZEROS", 1) in variant.source.macros) == (idx == 2)
        assert (("SUBGROUPS", subgroups) in variant.source.macros) == (subgroups > 1)
        assert nvrtc.compile_cubin(variant.source, 90)[:4] == b"\x7fELF"


@pytest.mark.parametrize("gpu", [H200, H100_PCIE], ids=lambda gpu: f"{gpu.num_sms}")
@pytest.mark.parametrize(("weight_format", "subgroups"), PROMPTS)
@pytest.mark.parametrize(("n", "k", "gated"), SHAPES.values(), ids=SHAPES)
@pytest.mark.one_in(4)
def test_plans_of_prompts_fit_the_device_and_cover_the_product(
    n: int, k: int, gated: bool, weight_format: Format, subgroups: int, gpu: Gpu
) -> None:
    for rows, tiles in itertools.product((1, 129, 512, 1024), (None, *PROMPT_TILES)):
        each = prompt_plan(Shape(weight_format, n, k, gated, subgroups), rows, gpu, tiles=tiles)
        assert 2 <= each.window <= each.stages <= MAX_STAGES
        assert each.launch.shared_bytes < gpu.shared_bytes
        assert each.launch.grid[0] <= min(gpu.num_sms, each.num_items)
        assert each.token_blocks * 8 * each.token_tiles >= rows
        assert each.num_items // each.token_blocks * each.tiles * 16 >= n
        assert each.parts == 1, "a thread has whole sums"


@needs_nvrtc
@pytest.mark.parametrize("tiles", PROMPT_TILES)
@pytest.mark.parametrize(("weight_format", "subgroups"), PROMPTS)
@pytest.mark.one_in(6)
def test_the_kernel_of_prompts_compiles(
    weight_format: Format, subgroups: int, tiles: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = Shape(weight_format, *SHAPES["gate_up 8b"], subgroups)
    variant = variant_of(
        PROGRAM,
        prompt_plan(shape, 512, H200, tiles=tiles),
        shape,
        torch.bfloat16,
        None,
        float32_output=False,
        normed=False,
        rounding="no",
    )
    assert nvrtc.compile_cubin(variant.source, 90)[:4] == b"\x7fELF"


def problem(**facts: object) -> Problem:
    defaults = {
        "n": 4096,
        "k": 4096,
        "m_min": 1,
        "m_max": 64,
        "row_invariant": True,
        "scheme": "FP8_DYNAMIC",
        "sm": 90,
    }
    return Problem(
        op="linear",
        dtype=torch.bfloat16,
        device="cuda",
        **{**defaults, **facts},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("scheme", "kernel"),
    [
        ("BF16", "dense16"),
        ("FP8_DYNAMIC", "fp8"),
        ("FP8_STATIC", "fp8"),
        ("W4A16_G128", "w4a16"),
        ("W4A16_G128_ASYM", "w4a16"),
        ("W4A8_FP8", "w4a8"),
    ],
)
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_pytorch_tanh"])
def test_hopper_serves_itself_and_other_devices_stream(
    scheme: str, kernel: str, activation: str | None
) -> None:
    suffix = f".{activation}" if activation else ""
    asked = problem(scheme=scheme, activation=activation)
    assert select(asked).name == f"hopper.{kernel}{suffix}"
    assert select(asked).prepares
    for sm in (80, 89, 100) if kernel != "w4a8" else ():
        assert select(replace(asked, sm=sm)).name == f"stream.{kernel}{suffix}"


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_pytorch_tanh"])
def test_hopper_serves_int8_and_other_devices_multiply_in_slices(activation: str | None) -> None:
    suffix = f".{activation}" if activation else ""
    asked = problem(scheme="INT8_DYNAMIC", activation=activation)
    assert select(asked).name == f"hopper.int8{suffix}"
    assert select(asked).prepares
    for other in (replace(asked, sm=80), replace(asked, k=4112), replace(asked, n=4104)):
        assert select(other).name == f"cuda.slices.int8{suffix}"
    longer = problem(scheme="INT8_DYNAMIC", activation=activation, k=1 << 18)
    assert "overflow" in refusals(longer)[f"hopper.int8{suffix}"]
    assert "overflow" in refusals(longer)[f"cuda.slices.int8{suffix}"]


@pytest.mark.parametrize("activation", [None, "silu"])
def test_hopper_serves_blocks_of_e4m3_up_to_its_sizes(activation: str | None) -> None:
    suffix = f".{activation}" if activation else ""
    asked = problem(scheme="FP8_BLOCK", activation=activation)
    assert select(asked).name == f"hopper.fp8_block{suffix}"
    for other in (replace(asked, sm=80), replace(asked, k=65536)):
        assert select(other).name == f"cuda.slices.fp8_block{suffix}"

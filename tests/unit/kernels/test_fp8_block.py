"""FP8 in blocks of 128 x 128: rows in groups, their linear against the sum written out, and the engine
against the decoder.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.layer_run import LayerRun
from compress.calibrate.layer_state import LayerState
from compress.calibrate.stats import InputStats, SecondMoment
from compress.kernels.linear.fp8_block import PackedBlocks, linear, repack
from compress.kernels.linear.tiles import DECODE_ROWS, PREFILL_ROWS
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, quantize
from compress.kernels.problem import Problem
from compress.kernels.select import refusals, select
from compress.methods.quantize.descent import Descent
from compress.methods.quantize.gptq import Gptq
from compress.methods.quantize.passes import RoundPass
from compress.models.linear_groups import LinearGroup
from compress.models.weights import MemorySource, build_decoder, dense
from compress.quant.numerics import nearest_weight, output_error
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.runtime.engine import Engine
from tests.support.tiny_decoder import LLAMA, tiny_arch, tiny_source, tiny_tokens

CPU = torch.device("cpu")
SCHEME = SCHEMES["FP8_BLOCK"]
GROUPS = ActivationQuant(group_size=128)
ARCH = tiny_arch(
    LLAMA,
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    head_dim=32,
    num_hidden_layers=2,
    dtype="float32",
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def coded(out_features: int, in_features: int, seed: int = 0) -> QuantizedWeight:
    spread = torch.exp(2 * randn(-(-out_features // 128), in_features // 128, seed=seed + 100))
    w_OI = randn(out_features, in_features, seed=seed) * SCHEME.by_row(
        spread, out_features
    ).repeat_interleave(128, dim=1)
    return nearest_weight(w_OI, SCHEME, torch.float32)


def packed(*rows: int, in_features: int, dtype: torch.dtype = torch.float32) -> PackedBlocks:
    return repack(
        [coded(each, in_features, seed) for seed, each in enumerate(rows)],
        dtype=dtype,
        device=CPU,
        gated=False,
    )


def same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def test_a_group_of_a_row_is_rounded_as_a_row_of_its_own() -> None:
    x_TK = randn(5, 384) * torch.exp(3 * randn(5, 3, seed=1)).repeat_interleave(128, dim=1)
    x_TK[2, 128:256] = 0
    rows = quantize(x_TK, GROUPS)
    assert rows.scale_T.shape == (5, 3)
    for group, part in enumerate(x_TK.split(128, dim=1)):
        alone = quantize(part, ActivationQuant())
        assert torch.equal(rows.scale_T[:, group], alone.scale_T)
        assert same_bits(rows.values_TK[:, 128 * group : 128 * (group + 1)], alone.values_TK)
        assert torch.equal(
            rows.dequantize(torch.float32)[:, 128 * group : 128 * (group + 1)],
            alone.dequantize(torch.float32),
        )
    x_TK = randn(5, 384)
    x_TK[:, :128] *= 1e-6  # lost beside the others where the whole row has one scale
    assert not quantize(x_TK, ActivationQuant()).dequantize(torch.float32)[:, :128].any()
    kept = quantize(x_TK, GROUPS).dequantize(torch.float32)[:, :128]
    assert torch.allclose(kept, x_TK[:, :128], rtol=2**-4, atol=2**-9 * float(x_TK[:, :128].abs().max()))


def test_rows_without_whole_groups_are_a_programmers_error() -> None:
    with pytest.raises(AssertionError, match="no whole groups"):
        quantize(torch.ones(2, 200), GROUPS)
    with pytest.raises(AssertionError, match="own scales"):
        ActivationQuant(torch.tensor(0.1), group_size=128)


@pytest.mark.parametrize("rows", [DECODE_ROWS, PREFILL_ROWS["cpu"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_linear_is_the_sum_over_groups_and_blocks(rows: int, dtype: torch.dtype) -> None:
    """Element by element in float64, with blocks that begin with each linear's own first row."""
    sizes = (200, 7, 128)
    k = 384
    x = quantize(randn(9, k, seed=5), GROUPS)
    bias_O = randn(sum(sizes), seed=6).to(dtype)
    residual_TO = randn(9, sum(sizes), seed=7).to(dtype)
    weight = packed(*sizes, in_features=k, dtype=dtype)
    expected = torch.zeros(9, sum(sizes), dtype=torch.float64)
    first = 0
    for seed, size in enumerate(sizes):
        part = coded(size, k, seed)
        for row in range(size):
            for group in range(k // 128):
                columns = slice(128 * group, 128 * (group + 1))
                sums = (x.values_TK[:, columns].double() * part.codes_OI[row, columns].double()).sum(dim=1)
                expected[:, first + row] += (
                    sums * x.scale_T[:, group].double() * float(part.scale_OG[row // 128, group])
                )
        first += size
    bound = 4 * torch.finfo(torch.float32).eps * k**0.5 * float(expected.abs().max())
    y_TO = linear(x, weight, None, rows=rows, out_dtype=torch.float32)
    assert (y_TO.double() - expected).abs().max() < bound
    rounded = linear(x, weight, bias_O, rows=rows, residual_TO=residual_TO)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, residual_TO + (y_TO.to(dtype) + bias_O))


@pytest.mark.parametrize("rows", [DECODE_ROWS, PREFILL_ROWS["cpu"]])
@pytest.mark.parametrize(("n", "k"), [(192, 256), (7, 128), (1024, 384)])
def test_a_row_has_the_same_bits_in_any_company(rows: int, n: int, k: int) -> None:
    x = quantize(randn(70, k, seed=5), GROUPS)
    weight = packed(n, in_features=k)
    whole = linear(x, weight, None, rows=rows)
    for part in (*(slice(0, count) for count in (1, 3, 4, 5, 63, 65)), slice(7, 8), slice(13, 70, 2)):
        alone = linear(QuantizedRows(x.values_TK[part], x.scale_T[part]), weight, None, rows=rows)
        assert same_bits(alone, whole[part])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_stays_broken_and_alone(broken: float) -> None:
    x_TI = randn(3, 256)
    x_TI[1, 5] = broken
    y_TO = linear(quantize(x_TI, GROUPS), packed(8, in_features=256), None, rows=4)
    assert not torch.isfinite(y_TO[1]).any()
    assert torch.isfinite(y_TO[::2]).all()


@pytest.mark.parametrize("m_max", [1, 128, 4096])
@pytest.mark.parametrize(("device", "sm"), [("cpu", 0), ("cuda", 80), ("cuda", 90)])
def test_blocks_are_served_everywhere_and_the_other_kernels_say_why_not(
    device: str, sm: int, m_max: int
) -> None:
    problem = Problem("linear", 192, 256, 1, m_max, m_max <= 128, "FP8_BLOCK", torch.bfloat16, device, sm)
    if device == "cuda":
        decodes = "hopper.fp8_block" if sm == 90 else "cuda.slices.fp8_block"
        served = decodes if m_max <= 128 else "triton.fp8_block.prefill"
        assert select(problem).name == served
    else:
        assert select(problem).name == f"reference.fp8_block.tile{4 if m_max <= 128 else 48}"
    reasons = refusals(problem)
    assert all(
        reasons[name] for name in ("hopper.fp8", "stream.fp8", "fp8.cublas", "reference.dequantized.tile4")
    )
    rows = Problem("quantize_rows", 256, 0, 1, m_max, True, "FP8_BLOCK", torch.bfloat16, device, sm)
    assert select(rows).name == ("triton.row" if device == "cuda" else "reference")


@pytest.mark.parametrize("method", ["gptq", "gptq+descent"])
def test_linears_over_one_input_are_rounded_together_as_each_is_alone(method: str) -> None:
    """Though one ends within a block."""
    moment = SecondMoment()
    moment.update(randn(600, 256) @ (randn(256, 256, seed=1) * 256**-0.5 + 0.3 * torch.eye(256)))
    linears = {
        "attn.q": randn(256, 256, seed=2),
        "attn.k": randn(160, 256, seed=3),
        "attn.v": randn(32, 256, seed=4),
    }
    refiner = Descent(sweeps=1) if method == "gptq+descent" else None

    def rounded(names: tuple[str, ...]) -> dict[str, QuantizedWeight]:
        weights = {f"{name}.weight": linears[name].clone() for name in names}
        state = LayerState(
            0,
            [LinearGroup("qkv", "attn_in", names)],
            [],
            weights,
            {"attn_in": InputStats(moment)},
            LayerRun.on_one_rank(torch.zeros(1, 1, 1)),
        )
        RoundPass(Gptq(), SCHEME, torch.bfloat16, refiner).apply(state)
        return state.quantized

    together = rounded(tuple(linears))
    for name, w_OI in linears.items():
        alone = rounded((name,))[name]
        found = together[name]
        assert found.shape == w_OI.shape
        assert found.scale_OG.shape == (-(-len(w_OI) // 128), 2)
        assert (alone.scale_OG != found.scale_OG).float().mean() <= (
            0.25 if refiner else 0
        )  # a tie may turn a whole refit
        assert (alone.codes_OI.float() != found.codes_OI.float()).float().mean() < (1 if refiner else 0.01)
        errors = [
            output_error(w_OI, each.dequantize(torch.float32), moment.mean()) for each in (alone, found)
        ]
        assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_a_shared_scale_is_refitted_to_the_least_error_of_all_its_rows() -> None:
    """Against a fine grid around it, the codes standing still."""
    moment = SecondMoment()
    w_OI = randn(150, 128, seed=2)
    moment.update(randn(400, 128) @ (randn(128, 128, seed=1) * 128**-0.5 + 0.3 * torch.eye(128)))
    given = nearest_weight(w_OI, SCHEME, torch.float32)
    off = QuantizedWeight(SCHEME, given.codes_OI, given.scale_OG * 1.01)
    h_II = moment.mean()
    found = Descent(sweeps=1, damping=0).refine(w_OI, off, InputStats(moment)).weight
    for block in range(2):
        rows = slice(128 * block, min(128 * (block + 1), 150))
        grid = torch.linspace(0.97, 1.01, 401) * off.scale_OG[block, 0]
        part = given.codes_OI[rows].float()
        errors = torch.stack([output_error_of(w_OI[rows], part * scale, h_II) for scale in grid])
        assert float(found.scale_OG[block, 0]) == pytest.approx(float(grid[errors.argmin()]), rel=2e-4)


def output_error_of(w_OI: Tensor, values_OI: Tensor, h_II: Tensor) -> Tensor:
    delta = (values_OI - w_OI).double()
    return ((delta @ h_II.double()) * delta).sum()


class Blocks:
    """A source with every linear of its layers in blocks."""

    def __init__(self, source: MemorySource) -> None:
        self._source = source
        self.arch = source.arch
        self.kv_format = source.kv_format

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        weights = {name: dense(value) for name, value in self._source.layer(layer_idx).items()}
        return {
            name: nearest_weight(value, SCHEME, torch.float32) if value.dim() == 2 else value
            for name, value in weights.items()
        }


def rounded_inputs(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    groups = inputs[0].unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    return (((groups / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale).flatten(-2),)


@torch.no_grad()
def test_the_engine_serves_what_the_decoder_computes_of_inputs_rounded_in_groups() -> None:
    """To float32's precision in most logits: sums in another order move an input over a tie now and then, and
    what follows it with it.
    """
    source = Blocks(tiny_source(ARCH))
    unrounded, decoder = (build_decoder(source, dtype=torch.float32, device=CPU) for _ in range(2))
    linears = [
        module
        for name, module in decoder.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "head"
    ]
    assert len(linears) == 7 * ARCH.num_layers
    for each in linears:
        each.register_forward_pre_hook(rounded_inputs)
    tokens = tiny_tokens(ARCH, 3, 40, seed=5)
    engine = Engine(source, device=CPU)
    served = engine.runner.score(tokens)
    expected = decoder(tokens)
    of_rounding = (unrounded(tokens) - expected).abs()
    difference = (served - expected).abs()
    assert difference.median() < 1e-4 * of_rounding.median()
    assert difference.max() < of_rounding.max()
    rows = [row for row in engine.kernel_report() if row["op"] == "linear" and row["layer"] is not None]
    assert {(row["scheme"], row["phase"], row["kernel"]) for row in rows} == {
        ("FP8_BLOCK", "decode", "reference.fp8_block.tile4"),
        ("FP8_BLOCK", "prefill", "reference.fp8_block.tile48"),
    }

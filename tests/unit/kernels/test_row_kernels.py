"""Row-wise kernels, sampling and dequantization in triton's interpreter: the arithmetic of the GPU kernels,
without one.

The interpreter truncates where bfloat16 rounds: float16 and float32 stand in.
"""

import math

import pytest
import torch

from tests.support.triton_interpreter import INTERPRETED

pytest.importorskip("triton")


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("sm", [80, 90])
def test_kernels_compile_for_ampere_and_hopper(sm: int) -> None:
    """Without a GPU: the assembler comes with triton. A kernel that spilled would be slower than its data."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from compress.kernels.act_mul import fused as act_mul
    from compress.kernels.linear import prefill_w4a16, prefill_widened
    from compress.kernels.quantize_rows import blocks, fused
    from compress.kernels.sample import choose

    pdl = sm >= 90
    drawn = ["*fp64", "*i32", "*i64", "*fp32", "*fp64"]
    row = {"SIZE": 14336, "BLOCK": 16384, "GROUP": 0, "CONVERTS": sm >= 89}
    whole = {**row, "zero_ptr": None, "static_zero_ptr": None}
    up_alone = {
        "SIZE": 21504,
        "GATED": False,
        "gate_stride": 21504,
        "up_stride": 21504,
        "gate_factor": 1.0,
        "CAP": 0.0,
    }

    dense = {"SPARSE": False, "quantile": 0.0}

    def of(activation: str) -> dict[str, str | bool]:
        return {"ACTIVATION": activation, "GATED": activation == "swiglu_clamped"}

    cases = [
        (fused._quantize_rows, ["*bf16", "*u8", "*fp32", "*fp32"], {**whole, "QUANT": 1}, 32),
        (fused._quantize_rows, ["*bf16", "*u8", "*fp32", "*fp32"], {**whole, "QUANT": 3}, 32),
        (fused._quantize_rows, ["*bf16", "*u8", "*fp32", "*fp32"], {**whole, "QUANT": 5}, 32),
        (
            fused._quantize_rows,
            ["*bf16", "*u8", "*fp32", "*fp32", "*i32"],
            {**row, "QUANT": 6, "static_zero_ptr": None},
            32,
        ),
        (fused._quantize_rows, ["*bf16", "*u8", "*fp32", "*fp32", "*i32", "*i32"], {**row, "QUANT": 7}, 32),
        (
            fused._quantize_rows,
            ["*bf16", "*u8", "*fp32", "*fp32"],
            {**whole, "BLOCK": 2048, "SIZE": 2048, "QUANT": 4, "GROUP": 128},
            4,
        ),
        *(
            (
                act_mul._act_mul,
                ["*bf16", "*bf16", "*fp32", "*bf16"],
                {**up_alone, **of(activation), "SPAN": act_mul.SPAN},
                4,
            )
            for activation in ("xielu", "gelu", "swiglu_clamped")
        ),
        *(
            (
                act_mul._act_mul_quantize,
                ["*bf16", "*bf16", "*fp32", "*u8", "*fp32", "*fp32"],
                {**whole, **up_alone, **of(activation), **dense, "BLOCK": 32768, "QUANT": how},
                32,
            )
            for activation in ("xielu", "gelu", "swiglu_clamped")
            for how in (1, 3)
        ),
        *(
            (
                blocks._quantize_blocks,
                ["*bf16", "*u8", "*fp32", *global_scale],
                {"SIZE": 14336, "BLOCK": 16384, "GROUP": group, "LARGEST": largest, **absent},
                32,
            )
            for group, largest, global_scale, absent in (
                (16, 6.0, ["*fp32"], {}),
                (32, 448.0, [], {"global_ptr": None}),
            )
        ),
        *(
            (
                fused._dequantize_rows,
                [codes, "*fp32", *zero, "*bf16"],
                {
                    "SIZE": 14336,
                    "BLOCK": 16384,
                    "GROUP": group,
                    "INTEGERS": bool(zero),
                    "LARGEST": 3e38,
                    **absent,
                },
                32,
            )
            for codes, zero, group, absent in (
                ("*u8", [], 16, {"zero_ptr": None}),
                ("*i8", ["*i32"], 14336, {}),
            )
        ),
        (
            choose._filter,
            ["*fp32", "*i64", "*fp32", *drawn, "*i64"],
            {"VOCAB": 128256, "SPAN": 4096, "SPANS": 126, "BLOCK": 128},
            32,
        ),
        (
            prefill_w4a16._dequantize,
            ["*i32", "*bf16", "*bf16", "i32", "i32", "i32", "i32"],
            {"outer_ptr": None, "GROUPS": 4, "BLOCK_WORDS": 272, "SUBGROUPS": 1, "ZERO": 0.0, "GATED": True},
            4,
        ),
        (
            prefill_w4a16._dequantize,
            ["*i32", "*bf16", "*fp32", "*bf16", "i32", "i32", "i32", "i32"],
            {"GROUPS": 4, "BLOCK_WORDS": 320, "SUBGROUPS": 8, "ZERO": 2.0**-126, "GATED": True},
            4,
        ),
        *(
            (
                prefill_widened._dequantize,
                ["*u8", "*fp32", "*bf16", "i32", "i32"],
                {
                    **{"offset_ptr": None, "outer_ptr": None, "IN": 4096, "COLUMNS": 4096, "GROUP": 0},
                    **{"FORMAT": 5, "INTERLEAVED": interleaved, "EACH": 4},
                },
                4,
            )
            for interleaved in (False, True)
        ),
    ]
    for kernel, types, constants, num_warps in cases:
        constants = {**constants, "PDL": pdl}
        names = [name for name in kernel.arg_names if name not in constants]
        signature = dict.fromkeys(kernel.arg_names, "constexpr") | dict(zip(names, types, strict=True))
        aligned = {
            (idx,): [["tt.divisibility", 16]]
            for idx, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*")
        }
        options = {"num_warps": num_warps, "launch_pdl": pdl}
        compiled = triton.compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget("cuda", sm, 32),
            options=options,
        )
        ptx = compiled.asm["ptx"]
        assert ("griddepcontrol.wait" in ptx) == pdl
        assert "ld.global.v4.b32" in ptx
        assert "st.local" not in ptx


if INTERPRETED:
    from torch import Tensor

    from compress.kernels.act_mul.fused import act_mul
    from compress.kernels.act_mul.reference import act_mul_rows
    from compress.kernels.hyper_mix.fused import COLUMNS, hyper_mix
    from compress.kernels.hyper_mix.reference import hyper_mix as reference_hyper_mix
    from compress.kernels.hyper_spread.fused import hyper_spread
    from compress.kernels.hyper_spread.reference import hyper_spread as reference_hyper_spread
    from compress.kernels.linear import fp4, prefill_w4a16
    from compress.kernels.linear.w4a16 import MULTIPLIED
    from compress.kernels.operands.hyper import HyperWeights
    from compress.kernels.operands.rows import ActivationQuant, Branch, QuantizedRows, RowNorm, quantize
    from compress.kernels.post_norm.fused import post_norm
    from compress.kernels.post_norm.reference import post_norm as reference_post_norm
    from compress.kernels.quantize_rows.blocks import quantize_blocks
    from compress.kernels.quantize_rows.fused import dequantize_rows, quantize_rows
    from compress.kernels.rms_norm.fused import rms_norm
    from compress.kernels.rms_norm.reference import rms_norm_rows
    from compress.kernels.sample.choose import SPAN, Draw, Filter, choose, choose_drawn
    from compress.kernels.soft_cap.fused import soft_cap_
    from compress.kernels.soft_cap.reference import soft_cap_ as reference_soft_cap_
    from compress.models.hyper_connection import HyperConnections
    from compress.quant.scheme import SCHEMES, QuantizedWeight
    from compress.runtime.request import SamplingParams
    from compress.runtime.sampler import gumbel, sample
    from tests.support.random_experts import random_weight
    from tests.unit.kernels.test_experts import wide

    DYNAMIC = ActivationQuant()
    GROUPS = ActivationQuant(group_size=128)
    QUANTS = [
        DYNAMIC,
        ActivationQuant(torch.tensor(0.013)),
        ActivationQuant(dtype=torch.int8),
        ActivationQuant(torch.tensor(0.013), torch.int8),
        ActivationQuant(dtype=torch.int8, symmetric=False),
        ActivationQuant(
            torch.tensor(0.013), torch.int8, symmetric=False, static_zero=torch.tensor(-37, dtype=torch.int32)
        ),
    ]
    ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "swiglu_clamped"]
    SIZES = [1, 65, 384, 1000]

    def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def extreme_rows(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Ordinary, zero, large and vanishing rows."""
        return randn(4, size, dtype=dtype) * torch.tensor([[1.0], [0.0], [200.0], [1e-6]], dtype=dtype)

    def assert_same_rows(actual: Tensor | QuantizedRows, expected: QuantizedRows) -> None:
        assert isinstance(actual, QuantizedRows)
        assert torch.equal(actual.scale_T, expected.scale_T)
        assert torch.equal(actual.values_TK.view(torch.uint8), expected.values_TK.view(torch.uint8))
        assert (actual.zero_T is None) == (expected.zero_T is None)
        if actual.zero_T is not None and expected.zero_T is not None:
            assert torch.equal(actual.zero_T, expected.zero_T)

    def assert_same(actual: Tensor | QuantizedRows | None, expected: Tensor | QuantizedRows) -> None:
        assert actual is not None
        if isinstance(expected, QuantizedRows):
            assert_same_rows(actual, expected)
        else:
            assert isinstance(actual, Tensor)
            assert torch.equal(actual, expected)

    @pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("quant", [each for each in QUANTS if each.dtype == torch.int8])
    def test_a_broken_row_of_integers_shows_in_its_scale(quant: ActivationQuant, broken: float) -> None:
        x = randn(3, 65)
        x[1, 7] = broken
        for rows in (quantize_rows(x, quant), quantize(x, quant)):
            assert isinstance(rows, QuantizedRows)
            assert rows.scale_T.isfinite().tolist() == [True, False, True]

    @pytest.mark.parametrize("quant", QUANTS)
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_rows_are_quantized_by_the_definition(
        quant: ActivationQuant, size: int, dtype: torch.dtype
    ) -> None:
        x = extreme_rows(size, dtype)
        rows = quantize(x, quant)
        assert_same_rows(quantize_rows(x, quant), rows)
        assert_same_numbers(dequantize_rows(rows, dtype), rows.dequantize(dtype))

    def assert_same_numbers(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)

    def test_numbers_that_rounding_took_too_far_are_the_largest() -> None:
        x = torch.full((3, 32), 65504.0, dtype=torch.float16)
        x[1], x[2, 5] = -x[1], float("nan")
        rows = quantize(x, ActivationQuant(group_size=32, scale_type="e8m0"))
        numbers = dequantize_rows(rows, torch.float16)
        assert_same_numbers(numbers, rows.dequantize(torch.float32).clamp(-65504, 65504).to(torch.float16))
        assert dequantize_rows(rows[3:], torch.float16).shape == (0, 32)

    @pytest.mark.parametrize("size", [32, 96, 1024])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize(
        "quant",
        [
            ActivationQuant(group_size=32, num_bits=4, scale_type="e8m0"),
            ActivationQuant(group_size=32, scale_type="e8m0"),
            ActivationQuant(group_size=16, num_bits=4, scale_type="e4m3", global_scale=torch.tensor(64.0)),
            ActivationQuant(group_size=16, num_bits=4, scale_type="e4m3", global_scale=torch.tensor(3000.7)),
        ],
    )
    def test_blocks_are_quantized_by_the_definition(
        quant: ActivationQuant, size: int, dtype: torch.dtype
    ) -> None:
        halves = torch.arange(-64, 64).to(dtype).div(8).repeat(size // 32 + 1)[:size]
        x = torch.cat((extreme_rows(size, dtype), halves.unsqueeze(0), randn(6, size).to(dtype)))
        rows = quantize(x, quant)
        assert_same_rows(quantize_blocks(x, quant), rows)
        for broken in (float("nan"), float("inf")):
            x[1, 7] = broken
            assert quantize_blocks(x, quant).scale_T.isnan().nonzero().tolist() == [[1, 0]]
        assert_same_numbers(dequantize_rows(rows, torch.float16), rows.dequantize(torch.float16))

    @pytest.mark.parametrize("size", [128, 384, 1024])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_groups_of_columns_are_quantized_by_the_definition(size: int, dtype: torch.dtype) -> None:
        x = extreme_rows(size, dtype)
        x[0, 5] = float("nan")
        rows = quantize_rows(x, GROUPS)
        expected = quantize(x, GROUPS)
        assert isinstance(rows, QuantizedRows)
        assert rows.scale_T.shape == (4, size // 128)
        assert rows.scale_T[0, 0].isnan()
        assert torch.equal(rows.scale_T[1:], expected.scale_T[1:])
        assert torch.equal(rows.scale_T[0, 1:], expected.scale_T[0, 1:])
        assert torch.equal(rows.values_TK[1:].view(torch.uint8), expected.values_TK[1:].view(torch.uint8))

    def test_halves_between_integers_go_to_the_even_one() -> None:
        whole = torch.arange(-127, 128, dtype=torch.float32)
        between = [torch.nextafter(whole[1:] - 0.5, bound) for bound in (whole[1:], whole[:-1])]
        x = torch.cat((whole, whole[1:] - 0.5, *between)).unsqueeze(0)
        rows = quantize_rows(x, ActivationQuant(dtype=torch.int8))
        assert isinstance(rows, QuantizedRows)
        assert rows.scale_T.tolist() == [1.0]
        assert rows.values_TK.tolist() == [
            [round(each) for each in x[0].tolist()]
        ]  # Python rounds halves to even too

    def test_every_e4m3_number_and_tie_is_rounded_as_torch_rounds_it() -> None:
        codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
        middles = (codes[1:] + codes[:-1]) / 2
        near = [torch.nextafter(middles, codes[1:]), torch.nextafter(middles, codes[:-1])]
        x = torch.cat((codes, middles, *near, torch.tensor([1e30, 1e-30, 447.9, 464.0, 500.0])))
        one = ActivationQuant(torch.tensor(1.0))
        for signed in (x, -x):
            assert_same_rows(quantize_rows(signed.unsqueeze(0), one), quantize(signed.unsqueeze(0), one))

    @pytest.mark.parametrize("size", SIZES)
    def test_rms_norm_is_the_reference(size: int) -> None:
        x = extreme_rows(size)
        weight = randn(size, seed=1)
        torch.testing.assert_close(
            rms_norm(x, weight, 1e-5), rms_norm_rows(x, weight, 1e-5), rtol=4e-7, atol=1e-12
        )

    def test_rms_norm_takes_a_weight_for_each_head() -> None:
        x = randn(3, 5, 24)
        weight = randn(5, 24, seed=1)
        torch.testing.assert_close(
            rms_norm(x, weight, 1e-5), rms_norm_rows(x, weight, 1e-5), rtol=4e-7, atol=1e-12
        )

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize("centered", [False, True])
    @pytest.mark.parametrize("biased", [False, True])
    def test_norms_with_float32_weights_are_the_reference(
        size: int, dtype: torch.dtype, centered: bool, biased: bool
    ) -> None:
        x = extreme_rows(size, dtype)
        weight = 1 + randn(size, seed=1)
        bias = randn(size, seed=2) if biased else None
        actual = rms_norm(x, weight, 1e-5, centered=centered, bias=bias)
        expected = rms_norm_rows(x, weight, 1e-5, centered=centered, bias=bias)
        assert isinstance(actual, Tensor)
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(
            actual,
            expected,
            rtol=2**-10 if dtype == torch.float16 else 1e-6,
            atol=1e-6 if centered or biased else 1e-12,
        )

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("wide", [False, True], ids=["weights like rows", "float32 weights"])
    @pytest.mark.parametrize("centered", [False, True])
    @pytest.mark.parametrize("quant", [None, *QUANTS])
    def test_a_post_norm_is_the_norm_the_sum_and_the_norm_that_follows(
        size: int, wide: bool, centered: bool, quant: ActivationQuant | None
    ) -> None:
        """Bit for bit, by the kernel of single norms."""
        y = extreme_rows(size, torch.float16)
        x = extreme_rows(size, torch.float16).flip(1)
        weights = [(1 + randn(size, seed=seed)).to(torch.float32 if wide else x.dtype) for seed in (1, 2)]
        norm, following = (
            RowNorm(weight, eps, centered) for weight, eps in zip(weights, (1e-5, 1e-3), strict=True)
        )
        total, rows, _ = post_norm(y, x, norm, following, quant)
        normed = rms_norm(y, norm.weight, norm.eps, centered=centered)
        assert isinstance(normed, Tensor)
        assert torch.equal(total, x + normed)
        expected = rms_norm(total, following.weight, following.eps, quant, centered=centered)
        assert_same(rows, expected)
        scaled, scaled_rows, _ = post_norm(y, x, norm, following, None, scale=0.3125)
        assert torch.equal(scaled, total * 0.3125)
        assert torch.equal(scaled_rows, rms_norm(scaled, following.weight, following.eps, centered=centered))
        alone, no_rows, _ = post_norm(y[1:2], x[1:2], norm)
        assert no_rows is None
        assert torch.equal(alone, total[1:2])
        reference, _, _ = reference_post_norm(y, x, norm, following, quant)
        torch.testing.assert_close(total, reference, rtol=2**-9, atol=2**-14)

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("centered", [False, True])
    @pytest.mark.parametrize("quant", [None, *QUANTS])
    def test_branches_and_other_readers_of_a_post_norm_are_norms_of_their_own(
        size: int, centered: bool, quant: ActivationQuant | None
    ) -> None:
        """Bit for bit, by the kernel of single norms."""
        a = extreme_rows(size, torch.float16)
        x = a.flip(1)
        b = randn(*a.shape, seed=9).to(a.dtype)
        kinds = (torch.float16, torch.float32, torch.float16, torch.float16, torch.float32, torch.float16)
        of_a, of_b, norm, following, second, third = (
            RowNorm((1 + randn(size, seed=seed)).to(kind), 10.0**-seed, centered)
            for seed, kind in enumerate(kinds, start=1)
        )

        def normed(values: Tensor, by: RowNorm) -> Tensor:
            rows = rms_norm(values, by.weight, by.eps, centered=centered)
            assert isinstance(rows, Tensor)
            return rows

        total, rows, others = post_norm(
            (Branch(a, of_a), Branch(b, of_b)), x, norm, following, quant, also=(second, third), scale=0.3125
        )
        assert torch.equal(total, (x + normed(normed(a, of_a) + normed(b, of_b), norm)) * 0.3125)
        assert torch.equal(others[0], normed(total, second))
        assert torch.equal(others[1], normed(total, third))
        expected = rms_norm(total, following.weight, following.eps, quant, centered=centered)
        assert_same(rows, expected)

    STREAMS = [
        HyperConnections(4, 1e-6, post_eps=1e-6),
        HyperConnections(4, 1e-6, sinkhorn_iterations=20),
        HyperConnections(3, 1e-4, sinkhorn_iterations=2, post_factor=1.3),
    ]

    def hyper_weights(facts: HyperConnections, size: int, *, of_head: bool) -> HyperWeights:
        shapes = facts.shapes(size, of_head=of_head)
        weight = randn(*shapes["weight"], seed=21) * (facts.num_streams * size) ** -0.5
        bias, gains = randn(*shapes["bias"], seed=22), 1 + 0.3 * randn(*shapes["gains"], seed=23)
        return HyperWeights(facts, 1e-5, weight, bias, gains)

    @pytest.mark.parametrize("facts", STREAMS)
    @pytest.mark.parametrize("size", [1, 65, COLUMNS // 2])
    @pytest.mark.parametrize("of_head", [False, True])
    def test_a_mixture_of_streams_and_its_factors_are_the_reference(
        facts: HyperConnections, size: int, of_head: bool
    ) -> None:
        streams = extreme_rows(facts.num_streams * size)
        hyper = hyper_weights(facts, size, of_head=of_head)
        norm = RowNorm(1 + randn(size, seed=24), 1e-3)
        rows, factors = hyper_mix(streams, hyper, norm)
        expected, expected_factors = reference_hyper_mix(streams, hyper, norm)
        assert isinstance(rows, Tensor)
        assert isinstance(expected, Tensor)
        atol = 32 * 2.0**-23 * (facts.num_streams * size) ** 0.5
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=atol)
        assert (factors is None) == of_head
        if factors is not None and expected_factors is not None:
            torch.testing.assert_close(factors, expected_factors, rtol=1e-5, atol=atol)
        for row in range(len(streams)):
            alone, own = hyper_mix(streams[row : row + 1], hyper, norm)
            assert torch.equal(alone, rows[row : row + 1])
            assert own is None or factors is None or torch.equal(own, factors[row : row + 1])

    @pytest.mark.parametrize("quant", QUANTS)
    def test_a_mixture_of_streams_leaves_quantized_as_its_rows_would(quant: ActivationQuant) -> None:
        streams = extreme_rows(4 * 65)
        hyper = hyper_weights(STREAMS[1], 65, of_head=False)
        norm = RowNorm(1 + randn(65, seed=24), 1e-3)
        rows, factors = hyper_mix(streams, hyper, norm)
        assert isinstance(rows, Tensor)
        quantized, same = hyper_mix(streams, hyper, norm, quant)
        assert_same(quantized, quantize_rows(rows, quant))
        assert factors is not None
        assert torch.equal(same, factors)

    @pytest.mark.parametrize("num_streams", [2, 3, 4])
    @pytest.mark.parametrize("mixed", [False, True])
    @pytest.mark.parametrize("size", [1, 65, 1030])
    def test_streams_after_a_half_layer_have_the_bits_of_the_reference(
        num_streams: int, mixed: bool, size: int
    ) -> None:
        streams, y = extreme_rows(num_streams * size), extreme_rows(size).flip(0)
        num_factors = num_streams * (1 + num_streams * mixed)
        factors = randn(4, num_factors, seed=25)
        after = hyper_spread(y, streams, factors)
        assert torch.equal(after, reference_hyper_spread(y, streams, factors))
        assert torch.equal(hyper_spread(y[:0], streams[:0], factors[:0]), streams[:0])

    @pytest.mark.parametrize("shape", [(1, 1), (3, 1030), (0, 7)])
    def test_capped_numbers_are_the_reference(shape: tuple[int, int]) -> None:
        x = randn(*shape) * 40
        if x.numel() > 3:
            x[0, :3] = torch.tensor([float("inf"), float("-inf"), 1e30])
        torch.testing.assert_close(
            soft_cap_(x.clone(), 30.0), reference_soft_cap_(x.clone(), 30.0), rtol=0, atol=8 * 30 * 2**-24
        )

    @pytest.mark.parametrize("num_rows", [1, 3])
    @pytest.mark.parametrize("start", [0, 16, 5])
    def test_norms_of_columns_are_those_of_the_rows_that_they_make(num_rows: int, start: int) -> None:
        x = randn(num_rows, 160)[:, start : start + 96]
        weight = randn(96, seed=1)
        assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.contiguous(), weight, 1e-6))

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("size", [*SIZES, 1030])
    def test_act_mul_is_the_reference(activation: str, size: int) -> None:
        gate_up = torch.cat((randn(3, size) * 4, randn(3, size, seed=1)), dim=1)
        torch.testing.assert_close(
            act_mul(gate_up, activation), act_mul_rows(gate_up, activation), rtol=2e-6, atol=2e-6
        )

    @pytest.mark.parametrize("cap", [0.75, 2.0])
    def test_act_mul_with_a_cap_is_the_reference(cap: float) -> None:
        gate_up = torch.cat((randn(3, 83) * 4, randn(3, 83, seed=1) * 2), dim=1)
        found = act_mul(gate_up, "silu", cap=cap)
        assert not torch.equal(found, act_mul(gate_up, "silu"))
        torch.testing.assert_close(found, act_mul_rows(gate_up, "silu", cap=cap), rtol=2e-6, atol=2e-6)
        assert found.abs().max() == cap * cap, "both factors reach the cap somewhere"

    @pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
    @pytest.mark.parametrize("size", [*SIZES, 1030])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_gelu_without_a_gate_is_its_definition_in_float64(
        dtype: torch.dtype, size: int, activation: str
    ) -> None:
        """The share of x that is left is within some roundings of float32."""
        x = randn(4, size, dtype=dtype) * 4
        exact = x.double()
        approximate = "none" if activation == "gelu" else "tanh"
        expected = torch.nn.functional.gelu(exact, approximate=approximate)
        atol = 8 * torch.finfo(torch.float32).eps * exact.abs() + 2**-24
        atol = atol + torch.finfo(dtype).eps * expected.abs()
        for columns in (x, torch.cat((x, x, x), dim=1)[:, size:-size]):
            for fn in (act_mul, act_mul_rows):
                actual = fn(columns, activation, gated=False)
                assert isinstance(actual, Tensor)
                assert actual.is_contiguous()
                assert ((actual.double() - expected).abs() <= atol).all()

    @pytest.mark.parametrize("quant", QUANTS)
    @pytest.mark.parametrize("size", [65, 384])
    def test_gelu_without_a_gate_is_rounded_before_it_is_quantized(quant: ActivationQuant, size: int) -> None:
        x = extreme_rows(size, torch.float16)
        product = act_mul(x, "gelu", gated=False)
        assert isinstance(product, Tensor)
        assert_same_rows(act_mul(x, "gelu", quant, gated=False), quantize(product, quant))

    # a_p, a_n, b and eps: of a layer that is not trained, of others, and without a part where x is negative.
    XIELU_NUMBERS = [
        (0.8, 0.8, 0.5, -1e-6),
        (2.5, 1.75, 0.5, -9.98377799987793e-07),
        (1e-3, 0.5, 0.5, -1e-6),
        (0.25, 12.0, 0.75, -1e-3),
    ]

    @pytest.mark.parametrize("numbers", XIELU_NUMBERS)
    @pytest.mark.parametrize("size", [*SIZES, 1030])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_xielu_is_its_definition_in_float64(
        dtype: torch.dtype, size: int, numbers: tuple[float, ...]
    ) -> None:
        """Each term is within some roundings of float32; where they cancel, so is the sum."""
        numbers_4 = torch.tensor(numbers, dtype=torch.float32)
        a_p, a_n, beta, eps = numbers_4.double()
        small = torch.logspace(-9, 1, size).neg().unsqueeze(0).to(dtype)
        edges = torch.tensor([0.0, -0.0, -0.5, -0.50001, 1e-7, -1e-7, -1e-6, -30.0, 60.0]).to(dtype)
        x = torch.cat((randn(3, size, dtype=dtype) * 3, small, -small, edges.repeat(size)[None, :size]))
        beside = randn(len(x), 5, dtype=dtype, seed=1)
        for columns in (x, torch.cat((beside, x, beside), dim=1)[:, 5:-5]):
            exact = columns.double()
            positive = a_p * exact * exact
            curve = torch.expm1(torch.minimum(exact, eps)) - exact
            curved = torch.where(exact > 0, positive, a_n * curve)
            expected = curved + beta * exact
            atol = 8 * torch.finfo(torch.float32).eps * (curved.abs() + a_n * exact.abs()) + 1e-12
            if dtype == torch.float16:
                atol = atol + torch.finfo(dtype).eps * expected.abs() + 2**-24
            for fn in (act_mul, act_mul_rows):
                actual = fn(columns, "xielu", xielu_4=numbers_4)
                assert isinstance(actual, Tensor)
                assert actual.is_contiguous()
                assert ((actual.double() - expected).abs() <= atol).all()

    def test_xielu_loses_no_small_number_and_is_not_zero_at_zero() -> None:
        """e^x - 1 of a small x has no digit in float32, and b x is of the size of a_n x."""
        numbers_4 = torch.tensor([0.8, 3.0, 0.0, -1e-30])
        x = -torch.logspace(-4, -1, 50).unsqueeze(0)
        actual = act_mul(x, "xielu", xielu_4=numbers_4)
        assert isinstance(actual, Tensor)
        exact = x.double()
        expected = 3.0 * (torch.expm1(exact) - exact)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)
        for fn in (act_mul, act_mul_rows):
            at_zero = fn(torch.zeros(2, 5), "xielu", xielu_4=torch.tensor([0.8, 0.75, 0.5, -0.001]))
            assert isinstance(at_zero, Tensor)
            expected = torch.full((2, 5), 0.75 * math.expm1(-0.001))
            torch.testing.assert_close(at_zero, expected, rtol=1e-6, atol=0)

    def test_xielu_keeps_nan_and_what_is_too_large_is_infinite() -> None:
        x = randn(2, 65, dtype=torch.float16)
        x[0, :2] = torch.tensor([float("nan"), float("inf")])
        x[1, 7] = 60000.0
        for fn in (act_mul, act_mul_rows):
            actual = fn(x, "xielu", xielu_4=torch.tensor(XIELU_NUMBERS[0]))
            assert isinstance(actual, Tensor)
            assert actual.isnan().nonzero().tolist() == [[0, 0]]
            assert actual.isposinf().nonzero().tolist() == [[0, 1], [1, 7]]

    @pytest.mark.parametrize("quant", [*QUANTS, ActivationQuant(group_size=64)])
    @pytest.mark.parametrize("size", [65, 384])
    def test_what_leaves_xielu_quantized_is_its_rounded_result_quantized(
        quant: ActivationQuant, size: int
    ) -> None:
        """What a program holds beyond a row is no part of it: in the last row, its size decides the scale
        if it is, because xielu(0) is -253."""
        if quant.group_size and size % quant.group_size:
            pytest.skip("no whole groups")
        numbers_4 = torch.tensor([0.8, 400.0, 0.5, -1.0])
        x = randn(4, size, dtype=torch.float16) * torch.tensor([[1.0], [0.0], [5.0], [1e-3]]).half()
        x = torch.cat((x, 5 + x[:1].abs()))
        product = act_mul(x, "xielu", xielu_4=numbers_4)
        assert isinstance(product, Tensor)
        assert float(product[1, 0]) == pytest.approx(400 * math.expm1(-1), rel=1e-3)
        assert_same_rows(act_mul(x, "xielu", quant, xielu_4=numbers_4), quantize(product, quant))

    @pytest.mark.parametrize(("activation", "power"), [("relu", 1), ("relu2", 2)])
    def test_relu_and_its_square_are_rounded_once_and_keep_nan(activation: str, power: int) -> None:
        x = extreme_rows(1030, torch.float16)
        x[1, 7] = float("nan")
        wide = torch.cat((x, x), dim=1)
        for columns in (x, wide[:, 5:1035]):
            expected = (columns.float().clamp(min=0) ** power).to(x.dtype)
            for fn in (act_mul, act_mul_rows):
                actual = fn(columns, activation)
                assert isinstance(actual, Tensor)
                assert_same_numbers(actual, expected)

    @pytest.mark.parametrize("quant", QUANTS)
    def test_what_leaves_quantized_is_the_rounded_result_quantized(quant: ActivationQuant) -> None:
        x = extreme_rows(384, torch.float16)
        weight = randn(384, dtype=torch.float16, seed=1)
        normed = rms_norm(x, weight, 1e-5)
        assert isinstance(normed, Tensor)
        assert_same_rows(rms_norm(x, weight, 1e-5, quant), quantize(normed, quant))
        gate_up = randn(4, 384, dtype=torch.float16, seed=2)
        for activation in ACTIVATIONS:
            product = act_mul(gate_up, activation)
            assert isinstance(product, Tensor)
            assert_same_rows(act_mul(gate_up, activation, quant), quantize(product, quant))
        up = randn(4, 100, dtype=torch.float16, seed=3)
        product = act_mul(gate_up[:, 284:], "sigmoid", up_TF=up)
        assert isinstance(product, Tensor)
        assert_same_rows(act_mul(gate_up[:, 284:], "sigmoid", quant, up_TF=up), quantize(product, quant))

    def test_rows_are_independent() -> None:
        x = randn(9, 200)
        weight = randn(200, seed=1)
        together = rms_norm(x, weight, 1e-5, DYNAMIC)
        assert isinstance(together, QuantizedRows)
        for row in range(9):
            alone = rms_norm(x[row : row + 1], weight, 1e-5, DYNAMIC)
            assert_same_rows(
                alone, QuantizedRows(together.values_TK[row : row + 1], together.scale_T[row : row + 1])
            )

    @pytest.mark.parametrize("vocab_size", [1, 7, SPAN, SPAN + 1, 2 * SPAN + 500])
    def test_the_lowest_id_among_the_largest_is_chosen(vocab_size: int) -> None:
        logits = randn(4, vocab_size).round()  # many equals
        logits[1] = 0.0
        logits[2] = float("-inf")
        logits[3] = -0.0
        logits[3, vocab_size // 2] = 0.0
        assert torch.equal(choose(logits), logits.argmax(dim=-1))

    def test_drawing_is_argmax_with_the_noise_of_seed_position_and_token() -> None:
        logits = randn(4, SPAN + 300) * 2
        temperature = torch.tensor([0.0, 1.0, 0.5, 3.0])
        min_p = torch.tensor([0.3, 0.0, 0.2, 0.01])
        seeds = torch.tensor([1, 0, (1 << 63) - 1, 7])
        positions = torch.tensor([3, 0, 70_000, 12])
        tokens = choose_drawn(logits, Draw(temperature, min_p.log(), seeds, positions))
        scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp_min(1e-30).unsqueeze(1)
        noisy = (scaled.double() + gumbel(seeds, positions, logits.shape[1])).masked_fill(
            scaled < min_p.log().unsqueeze(1), float("-inf")
        )
        assert tokens.tolist() == [int(logits[0].argmax()), *noisy[1:].argmax(dim=-1).tolist()]

    def test_filters_without_sorting_keep_what_sorting_keeps() -> None:
        """Many equal logits, tiny and large temperatures, every filter alone and together."""
        logits = torch.cat((randn(24, 700) * 3, (randn(24, 700, seed=1) * 2).round()), dim=1)[
            :, torch.randperm(1400)
        ]
        params = [
            SamplingParams(
                1,
                temperature=(0.0, 1e-20, 0.7, 3.0)[row % 4],
                top_k=(0, 1, 3, 40, 2000)[row % 5],
                top_p=(1.0, 0.9, 0.3, 1e-6)[row // 4 % 4],
                min_p=(0.0, 0.05)[row // 12],
                seed=row,
            )
            for row in range(24)
        ]
        expected = sample(logits, params, range(24)).tokens_R

        def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor([getattr(each, name) for each in params], dtype=dtype)

        draw = Draw(
            column("temperature"), column("min_p").log(), column("seed", torch.int64), torch.arange(24)
        )
        assert torch.equal(
            choose_drawn(logits, draw, Filter(column("top_k", torch.int64), column("top_p"))), expected
        )
        broken = torch.stack(
            (logits[0], torch.full_like(logits[0], float("nan")), torch.full_like(logits[0], float("inf")))
        )
        tokens = choose_drawn(
            broken,
            Draw(torch.ones(3), torch.zeros(3).log(), torch.arange(3), torch.arange(3)),
            Filter(torch.ones(3).long(), torch.ones(3)),
        )
        assert bool(((tokens >= 0) & (tokens < 1400)).all())

    @pytest.mark.parametrize("scheme", MULTIPLIED)
    @pytest.mark.parametrize(("size", "gated"), [(64, False), (100, False), (96, True), (104, True)])
    def test_pieces_of_a_packed_weight_are_its_dequantized_rows(
        scheme: str, size: int, gated: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        generator = torch.Generator().manual_seed(4)
        facts = SCHEMES[scheme]
        groups = 640 // (facts.group_size or 640)
        codes, zero = (
            torch.randint(facts.min_code, facts.max_code + 1, shape, generator=generator, dtype=torch.int8)
            for shape in ((size, 640), (size, groups))
        )
        scale = (torch.rand(size, groups, generator=generator) * 0.02).to(torch.float16)
        weight = QuantizedWeight(facts, codes, scale, None if facts.symmetric else zero)
        packed = prefill_w4a16.repack([weight], dtype=torch.float16, device=torch.device("cpu"), gated=gated)
        monkeypatch.setattr(prefill_w4a16, "SCRATCH_BYTES", 1)
        monkeypatch.setattr(prefill_w4a16, "MIN_PIECE_ROWS", 32)
        found = torch.full(
            (2 if gated else 1, size // (2 if gated else 1), 640), float("nan"), dtype=torch.float16
        )
        starts = []
        for start, w_HPK in prefill_w4a16.pieces(packed):
            found[:, start : start + w_HPK.shape[1]] = w_HPK
            starts.append(start)
        assert len(starts) > 1
        assert torch.equal(found.view(size, 640), weight.dequantize())

    @pytest.mark.parametrize(
        ("scheme", "dtype"),
        [("NVFP4", torch.bfloat16), ("NVFP4", torch.float16), ("MXFP4", torch.bfloat16)],
    )
    @pytest.mark.parametrize("gated", [False, True])
    def test_numbers_of_e2m1_are_dequantized_from_words(scheme: str, dtype: torch.dtype, gated: bool) -> None:
        weights = [random_weight((size, 256), scheme, dtype, size) for size in (56, 40)]
        packed = fp4.repack(weights, dtype=dtype, device=torch.device("cpu"), gated=gated)
        exact = torch.cat([wide(each) for each in weights])
        found = torch.cat([*prefill_w4a16.dequantize(packed, 0, packed.blocks.shape[0])])
        limit = torch.finfo(dtype).eps  # the interpreter cuts bfloat16 off
        assert bool(((found.double() - exact).abs() <= exact.abs() * limit * (1 + 1e-3)).all())

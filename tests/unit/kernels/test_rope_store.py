"""The fused rope + norm + store kernel in triton's interpreter, held to the reference op by op.

The interpreter truncates where bfloat16 rounds: float16 and float32 stand in.
"""

from itertools import pairwise

import pytest
import torch

from tests.support.triton_interpreter import INTERPRETED

pytest.importorskip("triton")


if INTERPRETED:
    from torch import Tensor

    from compress.kernels.compilers.triton import jit, tl
    from compress.kernels.hadamard.fused import hadamard
    from compress.kernels.hadamard.reference import hadamard as reference_hadamard
    from compress.kernels.operands.e4m3 import decode_even, decode_odd, encode_e4m3
    from compress.kernels.operands.paged import (
        CODED_FORMATS,
        DENSE_FORMATS,
        INT_FORMATS,
        TOKEN_HEAD_FORMATS,
        PagedKV,
        dequantized,
        empty_pages,
    )
    from compress.kernels.operands.rows import FP8
    from compress.kernels.rope_store import reference
    from compress.kernels.rope_store.fused import rope_store

    FORMATS = ["dense", *CODED_FORMATS]
    BLOCK_SIZE = 16
    NUM_BLOCKS = 5
    NUM_POSITIONS = 40
    NUM_ROWS = 5

    def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def filled_pages(kv_format: str, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedKV:
        """Pages that hold something at every position."""
        name = DENSE_FORMATS[dtype] if kv_format == "dense" else kv_format
        shape = (num_kv_heads, NUM_BLOCKS, BLOCK_SIZE, head_dim)
        kv = empty_pages(name, shape, static_scales=(0.002, 0.02))
        for pages, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
            pages.view(torch.uint8).fill_(0x44)
            if scale is not None and scale.dim():
                scale.fill_(7.0)
        return kv

    def assert_values_close(actual: PagedKV, expected: PagedKV, rounding: float, atol: float = 0.0) -> None:
        """Stored values differ by that rounding before they were stored, or by one step of the codes."""
        for pages, scale, theirs, their_scale in (
            (actual.k, actual.k_scale, expected.k, expected.k_scale),
            (actual.v, actual.v_scale, expected.v, expected.v_scale),
        ):
            ours, theirs = (
                dequantized(each, of, torch.float32) for each, of in ((pages, scale), (theirs, their_scale))
            )
            rtol = 2**-3 if pages.dtype == FP8 else rounding
            if pages.dtype in INT_FORMATS and their_scale is not None:
                atol = atol + 1.01 * float(their_scale[their_scale != 7.0].max())
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)

    def arguments(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        qkv_TF = randn(NUM_ROWS, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        qkv_TF[3] = 0
        cos_PC = randn(NUM_POSITIONS, head_dim, dtype=dtype, seed=1)
        sin_PC = randn(NUM_POSITIONS, head_dim, dtype=dtype, seed=2)
        return qkv_TF, cos_PC, sin_PC, torch.tensor([3, 0, 39, 7, 7]), torch.tensor([16, 79, 31, 40, 41])

    def bits(x: Tensor) -> Tensor:
        return x.contiguous().view(torch.uint8)

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 64), (7, 1, 128), (9, 3, 80), (2, 2, 512)]
    )
    @pytest.mark.parametrize("norms", ["heads", "whole", "rotated"])
    @pytest.mark.parametrize("centered", [False, True])
    @pytest.mark.parametrize("weights", [torch.float16, torch.float32])
    def test_wide_and_centered_norms_and_growing_queries_are_those_of_the_reference(
        num_heads: int, num_kv_heads: int, head_dim: int, norms: str, centered: bool, weights: torch.dtype
    ) -> None:
        args = arguments(num_heads, num_kv_heads, head_dim, torch.float16)
        facts = {
            "qk_norm": 1 + randn(num_heads + num_kv_heads, head_dim, dtype=weights, seed=3) / 4,
            "whole": norms == "whole",
            "rotates_first": norms == "rotated",
            "centered": centered,
            "growth_P": 1 + torch.arange(NUM_POSITIONS).to(torch.float16) / 16,
        }
        expected, actual = (filled_pages("dense", num_kv_heads, head_dim, torch.float16) for _ in range(2))
        q = reference.rope_store(*args, expected, num_heads=num_heads, eps=1e-5, **facts)
        got = rope_store(*args, actual, num_heads=num_heads, eps=1e-5, **facts)
        # A rounding of float16 before the rotation, and those after it.
        torch.testing.assert_close(got, q, rtol=2**-9, atol=2**-9)
        torch.testing.assert_close(actual.k, expected.k, rtol=2**-9, atol=2**-9)
        assert torch.equal(bits(actual.v), bits(expected.v))
        for row in range(NUM_ROWS):
            one = (each[row : row + 1] for each in (args[0], *args[3:]))
            qkv, positions, slots = one
            alone = rope_store(
                qkv, *args[1:3], positions, slots, actual, num_heads=num_heads, eps=1e-5, **facts
            )
            assert torch.equal(alone, got[row : row + 1])

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_dim", "leading_dim", "rotates_first"),
        [(8, 2, 64, 0, False), (7, 1, 128, 0, True), (9, 3, 80, 22, False), (5, 5, 144, 36, False)],
    )
    @pytest.mark.parametrize("kv_format", ["dense", "FP8_TOKEN_HEAD"])
    def test_norms_of_heads_with_a_bias_are_those_of_the_reference(
        kv_format: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        leading_dim: int,
        rotates_first: bool,
    ) -> None:
        args = arguments(num_heads, num_kv_heads, head_dim, torch.float16)
        size = num_heads + num_kv_heads, head_dim
        facts = {
            "num_heads": num_heads,
            "qk_norm": 1 + randn(*size, seed=3) / 4,
            "qk_bias": randn(*size, seed=4),
            "eps": 1e-5,
            "centered": True,
            "leading_dim": leading_dim,
            "rotates_first": rotates_first,
        }
        expected, actual, without = (
            filled_pages(kv_format, num_kv_heads, head_dim, torch.float16) for _ in range(3)
        )
        q = reference.rope_store(*args, expected, **facts)
        got = rope_store(*args, actual, **facts)
        torch.testing.assert_close(got, q, rtol=2**-9, atol=2**-9)
        assert_values_close(actual, expected, 2**-9, atol=2**-9)
        assert torch.equal(bits(actual.v), bits(expected.v))
        plain = rope_store(*args, without, **{**facts, "qk_bias": None})
        assert float((plain.float() - q.float()).abs().max()) > 1

    def test_a_bias_without_a_float32_weight_or_over_all_heads_is_refused() -> None:
        args = arguments(8, 2, 64, torch.float16)
        weight, bias = (randn(10, 64, seed=seed) for seed in (3, 4))
        for qk_norm, whole in ((weight.half(), False), (weight, True), (None, False)):
            facts = {"num_heads": 8, "qk_norm": qk_norm, "qk_bias": bias, "eps": 1e-5, "whole": whole}
            for kernel in (reference.rope_store, rope_store):
                with pytest.raises(AssertionError):
                    kernel(*args, filled_pages("dense", 2, 64, torch.float16), **facts)

    @pytest.mark.parametrize("kv_format", FORMATS)
    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_dim", "leading_dim", "norms"),
        [
            (5, 1, 256, 64, "none"),
            (5, 1, 256, 64, "hadamard"),
            (8, 2, 256, 64, "heads"),
            (7, 1, 144, 36, "heads"),
            (3, 3, 80, 22, "whole"),
            (4, 2, 132, 130, "none"),
        ],
    )
    def test_leading_dimensions_turn_as_those_of_heads_in_the_order_of_halves(
        kv_format: str, num_heads: int, num_kv_heads: int, head_dim: int, leading_dim: int, norms: str
    ) -> None:
        qkv_TF, *others = arguments(num_heads, num_kv_heads, head_dim, torch.float16)
        num_turned = num_heads + num_kv_heads
        normed = norms in ("heads", "whole")
        qk_norm = 1 + randn(num_turned, head_dim, dtype=torch.float16, seed=3) / 4 if normed else None
        still = leading_dim + (head_dim - leading_dim) // 2
        ends = (0, leading_dim // 2, leading_dim, still, head_dim)
        spans = [torch.arange(*span) for span in pairwise(ends)]
        order_C = torch.cat((spans[0], spans[2], spans[1], spans[3]))
        qk_THC, v_TKC = qkv_TF.view(NUM_ROWS, -1, head_dim).split([num_turned, num_kv_heads], dim=1)
        in_halves = {
            "qkv": torch.cat((qk_THC[..., order_C], v_TKC), dim=1).flatten(1),
            "qk_norm": None if qk_norm is None else qk_norm[:, order_C].contiguous(),
        }
        as_stored = {"qkv": qkv_TF, "qk_norm": qk_norm, "leading_dim": leading_dim}
        results = []
        for kernel in (reference.rope_store, rope_store):
            for form in (in_halves, as_stored):
                facts = {name: value for name, value in form.items() if name != "qkv"}
                facts |= {"whole": norms == "whole", "hadamard": norms == "hadamard"}
                kv = filled_pages(kv_format, num_kv_heads, head_dim, torch.float16)
                q = kernel(form["qkv"], *others, kv, num_heads=num_heads, eps=1e-5, **facts)
                results.append((q, kv))
        for expected, actual in ((0, 1), (0, 3), (2, 3)):
            (theirs, their_kv), (ours, our_kv) = results[expected], results[actual]
            if normed and expected == 0:  # the sum of squares has another order
                torch.testing.assert_close(ours, theirs, rtol=2**-9, atol=2**-9)
                assert_values_close(our_kv, their_kv, 2**-9, atol=2**-9)
            else:
                assert torch.equal(ours, theirs)
                assert torch.equal(bits(our_kv.k), bits(their_kv.k))
            assert torch.equal(bits(our_kv.v), bits(their_kv.v))

    @pytest.mark.parametrize(
        ("kv_format", "num_heads", "num_kv_heads", "head_dim", "leading_dim", "hadamard"),
        [
            ("INT4_TOKEN_HEAD", 8, 2, 64, 0, True),
            ("dense", 8, 1, 128, 0, False),
            ("FP8_TOKEN_HEAD", 9, 3, 80, 22, False),
            ("INT8_TOKEN_HEAD", 5, 1, 256, 64, True),
            ("FP8_STATIC", 3, 3, 132, 130, False),
            ("FP8_ATTENTION", 1, 1, 64, 0, False),
            ("dense", 3, 1, 512, 0, False),
        ],
    )
    @pytest.mark.parametrize("norms", ["none", "heads", "whole", "rotated"])
    @pytest.mark.parametrize("flags", [False, True])
    def test_queries_without_keys_are_those_beside_keys_and_nothing_is_written(
        kv_format: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        leading_dim: int,
        hadamard: bool,
        norms: str,
        flags: bool,
    ) -> None:
        qkv_TF, *others = arguments(num_heads, num_kv_heads, head_dim, torch.float16)
        q_TF = qkv_TF[:, : num_heads * head_dim]
        qk_norm = q_norm = None
        if norms != "none":
            weights = torch.float32 if flags else torch.float16
            qk_norm = 1 + randn(num_heads + num_kv_heads, head_dim, dtype=weights, seed=3) / 4
            q_norm = qk_norm[:num_heads]
        facts = {
            "num_heads": num_heads,
            "eps": 1e-5,
            "whole": norms == "whole",
            "rotates_first": norms == "rotated",
            "centered": flags,
            "growth_P": 1 + torch.arange(NUM_POSITIONS).to(torch.float16) / 16 if flags else None,
            "v_norm": flags,
            "hadamard": hadamard,
            "leading_dim": 0 if norms == "rotated" else leading_dim,
            "early": flags,
        }
        results = []
        for kernel in (reference.rope_store, rope_store):
            kv, untouched, written = (
                filled_pages(kv_format, num_kv_heads, head_dim, torch.float16) for _ in range(3)
            )
            results.append(kernel(q_TF, *others, kv, qk_norm=q_norm, **facts))
            assert results[-1].shape == (NUM_ROWS, num_heads, head_dim)
            assert torch.equal(kernel(qkv_TF, *others, written, qk_norm=qk_norm, **facts), results[-1])
            assert not torch.equal(bits(written.k), bits(untouched.k))
            for name in ("k", "v", "k_scale", "v_scale"):
                ours, theirs = getattr(kv, name), getattr(untouched, name)
                assert ours is theirs is None or torch.equal(bits(ours.view(-1)), bits(theirs.view(-1)))
        bound = 0 if norms == "none" else 2**-9  # the sum of squares has another order
        torch.testing.assert_close(results[1], results[0], rtol=bound, atol=bound)

    @pytest.mark.parametrize("whole", [False, True])
    def test_weights_of_keys_that_are_not_there_are_refused(whole: bool) -> None:
        qkv_TF, *others = arguments(8, 2, 64, torch.float16)
        kv = filled_pages("dense", 2, 64, torch.float16)
        facts = {"num_heads": 8, "qk_norm": torch.ones(10, 64), "eps": 1e-5, "whole": whole}
        for kernel in (reference.rope_store, rope_store):
            with pytest.raises((AssertionError, RuntimeError)):
                kernel(qkv_TF[:, : 8 * 64], *others, kv, **facts)

    def test_scales_that_are_powers_of_two_are_those_of_the_reference() -> None:
        args = arguments(8, 2, 64, torch.float32)
        expected, actual = (filled_pages("FP8_ATTENTION", 2, 64, torch.float32) for _ in range(2))
        for rope_store_of, kv in ((reference.rope_store, expected), (rope_store, actual)):
            rope_store_of(*args, kv, num_heads=8, qk_norm=None, eps=1e-5)
        for ours, theirs in ((actual.k_scale, expected.k_scale), (actual.v_scale, expected.v_scale)):
            assert ours is not None
            assert torch.equal(ours, theirs)
            written = ours.view(2, -1)[:, args[-1]]
            assert (torch.frexp(written).mantissa == 0.5).all()

    @pytest.mark.parametrize("kv_format", FORMATS)
    @pytest.mark.parametrize("own_values", [False, True])
    @pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 64), (7, 1, 80), (2, 2, 512)])
    def test_normed_values_and_values_that_are_keys_are_those_of_the_reference(
        kv_format: str, own_values: bool, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        qkv_TF, *others = arguments(num_heads, num_kv_heads, head_dim, torch.float16)
        num_stored = num_heads + num_kv_heads * (1 + own_values)
        args = (qkv_TF[:, : num_stored * head_dim].contiguous(), *others)
        qk_norm = 1 + randn(num_heads + num_kv_heads, head_dim, dtype=torch.float16, seed=3) / 4
        for v_norm in (False, True):
            facts = {"num_heads": num_heads, "qk_norm": qk_norm, "eps": 1e-5, "v_norm": v_norm}
            expected, actual = (
                filled_pages(kv_format, num_kv_heads, head_dim, torch.float16) for _ in range(2)
            )
            q = reference.rope_store(*args, expected, **facts)
            got = rope_store(*args, actual, **facts)
            torch.testing.assert_close(got, q, rtol=2**-9, atol=2**-9)
            assert_values_close(actual, expected, 2**-9, atol=2**-9)
            if not v_norm:
                assert torch.equal(bits(actual.v), bits(expected.v))

    @pytest.mark.parametrize("kv_format", FORMATS)
    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_dim", "normed"),
        [(8, 2, 64, True), (7, 1, 128, False), (9, 3, 80, True)],
    )
    def test_float16_rows_are_those_of_the_reference(
        kv_format: str, num_heads: int, num_kv_heads: int, head_dim: int, normed: bool
    ) -> None:
        args = arguments(num_heads, num_kv_heads, head_dim, torch.float16)
        qk_norm = randn(num_heads + num_kv_heads, head_dim, dtype=torch.float16, seed=3) if normed else None
        expected, actual = (filled_pages(kv_format, num_kv_heads, head_dim, torch.float16) for _ in range(2))
        q = reference.rope_store(*args, expected, num_heads=num_heads, qk_norm=qk_norm, eps=1e-5)
        got = rope_store(*args, actual, num_heads=num_heads, qk_norm=qk_norm, eps=1e-5)
        # The mean of squares may differ in its last bit, and one rounding of float16 after it.
        torch.testing.assert_close(got, q, rtol=2**-10, atol=0)
        if normed:
            assert_values_close(actual, expected, 2**-10)
        else:
            assert torch.equal(bits(actual.k), bits(expected.k))
        if kv_format in TOKEN_HEAD_FORMATS:
            assert actual.k_scale is not None
            assert expected.k_scale is not None
            assert actual.v_scale is not None
            assert expected.v_scale is not None
            torch.testing.assert_close(actual.k_scale, expected.k_scale, rtol=2**-10, atol=0)
            assert torch.equal(actual.v_scale, expected.v_scale)
        assert torch.equal(
            bits(actual.v), bits(expected.v)
        )  # neither normed nor turned: exact, and nothing else was written

    @pytest.mark.parametrize("kv_format", FORMATS)
    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_dim", "value_dim", "leading_dim"),
        [(8, 2, 64, 32, 0), (7, 1, 192, 128, 64), (9, 3, 80, 78, 0), (4, 2, 24, 2, 8)],
    )
    def test_narrower_values_are_stored_as_values_with_zeros(
        kv_format: str, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int, leading_dim: int
    ) -> None:
        qkv_TF, *others = arguments(num_heads, num_kv_heads, head_dim, torch.float16)
        qk_TF, v_TF = qkv_TF.split([(num_heads + num_kv_heads) * head_dim, num_kv_heads * head_dim], dim=1)
        v_TKC = v_TF.unflatten(1, (-1, head_dim)).clone()
        v_TKC[..., value_dim:] = 0
        narrow_TF = torch.cat((qk_TF, v_TKC[..., :value_dim].flatten(1)), dim=1)
        qk_norm = 1 + randn(num_heads + num_kv_heads, head_dim, dtype=torch.float16, seed=3) / 4
        facts = {"num_heads": num_heads, "qk_norm": qk_norm, "eps": 1e-5, "leading_dim": leading_dim}
        for store in (reference.rope_store, rope_store):
            expected, actual = (
                filled_pages(kv_format, num_kv_heads, head_dim, torch.float16) for _ in range(2)
            )
            q = store(torch.cat((qk_TF, v_TKC.flatten(1)), dim=1), *others, expected, **facts)
            got = store(narrow_TF, *others, actual, value_dim=value_dim, **facts)
            assert torch.equal(got, q)
            assert all(
                torch.equal(bits(ours), bits(theirs))
                for ours, theirs in zip(actual.tensors, expected.tensors, strict=True)
            )

    def test_a_rotation_without_norm_rounds_where_the_reference_does() -> None:
        args = arguments(4, 2, 64, torch.float16)
        expected, actual = (filled_pages("FP8_STATIC", 2, 64, torch.float16) for _ in range(2))
        q = reference.rope_store(*args, expected, num_heads=4, qk_norm=None, eps=1e-5)
        assert torch.equal(rope_store(*args, actual, num_heads=4, qk_norm=None, eps=1e-5), q)
        assert torch.equal(bits(actual.k), bits(expected.k))

    @pytest.mark.parametrize("kv_format", FORMATS)
    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 64), (7, 1, 128), (3, 3, 256)]
    )
    def test_transformed_heads_have_the_bits_of_the_reference(
        kv_format: str, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        args = arguments(num_heads, num_kv_heads, head_dim, torch.float16)
        facts = {"num_heads": num_heads, "qk_norm": None, "eps": 1e-5, "hadamard": True}
        expected, actual = (filled_pages(kv_format, num_kv_heads, head_dim, torch.float16) for _ in range(2))
        q = reference.rope_store(*args, expected, **facts)
        assert torch.equal(rope_store(*args, actual, **facts), q)
        for ours, theirs in ((actual.k, expected.k), (actual.v, expected.v)):
            assert torch.equal(bits(ours), bits(theirs))
        assert torch.equal(hadamard(q), reference_hadamard(q))
        assert torch.equal(hadamard(q[2:3, 1:2]), reference_hadamard(q[2:3, 1:2]))
        assert hadamard(q[:0]).shape == q[:0].shape

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_the_transform_of_heads_has_the_bits_of_the_reference(head_dim: int, dtype: torch.dtype) -> None:
        x_THC = randn(11, 3, head_dim, dtype=dtype)
        x_THC[4] = 0
        x_THC[5, 1, 7] = float("nan")
        y_THC = hadamard(x_THC)
        assert y_THC[5, 1].isnan().all()
        y_THC[5, 1], expected = 0, reference_hadamard(x_THC).nan_to_num(0)
        assert torch.equal(y_THC, expected)

    def test_a_row_is_the_same_alone_and_among_others() -> None:
        qkv_TF, cos_PC, sin_PC, positions_T, slots_T = arguments(8, 2, 64, torch.float32)
        qk_norm = randn(10, 64, seed=3)
        together, alone = (filled_pages("FP8_TOKEN_HEAD", 2, 64, torch.float32) for _ in range(2))
        q = rope_store(
            qkv_TF, cos_PC, sin_PC, positions_T, slots_T, together, num_heads=8, qk_norm=qk_norm, eps=1e-5
        )
        for row in range(NUM_ROWS):
            part = slice(row, row + 1)
            each = rope_store(
                qkv_TF[part],
                cos_PC,
                sin_PC,
                positions_T[part],
                slots_T[part],
                alone,
                num_heads=8,
                qk_norm=qk_norm,
                eps=1e-5,
            )
            assert torch.equal(each, q[part])
        assert torch.equal(bits(alone.k), bits(together.k))

    @jit()
    def _encode(x_ptr: tl.tensor, codes_ptr: tl.tensor, SIZE: tl.constexpr) -> None:
        at = tl.arange(0, SIZE)
        tl.store(codes_ptr + at, encode_e4m3(tl.load(x_ptr + at)))

    @jit()
    def _decode(
        codes_ptr: tl.tensor,
        even_ptr: tl.tensor,
        odd_ptr: tl.tensor,
        SIZE: tl.constexpr,
        INTERPRETED: tl.constexpr,
    ) -> None:
        at = tl.arange(0, SIZE)
        pairs = tl.load(codes_ptr + at)
        tl.store(even_ptr + at, decode_even(pairs, even_ptr.dtype.element_ty, INTERPRETED))
        tl.store(odd_ptr + at, decode_odd(pairs, even_ptr.dtype.element_ty, INTERPRETED))

    def every_code() -> Tensor:
        """The 254 that are numbers, and two zeros."""
        codes = torch.arange(256, dtype=torch.uint8)
        return torch.where((codes & 0x7F) == 0x7F, 0, codes)

    def test_integer_rounding_is_that_of_e4m3() -> None:
        values = every_code().view(FP8).float().sort().values
        middles = (values[1:] + values[:-1]) / 2  # ties
        x = torch.cat(
            (values, middles, middles.nextafter(values[1:]), randn(4096 - 256 - 2 * 255) * 100)
        ).clamp(-448, 448)
        codes = torch.empty(4096, dtype=torch.uint8)
        _encode[(1,)](x, codes, SIZE=4096)
        assert torch.equal(codes.view(FP8).float(), x.to(FP8).float())

    @pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 2.0**120), (torch.float16, 2.0**8)])
    def test_integer_widening_is_exact(dtype: torch.dtype, factor: float) -> None:
        codes = every_code()
        even = torch.empty(128, dtype=dtype)
        odd = torch.empty(128, dtype=dtype)
        _decode[(1,)](codes.view(torch.int16), even, odd, SIZE=128, INTERPRETED=True)
        assert torch.equal(
            torch.stack((even, odd), dim=1).flatten().double() * factor, codes.view(FP8).double()
        )

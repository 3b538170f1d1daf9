"""Kernels of latent attention: every one that runs here against the law, and the bits of rows in company. In
triton's interpreter those are the GPU's kernels, too, on a GPU the same.

The interpreter truncates where bfloat16 rounds: float16 and float32 stand in.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.kernels.operands.paged import DENSE_FORMATS
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import ActivationQuant, RowNorm, quantize
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel
from compress.models.latent import LATENT_EPS, Latent
from compress.models.layer_shape import Rope
from compress.models.rope import cos_sin
from compress.quant.kv import FP8_TOKEN_HEAD, INT8_TOKEN_HEAD, KV_DENSE
from tests.support.triton_interpreter import INTERPRETED, use_row_independent_products
from tests.support.usable_kernels import DEVICES, usable

DTYPES = {"F32": torch.float32, "F16": torch.float16}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
"""Largest error of a product over the largest number of its result."""


@pytest.fixture(autouse=True)
def row_independent_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        use_row_independent_products(monkeypatch)


each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
each_cache = pytest.mark.parametrize(
    ("dtype", "kv_format"),
    [
        (torch.float32, KV_DENSE),
        (torch.float16, KV_DENSE),
        (torch.float16, FP8_TOKEN_HEAD),
        (torch.float32, INT8_TOKEN_HEAD),
    ],
    ids=["F32", "F16", "F16-FP8", "F32-INT8"],
)


def randn(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def filled(
    kv_format: str, rank: int, rope_dim: int, *, num_blocks: int, block_size: int, device: str
) -> PagedLatents:
    """Return pages of random latents, each position of another size."""
    pages = PagedLatents.empty(kv_format, num_blocks, block_size, rank + rope_dim, torch.device(device))
    rows = randn(num_blocks * block_size, rank + rope_dim, device=device, dtype=torch.float32, seed=7)
    sizes = torch.linspace(0.3, 3.0, len(rows), device=device).unsqueeze(1)
    pages.write_(torch.arange(len(rows), device=device), rows * sizes)
    return pages


@usable("latent_attention", n=16, k=16)
@each_cache
@pytest.mark.parametrize(
    ("num_heads", "rank", "rope_dim", "block_size"),
    [(5, 24, 6, 16), (40, 64, 32, 64), (16, 48, 16, 128), (3, 24, 0, 16)],
)
@pytest.mark.parametrize(("has_sinks", "window"), [(False, None), (True, None), (False, 3), (True, 66)])
def test_heads_attend_to_latents_and_a_row_has_its_bits_in_any_company(
    kernel: Kernel,
    device: str,
    dtype: torch.dtype,
    kv_format: str,
    num_heads: int,
    rank: int,
    rope_dim: int,
    block_size: int,
    has_sinks: bool,
    window: int | None,
) -> None:
    kv_format = DENSE_FORMATS[dtype] if kv_format == KV_DENSE else kv_format
    lens, head_dim, scale = (1, 130, 70, 2), rope_dim + 10, 0.11
    columns = 144 // block_size + 1
    pages = filled(kv_format, rank, rope_dim, num_blocks=4 * columns, block_size=block_size, device=device)
    table_RB = torch.randperm(4 * columns, generator=torch.Generator().manual_seed(3)).view(4, columns)
    table_RB = table_RB.to(device)
    lens_R = torch.tensor(lens, device=device)
    sinks_H = 2 * randn(num_heads, device=device, dtype=torch.float32, seed=4) if has_sinks else None

    def attend(first: int, stop: int, q_len: int, at: int = 0) -> Tensor:
        """Return rows of the requests from `first` on; those of `q_len` tokens end `at` positions early."""
        rows = slice(first, stop)
        return kernel.fn(
            absorbed[rows, 2 - q_len - at : 2 - at].flatten(0, 1).contiguous(),
            rotated[rows, 2 - q_len - at : 2 - at].flatten(0, 1).contiguous(),
            pages,
            table_RB[rows],
            lens_R[rows] - at,
            q_len=q_len,
            scale=scale,
            window=window,
            sinks_H=sinks_H,
        )

    absorbed = randn(4, 2, num_heads, rank, device=device, dtype=dtype)
    rotated = randn(4, 2, num_heads, head_dim, device=device, dtype=dtype, seed=1)
    actual = attend(0, 4, 1)
    for idx, length in enumerate(lens):
        latent, turned = (each.double() for each in pages.gather(table_RB[idx], rank, torch.float32))
        q = absorbed[idx, 1].double(), rotated[idx, 1, :, head_dim - rope_dim :].double()
        scores = (q[0] @ latent[:length].T + q[1] @ turned[:length].T) * scale
        if window is not None:
            scores[:, : max(length - window, 0)] = -torch.inf
        if sinks_H is not None:
            scores = torch.cat((scores, sinks_H.double().unsqueeze(1)), dim=1)
        expected = scores.softmax(dim=-1)[:, :length] @ latent[:length]
        error = (actual[idx].double() - expected).abs().max() / latent[:length].abs().max()
        assert error <= TOLERANCE[dtype] * 2
        assert torch.equal(attend(idx, idx + 1, 1)[0], actual[idx])
    pairs = attend(1, 3, 2)
    assert torch.equal(pairs[1::2], actual[1:3])
    assert torch.equal(pairs[0::2], attend(1, 3, 1, at=1))


@usable("head_linear", n=16, k=16)
@each_dtype
@pytest.mark.parametrize(("num_heads", "num_inputs", "num_outputs"), [(3, 20, 70), (2, 130, 24)])
def test_heads_have_linears_of_their_own_and_rows_their_bits(
    kernel: Kernel, device: str, dtype: torch.dtype, num_heads: int, num_inputs: int, num_outputs: int
) -> None:
    x = randn(37, num_heads, num_inputs + 5, device=device, dtype=dtype)[..., :num_inputs]
    weights = randn(num_heads, num_outputs, num_inputs, device=device, dtype=dtype, seed=1)
    assert kernel.repack is not None
    packed = kernel.repack(tuple(weights), dtype=dtype, device=torch.device(device), gated=False)
    actual = kernel.fn(x, packed)
    expected = torch.einsum("thi,hoi->tho", x.double(), weights.double())
    assert (actual.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    for rows in (slice(0, 1), slice(36, 37), slice(3, 20)):
        assert torch.equal(kernel.fn(x[rows], packed), actual[rows])


@usable("latent_store", n=16, k=16)
@each_cache
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "rank", "rope_dim", "interleaved"),
    [(5, 24, 20, 8, True), (3, 10, 12, 6, False), (9, 192, 48, 64, True), (3, 10, 12, 0, True)],
)
def test_what_rotates_comes_last_and_latents_are_normed(
    kernel: Kernel,
    device: str,
    dtype: torch.dtype,
    kv_format: str,
    num_heads: int,
    head_dim: int,
    rank: int,
    rope_dim: int,
    interleaved: bool,
) -> None:
    """Each pair turns as a complex number by the angle of its position."""
    kv_format = DENSE_FORMATS[dtype] if kv_format == KV_DENSE else kv_format
    latent = Latent(0, rank, rope_dim, 4, interleaved)
    size = num_heads * head_dim
    first = randn(7, size + rank + rope_dim, device=device, dtype=dtype)
    weight = randn(rank, device=device, dtype=dtype, seed=1)
    positions = torch.tensor([0, 5, 3, 1, 49, 2, 7], device=device)
    slots = torch.tensor([4, 17, 2, 31, 16, 0, 9], device=device)
    rope = Rope(theta=100.0)
    tables = cos_sin(rope, rope_dim, torch.arange(50, device=device), dtype)
    pages = PagedLatents.empty(kv_format, 2, 16, rank + rope_dim, torch.device(device))
    poisoned = pages.rows.view(torch.uint8)
    poisoned.fill_(0x7F)
    norm = RowNorm(weight, LATENT_EPS)

    def stored(rows: slice) -> Tensor:
        return kernel.fn(
            first[rows, :size],
            first[rows, size:],
            norm,
            *tables,
            positions[rows],
            slots[rows],
            pages,
            latent=latent,
            head_dim=head_dim,
        )

    q = stored(slice(0, 7))
    written = pages.gather(torch.arange(2, device=device), rank, torch.float64)
    cos, sin = (table[positions, : rope_dim // 2].double() for table in tables)

    def turned(x: Tensor) -> Tensor:
        parts = (x[..., 0::2], x[..., 1::2]) if interleaved else x.double().chunk(2, -1)
        a, b = (part.double() for part in parts)
        c, s = (each.view(7, *[1] * (x.dim() - 2), -1) for each in (cos, sin))
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1)

    heads = first[:, :size].unflatten(1, (num_heads, head_dim))
    assert torch.equal(q[..., : head_dim - rope_dim], heads[..., : head_dim - rope_dim])
    tolerance = TOLERANCE[dtype] * 4
    torch.testing.assert_close(
        q[..., head_dim - rope_dim :].double(),
        turned(heads[..., head_dim - rope_dim :]),
        rtol=tolerance,
        atol=tolerance,
    )
    x = first[:, size : size + rank].double()
    normed = x * (x.square().mean(-1, keepdim=True) + LATENT_EPS).rsqrt() * weight.double()
    expected = torch.cat((normed, turned(first[:, size + rank :])), dim=1)
    codes = {"FP8_TOKEN_HEAD": 2**-4, "INT8_TOKEN_HEAD": 1 / 254}.get(kv_format, 0.0)
    largest = expected.abs().amax(-1, keepdim=True)
    error = (torch.cat(written, dim=1)[slots] - expected).abs() / largest
    assert error.max() <= codes + tolerance * 2
    whole = pages.rows.view(torch.uint8).clone()
    assert torch.equal(stored(slice(4, 5)), q[4:5])
    assert torch.equal(pages.rows.view(torch.uint8), whole)
    untouched = [slot for slot in range(32) if slot not in slots.tolist()]
    assert (poisoned.flatten(1, 2)[:, untouched] == 0x7F).all()


@usable("latent_store", n=16, k=16)
@each_dtype
@pytest.mark.parametrize("rope_dim", [8, 0])
def test_without_latents_queries_rotate_and_the_cache_stays(
    kernel: Kernel, device: str, dtype: torch.dtype, rope_dim: int
) -> None:
    latent = Latent(0, 20, rope_dim, 4, True)
    first = randn(7, 3 * 24 + 20 + rope_dim, device=device, dtype=dtype)
    tables = cos_sin(Rope(theta=100.0), rope_dim, torch.arange(50, device=device), dtype)
    positions = torch.tensor([0, 5, 3, 1, 49, 2, 7], device=device)
    slots = torch.arange(7, device=device)
    pages = filled(DENSE_FORMATS[dtype], 20, rope_dim, num_blocks=1, block_size=16, device=device)
    norm = RowNorm(torch.ones(20, device=device, dtype=dtype), LATENT_EPS)
    before = pages.rows.clone()
    where = *tables, positions, slots, pages
    alone = kernel.fn(first[:, :72], None, None, *where, latent=latent, head_dim=24)
    assert torch.equal(pages.rows, before)
    with_latents = kernel.fn(first[:, :72], first[:, 72:], norm, *where, latent=latent, head_dim=24)
    assert torch.equal(alone, with_latents)
    assert not torch.equal(pages.rows, before)


QUANTS = {
    "token": ActivationQuant(),
    "static": ActivationQuant(torch.tensor(0.004)),
    "groups": ActivationQuant(group_size=16),
    "int8": ActivationQuant(dtype=torch.int8),
    "static int8": ActivationQuant(torch.tensor(0.02), torch.int8),
    "zero points": ActivationQuant(dtype=torch.int8, symmetric=False),
    "byte scales": ActivationQuant(group_size=16, num_bits=4, scale_type="e8m0"),
}


@usable("latent_store", n=16, k=16)
@each_dtype
@pytest.mark.parametrize("quant", QUANTS.values(), ids=QUANTS)
def test_latents_are_stored_as_their_linear_reads_them(
    kernel: Kernel, device: str, dtype: torch.dtype, quant: ActivationQuant
) -> None:
    if quant.static_scale is not None:
        quant = replace(quant, static_scale=quant.static_scale.to(device))
    latent = Latent(0, 48, 8, 4, False)
    first = randn(7, 24 + 56, device=device, dtype=dtype)
    norm = RowNorm(randn(48, device=device, dtype=dtype, seed=1), LATENT_EPS)
    tables = cos_sin(Rope(theta=100.0), 8, torch.arange(7, device=device), dtype)
    rows = torch.arange(7, device=device)
    pages = PagedLatents.empty(DENSE_FORMATS[dtype], 1, 16, 56, torch.device(device))
    where = *tables, rows, rows, pages
    kernel.fn(first[:, :24], first[:, 24:], norm, *where, latent=latent, head_dim=24, quant=quant)
    normed = rms_norm(first[:, 24:72], norm.weight, norm.eps)
    stored, _ = pages.gather(rows[:1] * 0, 48, dtype)
    expected = quantize(normed, quant).dequantize(dtype)
    assert not torch.equal(expected, normed)
    if kernel.name == "reference":
        assert torch.equal(stored[:7], expected)
    else:  # another order of the sum of squares, and now and then another code
        assert ((stored[:7] - expected).abs() > TOLERANCE[dtype] * 4).float().mean() < 0.03
        assert (stored[:7] - normed).abs().max() < 0.8 * normed.abs().max()


@usable("latent_heads", n=16, k=16)
@each_dtype
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "rope_dim", "value_dim"), [(5, 24, 8, 14), (3, 6, 2, 6), (3, 6, 0, 6)]
)
def test_keys_share_what_rotates_and_zeros_fill_values(
    kernel: Kernel,
    device: str,
    dtype: torch.dtype,
    num_heads: int,
    head_dim: int,
    rope_dim: int,
    value_dim: int,
) -> None:
    still_dim = head_dim - rope_dim
    kv = randn(37, num_heads, still_dim + value_dim, device=device, dtype=dtype)
    rotated = randn(37, 12 + rope_dim, device=device, dtype=dtype, seed=2)[:, 12:]
    latent = Latent(0, 12, rope_dim, value_dim, True)
    whole = torch.full((2, num_heads, 50, head_dim), 7.0, device=device, dtype=dtype)
    k, v = whole[:, :, 5:42]
    kernel.fn(kv.flatten(1), rotated, k, v, latent=latent, head_dim=head_dim)
    assert (whole[:, :, :5] == 7).all()
    assert (whole[:, :, 42:] == 7).all()
    assert torch.equal(k[..., :still_dim], kv[..., :still_dim].transpose(0, 1))
    assert torch.equal(k[..., still_dim:], rotated.expand(num_heads, -1, -1))
    assert torch.equal(v[..., :value_dim], kv[..., still_dim:].transpose(0, 1))
    assert not v[..., value_dim:].any()


@pytest.mark.skipif(not INTERPRETED and "cuda" not in DEVICES, reason="needs the interpreter or a GPU")
def test_chunks_of_every_size_add_up_and_programs_may_have_several() -> None:
    from compress.kernels.latent_attention.paged import Config, attend

    device, rank, lens = DEVICES[-1], 32, (2120, 300, 16)
    pages = filled(DENSE_FORMATS[torch.float32], rank, 8, num_blocks=399, block_size=16, device=device)
    table_RB = torch.randperm(399, generator=torch.Generator().manual_seed(3)).view(3, 133).to(device)
    absorbed = randn(3, 3, rank, device=device, dtype=torch.float32)
    rotated = randn(3, 3, 8, device=device, dtype=torch.float32, seed=1)

    def attended(programs: int) -> Tensor:
        config = Config(chunk=16, tile=16, programs=programs)
        lens_R = torch.tensor(lens, device=device)
        return attend(absorbed, rotated, pages, table_RB, lens_R, q_len=1, scale=0.1, config=config)

    actual = attended(999)
    for idx, length in enumerate(lens):
        keys = torch.cat(pages.gather(table_RB[idx], rank, torch.float64), dim=1)[:length]
        queries = torch.cat((absorbed[idx], rotated[idx]), dim=1).double()
        expected = (queries @ keys.T * 0.1).softmax(dim=-1) @ keys[:, :rank]
        torch.testing.assert_close(actual[idx].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(attended(12), actual)


def test_chunks_follow_one_another_for_any_number_of_positions() -> None:
    pytest.importorskip("triton")
    from compress.kernels.latent_attention.paged import num_chunks

    starts = [0, *(64 * each for each in range(1, 16)), *range(1024, 8192, 128), *range(8192, 9999, 256)]
    for positions in (1, 64, 65, 1023, 1024, 1025, 1152, 8192, 8193, 9999):
        assert num_chunks(positions, 64) == sum(start < positions for start in starts)

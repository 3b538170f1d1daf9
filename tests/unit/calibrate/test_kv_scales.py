"""Static scales of a KV cache: where they come from, what is said of them, and who serves by them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.kv import CacheError, cache_warning
from compress.calibrate.layer_state import Row
from compress.calibrate.sequential import Compression, run_sequential
from compress.context import Context
from compress.errors import UsageError
from compress.kernels.operands.paged import PagedKV
from compress.models.attention import FullAttention
from compress.models.canonical import layer_name, load_weights
from compress.models.weights import WeightSource, build_decoder
from compress.quant.kv import KV_CACHES, KV_SCALES
from compress.quant.scheme import SCHEMES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.stages.quantize.layers import quantization_passes
from compress.stages.quantize.spec import Quantize
from tests.support.stored_layers import WithStoredLayers
from tests.support.tiny_decoder import LLAMA, QWEN3, tiny_arch, tiny_source, tiny_tokens

CPU = torch.device("cpu")
W4 = Quantize.model_validate({"scheme": "W4A16_G32", "round": {"kind": "rtn"}})
WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "dtype": "bfloat16",
}


def quantized(source: WeightSource, out: Path, *, true_sequential: bool = False) -> list[Row]:
    out.mkdir(parents=True, exist_ok=True)
    tokens = tiny_tokens(source.arch, 5, 24)
    passes = quantization_passes(W4, SCHEMES["W4A16_G32"], torch.bfloat16)
    scheme = SCHEMES["W4A16_G32"]
    ctx = Context("cpu", 0, out)
    return run_sequential(
        source,
        tokens,
        Compression(passes, scheme=scheme, kv_scales=True, true_sequential=true_sequential),
        out,
        ctx,
        compute_dtype=torch.float32,
    )


class Listening:
    """Attention that remembers the largest key and value of each layer."""

    def __init__(self) -> None:
        self.largest: dict[tuple[int, str], float] = {}
        self._full = FullAttention()

    def __call__(
        self, layer_idx: int, q_BSHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, *, window: int | None
    ) -> Tensor:
        self.largest.update(
            {(layer_idx, "k"): float(k_BSKC.abs().max()), (layer_idx, "v"): float(v_BSKC.abs().max())}
        )
        return self._full(layer_idx, q_BSHC, k_BSKC, v_BSKC, window=window)


@pytest.mark.parametrize("true_sequential", [False, True])
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_a_scale_is_the_range_of_what_attention_is_given_behind_quantized_linears(
    config: dict[str, Any], true_sequential: bool, tmp_path: Path
) -> None:
    source = tiny_source(tiny_arch(config, **WIDTHS))
    rows = quantized(source, tmp_path, true_sequential=true_sequential)
    listening = Listening()
    dense = Listening()
    stored = WithStoredLayers(source, tmp_path, SCHEMES["W4A16_G32"])
    for of, attention in ((stored, listening), (source, dense)):
        build_decoder(of, dtype=torch.float32, device=CPU)(
            tiny_tokens(source.arch, 5, 24), attention=attention
        )
    for idx in range(2):
        layer = load_weights(tmp_path / layer_name(idx), SCHEMES["W4A16_G32"])
        for name, scale_name in KV_SCALES.items():
            scale = layer[scale_name]
            assert isinstance(scale, Tensor)
            assert (scale.dtype, scale.shape) == (torch.float32, ())
            assert scale == scale.to(torch.bfloat16)  # in which some consumers keep it
            assert float(scale) == pytest.approx(listening.largest[idx, name] / 448, rel=2**-8)
            (row,) = [row for row in rows if row.get("cache") == name and row["layer"] == idx]
            assert row["amax"] == pytest.approx(listening.largest[idx, name], rel=1e-4)
            assert row["scale"] == float(scale)
            assert row["saturated_frac"] == 0
            assert 0.01 < row["error"] < 0.05
    moved = [abs(listening.largest[key] / dense.largest[key] - 1) for key in dense.largest]
    assert max(moved) > 2**-8  # ... and not the range behind dense ones


def test_a_lost_layer_is_made_again_in_the_same_bytes(tmp_path: Path) -> None:
    source = tiny_source(tiny_arch(LLAMA, **WIDTHS))
    rows = quantized(source, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / layer_name(1)).unlink()
    assert quantized(source, tmp_path) == rows
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def pages_error(x_TKC: Tensor, static: bool) -> Tensor:
    """Mean square error of the cache's own rounding over the mean square, [K, C] in float64: keys written and
    read again.
    """
    num_tokens, num_heads, head_dim = x_TKC.shape
    codes = torch.zeros(num_heads, 1, num_tokens, head_dim, dtype=torch.float8_e4m3fn)
    scales = [torch.ones(()) if static else torch.zeros(num_heads, 1, num_tokens) for _ in "kv"]
    pages = PagedKV(codes, codes.clone(), *scales)
    pages.write_(torch.arange(num_tokens), x_TKC, x_TKC)
    read_KTC, _ = pages.gather(torch.zeros(1, dtype=torch.int64), num_tokens, torch.float32)
    written_KTC = x_TKC.transpose(0, 1).double()
    return (read_KTC.double() - written_KTC).square().mean(1) / written_KTC.square().mean(1)


def test_the_stated_error_is_that_of_the_caches_own_rounding() -> None:
    x_TKC = (
        torch.randn(200, 3, 8, generator=torch.Generator().manual_seed(0))
        * torch.tensor([100.0, 1.0, 2**-8])[:, None]
    )
    x_TKC[7, 0, 0] = 900.0  # cut
    x_TKC[9, 2, 1] = 2**-11  # becomes zero, whatever is near
    x_TKC[9, 0, 1] = 0.0  # was zero
    stat = CacheError(3)
    rest = CacheError(3)
    stat.update(x_TKC[:120].flatten(1))
    rest.update(x_TKC[120:].flatten(1))
    stat.merge(rest)
    facts = stat.facts()
    assert facts["error"] == pytest.approx(float(pages_error(x_TKC, True).mean(-1).sqrt().max()), rel=1e-4)
    assert facts["worst_head"] == 2
    assert facts["error_token_head"] == pytest.approx(
        float(pages_error(x_TKC, False).mean(-1).sqrt().max()), rel=1e-4
    )
    assert facts["saturated_frac"] == pytest.approx(float((x_TKC.abs() > 464).float().mean()))
    assert facts["flushed_frac"] == pytest.approx(
        float(((x_TKC.abs() <= 2**-10) & (x_TKC != 0)).float().mean())
    )


def test_the_error_does_not_change_with_scales_that_the_model_does_not_feel() -> None:
    """A channel times a power of two, in range; and a lost head beside a large one, which the error of the
    whole tensor does not show.
    """
    x_TD = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))
    lost_TD = x_TD * 2.0**-11
    one = torch.ones(16)
    one[3] = 2.0**6

    def error(x_TD: Tensor) -> float:
        stat = CacheError(2)
        stat.update(x_TD)
        return float(stat.facts()["error"])

    assert error(x_TD * one) == pytest.approx(error(x_TD), rel=1e-2)
    beside_outliers = torch.cat((x_TD[:, :8] * 100, lost_TD[:, 8:]), dim=1)
    rounded = beside_outliers.to(torch.float8_e4m3fn).float()
    assert float((rounded - beside_outliers).norm() / beside_outliers.norm()) < 0.03
    assert error(beside_outliers) > 0.5


def row(layer: int, cache: str, error: float, own: float = 0.026) -> Row:
    return {"layer": layer, "cache": cache, "error": error, "error_token_head": own, "worst_head": 5}


def test_a_warning_names_the_layers_and_the_format_that_holds_them() -> None:
    healthy = [row(0, "k", 0.027), row(0, "v", 0.09)]
    assert cache_warning(healthy) is None
    warning = cache_warning([*healthy, row(2, "k", 0.3), row(1, "k", 0.7), row(2, "v", 0.2)])
    assert warning is not None
    for words in (
        "keys of layer 1, 2 and the values of layer 2",
        "head 5 of layer 1",
        "error of 0.7",
        "kv_cache: fp8_token_head",
    ):
        assert words in warning
    helpless = cache_warning([row(1, "v", 0.9, own=0.8)])
    assert helpless is not None
    assert "fp8_token_head" not in helpless
    assert "16 bits" in helpless


def test_the_name_of_a_cache_is_checked_and_without_one_nothing_is_said() -> None:
    assert "kv_cache" not in Quantize().model_dump(mode="json")
    for name, kv_format in KV_CACHES.items():
        spec = Quantize.model_validate({"kv_cache": name})
        assert spec.kv_format() == kv_format
        assert spec.model_dump(mode="json")["kv_cache"] == name
    with pytest.raises(ValueError, match=r"unknown KV cache 'fp4'.*fp8"):
        Quantize.model_validate({"kv_cache": "fp4"})


def test_the_engine_serves_the_cache_that_its_model_states_unless_told_otherwise(tmp_path: Path) -> None:
    source = tiny_source(tiny_arch(LLAMA, **WIDTHS))
    quantized(source, tmp_path)
    stored = WithStoredLayers(source, tmp_path, SCHEMES["W4A16_G32"])
    tokens = tiny_tokens(source.arch, 2, 24, seed=9).to(torch.int64)

    def engine(of: WeightSource, kv_format: str | None = None) -> Engine:
        return Engine(of, device=CPU, config=EngineConfig(max_model_len=32, kv_format=kv_format))

    dense = engine(stored, "DENSE")
    assert dense.kv_format == "F32"
    assert engine(stored).kv_format == "FP8_STATIC"
    assert engine(source).kv_format == "F32"
    assert engine(stored, "INT8_TOKEN_HEAD").kv_format == "INT8_TOKEN_HEAD"
    with pytest.raises(UsageError, match="kv_cache: fp8"):
        engine(source, "FP8_STATIC")

    class Rounding:
        """Full attention over keys and values rounded by the stored scales: the oracle."""

        def __call__(
            self, layer_idx: int, q_BSHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, *, window: int | None
        ) -> Tensor:
            layer = stored.layer(layer_idx)
            k, v = (
                (x.double() / float(layer[name])).float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
                * layer[name]  # type: ignore[arg-type, operator]
                for x, name in ((k_BSKC, "attn.k_scale"), (v_BSKC, "attn.v_scale"))
            )
            return FullAttention()(layer_idx, q_BSHC, k, v, window=window)

    with torch.inference_mode():
        expected = build_decoder(stored, dtype=torch.float32, device=CPU)(tokens, attention=Rounding())
        served = engine(stored).runner.score(tokens)
        unrounded = dense.runner.score(tokens)
    shift = float((expected - unrounded).square().mean().sqrt())
    # Rounding moves logits by `shift`; a tie that float32 decides the other way moves one number of thousands
    # by as much as all of them.
    assert float((served - expected).square().mean().sqrt()) < shift / 10
    assert shift > 1e-3

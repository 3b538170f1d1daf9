"""Static scales of the KV cache of models in which only some layers have attention."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.calibrate.sequential import Compression, run_sequential
from compress.context import Context
from compress.methods.quantize.passes import RoundPass
from compress.methods.quantize.rtn import Rtn
from compress.models.mamba2 import Mamba2
from compress.models.short_conv import ShortConv
from compress.models.weights import build_decoder
from compress.quant.kv import FP8_STATIC, KV_SCALES
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import kv_bytes_per_token
from tests.support.stored_layers import WithStoredLayers
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
SCHEME = ModelScheme(SCHEMES["W8A16"])
MAMBA = Mamba2(4, 2, 16, 12, 4, conv_bias=True)
HALVES = {
    "activation": "relu2",
    "layers": (
        tiny_shape(only_half="ffn", gated=False),
        tiny_shape(only_half="mixer", gated=False, rope=None, recurrence=MAMBA),
        tiny_shape(only_half="mixer", gated=False),
        tiny_shape(only_half="ffn", gated=False),
    ),
}
CONVOLUTION = tiny_shape(recurrence=ShortConv.of(56, 3), rope=None)
CONVOLUTIONS = {"layers": (CONVOLUTION, CONVOLUTION, tiny_shape())}
JOINT = {"layers": (CONVOLUTION, CONVOLUTION, tiny_shape(joint=True, recurrence=MAMBA))}
ATTENDS = 2
"""The layer of both models that has attention."""


@pytest.mark.parametrize("true_sequential", [False, True])
@pytest.mark.parametrize("facts", [HALVES, CONVOLUTIONS, JOINT], ids=["halves", "convolutions", "joint"])
def test_layers_with_attention_alone_have_scales_and_the_cache_is_served_by_them(
    facts: dict[str, Any], true_sequential: bool, tmp_path: Path
) -> None:
    source = tiny_source(**facts)
    tokens_BS = torch.randint(101, (4, 40), generator=torch.Generator().manual_seed(3))
    compression = Compression(
        [RoundPass(Rtn(), SCHEME, torch.float32)],
        scheme=SCHEME,
        kv_scales=True,
        true_sequential=true_sequential,
    )
    ctx = Context("cpu", 0, tmp_path)
    rows = run_sequential(source, tokens_BS, compression, tmp_path, ctx, compute_dtype=torch.float32)
    stored = WithStoredLayers(source, tmp_path, SCHEME)
    having = [idx for idx in range(source.arch.num_layers) if {*KV_SCALES.values()} & {*stored.layer(idx)}]
    assert having == [ATTENDS]
    assert {row["layer"] for row in rows if "cache" in row} == {ATTENDS}

    exact = build_decoder(stored, dtype=torch.float32, device=CPU)(tokens_BS)
    errors = {}
    for kv_format in ("F32", FP8_STATIC):
        engine = Engine(stored, device=CPU, config=EngineConfig(kv_format=kv_format))
        errors[kv_format] = float((engine.runner.score(tokens_BS) - exact).norm() / exact.norm())
    assert errors["F32"] < 1e-5
    assert 1e-4 < errors[FP8_STATIC] < 0.05  # rounded, and by scales that fit
    shape = source.arch.layers[ATTENDS]
    assert kv_bytes_per_token(source.arch, FP8_STATIC) == 2 * shape.num_kv_heads * shape.head_dim

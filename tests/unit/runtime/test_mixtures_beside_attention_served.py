"""Experts beside attention in serving: one norm serves linears that take codes and a router that does not."""

import pytest
import torch

from compress.models.experts import Experts
from compress.models.random_source import RandomSource
from compress.models.weights import Dense, build_decoder
from compress.quant.scheme import SCHEMES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
AVERAGED = Experts(4, 4, 128, score="softmax_topk", scale=0.5, shared_size=128, shared_scale=0.5)
"""All experts are chosen, so that rounded inputs choose no others."""


@pytest.mark.parametrize(
    ("scheme", "most"), [("W4A16_G128", 1e-5), ("INT8_DYNAMIC", 0.03), ("FP8_DYNAMIC", 0.1)]
)
def test_experts_in_codes_compute_what_their_dequantized_weights_do(scheme: str, most: float) -> None:
    """Weights alone in codes change no product; inputs of seven bits, and of three behind the first, do."""
    layer = tiny_shape(head_dim=32, num_heads=8, experts=AVERAGED)
    arch = tiny_source(hidden_size=256, layers=(layer, layer), block="parallel", norm="layer").arch
    source = RandomSource(arch, device=CPU, dtype=torch.float32, scheme=SCHEMES[scheme])
    tokens_BS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))
    engine = Engine(source, device=CPU, config=EngineConfig(max_model_len=64))
    with torch.inference_mode():
        found = engine.runner.score(tokens_BS)
        expected = build_decoder(Dense(source), dtype=torch.float32, device=CPU)(tokens_BS)
    assert torch.linalg.vector_norm(found - expected) <= most * torch.linalg.vector_norm(expected)

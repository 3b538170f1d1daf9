"""The serving forward computes what the canonical decoder computes, for every feature of an architecture."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.models.arch import Rope
from compress.models.weights import MemorySource, build_decoder
from compress.quant.numerics import grouped, min_max_scale, round_to_nearest
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
FEATURES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "one query head a kv head": {"layers": (tiny_shape(num_kv_heads=4),)},
    "one kv head": {"layers": (tiny_shape(num_kv_heads=1),)},
    "tied head": {"tied_head": True},
    "qkv bias": {"qkv_bias": True},
    "all biases": {"qkv_bias": True, "o_bias": True, "ffn_bias": True},
    "normed heads": {"qk_norm": True},
    "gelu": {"activation": "gelu_pytorch_tanh"},
    "window shorter than a block": {"layers": (tiny_shape(window=5), tiny_shape())},
    "window longer than a chunk": {"layers": (tiny_shape(window=131), tiny_shape(window=40))},
    "widths differ by layer": {
        "layers": (
            tiny_shape(num_heads=6, num_kv_heads=3, intermediate_size=40),
            tiny_shape(head_dim=24, num_kv_heads=1),
        )
    },
    "rope linear": {"layers": (tiny_shape(rope=Rope(10000.0, "linear", factor=4.0)),)},
    "rope llama3": {
        "layers": (tiny_shape(rope=Rope(500000.0, "llama3", factor=8.0, original_max_position=64)),)
    },
    "rope yarn": {
        "layers": (
            tiny_shape(
                rope=Rope(10000.0, "yarn", factor=4.0, original_max_position=64, attention_factor=1.1386)
            ),
        )
    },
    "rope differs by layer": {"layers": (tiny_shape(), tiny_shape(rope=Rope(1000000.0)))},
}


def tolerance(expected: Tensor, source: MemorySource) -> float:
    """c eps sqrt(K) absmax: K sums the depth of all products in a row's way through the model."""
    arch = source.arch
    depth = sum(
        2 * arch.hidden_size + layer.num_heads * layer.head_dim + layer.intermediate_size
        for layer in arch.layers
    )
    return 8 * torch.finfo(torch.float32).eps * depth**0.5 * float(expected.abs().max())


def served_logits(
    engine: Engine, prompts: list[tuple[int, ...]], num_tokens: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Per request: the sequence that was fed, and the logits [num_tokens, V] its tokens were chosen from."""
    rows: dict[int, list[Tensor]] = {idx: [] for idx in range(len(prompts))}

    def record(requests: Any, positions: Any, logits_RV: Tensor) -> None:
        for row, request in zip(logits_RV, requests, strict=True):
            rows[request.params.seed].append(row.clone())

    engine.observer = record
    params = [SamplingParams(num_tokens, seed=idx, ignore_eos=True) for idx in range(len(prompts))]
    done = engine.generate([Request(str(idx), prompt, params[idx]) for idx, prompt in enumerate(prompts)])
    return [torch.tensor(each.prompt + each.tokens[:-1]) for each in done], [
        torch.stack(each) for each in rows.values()
    ]


def prompts(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(101, (length,), generator=generator).tolist()) for length in lengths]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("max_step_tokens", [512, 23], ids=["whole", "chunked"])
def test_served_logits_are_the_decoders(feature: str, max_step_tokens: int) -> None:
    source = tiny_source(**FEATURES[feature])
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    engine = Engine(source, device=CPU, config=EngineConfig(max_step_tokens=max_step_tokens))
    sequences, served = served_logits(engine, prompts((1, 37, 130)), num_tokens=7)
    for sequence, logits in zip(sequences, served, strict=True):
        expected = decoder(sequence.unsqueeze(0))[0, -logits.shape[0] :]
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance(expected, source))


@pytest.mark.parametrize("feature", FEATURES)
def test_scored_logits_are_the_decoders(feature: str) -> None:
    source = tiny_source(**FEATURES[feature])
    tokens_BS = torch.tensor(prompts((140, 140, 140)))
    expected = build_decoder(source, dtype=torch.float32, device=CPU)(tokens_BS)
    scored = Engine(source, device=CPU).runner.score(tokens_BS)
    assert scored.dtype == torch.float32
    torch.testing.assert_close(scored, expected, rtol=0, atol=tolerance(expected, source))


class Quantized:
    """A source whose linears are quantized, `ffn.up` and `attn.k` at another width, so that fused projections
    fall into parts.
    """

    def __init__(self, source: MemorySource) -> None:
        self._source = source
        self.arch = source.arch
        self.kv_format = source.kv_format

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return {name: self._quantize(name, weight) for name, weight in self._source.layer(layer_idx).items()}

    def _quantize(self, name: str, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        assert isinstance(weight, Tensor)
        if weight.dim() == 1:
            return weight
        scheme = (
            Scheme("W8A16", 8, True, None)
            if name in ("ffn.up.weight", "attn.k.weight")
            else Scheme("W4A16_G128_ASYM", 4, False, 8)
        )
        return round_to_nearest(
            weight, scheme, *min_max_scale(grouped(weight, scheme), scheme, torch.float32)
        )


def test_quantized_linears_are_served_as_their_dequantized_weights() -> None:
    plain = tiny_source(qkv_bias=True)
    source = Quantized(plain)
    tokens_BS = torch.tensor(prompts((40, 40)))
    expected = build_decoder(source, dtype=torch.float32, device=CPU)(tokens_BS)
    engine = Engine(source, device=CPU)
    torch.testing.assert_close(
        engine.runner.score(tokens_BS), expected, rtol=0, atol=tolerance(expected, plain)
    )
    rows = [row for row in engine.kernel_report() if row["layer"] == 0 and row["phase"] == "decode"]
    assert [(row["linear"], row["scheme"]) for row in rows] == [
        ("attn.q", "W4A16_G128_ASYM"),
        ("attn.k", "W8A16"),
        ("attn.v", "W4A16_G128_ASYM"),
        ("attn.o", "W4A16_G128_ASYM"),
        ("ffn.gate", "W4A16_G128_ASYM"),
        ("ffn.up", "W8A16"),
        ("ffn.down", "W4A16_G128_ASYM"),
    ]
    assert all("dequantized" in row["kernel"] for row in rows)

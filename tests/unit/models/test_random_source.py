"""Random weights stand for real ones: the shapes and schemes asked for, the deviation of a trained layer, the
same every time.
"""

import pytest
import torch

from compress.errors import UsageError
from compress.models.random_source import RandomSource, random_weight
from compress.models.weights import build_decoder, dense, parameter_names
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from tests.support.tiny_decoder import LLAMA, QWEN3, tiny_arch

CPU = torch.device("cpu")
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
UNTIED = {**LLAMA, **WIDE, "tie_word_embeddings": False}


def source(scheme: str | None, *, head: str | None = None, seed: int = 0) -> RandomSource:
    schemes = [None if name is None else SCHEMES[name] for name in (scheme, head)]
    return RandomSource(
        tiny_arch(UNTIED),
        device=CPU,
        dtype=torch.bfloat16,
        scheme=schemes[0],
        head_scheme=schemes[1],
        seed=seed,
    )


@pytest.mark.parametrize("config", [QWEN3, LLAMA], ids=["qwen3", "llama"])
def test_every_parameter_of_the_shape_is_there(config: dict[str, object]) -> None:
    arch = tiny_arch(config)
    random = RandomSource(arch, device=CPU, dtype=torch.float32)
    (outer, layers) = parameter_names(arch)
    assert {name: tuple(value.shape) for name, value in random.outer().items()} == outer
    for idx, shapes in enumerate(layers):
        assert {name: tuple(value.shape) for name, value in random.layer(idx).items()} == shapes
    logits = build_decoder(random, dtype=torch.float32, device=CPU)(torch.tensor([[1, 2, 3]]))
    assert bool(logits.isfinite().all())
    assert 0.1 < float(logits.std()) < 10


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
def test_codes_fill_their_range_and_weights_keep_the_deviation_of_dense_ones(scheme: Scheme) -> None:
    weight = random_weight(
        (256, 1024), scheme, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)
    )
    assert isinstance(weight, QuantizedWeight)
    codes = weight.codes_OI.to(torch.float32)
    assert weight.codes_OI.dtype == scheme.code_dtype
    assert (float(codes.min()), float(codes.max())) == (scheme.min_code, scheme.max_code)
    assert weight.scale_OG.shape == (scheme.num_scale_rows(256), scheme.num_groups(1024))
    assert (weight.zero_point_OG is None) == scheme.symmetric
    assert (weight.input_scale is None) == (scheme.activation != "tensor")
    std = float(weight.dequantize(torch.float32).std())
    assert 0.95 < std * 1024**0.5 < 1.25


def test_only_linears_have_the_scheme_and_the_head_its_own() -> None:
    random = source("W4A16_G128", head="FP8_DYNAMIC")
    quantized = {name for name, value in random.layer(0).items() if isinstance(value, QuantizedWeight)}
    assert quantized == {f"{name}.weight" for name in random.arch.layers[0].linears}
    outer = random.outer()
    assert isinstance(outer["embed.weight"], torch.Tensor)
    head = outer["head.weight"]
    assert isinstance(head, QuantizedWeight)
    assert head.scheme.name == "FP8_DYNAMIC"


def test_a_layer_is_the_same_again_and_differs_from_other_layers_and_seeds() -> None:
    first = dense(source("W4A16_G128").layer(1)["ffn.up.weight"])
    assert torch.equal(dense(source("W4A16_G128").layer(1)["ffn.up.weight"]), first)
    assert not torch.equal(dense(source("W4A16_G128").layer(0)["ffn.up.weight"]), first)
    assert not torch.equal(dense(source("W4A16_G128", seed=1).layer(1)["ffn.up.weight"]), first)


def test_a_tied_head_stays_dense() -> None:
    with pytest.raises(UsageError, match="its embedding"):
        RandomSource(
            tiny_arch(LLAMA, tie_word_embeddings=True),
            device=CPU,
            dtype=torch.bfloat16,
            head_scheme=SCHEMES["FP8_DYNAMIC"],
        )

"""AWQ: the Gram loss is the replayed loss, the search never loses to doing nothing, and folding a scale keeps
the function of a layer.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.stats import AbsMean, InputStats, SecondMoment
from compress.methods.quantize.awq import Awq, rounding_loss
from compress.models.attention import FullAttention
from compress.models.decoder import DecoderLayer
from compress.models.smoothing_pair import SmoothingPair
from compress.models.surgery import fold_
from compress.quant.scheme import Scheme
from tests.support.tiny_decoder import LLAMA, QWEN3, tiny_arch, tiny_decoder

SIZE = 64
SCHEMES = {
    "sym": Scheme("sym", 4, symmetric=True, group_size=16),
    "asym": Scheme("asym", 4, symmetric=False, group_size=16),
    "channel": Scheme("channel", 8, symmetric=True, group_size=None),
}


def inputs(seed: int = 0) -> Tensor:
    """A few features are much larger than the rest, as AWQ assumes."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(1.5 * torch.randn(SIZE, generator=generator))
    return torch.randn(300, SIZE, generator=generator) * spread


def weights(out_features: int = 12, seed: int = 1) -> Tensor:
    return 0.05 * torch.randn(out_features, SIZE, generator=torch.Generator().manual_seed(seed))


def statistics(x_TI: Tensor) -> InputStats:
    stats = InputStats(SecondMoment(), AbsMean())
    for stat in stats:
        stat.update(x_TI)
    return stats


def moment(stats: InputStats) -> Tensor:
    return stats[SecondMoment].mean()


def fake_quantized(w_OI: Tensor, scheme: Scheme) -> Tensor:
    """Round to nearest, written anew. Codes are chosen in float32: the largest weight of a symmetric group is
    a tie by construction.
    """
    w_OGN = w_OI.view(w_OI.shape[0], -1, scheme.group_size or w_OI.shape[1])
    steps = 2**scheme.num_bits - 1
    if scheme.symmetric:
        scale = w_OGN.abs().amax(-1, keepdim=True) * 2 / steps
        zero = torch.zeros_like(scale)
    else:
        low = w_OGN.amin(-1, keepdim=True).clamp(max=0)
        high = w_OGN.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / steps
        zero = torch.round(scheme.min_code - low / scale)
    codes = (torch.round(w_OGN / scale) + zero).clamp(scheme.min_code, scheme.max_code)
    return ((codes - zero).double() * scale.double()).view(w_OI.shape)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_the_loss_is_that_of_replayed_linears(scheme: Scheme) -> None:
    x_TI = inputs()
    w_OI = weights()
    for seed in range(3):
        scale_I = torch.exp(torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)))
        outputs_TO = x_TI.double() @ w_OI.double().t()
        replayed_TO = (x_TI.double() / scale_I) @ fake_quantized(w_OI * scale_I, scheme).t()
        replayed = float((replayed_TO - outputs_TO).square().sum() / x_TI.shape[0])
        loss = rounding_loss(w_OI, scale_I, moment(statistics(x_TI)), scheme, torch.float32)
        assert loss == pytest.approx(replayed, rel=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_the_scale_found_is_never_worse_than_none(scheme: Scheme) -> None:
    for seed in range(4):
        stats = statistics(inputs(seed))
        w_OI = weights(seed=seed + 10)
        scale_I = Awq().scale(w_OI, stats, scheme, scale_dtype=torch.bfloat16, head_repeat=(1, 0))
        assert scale_I.shape == (SIZE,)
        assert bool((scale_I > 0).all())
        h_II = moment(stats)
        found = rounding_loss(w_OI, scale_I, h_II, scheme, torch.bfloat16)
        assert found <= rounding_loss(w_OI, torch.ones(SIZE), h_II, scheme, torch.bfloat16)


def test_large_inputs_are_protected() -> None:
    x_TI = inputs()
    stats = statistics(x_TI)
    scale_I = Awq().scale(weights(), stats, SCHEMES["sym"], scale_dtype=torch.bfloat16, head_repeat=(1, 0))
    h_II = moment(stats)
    plain = rounding_loss(weights(), torch.ones(SIZE), h_II, SCHEMES["sym"], torch.bfloat16)
    assert rounding_loss(weights(), scale_I, h_II, SCHEMES["sym"], torch.bfloat16) < 0.8 * plain
    loudest = x_TI.abs().mean(0).argmax()
    quietest = x_TI.abs().mean(0).argmin()
    assert scale_I[loudest] > scale_I[quietest]


def test_linears_that_share_an_input_are_searched_together() -> None:
    """The loss of the stack is the sum of the losses, so the scale minimises the sum over the candidates."""
    stats = statistics(inputs())
    h_II = moment(stats)
    scale_I = torch.rand(SIZE, generator=torch.Generator().manual_seed(2)) + 0.5
    one = weights(5, seed=3)
    two = 10 * weights(9, seed=4)
    parts = sum(rounding_loss(each, scale_I, h_II, SCHEMES["sym"], torch.bfloat16) for each in (one, two))
    assert rounding_loss(
        torch.cat((one, two)), scale_I, h_II, SCHEMES["sym"], torch.bfloat16
    ) == pytest.approx(parts, rel=1e-4)


@pytest.mark.parametrize(("repeat", "head_dim"), [(2, 8), (4, 4), (8, 8)])
def test_columns_that_read_one_channel_get_one_scale(repeat: int, head_dim: int) -> None:
    scale_I = Awq().scale(
        weights(),
        statistics(inputs()),
        SCHEMES["sym"],
        scale_dtype=torch.bfloat16,
        head_repeat=(repeat, head_dim),
    )
    scale_KRC = scale_I.view(-1, repeat, head_dim)
    assert torch.equal(scale_KRC, scale_KRC[:, :1].expand_as(scale_KRC))
    assert scale_I.unique().numel() > 1


def test_features_that_never_fire_break_nothing() -> None:
    x_TI = inputs()
    x_TI[:, [0, 17, 63]] = 0
    scale_I = Awq().scale(
        weights(), statistics(x_TI), SCHEMES["sym"], scale_dtype=torch.bfloat16, head_repeat=(1, 0)
    )
    assert bool(torch.isfinite(scale_I).all())
    assert bool((scale_I > 0).all())
    silent = Awq().scale(
        weights(),
        statistics(torch.zeros(5, SIZE)),
        SCHEMES["sym"],
        scale_dtype=torch.bfloat16,
        head_repeat=(1, 0),
    )
    assert bool(torch.isfinite(silent).all())


VARIANTS: dict[str, dict[str, Any]] = {
    "gqa-qkv-bias-qk-norm": QWEN3,
    "mha": {**LLAMA, "num_key_value_heads": 4},
    "all-biases": {**LLAMA, "attention_bias": True},
    "mqa-gelu": {**LLAMA, "num_key_value_heads": 1, "hidden_act": "gelu"},
}
PAIRS = range(4)


def random_scale(pair: SmoothingPair, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    if pair.repeat == 1:
        return torch.exp(torch.randn(size, generator=generator))
    scale_KC = torch.exp(torch.randn(size // pair.repeat, generator=generator)).view(-1, 1, pair.head_dim)
    return scale_KC.expand(-1, pair.repeat, pair.head_dim).reshape(-1)


def outputs_and_taps(
    layer: DecoderLayer, weights_of: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """In float64, so that what is left is the folding's own error."""
    layer = layer.double()
    layer.load_state_dict({name: value.double() for name, value in weights_of.items()})
    taps: dict[str, Tensor] = {}
    x_BSD = torch.randn(
        2, 9, layer.attn_norm.weight.numel(), generator=torch.Generator().manual_seed(3)
    ).double()
    return layer(x_BSD, torch.arange(9), FullAttention(), taps.__setitem__), taps


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pair_idx", PAIRS)
def test_folding_a_scale_keeps_the_function_of_the_layer(variant: str, pair_idx: int) -> None:
    layer = tiny_decoder(tiny_arch(VARIANTS[variant])).layers[1]
    assert isinstance(layer, DecoderLayer)
    pair = layer.smoothing_pairs()[pair_idx]
    weights_of = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    before, taps_before = outputs_and_taps(layer, weights_of)
    scale_I = random_scale(pair, weights_of[f"{pair.linears[0]}.weight"].shape[1])
    originals = dict(weights_of)
    folded_I = fold_(weights_of, pair, scale_I, stored_dtype=torch.bfloat16)
    after, taps_after = outputs_and_taps(layer, weights_of)
    eps = torch.finfo(torch.float32).eps
    tolerance = 16 * eps * 48**0.5 * float(before.abs().max())
    assert (after - before).abs().max() < tolerance
    assert torch.allclose(
        taps_after[pair.tap] * folded_I,
        taps_before[pair.tap],
        rtol=1e-4,
        atol=1e-5 * float(taps_before[pair.tap].abs().max()),
    )
    for linear in pair.linears:
        assert torch.equal(weights_of[f"{linear}.weight"], originals[f"{linear}.weight"] * folded_I)
    changed = {name for name in originals if not torch.equal(originals[name], weights_of[name])}
    allowed = {f"{linear}.weight" for linear in pair.linears} | {
        f"{pair.producer}.weight",
        f"{pair.producer}.bias",
    }
    assert changed <= allowed
    assert f"{pair.producer}.weight" in changed


def test_a_folded_norm_is_stored_without_a_second_rounding() -> None:
    """What goes to disk in bf16 is what the columns were fitted to."""
    layer = tiny_decoder(tiny_arch()).layers[0]
    assert isinstance(layer, DecoderLayer)
    pair = layer.smoothing_pairs()[0]
    weights_of = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    fold_(weights_of, pair, random_scale(pair, 32), stored_dtype=torch.bfloat16)
    norm = weights_of[f"{pair.producer}.weight"]
    assert torch.equal(norm.to(torch.bfloat16).to(torch.float32), norm)


def test_a_norm_weight_that_is_zero_survives_folding() -> None:
    layer = tiny_decoder(tiny_arch()).layers[0]
    assert isinstance(layer, DecoderLayer)
    weights_of = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    weights_of["ffn_norm.weight"][4] = 0
    folded_I = fold_(
        weights_of,
        layer.smoothing_pairs()[2],
        random_scale(layer.smoothing_pairs()[2], 32),
        stored_dtype=torch.bfloat16,
    )
    assert bool(torch.isfinite(folded_I).all())
    assert all(bool(torch.isfinite(each).all()) for each in weights_of.values())

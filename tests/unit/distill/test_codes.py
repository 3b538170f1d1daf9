"""Codes and scales in training: the product is that of the artifact that would be written, the gradients are
the straight-through ones, and training brings the model closer to its source.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from compress.context import Context
from compress.data.tokens import TokenSet
from compress.distill.codes import TOWARDS_SOURCE, CodesLinear, Levels, LevelsLora, levels_of
from compress.models.weights import MemorySource, Weights, WeightSource, build_decoder, dense
from compress.models.xielu import PARAMETERS
from compress.quant.kv import KV_SCALES
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.stages.distill.text import TrainingText
from compress.stages.recover.spec import Recover
from compress.stages.recover.training import Recovered, train_codes
from tests.support.tiny_decoder import QWEN3, tiny_arch, tiny_source, tiny_tokens
from tests.unit.models.test_xielu import APERTUS

CPU = torch.device("cpu")
SCHEMES = {
    each.name: each
    for each in (
        Scheme("sym4", 4, symmetric=True, group_size=16),
        Scheme("asym4", 4, symmetric=False, group_size=16),
        Scheme("asym3_channel", 3, symmetric=False, group_size=None),
        Scheme("sym2", 2, symmetric=True, group_size=16),
        Scheme("nvfp4", 4, symmetric=True, group_size=16, type="float", scale_type="e4m3"),
        Scheme("mxfp4", 4, symmetric=True, group_size=16, type="float", scale_type="e8m0"),
        Scheme("w4a8", 4, True, 16, activation="token", activation_type="float"),
        Scheme("int8", 8, symmetric=True, group_size=None, activation="token"),
        Scheme("e4m3", 8, symmetric=True, group_size=None, type="float", activation="token"),
        Scheme("block", 8, True, 16, type="float", activation="group", block_rows=16),
    )
}
SCHEME = Scheme("sym2", 2, symmetric=True, group_size=16)


def _weight(scheme: Scheme, dtype: torch.dtype = torch.bfloat16) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(7)
    w_OI = torch.randn(40, 48, generator=generator) * torch.rand(40, 1, generator=generator)
    return nearest_weight(w_OI, scheme, dtype)


def _linear(weight: QuantizedWeight, *, lora: bool = False, pace: float = 0.5) -> CodesLinear:
    generator = torch.Generator().manual_seed(1)
    levels: Levels | LevelsLora = Levels(weight, device=CPU)
    if lora:
        levels = LevelsLora(weight, rank=3, alpha=6.0, generator=generator, device=CPU)
    return CodesLinear(weight, None, levels=levels, scale_pace=pace, device=CPU)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_the_product_is_that_of_the_artifact_before_and_after_a_step(scheme: Scheme, lora: bool) -> None:
    weight = _weight(scheme)
    linear = _linear(weight, lora=lora)
    identity = torch.eye(48)
    linear.input_quant = None
    assert torch.equal(linear(identity).t(), weight.dequantize().float())
    start = linear.quantized(weight)
    assert torch.equal(start.codes_OI.float(), weight.codes_OI.float())
    assert torch.equal(start.scale_OG, weight.scale_OG)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.add_(0.7 * torch.randn(parameter.shape, generator=generator))
    trained = linear.quantized(weight)
    moved = (trained.codes_OI.float() != weight.codes_OI.float()).float().mean()
    assert moved > 0.01
    assert trained.codes_OI.float().max() <= scheme.max_code
    assert trained.codes_OI.float().min() >= scheme.min_code
    assert trained.codes_OI.dtype == weight.codes_OI.dtype
    if scheme.scale_type is None and not bool((linear.scale() <= 0).any()):
        assert torch.equal(linear(identity).t(), trained.dequantize().float())
        assert not torch.equal(trained.scale_OG, weight.scale_OG)
    if scheme.scale_type is not None:
        assert torch.equal(linear(identity).t(), trained.dequantize().float())
        assert torch.equal(trained.scale_OG, weight.scale_OG)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_levels_start_towards_the_source_without_a_changed_code(scheme: Scheme) -> None:
    generator = torch.Generator().manual_seed(8)
    w_OI = torch.randn(40, 48, generator=generator)
    weight = nearest_weight(w_OI, scheme, torch.float32)
    linear = _linear(weight)
    linear.start_towards_(w_OI)
    assert isinstance(linear.levels, Levels)
    latent_OI = linear.levels.latent_OI.detach()
    assert torch.equal(linear.quantized(weight).codes_OI.float(), weight.codes_OI.float())
    scale_OG = scheme.by_row(weight.scale_OG.float(), 40)
    steps_OI = w_OI / scale_OG.repeat_interleave(48 // scale_OG.shape[1], dim=1)
    levels_OI = levels_of(weight).float()
    offset_OI = (steps_OI - levels_OI).clamp(-0.5, 0.5)
    moved_OI = latent_OI != levels_OI
    if scheme.type == "float" and scheme.num_bits == 8:
        assert not moved_OI.any(), "codes of e4m3 are up to 32 steps apart"
        return
    assert moved_OI.float().mean() > 0.5
    found_OI = (latent_OI - levels_OI)[moved_OI]
    assert torch.allclose(found_OI, TOWARDS_SOURCE * offset_OI[moved_OI], rtol=1e-3, atol=1e-4)
    foreign = _linear(weight)
    foreign.start_towards_(w_OI * torch.linspace(0.2, 3, 48))
    assert isinstance(foreign.levels, Levels)
    assert scheme.num_bits == 2 or torch.equal(foreign.levels.latent_OI, levels_OI)
    linear.start_towards_(torch.full_like(w_OI, torch.inf))
    assert torch.equal(linear.levels.latent_OI, latent_OI)


def _expected_gradients(
    weight: QuantizedWeight, linear: CodesLinear, x: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by levels and by scales, of plain torch operations with the rounding left out of them."""
    levels_OI = levels_of(weight).float().requires_grad_(True)
    scale_OG = weight.scheme.by_row(weight.scale_OG.float(), weight.shape[0])
    members = weight.shape[1] // scale_OG.shape[1]
    scale_OI = scale_OG.repeat_interleave(members, dim=1).requires_grad_(True)
    (F.linear(x, levels_OI * scale_OI) * target).sum().backward()
    assert levels_OI.grad is not None
    assert scale_OI.grad is not None
    by_scale_OG = scale_OI.grad.view(*scale_OG.shape, -1).sum(-1)
    rows = weight.scale_OG.shape[0]
    padded = F.pad(by_scale_OG, (0, 0, 0, rows * weight.scheme.block_rows - len(by_scale_OG)))
    by_scale_RG = padded.view(rows, weight.scheme.block_rows, -1).sum(1)
    return levels_OI.grad / weight.scale_OG.float().mean(), by_scale_RG * linear.scale_pace * weight.scale_OG


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_gradients_pass_straight_through_the_rounding(scheme: Scheme) -> None:
    weight = _weight(scheme, torch.float32)
    linear = _linear(weight)
    linear.input_quant = None
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(6, 48, generator=generator)
    target = torch.randn(6, 40, generator=generator)
    by_levels_OI, by_scale_RG = _expected_gradients(weight, linear, x, target)
    (linear(x) * target).sum().backward()
    assert isinstance(linear.levels, Levels)
    found = linear.levels.latent_OI.grad
    assert found is not None
    assert torch.allclose(found, by_levels_OI, rtol=1e-4, atol=1e-5)
    if scheme.scale_type is None:
        assert linear.change is not None
        assert linear.change.grad is not None
        by_change_RG = linear.change.grad.view(by_scale_RG.shape)
        assert torch.allclose(by_change_RG, by_scale_RG, rtol=1e-3, atol=1e-4)
    else:
        assert linear.change is None


def test_gradients_of_a_low_rank_term_are_those_of_a_term_of_the_weights() -> None:
    """Up to the mean scale, in which the term is measured."""
    weight = _weight(SCHEMES["asym4"], torch.float32)
    linear = _linear(weight, lora=True, pace=0.0)
    assert linear.change is None, "a pace of zero leaves scales as they are"
    assert isinstance(linear.levels, LevelsLora)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, 48, generator=generator)
    target = torch.randn(6, 40, generator=generator)
    (linear(x) * target).sum().backward()
    by_weights_OI = target.t() @ x
    expected_OK = 2.0 * by_weights_OI @ linear.levels.a_KI.detach().t()
    assert linear.levels.b_OK.grad is not None
    assert torch.allclose(linear.levels.b_OK.grad, expected_OK, rtol=1e-4, atol=1e-4)


def test_levels_beyond_the_range_are_led_back_and_never_further_out() -> None:
    weight = _weight(SCHEME)
    linear = _linear(weight)
    assert isinstance(linear.levels, Levels)
    with torch.no_grad():
        linear.levels.latent_OI.fill_(3.0)
        linear.levels.latent_OI[:20] = -4.0
    linear(torch.ones(1, 48)).sum().backward()
    grad_OI = linear.levels.latent_OI.grad
    assert grad_OI is not None
    assert bool((grad_OI[:20] == 0).all()), "descent would lower what is below the least code"
    assert bool((grad_OI[20:] > 0).all())


def test_inputs_are_rounded_with_the_gradient_of_the_identity() -> None:
    weight = _weight(SCHEMES["int8"], torch.float32)
    linear = _linear(weight)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(6)).requires_grad_(True)
    y = linear(x)
    y.sum().backward()
    step = x.detach().abs().amax(-1, keepdim=True) / 127
    rounded = (x.detach() / step).round() * step
    assert torch.allclose(y, rounded @ weight.dequantize().t(), atol=1e-4)
    assert x.grad is not None
    assert torch.allclose(x.grad, weight.dequantize().sum(0).expand(3, -1), atol=1e-4)


class RoundedSource:
    """A source whose linears are rounded to nearest."""

    kv_format = None

    def __init__(self, source: MemorySource, scheme: Scheme) -> None:
        self.arch = source.arch
        self._source = source
        self._scheme = scheme

    def outer(self) -> dict[str, torch.Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, torch.Tensor | QuantizedWeight]:
        weights = self._source.layer(layer_idx)
        for name in self.arch.layers[layer_idx].linears:
            dense_OI = dense(weights[f"{name}.weight"], torch.float32)
            weights[f"{name}.weight"] = nearest_weight(dense_OI, self._scheme, torch.float32)
        return weights


SPEC = {
    "tokens": 1200,
    "seq_len": 20,
    "batch_size": 4,
    "micro_batch_size": 2,
    "lr": 0.15,
    "scale_lr": 0.01,
    "eval_samples": 4,
    "eval_every": 6,
    "compute_dtype": "float32",
}


def _train(source: WeightSource, quantized: WeightSource, scratch: Path, **changes: object) -> Recovered:
    spec = Recover.model_validate({**SPEC, **changes})
    tokens_NS = tiny_tokens(source.arch, spec.num_windows + 4, 21)
    text = TrainingText(TokenSet(tokens_NS[4:], 0, 0, {}), tokens_NS[:4], 400)
    return train_codes(spec, source, quantized, text, Context("cpu", 0, scratch), digest="sha256:0")


def _held_out_kl(source: WeightSource, outer: Weights, layers: Sequence[Weights]) -> float:
    """KL on windows that are not trained on, of a decoder with these weights dequantized."""
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    student = copy.deepcopy(decoder)
    student.norm.weight.data.copy_(dense(outer["norm.weight"], torch.float32))
    for idx, weights in enumerate(layers):
        for name, value in weights.items():
            if name not in KV_SCALES.values():
                student.layers[idx].get_parameter(name).data.copy_(dense(value, torch.float32))
    tokens = tiny_tokens(source.arch, 4, 21)[:, :-1].to(torch.int64)
    log_p, log_q = (each(tokens).log_softmax(-1) for each in (decoder, student))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 4}, "lr": 0.15}, {"optimizer": "muon", "lr": 0.5}])
@pytest.mark.one_in(8)
def test_trained_codes_keep_more_of_the_source(tmp_path: Path, changes: dict[str, object]) -> None:
    source = tiny_source(tiny_arch(QWEN3))
    quantized = RoundedSource(source, SCHEME)
    recovered = _train(source, quantized, tmp_path, **changes)
    before = [quantized.layer(idx) for idx in range(source.arch.num_layers)]
    after = [recovered.layer(idx) for idx in range(source.arch.num_layers)]
    assert recovered.keeps
    measured = (
        _held_out_kl(source, quantized.outer(), before),
        _held_out_kl(source, recovered.outer(), after),
    )
    assert measured[0] == pytest.approx(recovered.measured[0]["kl"], rel=1e-3)
    assert measured[1] == pytest.approx(recovered.measured[-1]["kl"], rel=1e-3)
    assert measured[1] < 0.9 * measured[0]
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        for name, value in new.items():
            first = old[name]
            if isinstance(value, QuantizedWeight) and isinstance(first, QuantizedWeight):
                assert value.codes_OI.dtype == first.codes_OI.dtype
                assert not torch.equal(value.codes_OI, first.codes_OI)
                assert not torch.equal(value.scale_OG, first.scale_OG)
            else:
                assert isinstance(first, torch.Tensor)
                assert isinstance(value, torch.Tensor)
                assert value.dtype == first.dtype
                assert torch.equal(value, first) != name.endswith("norm.weight"), name
    assert not torch.equal(dense(recovered.outer()["norm.weight"]), dense(source.outer()["norm.weight"]))


@pytest.mark.parametrize("scale_lr", [0.01, 0.0])
def test_learned_parameters_of_activations_are_trained_at_the_rate_of_scales(
    scale_lr: float, tmp_path: Path
) -> None:
    source = tiny_source(tiny_arch(APERTUS))
    quantized = RoundedSource(source, SCHEME)
    recovered = _train(source, quantized, tmp_path, scale_lr=scale_lr)
    assert recovered.keeps
    after = [recovered.layer(idx) for idx in range(source.arch.num_layers)]
    found = _held_out_kl(source, recovered.outer(), after)
    assert found == pytest.approx(recovered.measured[-1]["kl"], rel=1e-3)
    for idx, weights in enumerate(after):
        before = quantized.layer(idx)
        assert weights.keys() == before.keys()
        for name in PARAMETERS:
            old, new = (dense(each[f"ffn.{name}"]) for each in (before, weights))
            assert old.shape == new.shape
            assert torch.equal(old, new) == (scale_lr == 0 or name in ("beta", "eps"))
            assert float((old - new).abs().max()) < 20 * scale_lr + 1e-9


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    source = tiny_source(tiny_arch(QWEN3))
    quantized = RoundedSource(source, replace(SCHEME, symmetric=False))
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    runs = [_train(source, quantized, place, tokens=480) for place in places]
    assert runs[0].curve == runs[1].curve
    states = [dict(run.student.named_parameters()) for run in runs]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_codes_that_training_makes_worse_are_not_kept(tmp_path: Path) -> None:
    """The source is the rounded model itself, so training can only lead away from it."""
    source = tiny_source(tiny_arch(QWEN3))
    quantized = RoundedSource(source, SCHEME)
    decoder = copy.deepcopy(build_decoder(source, dtype=torch.float32, device=CPU))
    for idx, layer in enumerate(decoder.layers):
        for name, value in quantized.layer(idx).items():
            layer.get_parameter(name).data.copy_(dense(value, torch.float32))
    itself = MemorySource(decoder, dtype=torch.float32)
    recovered = _train(itself, quantized, tmp_path, tokens=480, lr=0.5)
    assert recovered.measured[0]["kl"] < 1e-6
    assert not recovered.keeps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_compiled_linear_has_the_gradients_of_the_eager_one(
    dtype: torch.dtype, stored: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nearest_weight(torch.randn(12, 32, generator=generator), SCHEME, stored)
    x = torch.randn(5, 32, generator=generator).to(dtype)

    def gradients(*, compiled: bool) -> list[torch.Tensor]:
        linear = CodesLinear(weight, None, levels=Levels(weight, device=CPU), scale_pace=0.1, device=CPU)
        call = torch.compile(linear, backend="eager", dynamic=False) if compiled else linear
        call(x).to(torch.float32).square().sum().backward()
        return [parameter.grad for parameter in linear.parameters() if parameter.grad is not None]

    eager, compiled = gradients(compiled=False), gradients(compiled=True)
    assert len(eager) == len(compiled) == 2
    for first, second in zip(eager, compiled, strict=True):
        assert float(first.norm()) > 0
        assert torch.equal(first, second)

"""Scales tuned end to end: the gradients are those of the dequantized weight, codes stay, and what is stored
keeps more of the source.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compress.context import Context
from compress.data.tokens import TokenSet
from compress.distill.scales import TunedLinear
from compress.errors import UsageError
from compress.models.canonical import layer_name, load_weights, save_weights
from compress.models.weights import MemorySource, build_decoder, dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.numerics import grouped, min_max_scale, nearest_weight, round_to_nearest
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.stages.quantize.tune import DIRECTORY, Tune, tune_scales, tuned_directory
from tests.support.tiny_decoder import QWEN3, tiny_arch, tiny_source, tiny_tokens

SCHEMES = {
    "sym": Scheme("sym", 4, symmetric=True, group_size=16),
    "asym": Scheme("asym", 4, symmetric=False, group_size=16),
    "asym8": Scheme("asym8", 8, symmetric=False, group_size=None),
    "e4m3": Scheme("e4m3", 8, symmetric=True, group_size=None, type="float", activation="token"),
}
SCHEME = Scheme("sym3", 3, symmetric=True, group_size=16)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_gradients_of_scales_are_those_of_the_dequantized_weight(scheme: Scheme) -> None:
    generator = torch.Generator().manual_seed(2)
    w_OI = torch.randn(24, 48, generator=generator)
    x = torch.randn(2, 5, 48, generator=generator).requires_grad_(True)
    bias_O = torch.randn(24, generator=generator)
    weight = round_to_nearest(w_OI, scheme, *min_max_scale(grouped(w_OI, scheme), scheme, torch.float32))
    linear = TunedLinear(weight, bias_O, device=torch.device("cpu"))
    scale_OG = weight.scale_OG.clone().requires_grad_(True)
    levels_OGN = grouped(weight.dequantize(torch.float32), scheme) / weight.scale_OG.unsqueeze(-1)
    expected = F.linear(x, (levels_OGN * scale_OG.unsqueeze(-1)).view(24, 48), bias_O)
    found = linear(x)
    assert torch.allclose(found, expected, atol=1e-5)
    target = torch.randn(expected.shape, generator=generator)
    of_expected = torch.autograd.grad((expected * target).sum(), [x, scale_OG])
    of_found = torch.autograd.grad((found * target).sum(), [x, linear.change_OG])
    assert torch.allclose(of_found[0], of_expected[0], atol=1e-4)
    assert torch.allclose(of_found[1], of_expected[1] * weight.scale_OG, rtol=1e-3, atol=1e-4)
    assert torch.equal(linear.tuned(weight).scale_OG, weight.scale_OG)
    assert torch.equal(linear.tuned(weight).codes_OI.view(torch.int8), weight.codes_OI.view(torch.int8))


def _rounded_model(tmp_path: Path) -> tuple[Any, ModelScheme, TokenSet]:
    """A model whose layers are rounded coarsely and stored where the runner would have stored them."""
    source = tiny_source(tiny_arch(QWEN3))
    schemes = ModelScheme(SCHEME)
    for idx in range(source.arch.num_layers):
        weights = dict(source.layer(idx))
        for name in source.arch.layers[idx].linears:
            weights[f"{name}.weight"] = nearest_weight(
                dense(weights[f"{name}.weight"]).float(), SCHEME, torch.float32
            )
        save_weights(tmp_path / layer_name(idx), weights)
    tokens_NS = tiny_tokens(source.arch, 24, 20)
    return source, schemes, TokenSet(tokens_NS, tokens_NS.numel(), tokens_NS.numel(), {})


def test_tuned_scales_keep_more_of_the_source(tmp_path: Path) -> None:
    source, schemes, tokens = _rounded_model(tmp_path)
    facts = tune_scales(
        Tune(epochs=6, lr=0.01),
        source,
        schemes,
        tokens,
        Context("cpu", 0, tmp_path),
        compute_dtype=torch.float32,
    )
    assert facts["kept"]
    assert facts["kl_after"] < 0.9 * facts["kl_before"]
    place = tuned_directory(tmp_path, {"tuning": facts})
    assert place == tmp_path / DIRECTORY
    decoder = build_decoder(source, dtype=torch.float32, device=torch.device("cpu"))
    losses = {}
    held_out_NS = tokens.tokens_NS[::8, :-1].to(torch.int64)
    for directory in (tmp_path, place):
        student = copy.deepcopy(decoder)
        for idx in range(source.arch.num_layers):
            before = load_weights(tmp_path / layer_name(idx), schemes, prefix=f"layers.{idx}.")
            weights = load_weights(directory / layer_name(idx), schemes, prefix=f"layers.{idx}.")
            assert weights.keys() == before.keys()
            for name, weight in weights.items():
                first = before[name]
                if isinstance(weight, QuantizedWeight) and isinstance(first, QuantizedWeight):
                    assert torch.equal(weight.codes_OI, first.codes_OI)
                    student.layers[idx].get_parameter(name).data.copy_(weight.dequantize(torch.float32))
        log_p, log_q = (each(held_out_NS).log_softmax(-1) for each in (decoder, student))
        losses[directory] = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    assert losses[place] == pytest.approx(facts["kl_after"], rel=0.02)
    assert losses[tmp_path] == pytest.approx(facts["kl_before"], rel=1e-3)


def test_scales_of_a_model_that_lost_nothing_are_not_changed(tmp_path: Path) -> None:
    """The source is the rounded model itself, so training can only lead away from it."""
    source, schemes, tokens = _rounded_model(tmp_path)
    rounded = build_decoder(source, dtype=torch.float32, device=torch.device("cpu"))
    rounded = copy.deepcopy(rounded)
    for idx, layer in enumerate(rounded.layers):
        for name, weight in load_weights(
            tmp_path / layer_name(idx), schemes, prefix=f"layers.{idx}."
        ).items():
            layer.get_parameter(name).data.copy_(dense(weight, torch.float32))
    itself = MemorySource(rounded, dtype=torch.float32)
    facts = tune_scales(
        Tune(epochs=1, lr=0.1),
        itself,
        schemes,
        tokens,
        Context("cpu", 0, tmp_path),
        compute_dtype=torch.float32,
    )
    assert facts["kl_before"] < 1e-6
    assert not facts["kept"]
    assert not (tmp_path / DIRECTORY).exists()
    assert tuned_directory(tmp_path, {"tuning": facts}) == tmp_path


def test_tuning_on_too_few_samples_is_refused(tmp_path: Path) -> None:
    source, schemes, tokens = _rounded_model(tmp_path)
    few = TokenSet(tokens.tokens_NS[:4], 80, 80, {})
    with pytest.raises(UsageError, match="at least 4 calibration samples"):
        tune_scales(Tune(), source, schemes, few, Context("cpu", 0, tmp_path), compute_dtype=torch.float32)

"""Gradients found layer by layer are those of the whole graph, and the sensitivities made of them foretell
what rounding really costs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor

from compress.calibrate.gradients import visit_gradients
from compress.calibrate.stats import InputStats, Stat
from compress.context import Context
from compress.errors import UsageError
from compress.kernels.operands.rows import activation_quant, quantize
from compress.models.decoder import Decoder, DecoderLayer
from compress.models.linear_groups import LinearGroup
from compress.models.weights import WeightSource, build_decoder
from compress.quant.block_inputs import global_scale_of_inputs
from compress.quant.numerics import choose_scale, round_to_nearest, whole_blocks
from compress.quant.scheme import SCHEMES, Scheme
from compress.stages.budget.sensitivity import Sensitivities
from tests.support.slow import slow
from tests.support.tiny_decoder import LLAMA, QWEN3, tiny_arch, tiny_source, tiny_tokens

NUM_SAMPLES = 6
SEQ_LEN = 24
SCHEMES_TRIED = [
    SCHEMES[name]
    for name in ("W8A16", "FP8_DYNAMIC", "FP8_STATIC", "INT8_DYNAMIC", "INT8_STATIC_ASYM", "W4A16_CHANNEL")
]


class Recorder:
    """Keeps inputs and gradients: (layer, linear) -> [sample -> tensor]."""

    def __init__(self) -> None:
        self.inputs: dict[tuple[int, str], list[Tensor]] = {}
        self.gradients: dict[tuple[int, str], list[Tensor]] = {}
        self.order: list[int] = []

    def needs(self) -> tuple[type[Stat], ...]:
        return ()

    def start_layer(self, layer: DecoderLayer, stats: Mapping[str, InputStats]) -> None:
        self.order.append(layer.layer_idx)

    def add_sample(
        self, layer: DecoderLayer, group: LinearGroup, x_TI: Tensor, gradients: Mapping[str, Tensor]
    ) -> None:
        assert tuple(gradients) == group.linears
        for linear, g_TO in gradients.items():
            self.inputs.setdefault((layer.layer_idx, linear), []).append(x_TI)
            self.gradients.setdefault((layer.layer_idx, linear), []).append(g_TO.clone())


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_gradients_layer_by_layer_are_those_of_the_whole_graph(
    config: dict[str, Any], tmp_path: Path
) -> None:
    source = tiny_source(tiny_arch(config))
    tokens_NS = tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)
    ctx = Context("cpu", 3, tmp_path)
    found = Recorder()
    draws_NS = torch.rand(tokens_NS.shape, generator=ctx.rng("labels"))
    visit_gradients(source, tokens_NS, found, ctx, compute_dtype=torch.float32, draws_NS=draws_NS)
    assert found.order == list(reversed(range(source.arch.num_layers)))
    decoder = build_decoder(source, dtype=torch.float32, device=torch.device("cpu"))
    linears = {
        (idx, name): decoder.layers[idx].linear(name)  # type: ignore[operator]
        for idx, name in found.gradients
    }
    for sample, tokens_S in enumerate(tokens_NS.to(torch.int64)):
        outputs: dict[tuple[int, str], Tensor] = {}
        hooks = [
            linear.register_forward_hook(
                lambda module, args, out, key=key, outputs=outputs: outputs.__setitem__(key, out)
            )
            for key, linear in linears.items()
        ]
        x_1SD = decoder.embed(tokens_S.unsqueeze(0)).requires_grad_(True)
        logits_SV = _logits(decoder, x_1SD)[0]
        for hook in hooks:
            hook.remove()
        cumulative_SV = logits_SV.detach().softmax(-1).cumsum(-1)
        labels_S = (cumulative_SV < draws_NS[sample].unsqueeze(1) * cumulative_SV[:, -1:]).sum(-1)
        loss = F.cross_entropy(logits_SV, labels_S, reduction="sum")
        expected = torch.autograd.grad(loss, list(outputs.values()))
        for key, gradient in zip(outputs, expected, strict=True):
            scale = float(gradient.abs().max())
            assert torch.allclose(found.gradients[key][sample], gradient[0], atol=2e-5 * scale, rtol=1e-4), (
                key
            )


def _draws(tokens_NS: Tensor) -> Tensor:
    return torch.rand(tokens_NS.shape, generator=torch.Generator().manual_seed(8))


def _logits(decoder: Decoder, x_BSD: Tensor) -> Tensor:
    from compress.models.attention import FullAttention

    positions = torch.arange(x_BSD.shape[1])
    for layer in decoder.layers:
        x_BSD = layer(x_BSD, positions, FullAttention())
    return decoder.head(decoder.norm(x_BSD))


def test_labels_follow_the_predictions(tmp_path: Path) -> None:
    """The mean over labels of a gradient of log p is zero: what is left is noise of the draws, which falls
    with their number.
    """
    source = tiny_source(tiny_arch(LLAMA))
    tokens_NS = tiny_tokens(source.arch, 1, SEQ_LEN).expand(200, -1)
    found = Recorder()
    visit_gradients(
        source,
        tokens_NS,
        found,
        Context("cpu", 0, tmp_path),
        compute_dtype=torch.float32,
        draws_NS=_draws(tokens_NS),
    )
    for gradients in found.gradients.values():
        g_NTO = torch.stack(gradients)
        noise = g_NTO.std(dim=0).square().sum().sqrt() / len(g_NTO) ** 0.5
        assert g_NTO.mean(dim=0).square().sum().sqrt() < 1.5 * noise


def rounded_input(x: Tensor, scheme: Scheme, largest: Tensor) -> Tensor:
    if scheme.activation is None:
        return x
    if scheme.scale_type is not None:
        found = global_scale_of_inputs(largest) if scheme.has_input_global_scale else None
        quant = activation_quant(scheme, global_scale=found)
        return quantize(x.flatten(0, -2), quant).dequantize(torch.float32).view_as(x)
    if scheme.activation == "group":
        parts = x.unflatten(-1, (-1, scheme.group_size))
        return rounded_input(parts, SCHEMES["FP8_DYNAMIC"], largest).flatten(-2)
    absmax = x.abs().amax(-1, keepdim=True) if scheme.activation == "token" else largest
    if scheme.type == "int":
        return (x / (absmax / 127)).round() * (absmax / 127)
    return (x / (absmax / 448)).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * (absmax / 448)


def measured_kl(
    source: WeightSource, tokens_NS: Tensor, group: tuple[int, tuple[str, ...]], scheme: Scheme
) -> float:
    """KL a token of the model with one group rounded, by the whole forward."""
    decoder = build_decoder(source, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        before = decoder(tokens_NS.to(torch.int64)).log_softmax(-1)
        layer_idx, names = group
        seen: list[Tensor] = []
        linears = [decoder.layers[layer_idx].linear(name) for name in names]  # type: ignore[operator]
        hook = linears[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        decoder(tokens_NS.to(torch.int64))
        hook.remove()
        x_TI = torch.cat(seen).flatten(0, 1)
        for linear in linears:
            padded = whole_blocks(linear.weight, scheme)
            scales = choose_scale(
                padded, scheme, torch.float32, choice="hessian", h_II=x_TI.t() @ x_TI / len(x_TI)
            )
            linear.weight = torch.nn.Parameter(
                round_to_nearest(padded, scheme, *scales).dequantize()[: len(linear.weight)]
            )
            linear.register_forward_pre_hook(
                lambda module, args: (rounded_input(args[0], scheme, x_TI.abs().max()),)
            )
        after = decoder(tokens_NS.to(torch.int64)).log_softmax(-1)
    return float((before.exp() * (before - after)).sum(-1).mean())


WIDE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize(
    ("changes", "schemes"),
    [
        slow({}, SCHEMES_TRIED),
        (WIDE, [SCHEMES[each] for each in ("FP8_BLOCK", "W4A16_G128", "NVFP4_W4A4", "MXFP8")]),
    ],
)
@pytest.mark.slow
def test_sensitivities_foretell_the_kl_of_rounding_one_group_at_a_time(
    changes: dict[str, int], schemes: list[Scheme], tmp_path: Path
) -> None:
    source = tiny_source(tiny_arch(LLAMA, **changes))
    tokens_NS = tiny_tokens(source.arch, 24, SEQ_LEN)
    visitor = Sensitivities(schemes, torch.float32)
    visit_gradients(
        source,
        tokens_NS,
        visitor,
        Context("cpu", 0, tmp_path),
        compute_dtype=torch.float32,
        draws_NS=_draws(tokens_NS),
    )
    layer = source.arch.layers[0]
    pairs = []
    for (layer_idx, tap), losses in visitor.loss.items():
        (names,) = (group.linears for group in layer.groups if group.tap == tap)
        pairs += [
            (losses[scheme.name], measured_kl(source, tokens_NS, (layer_idx, names), scheme))
            for scheme in schemes
        ]
    predicted, measured = (torch.tensor(each, dtype=torch.float64) for each in zip(*pairs, strict=True))
    assert len(pairs) == source.arch.num_layers * 4 * len(schemes)
    assert spearmanr(predicted, measured).statistic > 0.97
    error = (predicted / measured).log()
    assert abs(float(error.mean())) < 0.3
    assert float(error.std()) < 0.4


def test_a_model_without_finite_logits_is_refused(tmp_path: Path) -> None:
    source = tiny_source(tiny_arch(LLAMA))
    outer = source.outer() | {"norm.weight": torch.full((source.arch.hidden_size,), torch.inf)}

    class Damaged:
        arch = source.arch
        layer = source.layer

        def outer(self) -> Any:
            return outer

    tokens_NS = tiny_tokens(source.arch, 1, 4)
    ctx = Context("cpu", 0, tmp_path)
    with pytest.raises(UsageError, match="not finite"):
        visit_gradients(
            Damaged(), tokens_NS, Recorder(), ctx, compute_dtype=torch.float32, draws_NS=_draws(tokens_NS)
        )

"""Gradients found layer by layer where tokens have embeddings for each layer and layers read the keys and
values of earlier ones: they are those of the whole graph, and what readers want of shared keys and values
reaches the layer that makes them.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.calibrate.gradients import visit_gradients
from compress.calibrate.stats import InputStats, SecondMoment, Stat
from compress.context import Context
from compress.models.attention import FullAttention
from compress.models.decoder import Decoder, DecoderLayer
from compress.models.linear_groups import LinearGroup
from compress.models.weights import WeightSource, build_decoder
from tests.support.tiny_decoder import tiny_tokens
from tests.support.tiny_source import LIKE_GEMMA4_E, tiny_source

NUM_SAMPLES = 3
SEQ_LEN = 17
LAYERS = LIKE_GEMMA4_E["layers"]
Gradients = dict[tuple[int, str], list[Tensor]]
"""(layer, linear) -> the gradient [T, O] at its output for each sample."""


@pytest.fixture(scope="module")
def source() -> WeightSource:
    return tiny_source(**LIKE_GEMMA4_E)


class Recorder:
    """Keeps inputs, gradients and moments, and the order of the layers."""

    def __init__(self, *kinds: type[Stat]) -> None:
        self.kinds = kinds
        self.inputs: Gradients = {}
        self.gradients: Gradients = {}
        self.moments: dict[tuple[int, str], Tensor] = {}
        self.order: list[int] = []

    def needs(self) -> tuple[type[Stat], ...]:
        return self.kinds

    def start_layer(self, layer: DecoderLayer, stats: Mapping[str, InputStats]) -> None:
        self.order.append(layer.layer_idx)
        for tap, each in stats.items():
            self.moments[layer.layer_idx, tap] = each[SecondMoment].mean()

    def add_sample(
        self, layer: DecoderLayer, group: LinearGroup, x_TI: Tensor, gradients: Mapping[str, Tensor]
    ) -> None:
        assert tuple(gradients) == group.linears
        assert self.order[-1] == layer.layer_idx
        for linear, g_TO in gradients.items():
            self.inputs.setdefault((layer.layer_idx, linear), []).append(x_TI.clone())
            self.gradients.setdefault((layer.layer_idx, linear), []).append(g_TO.clone())


def visited(
    source: WeightSource, scratch: Path, *kinds: type[Stat], counted_NS: Tensor | None = None
) -> Recorder:
    found = Recorder(*kinds)
    visit_gradients(
        source,
        tokens_of(source),
        found,
        Context("cpu", 0, scratch),
        compute_dtype=torch.float32,
        draws_NS=draws_of(source),
        counted_NS=counted_NS,
    )
    return found


def tokens_of(source: WeightSource) -> Tensor:
    return tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)


def draws_of(source: WeightSource) -> Tensor:
    return torch.rand(tokens_of(source).shape, generator=torch.Generator().manual_seed(8))


class Apart(FullAttention):
    """Readers get keys and values that no gradient passes through."""

    def __call__(self, layer_idx: int, *args: Tensor | None, **facts: object) -> Tensor:  # type: ignore[override]
        out: Tensor = super().__call__(layer_idx, *args, **facts)  # type: ignore[arg-type]
        if layer_idx in self.kept:
            k_BSKC, v_BSKC = self.kept[layer_idx]
            self.kept[layer_idx] = k_BSKC.detach(), v_BSKC.detach()
        return out


def of_whole_graph(
    source: WeightSource, attention: type[FullAttention] = FullAttention, counted_NS: Tensor | None = None
) -> tuple[Gradients, Gradients]:
    """The inputs of the linears and the gradients at their outputs, through the whole decoder."""
    decoder = build_decoder(source, dtype=torch.float32, device=torch.device("cpu")).requires_grad_(True)
    linears = linears_of(decoder)
    inputs: Gradients = {key: [] for key in linears}
    gradients: Gradients = {key: [] for key in linears}
    for sample, (tokens_S, draws_S) in enumerate(zip(tokens_of(source), draws_of(source), strict=True)):
        outputs: dict[tuple[int, str], Tensor] = {}

        def keep(module: object, args: tuple[Tensor], out: Tensor, key: tuple[int, str]) -> None:
            inputs[key].append(args[0][0].detach())
            outputs[key] = out  # noqa: B023

        hooks = [
            linear.register_forward_hook(lambda module, args, out, key=key: keep(module, args, out, key))
            for key, linear in linears.items()
        ]
        logits_SV = decoder(tokens_S.long().unsqueeze(0), attention=attention())[0]
        for hook in hooks:
            hook.remove()
        below_SV = logits_SV.detach().softmax(-1).cumsum(-1)
        labels_S = (below_SV < draws_S.unsqueeze(1) * below_SV[:, -1:]).sum(-1)
        losses_S = F.cross_entropy(logits_SV, labels_S, reduction="none")
        if counted_NS is not None:
            losses_S = losses_S[:-1][counted_NS[sample, 1:]]
        found = torch.autograd.grad(losses_S.sum(), [outputs[key] for key in linears], allow_unused=True)
        for key, gradient in zip(linears, found, strict=True):
            gradients[key].append(torch.zeros_like(outputs[key][0]) if gradient is None else gradient[0])
    return inputs, gradients


OF_NO_SCHEME = (
    *("layer_embed.", "altup.", "laurel.", "attn_hyper.", "ffn_hyper.", "ngrams."),
    *("delta.beta", "delta.decay"),
)


def linears_of(decoder: Decoder) -> dict[tuple[int, str], torch.nn.Module]:
    """All linears of all layers but those of the embeddings for layers and of the residual, found by their
    type."""
    return {
        (idx, name): module
        for idx, layer in enumerate(decoder.layers)
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.startswith(OF_NO_SCHEME)
    }


def assert_same(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for key, of_samples in expected.items():
        for x_TF, expected_TF in zip(found[key], of_samples, strict=True):
            scale = float(expected_TF.abs().max())
            assert torch.allclose(x_TF, expected_TF, atol=2e-5 * scale, rtol=1e-4), key


@pytest.mark.parametrize("kinds", [(), (SecondMoment,)], ids=["gradients", "with_moments"])
def test_gradients_layer_by_layer_are_those_of_the_whole_graph(
    kinds: tuple[type[Stat], ...], source: WeightSource, tmp_path: Path
) -> None:
    found = visited(source, tmp_path, *kinds)
    inputs, gradients = of_whole_graph(source)
    assert found.order == list(reversed(range(len(LAYERS))))
    assert list(dict.fromkeys(idx for idx, _ in found.gradients)) == found.order
    assert_same(found.gradients, gradients)
    assert_same(found.inputs, inputs)


def test_readers_have_no_gradients_of_keys_and_values(source: WeightSource, tmp_path: Path) -> None:
    found = visited(source, tmp_path)
    for linear in ("attn.k", "attn.v"):
        assert {idx for idx, name in found.gradients if name == linear} == {0, 1}
    assert {idx for idx, name in found.gradients if name == "attn.q"} == set(range(len(LAYERS)))


def test_what_readers_want_of_shared_keys_and_values_is_a_large_part_of_their_gradients(
    source: WeightSource, tmp_path: Path
) -> None:
    found = visited(source, tmp_path).gradients
    without = of_whole_graph(source, Apart)[1]
    for idx in (0, 1):
        for linear in ("attn.k", "attn.v"):
            of_all, of_own = (torch.cat(each[idx, linear]) for each in (found, without))
            assert float((of_all - of_own).norm() / of_all.norm()) > 0.1, (idx, linear)


def test_only_predictions_that_count_have_gradients(source: WeightSource, tmp_path: Path) -> None:
    counted_NS = torch.rand(tokens_of(source).shape, generator=torch.Generator().manual_seed(4)) < 0.5
    found = visited(source, tmp_path, counted_NS=counted_NS)
    assert_same(found.gradients, of_whole_graph(source, counted_NS=counted_NS)[1])


def test_statistics_that_a_visitor_needs_are_those_of_the_whole_decoder(
    source: WeightSource, tmp_path: Path
) -> None:
    found = visited(source, tmp_path, SecondMoment)
    inputs = of_whole_graph(source)[0]
    for idx, layer in enumerate(LAYERS):
        for group in layer.groups:
            x_TI = torch.cat(inputs[idx, group.linears[0]])
            expected = x_TI.t() @ x_TI / len(x_TI)
            moment = found.moments[idx, group.tap]
            assert torch.allclose(moment, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))

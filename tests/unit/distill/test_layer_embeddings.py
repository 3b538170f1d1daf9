"""Students, teachers and drafts of models whose tokens have embeddings for each layer and whose layers read
the keys and values of earlier ones: what is trained computes the decoder, and what would cut layers or heads
out of it is refused with the reason.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.distill.draft_head import Target
from compress.distill.objective import checkpoint_layers_
from compress.distill.quantized_student import outer_decoder, quantized_student
from compress.distill.scales import TunedLinear
from compress.distill.student import Shape, student_arch
from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.eagle3 import eagle3_facts
from compress.models.fresh_eagle3 import fresh_eagle3
from compress.models.weights import WeightSource, build_decoder, dense
from compress.quant.numerics import grouped, min_max_scale, round_to_nearest
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.stages.draft.inits.pruned import Pruned
from compress.stages.prune.spec import Prune
from tests.support.tiny_decoder import tiny_tokens
from tests.support.tiny_source import LIKE_GEMMA4_E, tiny_shape, tiny_source

CPU = torch.device("cpu")
SCHEME = Scheme("W3", 3, symmetric=True, group_size=None)


class Rounded:
    """A source whose linears are codes."""

    kv_format: str | None = None

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.arch = source.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        weights = self._source.layer(layer_idx)
        for linear in self.arch.layers[layer_idx].linears:
            w_OI = dense(weights[f"{linear}.weight"])
            scales = min_max_scale(grouped(w_OI, SCHEME), SCHEME, torch.float32)
            weights[f"{linear}.weight"] = round_to_nearest(w_OI, SCHEME, *scales)
        return weights


@pytest.fixture(scope="module", params=[False, True], ids=["own_head", "tied_head"])
def source(request: pytest.FixtureRequest) -> WeightSource:
    return tiny_source(**LIKE_GEMMA4_E, tied_head=request.param)


def tokens_of(source: WeightSource) -> Tensor:
    return tiny_tokens(source.arch, 4, 17).long()


def decoder_of(source: WeightSource) -> Decoder:
    return build_decoder(source, dtype=torch.float32, device=CPU)


def tuned(weight: QuantizedWeight, bias_O: Tensor | None) -> nn.Module:
    return TunedLinear(weight, bias_O, device=CPU)


def student_of(source: WeightSource, make_linear: Callable[..., nn.Module | None]) -> Decoder:
    outer = outer_decoder(source, dtype=torch.float32, device=CPU)
    return quantized_student(outer, source.layer, make_linear, dtype=torch.float32, device=CPU)


def all_trained(source: WeightSource) -> Decoder:
    return decoder_of(source).requires_grad_(True)


def scales_trained(source: WeightSource) -> Decoder:
    return student_of(Rounded(source), tuned)


@pytest.mark.parametrize("make", [all_trained, scales_trained])
def test_layers_that_run_again_give_the_same_gradients(
    make: Callable[[WeightSource], Decoder], source: WeightSource
) -> None:
    tokens_BS = tokens_of(source)
    gradients = []
    for again in (False, True):
        decoder = make(source)
        if again:
            checkpoint_layers_(decoder)
        runs = [0] * len(LIKE_GEMMA4_E["layers"])

        def count(module: nn.Module, args: Any, idx: int, runs: list[int] = runs) -> None:
            runs[idx] += 1

        for idx, layer in enumerate(decoder.layers):
            layer.get_submodule("attn.q").register_forward_pre_hook(
                lambda module, args, idx=idx, count=count: count(module, args, idx)
            )
        logits_BSV = decoder(tokens_BS[:, :-1])
        F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, 1:].flatten()).backward()
        assert runs == [2 if again else 1] * len(LIKE_GEMMA4_E["layers"])
        trained = {name: each for name, each in decoder.named_parameters() if each.requires_grad}
        gradients.append({name: each.grad for name, each in trained.items()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        assert gradient is not None, name
        assert other is not None, name
        assert float(gradient.abs().max()) > 0, name
        assert torch.allclose(gradient, other, rtol=1e-5, atol=1e-7), name


def test_a_student_of_dense_layers_computes_the_decoder(source: WeightSource) -> None:
    student = student_of(source, lambda weight, bias: pytest.fail("no linear is quantized"))
    tokens_BS = tokens_of(source)
    assert torch.equal(student(tokens_BS), decoder_of(source)(tokens_BS))
    assert not any(each.requires_grad for each in student.parameters())


@pytest.mark.parametrize("make_linear", [tuned, lambda weight, bias: None], ids=["trained", "as_it_is"])
def test_a_student_of_quantized_layers_computes_the_dequantized_decoder(
    make_linear: Callable[..., nn.Module | None], source: WeightSource
) -> None:
    made = []

    def make(weight: QuantizedWeight, bias_O: Tensor | None) -> nn.Module | None:
        made.append(weight)
        return make_linear(weight, bias_O)

    rounded = Rounded(source)
    student = student_of(rounded, make)
    tokens_BS = tokens_of(source)
    torch.testing.assert_close(student(tokens_BS), decoder_of(rounded)(tokens_BS), rtol=1e-4, atol=1e-4)
    assert len(made) == sum(len(layer.linears) for layer in LIKE_GEMMA4_E["layers"]) == 7 * 2 + 5 * 3


def test_an_outer_decoder_has_all_that_is_outside_of_the_layers(source: WeightSource) -> None:
    outer = outer_decoder(source, dtype=torch.float32, device=CPU)
    stored = source.outer()
    assert {f"layer_embeds.{name}.weight" for name in ("table", "proj", "norm")} < stored.keys()
    for name, value in stored.items():
        assert torch.equal(outer.get_parameter(name), dense(value)), name
    assert (outer.head.weight is outer.embed.weight) == source.arch.tied_head
    assert all(each.is_meta for each in outer.layers.parameters())


def test_features_of_a_target_are_the_hidden_states_of_the_decoder(source: WeightSource) -> None:
    decoder = decoder_of(source)
    tokens_BS = tokens_of(source)
    states: list[Tensor] = []
    for layer in decoder.layers:
        layer.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    decoder.norm.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    hidden_BSD = decoder.hidden(tokens_BS)
    assert len(states) == len(LIKE_GEMMA4_E["layers"]) + 1
    layer_ids = (0, 2, 3, 5)
    target = Target(decoder_of(source), layer_ids, torch.arange(50), device=CPU)
    embedded_BSD, features_BSE, final_BSD = target.features(tokens_BS)
    assert torch.equal(embedded_BSD, decoder.embed.weight[tokens_BS])
    assert torch.equal(features_BSE, torch.cat([states[depth] for depth in layer_ids], dim=-1))
    assert torch.equal(final_BSD, hidden_BSD)


@pytest.mark.parametrize("num_layers", [3, 4, 5])
def test_a_fresh_head_takes_the_keys_and_values_that_the_last_layer_reads(num_layers: int) -> None:
    source = tiny_source(**{**LIKE_GEMMA4_E, "layers": LIKE_GEMMA4_E["layers"][:num_layers]})
    facts = eagle3_facts(source.arch, draft_vocab_size=50)
    assert (facts.arch.layers[0].kv_source, facts.arch.layer_embed_size) == (None, 0)
    head = fresh_eagle3(facts, source, torch.arange(50), generator=torch.Generator().manual_seed(1))
    shape = LIKE_GEMMA4_E["layers"][num_layers - 1]
    assert shape.kv_source is not None
    last, read = source.layer(num_layers - 1), source.layer(shape.kv_source)
    size = source.arch.hidden_size
    for linear in ("attn.k", "attn.v"):
        weight = head.get_parameter(f"layers.0.{linear}.weight")
        assert torch.equal(weight[:, size:], dense(read[f"{linear}.weight"]))
    for name in ("attn.q", "attn.o", "ffn.gate", "ffn.up", "ffn.down", "ffn_norm"):
        weight = head.get_parameter(f"layers.0.{name}.weight")
        expected = dense(last[f"{name}.weight"])
        assert torch.equal(weight[..., -expected.shape[-1] :], expected), name
    assert torch.equal(head.get_parameter("layers.0.hidden_norm.weight"), dense(last["attn_norm.weight"]))


SHARED = r"layers of this llama model read keys and values, or latents, of earlier ones\."
EMBEDDED = r"tokens of this llama model have embeddings for each of its layers\."
HEADS = r"layers of this llama model share keys and values, so their heads go together\."
SHARES = {"layers": (tiny_shape(), tiny_shape(), tiny_shape(kv_source=1))}
EMBEDS = {"layers": (tiny_shape(),) * 3, "block": "sandwich", "layer_embed_size": 8}
each_kind = pytest.mark.parametrize(
    ("facts", "reason"),
    [(SHARES, SHARED), (EMBEDS, EMBEDDED), ({**EMBEDS, **SHARES}, SHARED)],
    ids=["shared", "embedded", "both"],
)


def arch_of(**facts: Any) -> Arch:
    return tiny_source(**facts).arch


def prune(**axes: Any) -> Prune:
    return Prune.model_validate({**axes, "multiple": 1})


@each_kind
@pytest.mark.parametrize("shape", [Shape(), Shape(layers=2), Shape(ffn=44)])
def test_no_student_is_cut_from_such_a_model(shape: Shape, facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=f"student: {reason}"):
        student_arch(arch_of(**facts), shape)


@each_kind
@pytest.mark.parametrize(
    "axes", [{"depth": {"keep": 2}}, {"target": {"params_frac": 0.5}}], ids=["depth", "target"]
)
def test_no_layer_of_such_a_model_is_removed(
    axes: dict[str, Any], facts: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=f"depth: {reason}"):
        prune(**axes).check_model(arch_of(**facts))


@pytest.mark.parametrize("unit", ["kv_group", "query_head"])
@pytest.mark.parametrize("facts", [SHARES, {**EMBEDS, **SHARES}], ids=["shared", "both"])
def test_heads_of_shared_keys_stay(facts: dict[str, Any], unit: str) -> None:
    with pytest.raises(UsageError, match=f"heads: {HEADS}"):
        prune(heads={"keep": 2, "unit": unit}).check_model(arch_of(**facts))


@pytest.mark.parametrize(
    ("facts", "axes"),
    [
        (SHARES, {"ffn": {"keep": 44}}),
        (EMBEDS, {"ffn": {"keep": 44}, "heads": {"keep": 2}}),
        ({"layers": (tiny_shape(),) * 3}, {"depth": {"keep": 2}, "heads": {"keep": 2}}),
    ],
    ids=["shared", "embedded", "neither"],
)
def test_what_nothing_else_reads_may_be_removed(facts: dict[str, Any], axes: dict[str, Any]) -> None:
    prune(**axes).check_model(arch_of(**facts))


@each_kind
@pytest.mark.parametrize("keep_layers", [2, [0, 2]])
def test_no_draft_is_cut_from_such_a_model(
    keep_layers: int | list[int], facts: dict[str, Any], reason: str
) -> None:
    init = Pruned.model_validate({"keep_layers": keep_layers})
    with pytest.raises(UsageError, match=f"draft: {reason}"):
        init.shape(arch_of(**facts))


@pytest.mark.parametrize("keep_layers", [2, [0, 2]])
def test_a_draft_is_cut_from_a_model_without_either(keep_layers: int | list[int]) -> None:
    init = Pruned.model_validate({"keep_layers": keep_layers})
    assert init.shape(arch_of(layers=(tiny_shape(),) * 3)).num_layers == 2

"""MiniMax-Text-01: lightning attention against its formula, sums with the normed residual, and what is read,
refused and written."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.distill.student import Shape, student_arch
from compress.errors import StorageError, UnsupportedArch, UsageError
from compress.models.arch import Arch
from compress.models.attention import CachedAttention, FullAttention
from compress.models.decoder import Decoder
from compress.models.experts import Experts
from compress.models.family import family_of
from compress.models.layer_shape import Rope
from compress.models.lightning import Lightning, decay_rate_of
from compress.models.lightning_mixer import LightningAttention
from compress.models.mamba2 import CHUNK
from compress.models.overrides import decide
from compress.models.pruning import why_heads_stay, why_layers_stay
from compress.models.smoothing_pairs import smoothing_pairs_of
from tests.golden.test_known_configs import ROWS
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.test_lightning_served import FACTS, LAYERS

MINIMAX: dict[str, Any] = {
    "model_type": "minimax",
    "architectures": ["MiniMaxForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "linear_attn_alpha_factor": 3.5,
    "dtype": "float32",
}


def arch_of(**changes: Any) -> Arch:
    stated = {**MINIMAX, **changes}
    return family_of(stated).read_config(stated)


def written(arch: Arch) -> dict[str, Any]:
    """Return the config of an arch, which is that arch again."""
    config = family_of(arch.config).write_config(arch)
    assert family_of(config).read_config(config).replace(config={}) == arch.replace(config={})
    return config


def test_decays_follow_from_the_places_of_layers() -> None:
    arch = arch_of()
    rates = []
    for layer in arch.layers[:3]:
        assert isinstance(layer.recurrence, Lightning)
        rates.append(layer.recurrence.decay_rate)
    assert rates == pytest.approx([1 + 1e-5, 2 / 3 + 1e-5, 1 / 3 + 1e-5], abs=2e-5)
    assert rates == sorted(rates, reverse=True)
    assert decay_rate_of(79, 80) == pytest.approx(1e-5, rel=0.02)
    assert decay_rate_of(0, 1) == 1 + 1e-5
    assert replace(Lightning.of(8, 4), decay_rate=0.5).slopes == tuple(0.5 * 2.0**-n for n in range(1, 9))
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
    assert written(arch)["layer_types"] == MINIMAX["layer_types"]
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())


def test_every_second_layer_is_linear_where_none_is_stated() -> None:
    arch = arch_of(layer_types=None)
    assert [layer.attends for layer in arch.layers] == [True, False, True, False]


def test_a_part_of_each_head_rotates_where_it_is_stated() -> None:
    assert arch_of(rotary_dim=8).layers[3].rope == Rope(1e6, rotary_dim=8)
    assert arch_of().layers[3].rope == Rope(1e6)
    assert "transformers rotates whole heads" in str(family_of(MINIMAX).computed_otherwise)


@pytest.mark.parametrize("name", ["MiniMax-Text-01", "MiniMax-Text-01-hf", "MiniMax-M1-80k"])
def test_published_models_have_their_parameters(name: str) -> None:
    """456 billions by the report (arXiv 2501.08313), 45.9 of them active without the tables of tokens."""
    config = ROWS[f"MiniMaxAI/{name}"]["config"]
    arch = family_of(config).read_config(config)
    assert arch.num_params == 456_089_655_296
    tables = 2 * arch.vocab_size * arch.hidden_size
    assert (arch.num_active_params - tables) / 1e9 == pytest.approx(45.9, abs=0.05)


def test_names_of_the_published_code_mean_the_same() -> None:
    ours, theirs = (ROWS[f"MiniMaxAI/{name}"]["config"] for name in ("MiniMax-Text-01", "MiniMax-Text-01-hf"))
    published = family_of(ours).read_config(ours)
    whole = family_of(theirs).read_config({**theirs, "rotary_dim": 64})
    assert published.layers[7].rope == Rope(1e7, rotary_dim=64)
    assert published.replace(family="minimax", config={}) == whole.replace(config={})
    other = {**ours, "auto_map": {"AutoConfig": "configuration_other.OtherConfig"}}
    with pytest.raises(UnsupportedArch, match="auto_map"):
        family_of(other).read_config(other)
    with pytest.raises(UnsupportedArch, match="attn_type_list"):
        family_of(ours).read_config({**ours, "attn_type_list": [0, 1]})


def test_names_on_disk_are_explained() -> None:
    with pytest.raises(UsageError, match=r"lightning\.gate"):
        decide({"*.self_attn.output_gate": None}, arch_of())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"sliding_window": 16}, "sliding_window = 16"),
        ({"layer_types": ["sliding_attention"] * 4}, "full_attention and linear_attention"),
        ({"mlp_alpha_factor": "1"}, "mlp_alpha_factor"),
        ({"rotary_dim": 14}, "rotates 14 of the 12|rotary|partial"),
        ({"shared_intermediate_size": 48}, "shared_intermediate_size"),
        ({"postnorm": False}, "postnorm"),
    ],
    ids=str,
)
def test_what_the_decoder_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        arch_of(**changes)


def law(mixer: LightningAttention, x_BSD: Tensor, eps: float) -> Tensor:
    """What the formula of `lightning.py` computes in float64, one position after the other."""
    facts = mixer.lightning
    q, k, v = (
        F.silu(x_BSD.double() @ each.weight.double().T).unflatten(-1, (facts.num_heads, -1))
        for each in (mixer.q, mixer.k, mixer.v)
    )
    kept = torch.exp(-torch.tensor(facts.slopes, dtype=torch.float64)).view(-1, 1, 1)
    state = torch.zeros(len(x_BSD), facts.num_heads, facts.key_dim, facts.value_dim, dtype=torch.float64)
    found = []
    for t in range(x_BSD.shape[1]):
        state = kept * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out = torch.einsum("bhk,bhkv->bhv", q[:, t], state).flatten(-2)
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * mixer.norm.weight.double()
        found.append(torch.sigmoid(x_BSD[:, t].double() @ mixer.gate.weight.double().T) * normed)
    return torch.stack(found, dim=1)


@pytest.mark.parametrize(
    "facts", [Lightning.of(4, 16), replace(Lightning.of(3, 8), decay_rate=1e-5)], ids=str
)
def test_the_module_is_its_formula(facts: Lightning) -> None:
    source = tiny_source(layers=(tiny_shape(recurrence=facts, rope=None),), recurrent_norm_eps=1e-3)
    torch.manual_seed(0)
    mixer = Decoder(source.arch).requires_grad_(False).layers[0].lightning
    assert isinstance(mixer, LightningAttention)
    mixer.norm.weight.add_(0.3 * torch.randn(facts.value_size))
    x_BSD = torch.randn(2, CHUNK + 5, source.arch.hidden_size)
    out = mixer.heads(x_BSD, torch.arange(CHUNK + 5), FullAttention(), layer_idx=0).double()
    torch.testing.assert_close(out, law(mixer, x_BSD, 1e-3), rtol=1e-4, atol=1e-5)


def test_a_cached_decode_goes_on_where_it_ended() -> None:
    arch = tiny_source(layers=LAYERS, **FACTS).arch
    torch.manual_seed(0)
    decoder = Decoder(arch).requires_grad_(False)
    tokens_BS = torch.randint(arch.vocab_size, (2, 12))
    whole = decoder(tokens_BS, attention=FullAttention())
    cache = CachedAttention()
    cuts = (0, 1, 2, 7, 8, 12)
    pieces = [
        decoder(tokens_BS[:, begin:end], torch.arange(begin, end), cache)
        for begin, end in zip(cuts, cuts[1:], strict=False)
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=2e-4)


def test_a_layer_adds_its_outputs_to_what_its_norms_return() -> None:
    decoder = Decoder(tiny_source(layers=LAYERS[:1], **FACTS).arch).requires_grad_(False)
    layer = decoder.layers[0]
    layer.attn_norm.weight.normal_()
    layer.ffn_norm.weight.normal_()
    x_BSD = torch.randn(1, 5, decoder.arch.hidden_size)
    mixed = layer.lightning.heads(layer.attn_norm(x_BSD), torch.arange(5), FullAttention(), layer_idx=0)
    between = 2.5 * layer.attn_norm(x_BSD) + 1.25 * layer.lightning.o(mixed)
    normed = layer.ffn_norm(between)
    expected = 3.0 * normed + 0.75 * layer.ffn(normed, lambda name, value: None)
    torch.testing.assert_close(layer(x_BSD, torch.arange(5), FullAttention()), expected)


def test_all_parameters_have_gradients_and_norms_are_parameters_once() -> None:
    arch = tiny_source(layers=LAYERS[:1], **FACTS).arch
    torch.manual_seed(0)
    decoder = Decoder(arch)
    decoder(torch.randint(arch.vocab_size, (2, 9))).square().mean().backward()
    for name, parameter in decoder.layers[0].named_parameters():
        assert "hyper" not in name
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_no_scale_moves_into_a_norm_that_is_added_to_the_residual() -> None:
    decoder = Decoder(tiny_source(layers=LAYERS, **FACTS).arch)
    producers = [[pair.producer for pair in smoothing_pairs_of(layer)] for layer in decoder.layers]
    assert not {"attn_norm", "ffn_norm"} & {name for each in producers for name in each}
    assert producers[0] == ["lightning.norm", "ffn.up"]
    assert producers[3] == ["attn.v", "ffn.up"]


def test_layers_and_heads_stay() -> None:
    arch = arch_of()
    assert "follow from the places of layers" in str(why_layers_stay(arch))
    assert "recurrences" in str(why_heads_stay(arch))
    fewer = arch.replace(layers=arch.layers[1:])
    with pytest.raises(UnsupportedArch, match="layer 0: its lightning attention has the decays of another"):
        family_of(arch.config).write_config(fewer)
    with pytest.raises(UsageError):
        student_arch(tiny_source(layers=LAYERS[:1], **FACTS).arch, Shape())


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"block": "sandwich"}, "added to the normed residual, and the block is 'sandwich'"),
        ({"norm": "layer"}, "a recurrence in a 'pre' block with norm 'layer'"),
        ({"unit_norms": True}, "norms subtract the mean or have no weights"),
        ({"residual_scale": 0.5}, "have a factor"),
        ({"layers": (tiny_shape(only_half="mixer"),)}, "some layers have one half"),
        (
            {"layers": (tiny_shape(experts=Experts(4, 2, 48, post_norm=True)),)},
            "outputs of experts are normed",
        ),
        (
            {"layers": (tiny_shape(recurrence=Lightning.of(4, 16), joint=True),)},
            "a recurrence with attention",
        ),
        (
            {"layers": (tiny_shape(recurrence=Lightning(4, 2, 16, 16, 1), rope=None),)},
            "each head has one of each",
        ),
        (
            {"layers": (tiny_shape(recurrence=Lightning(4, 4, 16, 16, 4), rope=None),)},
            "a convolution over 4 positions",
        ),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedArch, match=reason):
        tiny_source(**{"layers": LAYERS, **FACTS, **facts})


@pytest.mark.parametrize("value", ["1", 1e9, None])
def test_factors_out_of_range_are_refused(value: Any) -> None:
    facts, layers = tiny_source(layers=LAYERS, **FACTS).arch.to_json()
    assert facts["hyper"]["recurrence_residual"] == 2.5
    with pytest.raises(StorageError, match="ffn_output"):
        Arch.from_json({**facts, "hyper": {**facts["hyper"], "ffn_output": value}}, layers)

"""Jamba, and the Mamba-1 mixers that its layers have in place of attention: what is read, refused and
written, and the mixer against its formula."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import StorageError, UnsupportedArch, UsageError
from compress.export import FORMATS
from compress.models.arch import Arch
from compress.models.attention import CachedAttention, FullAttention
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.initialise import fresh_decoder
from compress.models.mamba1 import CHUNK, Mamba1, selective_scan
from compress.models.mamba1_mixer import Mamba1Mixer
from compress.models.overrides import decide
from compress.models.pruning import why_heads_stay, with_layers
from compress.models.smoothing_pairs import smoothing_pairs_of
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.golden.test_known_configs import ROWS
from tests.support.tiny_source import tiny_shape, tiny_source

JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "architectures": ["JambaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 4,
    "dtype": "float32",
}
MIXER = Mamba1.of(40, 12, 4, 5, conv_bias=True)


def arch_of(**changes: Any) -> Arch:
    stated = {**JAMBA, **changes}
    return family_of(stated).read_config(stated)


def written(arch: Arch) -> dict[str, Any]:
    """Return the config of an arch, which is that arch again."""
    config = family_of(arch.config).write_config(arch)
    assert family_of(config).read_config(config).replace(config={}) == arch.replace(config={})
    return config


def attending(arch: Arch) -> list[int]:
    return [idx for idx, layer in enumerate(arch.layers) if layer.attends]


def sparse(arch: Arch) -> list[int]:
    return [idx for idx, layer in enumerate(arch.layers) if layer.experts is not None]


def test_layers_recur_with_their_periods() -> None:
    arch = arch_of()
    assert attending(arch) == [2, 6]
    assert sparse(arch) == [1, 3, 5, 7]
    assert {layer.rope for layer in arch.layers} == {None}
    assert arch.layers[0].recurrence == Mamba1.of(64, 16, 4, 2, conv_bias=True)
    assert arch_of(mamba_dt_rank=7).layers[0].recurrence == Mamba1.of(64, 16, 4, 7, conv_bias=True)
    assert arch_of(hidden_size=40).layers[0].recurrence == Mamba1.of(80, 16, 4, 3, conv_bias=True)
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())


def test_one_expert_is_an_ffn() -> None:
    arch = arch_of(num_experts=1)
    assert sparse(arch) == []
    assert written(arch)["num_experts"] == 1


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("AI21-Jamba-1.5-Mini", 51_570_323_328),
        ("AI21-Jamba-1.5-Large", 398_555_145_696),
        ("AI21-Jamba-Reasoning-3B", 3_029_337_472),
    ],
)
def test_published_models_have_their_parameters(name: str, num_params: int) -> None:
    """52, 398 and 3 billions by their cards."""
    config = ROWS[f"ai21labs/{name}"]["config"]
    assert family_of(config).read_config(config).num_params == num_params


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_layer_offset": 4}, "attn_layer_offset = 4"),
        ({"expert_layer_period": 0}, "expert_layer_period = 0"),
        ({"mamba_proj_bias": True}, r"mamba_proj_bias = True.*False only"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"mamba_dt_rank": "automatic"}, "mamba_dt_rank"),
        ({"mamba_dt_rank": 0}, "mamba_dt_rank"),
        ({"mamba_d_conv": 64}, "a convolution over 64 positions"),
        ({"layer_types": ["linear_attention"] * 8}, "layer_types"),
        ({"sliding_window": 16}, "sliding_window = 16"),
    ],
    ids=str,
)
def test_what_the_decoder_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        arch_of(**changes)


@pytest.mark.parametrize(
    ("kept", "stated"),
    [
        ([0, 1, 2, 3], (4, 2, 2, 1)),
        ([1, 2, 3, 4, 5, 6, 7], (4, 1, 2, 0)),
        ([2, 3, 6, 7], (2, 0, 2, 1)),
        ([0, 4], (4, 2, 3, 2)),
        ([1, 3], (4, 2, 1, 0)),
    ],
    ids=str,
)
def test_a_config_states_the_layers_that_stay(kept: list[int], stated: tuple[int, ...]) -> None:
    config = written(with_layers(arch_of(), kept))
    names = [f"{kind}_layer_{fact}" for kind in ("attn", "expert") for fact in ("period", "offset")]
    assert tuple(config[name] for name in names) == stated
    assert "layer_types" not in config


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([0, 1, 2, 6, 7], "of 5 layers those with attention are 2, 3"),
        ([0, 1, 3, 4], "of 4 layers those with experts are 1, 2"),
    ],
    ids=str,
)
def test_layers_that_do_not_recur_are_stated_by_no_config(kept: list[int], message: str) -> None:
    arch = with_layers(arch_of(), kept)
    assert message in str(family_of(arch.config).why_unstated(arch))
    with pytest.raises(UnsupportedArch, match=message):
        written(arch)


def test_a_mixture_of_one_expert_is_stated_by_no_config() -> None:
    arch = arch_of(num_experts_per_tok=1)
    of_one = (
        each.experts and replace(each, experts=replace(each.experts, num_experts=1)) for each in arch.layers
    )
    fewer = arch.replace(layers=tuple(one or each for one, each in zip(of_one, arch.layers, strict=True)))
    with pytest.raises(UnsupportedArch, match="a mixture of one expert"):
        written(fewer)


def law(mixer: Mamba1Mixer, x_BSD: Tensor) -> Tensor:
    """What the formula of `mamba1.py` computes in float64, one position after the other."""
    facts = mixer.mamba
    inputs, gate = (x_BSD.double() @ each.weight.double().T for each in (mixer.x, mixer.gate))
    weight = mixer.conv.weight.double().squeeze(1)
    state = torch.zeros(len(x_BSD), facts.value_size, facts.key_dim, dtype=torch.float64)
    found = []
    for t in range(x_BSD.shape[1]):
        total = torch.zeros_like(inputs[:, 0])
        for back in range(min(facts.kernel_size, t + 1)):
            total += weight[:, facts.kernel_size - 1 - back] * inputs[:, t - back]
        x = F.silu(total if mixer.conv.bias is None else total + mixer.conv.bias.double())
        d, b, c = (x @ mixer.x_proj.weight.double().T).split(facts.inner_sizes, dim=-1)
        if facts.normed:
            d, b, c = (
                each * torch.rsqrt(each.square().mean(-1, keepdim=True) + 1e-5) * norm.weight.double()
                for each, norm in zip((d, b, c), (mixer.dt_norm, mixer.B_norm, mixer.C_norm), strict=True)
            )
        dt = F.softplus(d @ mixer.dt_proj.weight.double().T + mixer.dt_proj.bias.double())
        kept = torch.exp(-mixer.A_log.double().exp() * dt.unsqueeze(-1))
        state = kept * state + (dt * x).unsqueeze(-1) * b.unsqueeze(1)
        out = torch.einsum("bvk,bk->bv", state, c) + mixer.D.double() * x
        found.append(out * F.silu(gate[:, t]))
    return torch.stack(found, dim=1)


@pytest.mark.parametrize(
    "facts",
    [MIXER, Mamba1.of(24, 16, 3, 7, conv_bias=False, normed=False)],
    ids=["with norms", "without norms or a bias"],
)
def test_the_module_is_its_formula(facts: Mamba1) -> None:
    source = tiny_source(layers=(tiny_shape(recurrence=facts, rope=None), tiny_shape()), norm_eps=1e-5)
    torch.manual_seed(0)
    mixer = Decoder(source.arch).requires_grad_(False).layers[0].mamba1
    assert isinstance(mixer, Mamba1Mixer)
    for name, parameter in mixer.named_parameters():
        if name.endswith(("norm.weight", "A_log", "D", "bias")):
            parameter.add_(0.3 * torch.randn(parameter.shape))
    x_BSD = torch.randn(2, CHUNK + 5, source.arch.hidden_size)
    out = mixer.heads(x_BSD, torch.arange(CHUNK + 5), FullAttention(), layer_idx=0).double()
    torch.testing.assert_close(out, law(mixer, x_BSD), rtol=1e-4, atol=1e-5)


def test_a_scan_goes_on_where_it_ended() -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    length = 2 * CHUNK + 3
    x, dt, b, c = randn(2, length, 16), randn(2, length, 16).exp(), randn(2, length, 8), randn(2, length, 8)
    rate = -randn(16, 8).exp()
    whole, last = selective_scan(x, dt, rate, b, c)
    found, state = [], None
    for begin, end in ((0, CHUNK), (CHUNK, CHUNK + 1), (CHUNK + 1, length)):
        out, state = selective_scan(
            *(each[:, begin:end] for each in (x, dt)), rate, b[:, begin:end], c[:, begin:end], state
        )
        found.append(out)
    assert state is not None
    torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, last, rtol=1e-6, atol=1e-7)


def test_a_cached_decode_goes_on_where_it_ended() -> None:
    arch = tiny_source(layers=(tiny_shape(recurrence=MIXER, rope=None), tiny_shape())).arch
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


def test_a_mixer_has_gradients_in_all_of_its_parameters() -> None:
    arch = tiny_source(layers=(tiny_shape(recurrence=MIXER, rope=None),)).arch
    torch.manual_seed(0)
    decoder = Decoder(arch)
    decoder(torch.randint(arch.vocab_size, (2, 9))).square().mean().backward()
    for name, parameter in decoder.layers[0].mamba1.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_fresh_mixers_have_the_rates_of_the_paper() -> None:
    arch = tiny_source(layers=(tiny_shape(recurrence=MIXER, rope=None),)).arch
    decoder = fresh_decoder(arch, generator=torch.Generator().manual_seed(0))
    rates = decoder.layers[0].mamba1.A_log.detach().exp()
    torch.testing.assert_close(rates, torch.arange(1.0, 13).expand(40, 12))


def test_schemes_take_the_first_and_the_last_linears_alone() -> None:
    arch = arch_of()
    linears = arch.layers[0].linears
    assert [each for each in linears if each.startswith("mamba1.")] == ["mamba1.x", "mamba1.gate", "mamba1.o"]
    decoder = Decoder(arch)
    norm, *others = smoothing_pairs_of(decoder.layers[0])
    assert norm.linears == ("mamba1.x", "mamba1.gate")
    assert not any("mamba1" in linear for pair in others for linear in pair.linears)


def test_heads_of_mixers_stay() -> None:
    assert "recurrences" in str(why_heads_stay(arch_of()))


def test_a_mixer_takes_the_place_of_attention_and_does_not_join_it() -> None:
    with pytest.raises(UnsupportedArch, match="attention and a Mamba-1 mixer are joint"):
        tiny_source(layers=(tiny_shape(recurrence=MIXER, joint=True),))


def test_a_manifest_states_one_head() -> None:
    arch = arch_of()
    facts, layers = json.loads(json.dumps(arch.to_json()))
    assert layers[0]["mamba1"]["rank"] == 2
    layers[0]["mamba1"]["num_heads"] = 2
    with pytest.raises((UnsupportedArch, StorageError), match="2 heads of a Mamba-1 mixer"):
        Arch.from_json(facts, layers)


def test_names_on_disk_are_explained() -> None:
    with pytest.raises(UsageError, match=r"mamba1\."):
        decide({"*.mamba.in_proj": None}, arch_of())


def test_vllm_is_stated_to_load_no_export() -> None:
    consumers = FORMATS.get("compressed-tensors").consumers(arch_of(), ModelScheme(SCHEMES["W8A16"]))
    (vllm,) = (each for each in consumers if each.name == "vLLM")
    assert not vllm.loads
    assert "Mamba-1 mixers have dense linears alone" in vllm.note

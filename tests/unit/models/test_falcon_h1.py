"""Falcon-H1: factors of linears, mixers with and without a norm, and layers in which they join attention."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.errors import UnsupportedArch
from compress.export import FORMATS
from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.experts import Experts
from compress.models.family import family_of
from compress.models.layer_checks import why_layer_unfit
from compress.models.mamba2 import Mamba2
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.runtime.deployment import Deployment
from compress.runtime.fusing import fuse
from tests.support.tiny_source import tiny_shape, tiny_source

CONFIG: dict[str, Any] = {
    "model_type": "falcon_h1",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "mamba_n_heads": 4,
    "mamba_d_state": 12,
    "mamba_d_ssm": 48,
    "dtype": "float32",
}
MAMBA = Mamba2(4, 1, 16, 12, 4, conv_bias=True)


def arch_of(**changes: Any) -> Arch:
    config = {**CONFIG, **changes}
    return family_of(config).read_config(config)


def mixer_of(arch: Arch) -> Mamba2:
    mixer = arch.layers[0].recurrence
    assert isinstance(mixer, Mamba2)
    return mixer


def test_factors_of_inputs_are_those_of_outputs_and_scores() -> None:
    plain = arch_of()
    assert plain.linear_factors == ()
    assert plain.attn_scale is None
    arch = arch_of(
        attention_in_multiplier=2.0,
        attention_out_multiplier=0.25,
        key_multiplier=0.5,
        ssm_in_multiplier=0.5,
        ssm_multipliers=[1.0, 2.0, 3.0, 4.0, 5.0],
        mlp_multipliers=[0.75, 1.0],
    )
    assert arch.attn_scale == 4 * 0.5 * 8**-0.5
    assert dict(arch.linear_factors) == {
        "attn.o": 0.5,
        "mamba.gate": 0.5,
        "mamba.B": 1.5,
        "mamba.C": 2.0,
        "mamba.dt": 2.5,
        "ffn.gate": 0.75,
    }
    assert Arch.from_json(*arch.to_json()) == arch


def test_the_width_of_the_heads_is_stated_or_a_multiple_of_the_hidden_size() -> None:
    assert mixer_of(arch_of()).value_dim == 12
    assert mixer_of(arch_of(mamba_d_ssm=None)).value_dim == 16
    assert mixer_of(arch_of(mamba_d_head=12)) == mixer_of(arch_of())
    with pytest.raises(UnsupportedArch, match=r"mamba_d_head = 8.*48 / 4"):
        arch_of(mamba_d_head=8)


def test_a_norm_follows_the_gates_or_there_is_none() -> None:
    assert not mixer_of(arch_of()).normed
    normed = arch_of(mamba_rms_norm=True, mamba_norm_before_gate=False)
    assert mixer_of(normed).normed
    for arch in (arch_of(), normed):
        names = dict(Decoder(arch).named_parameters())
        assert ("layers.0.mamba.norm.weight" in names) == mixer_of(arch).normed
        assert arch.num_params == sum(each.numel() for each in names.values())
        assert Arch.from_json(*arch.to_json()) == arch
    with pytest.raises(UnsupportedArch, match="mamba_norm_before_gate"):
        arch_of(mamba_rms_norm=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_in_multiplier": 2.0, "attention_bias": True}, "attention_in_multiplier"),
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers.*5 numbers"),
        ({"mlp_multipliers": [1.0] * 3}, "mlp_multipliers.*2 numbers"),
        ({"projectors_bias": True}, "projectors_bias"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias"),
        ({"key_multiplier": "0.5"}, "key_multiplier"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedArch, match=words):
        arch_of(**changes)


def test_a_layer_whose_parts_do_not_fit_is_refused() -> None:
    plain = tiny_shape()
    joint = replace(plain, recurrence=MAMBA, joint=True)
    assert why_layer_unfit(joint) is None
    assert joint.attends
    assert "no recurrence" in str(why_layer_unfit(replace(plain, joint=True)))
    assert "facts of its own" in str(why_layer_unfit(replace(joint, output_gate=True)))
    assert "facts of its own" in str(why_layer_unfit(replace(joint, window=5)))
    odd_rope = replace(joint.rope, rotary_dim=3) if joint.rope is not None else None
    assert "rope" in str(why_layer_unfit(replace(joint, rope=odd_rope)))
    with pytest.raises(UnsupportedArch, match="has a recurrence, too"):
        tiny_source(layers=(joint, replace(plain, kv_source=0)))


def test_factors_are_those_of_linears_that_some_layer_has() -> None:
    for name in ("mamba.o", "attn.gate", "moe.shared.up"):
        with pytest.raises(UnsupportedArch, match=f"factors of {name}"):
            tiny_source(linear_factors=((name, 2.0),))


def test_a_factor_of_ffns_is_refused_next_to_experts_which_have_none() -> None:
    with pytest.raises(UnsupportedArch, match=r"factors of ffn\.gate"):
        tiny_source(
            layers=(tiny_shape(), tiny_shape(experts=Experts(4, 2, 32))), linear_factors=(("ffn.gate", 0.3),)
        )


FACTOR = 0.0375123


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_is_not_rounded_to_the_dtype_of_a_model(dtype: torch.dtype) -> None:
    deployment = Deployment(torch.device("cpu"), dtype, max_batch_size=8, max_step_tokens=64)
    weight_OI = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x_TI = torch.randn(33, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights = {"attn.o.weight": weight_OI}
    plain, scaled = (fuse(("attn.o",), weights, deployment, factor=each) for each in (1.0, FACTOR))
    expected = (plain(x_TI, "prefill").float() * FACTOR).to(dtype)
    residual = torch.zeros_like(expected)
    for found in (scaled(x_TI, "prefill"), scaled(x_TI, "prefill", residual=residual)):
        assert torch.equal(found, expected)


def test_a_manifest_states_a_norm_only_where_a_mixer_has_none() -> None:
    arch = tiny_source(layers=(tiny_shape(recurrence=MAMBA, rope=None),)).arch
    assert "normed" not in arch.to_json()[1][0]["mamba"]
    assert arch_of().to_json()[1][0]["mamba"]["normed"] is False


def test_a_joint_layer_computes_the_sum_of_both_parts() -> None:
    """With one part silenced the layer is the one that has the other alone."""
    joint = tiny_source(layers=(tiny_shape(recurrence=MAMBA, joint=True, rope=None),))
    tokens_BS = torch.arange(20).view(2, 10)
    for silent, shape in (
        ("mamba.o", tiny_shape(rope=None)),
        ("attn.o", tiny_shape(recurrence=MAMBA, rope=None)),
    ):
        alone = Decoder(joint.arch.replace(layers=(shape,)))
        both = Decoder(joint.arch)
        with torch.no_grad():
            for parameter in both.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
            both.layers[0].linear(silent).weight.zero_()  # type: ignore[operator, union-attr]
            state = both.state_dict()
            alone.load_state_dict({name: state[name] for name in alone.state_dict()})
            assert torch.equal(both(tokens_BS), alone(tokens_BS))


def test_vllm_finds_codes_where_one_scheme_is_for_all_linears() -> None:
    arch = arch_of(mamba_d_ssm=64, intermediate_size=64)
    w4, w8 = SCHEMES["W4A16_G32"], SCHEMES["W8A16"]

    def loads(form: str, scheme: ModelScheme) -> bool:
        return {each.name: each.loads for each in FORMATS.get(form).consumers(arch, scheme)}["vLLM"]

    assert loads("compressed-tensors", ModelScheme(w8))
    for linear, other in (("layers.0.attn.o", None), ("layers.1.ffn.down", w4)):
        assert not loads("compressed-tensors", ModelScheme(w8, exceptions=((linear, other),)))
    assert not loads("gptq", ModelScheme(w4))

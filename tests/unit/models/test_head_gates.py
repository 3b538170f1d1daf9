"""Gates of heads, and query heads that layers have for themselves: LFM3 and Laguna."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.distill.student import Shape, sliced_decoder, student_arch
from compress.errors import StorageError, UnsupportedArch
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.layer_checks import why_layer_unfit
from compress.models.layer_shape import LayerShape
from compress.models.pruning import with_layers
from compress.models.short_conv import ShortConv
from compress.models.weights import MemorySource
from tests.support.tiny_decoder import tiny_decoder
from tests.support.tiny_source import tiny_shape, tiny_source

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "dtype": "float32",
}
LFM3 = {**SIZES, "model_type": "lfm3", "conv_L_cache": 3}
LAGUNA = {
    **SIZES,
    "model_type": "laguna",
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "num_attention_heads_per_layer": [4, 6, 4, 6],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
HEADS = "num_attention_heads_per_layer"


def arch_of(config: dict[str, Any], **changes: Any) -> Arch:
    stated = {**config, **changes}
    return family_of(stated).read_config(stated)


def written(arch: Arch) -> dict[str, Any]:
    """Return the config of an arch, which is that arch again."""
    config = family_of(arch.config).write_config(arch)
    assert arch_of(config).replace(config={}) == arch.replace(config={})
    return config


@pytest.mark.parametrize("config", [LFM3, LAGUNA], ids=["lfm3", "laguna"])
def test_what_a_manifest_and_a_config_state_is_read_back_and_every_parameter_counts(
    config: dict[str, Any],
) -> None:
    arch = arch_of(config)
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
    written(arch)
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())


def test_lfm3_has_full_attention_windows_and_convolutions_by_default() -> None:
    arch = arch_of(LFM3, num_hidden_layers=9)
    found = [
        "conv" if layer.recurrence else "full" if layer.window is None else layer.window
        for layer in arch.layers
    ]
    assert found == ["conv", "conv", "full", "conv", 5, "conv", "full", "conv", 5]
    assert {layer.head_gate for layer in arch.layers if layer.attends} == {"sigmoid"}
    assert {layer.head_gate for layer in arch.layers if not layer.attends} == {None}
    full, sliding = arch.layers[2].rope, arch.layers[4].rope
    assert full is not None
    assert sliding is not None
    assert (full.kind, full.rotary_dim, full.theta) == ("proportional", 4, 1e6)
    assert (sliding.kind, sliding.rotary_dim, sliding.theta) == ("default", 0, 1e4)
    assert arch.block == "sandwich"


def test_lfm3_may_have_neither_gates_nor_norms_after_the_halves() -> None:
    arch = arch_of(LFM3, use_attention_gate=False, use_sandwich_norm=False)
    assert {layer.head_gate for layer in arch.layers} == {None}
    assert arch.block == "pre"


def test_the_epsilon_of_lfm3_is_read_by_both_of_its_names() -> None:
    assert arch_of(LFM3).norm_eps == 1e-5
    assert arch_of(LFM3, norm_eps=1e-3).norm_eps == 1e-3
    assert arch_of(LFM3, rms_norm_eps=1e-4).norm_eps == 1e-4


def test_layers_of_laguna_have_the_query_heads_that_its_config_states() -> None:
    arch = arch_of(LAGUNA)
    assert [layer.num_heads for layer in arch.layers] == [4, 6, 4, 6]
    assert {layer.head_gate for layer in arch.layers} == {"softplus"}
    config = written(arch.replace(config={**arch.config, "num_attention_heads": 6}))
    assert (config[HEADS], config["num_attention_heads"]) == ([4, 6, 4, 6], 6)
    uniform = arch_of({name: value for name, value in LAGUNA.items() if name != HEADS})
    assert [layer.num_heads for layer in uniform.layers] == [4] * 4
    assert HEADS not in written(uniform)


def test_other_query_heads_of_laguna_are_stated_by_layer() -> None:
    arch = arch_of({name: value for name, value in LAGUNA.items() if name != HEADS})
    layers = (replace(arch.layers[0], num_heads=2), *arch.layers[1:])
    assert written(arch.replace(layers=layers))[HEADS] == [2, 4, 4, 4]


def test_a_model_of_fewer_layers_states_the_query_heads_of_those() -> None:
    config = written(with_layers(arch_of(LAGUNA), [0, 1, 3]))
    assert config[HEADS] == [4, 6, 6]
    assert config["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    assert config["mlp_layer_types"] == ["dense", "sparse", "dense"]


def test_other_widths_that_differ_are_stated_by_no_config_of_laguna() -> None:
    arch = arch_of(LAGUNA)
    layers = (replace(arch.layers[0], num_kv_heads=4), *arch.layers[1:])
    with pytest.raises(UnsupportedArch, match="layers differ in width"):
        family_of(LAGUNA).write_config(arch.replace(layers=layers))


@pytest.mark.parametrize("gating", [False, "per-element", 3], ids=repr)
def test_other_gates_of_laguna_are_refused(gating: Any) -> None:
    with pytest.raises(UnsupportedArch, match=f"gating.*{gating}"):
        arch_of(LAGUNA, gating=gating)
    assert {layer.head_gate for layer in arch_of(LAGUNA, gating="per-head").layers} == {"softplus"}


@pytest.mark.parametrize("heads", [[4, 6, 4], [4, 6, 4, 0], "4646"], ids=repr)
def test_query_heads_that_do_not_state_every_layer_are_refused(heads: Any) -> None:
    with pytest.raises(UnsupportedArch, match=HEADS):
        arch_of(LAGUNA, **{HEADS: heads})


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
HALF = {**PLAIN, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LFM3, {"partial_rotary_factor": 0.5}),
        (LAGUNA, {"partial_rotary_factor": 0.5}),
        (LFM3, {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": HALF}}),
        (LFM3, {"rope_parameters": {"full_attention": HALF, "sliding_attention": PLAIN}}),
    ],
    ids=["lfm3", "laguna", "a plain window", "a plain rope"],
)
def test_shares_of_rotating_dimensions_that_transformers_does_not_read_are_refused(
    config: dict[str, Any], changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedArch, match="partial_rotary_factor"):
        arch_of(config, **changes)


def test_a_share_of_rotating_dimensions_is_read_of_plain_ropes_of_laguna() -> None:
    arch = arch_of(LAGUNA, rope_parameters={"full_attention": PLAIN, "sliding_attention": HALF})
    assert [layer.rope and layer.rope.rotary_dim for layer in arch.layers] == [0, 4, 0, 4]


def test_query_heads_that_share_no_keys_evenly_are_refused() -> None:
    with pytest.raises(UnsupportedArch, match="layer 1: 5 query heads"):
        arch_of(LAGUNA, **{HEADS: [4, 5, 4, 6]})


def test_the_types_of_layers_of_laguna_have_defaults() -> None:
    left_out = ("layer_types", "mlp_layer_types", HEADS)
    arch = arch_of({name: value for name, value in LAGUNA.items() if name not in left_out})
    assert {layer.window for layer in arch.layers} == {None}
    assert [layer.experts is None for layer in arch.layers] == [True, False, False, False]


def test_a_manifest_with_an_unknown_gate_is_refused() -> None:
    facts = json.loads(json.dumps(arch_of(LAGUNA).to_json()))
    text = json.dumps(facts).replace('"softplus"', '"tanh"')
    with pytest.raises(StorageError, match="head_gate"):
        Arch.from_json(*json.loads(text))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output_gate": True}, "one of each head"),
        ({"keys_are_values": True}, "an output gate, and keys that are its values"),
        ({"recurrence": ShortConv.of(56, 3), "rope": None}, "facts of its own"),
    ],
    ids=["output gate", "keys are values", "recurrence"],
)
def test_a_gate_of_heads_that_fits_no_other_fact_is_refused(changes: dict[str, Any], reason: str) -> None:
    found = why_layer_unfit(tiny_shape(head_gate="sigmoid", **changes))
    assert found is not None
    assert reason in found


def test_a_gate_of_heads_in_a_parallel_block_is_refused() -> None:
    with pytest.raises(UnsupportedArch, match="'parallel' block"):
        tiny_source(layers=(tiny_shape(head_gate="sigmoid"),), block="parallel")


def attended(shape: LayerShape, gate_HD: torch.Tensor, x_BSD: torch.Tensor) -> torch.Tensor:
    """Return what the heads of a layer attend to, with a gate of their own."""
    source = tiny_source(layers=(shape,))
    decoder = Decoder(source.arch)
    names = {**source.outer(), **{f"layers.0.{name}": each for name, each in source.layer(0).items()}}
    state: dict[str, torch.Tensor] = {name: torch.as_tensor(each) for name, each in names.items()}
    if shape.head_gate is not None:
        state["layers.0.attn.head_gate.weight"] = gate_HD
    decoder.load_state_dict(state)
    positions = torch.arange(x_BSD.shape[1])
    out: torch.Tensor = decoder.layers[0].attn.heads(x_BSD, positions, FullAttention(), layer_idx=0)
    return out


@pytest.mark.parametrize("name", ["sigmoid", "softplus"])
def test_the_gate_of_a_head_is_a_function_of_one_number_of_the_input(name: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    x_BSD = torch.randn(2, 7, 56, generator=generator)
    gate_HD = torch.randn(4, 56, generator=generator) * 0.3
    plain_BSHC = attended(tiny_shape(), gate_HD, x_BSD).unflatten(-1, (4, 16))
    gated_BSHC = attended(tiny_shape(head_gate=name), gate_HD, x_BSD).unflatten(-1, (4, 16))
    numbers_BSH = torch.einsum("bsd,hd->bsh", x_BSD, gate_HD)
    factors = 1 / (1 + (-numbers_BSH).exp()) if name == "sigmoid" else (1 + numbers_BSH.exp()).log()
    torch.testing.assert_close(gated_BSHC, plain_BSHC * factors.unsqueeze(-1), rtol=1e-5, atol=1e-6)


def test_the_norm_before_a_gate_of_heads_is_in_no_pair_and_the_values_are() -> None:
    decoder = Decoder(arch_of(LAGUNA))
    producers = [pair.producer for pair in decoder.layers[0].smoothing_pairs()]
    assert producers == ["attn.v", "ffn_norm", "ffn.up"]


def test_a_student_keeps_the_gates_of_its_heads() -> None:
    config = {name: value for name, value in LAGUNA.items() if name != HEADS}
    teacher = arch_of(config, mlp_layer_types=["dense"] * 4)
    source = MemorySource(tiny_decoder(teacher), dtype=torch.float32)
    arch = student_arch(teacher, Shape(heads=2, kv_heads=2))
    student = sliced_decoder(source, arch)
    own = student.layers[1].attn.head_gate.weight
    whole = torch.as_tensor(source.layer(1)["attn.head_gate.weight"])
    assert torch.equal(own, whole[[0, 2]])

"""Layers that have one half only, and FFNs without gates: what configs and manifests say of them, what is
refused, and that they compute as the halves of whole layers.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import StorageError, UnsupportedArch
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import Decoder
from compress.models.delta_net import DeltaNet
from compress.models.experts import Experts
from compress.models.family import family_of
from compress.models.latent import Latent
from compress.models.layer_checks import why_layer_unfit
from compress.models.layer_shape import LayerShape
from compress.models.pruning import LayerSubset, with_layers
from compress.models.tap import no_tap
from compress.models.weights import MemorySource, WeightSource, build_decoder
from compress.untrusted.fields import Fields
from tests.support.halved_source import HalfKept, HalfSilenced, Halved, halved_arch
from tests.support.tiny_decoder import tiny_checkpoint, tiny_decoder, tiny_tokens
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 1,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
ARCEE: dict[str, Any] = {
    "model_type": "arcee",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "dtype": "float32",
}
PATTERN = "ME*-"
NEW = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
LISTS = ("layers_block_type", "layer_types")
LINEARS = {
    "M": {
        **dict.fromkeys(("mamba.C", "mamba.B", "mamba.x", "mamba.gate", "mamba.dt"), "attn_in"),
        "mamba.o": "attn_out",
    },
    "*": {**dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attn_in"), "attn.o": "attn_out"},
    "-": {"ffn.up": "ffn_in", "ffn.down": "ffn_mid"},
    "E": {
        "moe.shared.up": "ffn_in",
        "moe.experts.0.up": "moe_in.0",
        "moe.experts.1.up": "moe_in.1",
        "moe.shared.down": "ffn_mid",
        "moe.experts.0.down": "moe_mid.0",
        "moe.experts.1.down": "moe_mid.1",
    },
}
"""The linears of a layer of each letter, and the taps of their inputs."""


def stated(pattern: str | None = PATTERN, **changes: Any) -> dict[str, Any]:
    named = {} if pattern is None else {"hybrid_override_pattern": pattern}
    return {**NEMOTRON, **named, **changes}


def read(config: Mapping[str, Any]) -> Arch:
    return family_of(config).read_config(config)


def facts(config: Mapping[str, Any]) -> Arch:
    return read(config).replace(config={})


def spelled(pattern: str, words: Mapping[str, str]) -> list[str]:
    return [words[letter] for letter in pattern]


def letters(arch: Arch) -> str:
    """The pattern of a model, by what its layers have."""
    return "".join(
        ("E" if layer.experts is not None else "-")
        if layer.only_half == "ffn"
        else ("M" if layer.recurrence is not None else "*")
        for layer in arch.layers
    )


@pytest.mark.parametrize("letter", LINEARS)
def test_a_layer_of_each_letter_has_the_linears_of_its_half_alone(letter: str) -> None:
    (layer,) = read(stated(letter)).layers
    assert list(layer.linears.items()) == list(LINEARS[letter].items())
    assert (layer.has_mixer, layer.has_ffn) == ((True, False) if letter in "M*" else (False, True))
    assert layer.attends == (letter == "*")
    assert layer.cached_numbers == (2 * 2 * 8 if letter == "*" else 0)
    assert bool(layer.attention_groups) == layer.has_mixer
    assert layer.rope is None


def test_experts_that_act_on_latents_read_and_write_these_and_the_shared_one_the_stream() -> None:
    config = stated("E", moe_latent_size=12, mlp_bias=True)
    arch = read(config)
    (layer,) = arch.layers
    assert layer.linear_shape("moe.experts.1.up", 32) == (24, 12)
    assert layer.linear_shape("moe.experts.1.down", 32) == (12, 24)
    assert layer.linear_shape("moe.shared.up", 32) == (40, 32)
    assert layer.linear_shape("moe.shared.down", 32) == (32, 40)
    assert list(layer.linears) == list(LINEARS["E"])
    own = {name: shape for name, shape in layer.dense_shapes(32).items() if ".latent_" in name}
    assert own == {
        "moe.latent_in.weight": (12, 32),
        "moe.latent_in.bias": (12,),
        "moe.latent_out.weight": (32, 12),
        "moe.latent_out.bias": (32,),
    }
    assert layer.experts is not None
    assert layer.experts.changes_input
    again = family_of(config).write_config(arch)
    assert again["moe_latent_size"] == 12
    assert facts(again) == arch.replace(config={})
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(each.numel() for each in decoder.parameters())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"latent_size": 8, "branch_norms": True}, "latent_size"),
        ({"latent_size": 8, "weighs_input": True, "top_k": 1, "score": "sigmoid"}, "latent_size"),
        ({"latent_bias": True}, "latent_size"),
        ({"latent_size": -1}, "latent_size"),
    ],
    ids=str,
)
def test_latents_beside_facts_that_they_exclude_are_refused(changes: dict[str, Any], named: str) -> None:
    stored = {"num_experts": 4, "top_k": 2, "expert_size": 16, "shared_size": 16, **changes}
    with pytest.raises(StorageError, match=named):
        Experts.from_json(Fields(stored, "a manifest", StorageError))


def test_the_units_of_experts_without_gates_are_all_ups_and_all_downs() -> None:
    units = {unit.name: unit.linears for unit in read(stated("E")).layers[0].units}
    assert units == {
        "shared.gate_up": ("moe.shared.up",),
        "shared.down": ("moe.shared.down",),
        "experts.gate_up": ("moe.experts.0.up", "moe.experts.1.up"),
        "experts.down": ("moe.experts.0.down", "moe.experts.1.down"),
    }


@pytest.mark.parametrize("pattern", ["ME*-", "M-*-M", "--*", "*E"])
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("words", [OLD, NEW], ids=["old", "new"])
def test_a_list_of_types_in_either_spelling_is_the_pattern(
    pattern: str, name: str, words: Mapping[str, str]
) -> None:
    expected = facts(stated(pattern))
    assert letters(expected) == pattern
    types = spelled(pattern, words)
    assert facts(stated(None, **{name: types})) == expected
    assert facts(stated(pattern, **{name: types})) == expected
    other = next(each for each in LISTS if each != name)
    assert facts(stated(None, **{name: types, other: spelled(pattern, NEW)})) == expected


def test_the_number_of_layers_is_that_of_the_types() -> None:
    for num_layers in (1, 4, 9):
        assert letters(read(stated(num_hidden_layers=num_layers))) == PATTERN


def test_a_config_without_types_has_those_of_the_class_of_transformers() -> None:
    assert letters(read(stated(None))) == PATTERN


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (PATTERN, "layer_types"),
        (PATTERN, "layers_block_type"),
        (None, "layer_types"),
    ],
)
@pytest.mark.parametrize("pattern", ["ME*E", "ME*", "ME*--"])
def test_fields_that_differ_in_a_layer_are_refused(other: str | None, name: str, pattern: str) -> None:
    config = stated(other, **{name: spelled(pattern, NEW)})
    if other is None:
        config["layers_block_type"] = spelled(PATTERN, NEW)
    with pytest.raises(UnsupportedArch, match=r"must be the types of (layers_block_type|layer_types)\."):
        read(config)


def test_letters_that_are_not_known_are_named_with_those_that_are() -> None:
    with pytest.raises(UnsupportedArch) as refusal:
        read(stated("MX*QX"))
    assert str(refusal.value) == (
        "config.json of this nemotron_h model has layers of the type Q, X (hybrid_override_pattern); the "
        "decoder has M, *, -, E."
    )


@pytest.mark.parametrize("name", LISTS)
def test_words_that_are_not_known_are_named_with_those_that_are(name: str) -> None:
    with pytest.raises(UnsupportedArch) as refusal:
        read(stated(None, **{name: ["mamba", "swa", "attention"]}))
    assert f"has layers of the type swa ({name}); the decoder has " in str(refusal.value)
    listed = str(refusal.value).partition("the decoder has ")[2].rstrip(".").split(", ")
    assert set(listed) == {*OLD.values(), *NEW.values()}


@pytest.mark.parametrize(
    "types", [{"hybrid_override_pattern": ["M"]}, {"layers_block_type": "M*"}, {"layer_types": [0]}], ids=str
)
def test_types_of_the_wrong_type_are_refused(types: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArch, match=next(iter(types))):
        read(stated(None, **types))


@pytest.mark.parametrize(
    "types", [{"hybrid_override_pattern": ""}, {"layers_block_type": []}, {"layer_types": []}], ids=str
)
def test_a_model_without_layers_is_refused(types: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArch, match="num_hidden_layers = 0"):
        read(stated(None, **types))


@pytest.mark.parametrize("kind", ["mlp", "moe"])
@pytest.mark.parametrize("family", ["qwen3", "bamba"])
def test_families_of_whole_layers_have_no_layer_of_an_ffn_alone(family: str, kind: str) -> None:
    config = {
        **{name: value for name, value in NEMOTRON.items() if name in ARCEE},
        "model_type": family,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", kind],
    }
    with pytest.raises(UnsupportedArch, match="layer_types"):
        read(config)


STATED: dict[str, dict[str, Any]] = {
    "pattern": {"hybrid_override_pattern": "ME*-M"},
    "old list": {"layers_block_type": spelled("ME*-M", OLD)},
    "list": {"layers_block_type": spelled("ME*-M", NEW)},
    "layer_types": {"layer_types": spelled("ME*-M", NEW)},
    "pattern and list": {
        "hybrid_override_pattern": "ME*-M",
        "layers_block_type": spelled("ME*-M", OLD),
        "num_hidden_layers": 5,
    },
}


@pytest.mark.parametrize("kept", [[0, 2, 3], [1, 2], [3], [0, 1, 3, 4], [0, 1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("how", STATED)
def test_layers_that_go_are_in_no_field_of_the_config(how: str, kept: list[int]) -> None:
    arch = read(stated(None, **STATED[how]))
    small = with_layers(arch, kept)
    assert small.layers == tuple(arch.layers[idx] for idx in kept)
    config = family_of(small.config).write_config(small)
    assert read(config).replace(config={}) == small.replace(config={})
    pattern = "".join("ME*-M"[idx] for idx in kept)
    assert config["num_hidden_layers"] == len(kept)
    for name in STATED[how]:
        if name == "hybrid_override_pattern":
            assert config[name] == pattern
        elif name in LISTS:
            assert config[name] in (spelled(pattern, OLD), spelled(pattern, NEW))


@pytest.mark.parametrize("how", STATED)
def test_types_of_layers_after_the_last_are_not_written(how: str) -> None:
    arch = read(stated(None, **STATED[how]))
    first = arch.replace(layers=arch.layers[:3])
    config = family_of(arch.config).write_config(first)
    assert read(config).layers == first.layers


def test_layers_go_from_a_config_that_states_no_types() -> None:
    small = with_layers(read(stated(None)), [0, 3])
    config = family_of(small.config).write_config(small)
    assert letters(read(config)) == "M-"


@pytest.mark.parametrize("idx", range(4))
def test_a_half_that_adds_nothing_goes_without_changing_a_logit(idx: int) -> None:
    decoder = tiny_decoder(read(stated()))
    last = ("mamba.o", "moe", "attn.o", "ffn.down")[idx]
    layer = decoder.layers[idx]
    for name, parameter in layer.named_parameters():
        if name.startswith(f"{last}.") and (last != "moe" or ".down." in name):
            parameter.zero_()
    source = MemorySource(decoder, dtype=torch.float32)
    small = LayerSubset(source, [each for each in range(4) if each != idx])
    assert small.arch.num_params < source.arch.num_params
    assert torch.equal(logits(small), logits(source))
    speaking = MemorySource(tiny_decoder(read(stated())), dtype=torch.float32)
    assert not torch.allclose(logits(speaking), logits(source), atol=1e-3)


def logits(source: WeightSource) -> torch.Tensor:
    tokens_BS = tiny_tokens(source.arch, 2, 20).long()
    with torch.no_grad():
        found: torch.Tensor = build_decoder(source, dtype=torch.float32, device=CPU)(tokens_BS)
    return found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_latent_size", 0),
        ("moe_latent_size", "16"),
        ("n_shared_experts", 2),
        ("n_shared_experts", 0),
        ("partial_rotary_factor", 0.5),
        ("tie_word_embeddings", True),
        ("use_bias", True),
        ("mamba_proj_bias", True),
        ("mamba_hidden_act", "gelu"),
        ("sliding_window", 16),
        ("auto_map", {"AutoModelForCausalLM": "modeling.OtherForCausalLM"}),
        ("auto_map", {"AutoConfig": "m.NemotronHConfig", "AutoModel": "other--m.NemotronHModel2"}),
        ("time_step_limit", [0.0, 10.0]),
        ("time_step_limit", [1e-3, math.inf]),
    ],
    ids=str,
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedArch, match=f"{field} = "):
        read(stated(**{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_latent_size", None),
        ("n_shared_experts", 1),
        ("partial_rotary_factor", 1.0),
        ("tie_word_embeddings", False),
        ("sliding_window", None),
        ("auto_map", {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}),
        ("time_step_limit", [0.0, math.inf]),
        ("time_step_limit", [0.0, {"__float__": "Infinity"}]),
        ("time_step_min", 0.5),
        ("expand", 7),
        ("rope_theta", 5e6),
        ("mtp_hybrid_override_pattern", "*E"),
        ("num_nextn_predict_layers", 1),
    ],
    ids=str,
)
def test_what_changes_nothing_is_read_as_if_it_were_not_there(field: str, value: Any) -> None:
    assert facts(stated(**{field: value})) == facts(stated())


def test_the_size_of_a_head_has_another_name() -> None:
    for size in (4, 16):
        config = {**stated(), "attention_head_dim": size}
        del config["head_dim"]
        arch = read(config)
        assert arch.replace(config={}) == facts(stated(head_dim=size))
        again = family_of(arch.config).write_config(arch)
        assert read(again).replace(config={}) == arch.replace(config={})


def test_a_mixer_has_the_width_of_its_heads_whatever_the_hidden_size() -> None:
    for heads, dim in ((2, 10), (6, 4)):
        (layer,) = read(stated("M", mamba_num_heads=heads, mamba_head_dim=dim)).layers
        assert layer.linear_shape("mamba.o", 32) == (32, heads * dim)


def test_a_pruned_ffn_and_fewer_experts_are_stated() -> None:
    arch = read(stated())
    layers = tuple(
        replace(
            layer,
            intermediate_size=layer.intermediate_size if layer.experts else 20,
            experts=layer.experts and replace(layer.experts, num_experts=1),
        )
        for layer in arch.layers
    )
    config = family_of(arch.config).write_config(arch.replace(layers=layers))
    assert (config["intermediate_size"], config["n_routed_experts"]) == (20, 1)
    assert read(config).layers == layers


CONFIGS = {
    **{pattern: stated(pattern) for pattern in ("ME*-", "M", "*", "-", "E", "M*-*-")},
    "with biases": stated(mlp_bias=True),
    "no bias of the convolution": stated(use_conv_bias=False),
    "no shared expert's width": stated(moe_shared_expert_intermediate_size=24),
    "arcee": ARCEE,
    "arcee with biases": {**ARCEE, "mlp_bias": True, "tie_word_embeddings": True},
    "apertus": {**ARCEE, "model_type": "apertus", "attention_bias": True},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_number_of_parameters_is_that_of_the_decoder(config: dict[str, Any]) -> None:
    arch = read(config)
    with torch.device("meta"):
        decoder = Decoder(arch)
    sizes = {name: each.numel() for name, each in decoder.named_parameters()}
    if arch.tied_head:
        sizes.pop("head.weight", None)
    assert arch.num_params == sum(sizes.values())
    linears = [
        f"layers.{idx}.{linear}.weight" for idx, layer in enumerate(arch.layers) for linear in layer.linears
    ]
    assert arch.num_linear_params == sum(sizes[name] for name in linears)
    assert not any(".gate." in name for name in linears if "mamba" not in name)
    idle = sum(size for name, size in sizes.items() if ".experts.1." in name)  # one of two is chosen
    assert arch.num_active_params == arch.num_params - idle
    assert {name for name in sizes if name.endswith(("attn_norm.weight", "ffn_norm.weight"))} == {
        f"layers.{idx}.{name}.weight"
        for idx, layer in enumerate(arch.layers)
        for name, exists in (("attn_norm", layer.has_mixer), ("ffn_norm", layer.has_ffn))
        if exists
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_manifest_is_read_back_equal(config: dict[str, Any]) -> None:
    arch = read(config)
    model, layers = json.loads(json.dumps(arch.to_json()))
    assert Arch.from_json(model, layers) == arch
    assert [layer.get("only_half") for layer in layers] == [layer.only_half for layer in arch.layers]
    assert {layer["gated"] for layer in layers} == {False}


def test_the_manifest_of_a_model_of_whole_layers_is_as_it_was() -> None:
    _, layers = tiny_source().arch.to_json()
    assert not {"only_half", "gated"} & {name for layer in layers for name in layer}


@pytest.mark.parametrize("value", ["both", "", "Mixer", "attn", 1, True, ["ffn"], {}], ids=repr)
def test_a_manifest_with_another_half_is_refused(value: Any) -> None:
    model, layers = read(stated()).to_json()
    layers[2] = {**layers[2], "only_half": value}
    with pytest.raises(StorageError, match="layer 2 of a manifest has only_half = "):
        Arch.from_json(model, layers)


@pytest.mark.parametrize("value", ["no", 0, 1, []], ids=repr)
def test_a_manifest_whose_gate_is_no_truth_value_is_refused(value: Any) -> None:
    model, layers = read(stated()).to_json()
    layers[3] = {**layers[3], "gated": value}
    with pytest.raises(StorageError, match="layer 3 of a manifest has gated = "):
        Arch.from_json(model, layers)


def test_a_manifest_that_gives_half_a_layer_experts_of_the_other_is_refused() -> None:
    model, layers = read(stated()).to_json()
    layers[1] = {**layers[1], "only_half": "mixer"}
    with pytest.raises(UnsupportedArch, match="layer 1: it has experts, and no half for them"):
        Arch.from_json(model, layers)


def arch_with(*layers: LayerShape, **changes: Any) -> Arch:
    return tiny_source().arch.replace(layers=layers, **changes)


@pytest.mark.parametrize("half", [None, "ffn", "mixer"])
def test_a_gate_and_the_activation_fit_one_another_or_are_refused(half: Any) -> None:
    """As in the layers beside it, also where a layer has no FFN."""
    for activation in ("silu", "swiglu_clamped"):
        with pytest.raises(UnsupportedArch, match=rf"layer 1: the FFN has no gate and .*'{activation}'"):
            arch_with(tiny_shape(), tiny_shape(gated=False, only_half=half), activation=activation)
        assert arch_with(tiny_shape(only_half=half), activation=activation).activation == activation
    with pytest.raises(UnsupportedArch, match=r"layer 0: the FFN has a gate and the activation 'relu2'"):
        arch_with(tiny_shape(only_half=half), tiny_shape(gated=False), activation="relu2")
    assert not arch_with(tiny_shape(gated=False, only_half=half), activation="relu2").layers[0].gated
    for activation in ("gelu_pytorch_tanh", "gelu"):
        both = (tiny_shape(only_half=half), tiny_shape(gated=False))
        assert [layer.gated for layer in arch_with(*both, activation=activation).layers] == [True, False]


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu"])
def test_experts_without_gates_have_an_activation_of_their_own(activation: str) -> None:
    experts = Experts(4, 2, 32)
    with pytest.raises(UnsupportedArch, match=rf"layer 0: the experts have no gate .*'{activation}'.*relu2"):
        arch_with(tiny_shape(gated=False, experts=experts), activation=activation)
    assert arch_with(tiny_shape(experts=experts), activation=activation).has_experts


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (ARCEE, "hidden_act", "silu"),
        (stated(), "mlp_hidden_act", "silu"),
        ({**ARCEE, "model_type": "llama"}, "hidden_act", "relu2"),
    ],
)
def test_a_config_with_an_activation_of_the_other_kind_is_refused(
    config: dict[str, Any], name: str, value: str
) -> None:
    with pytest.raises(UnsupportedArch, match=f"gate and the activation '{value}'"):
        read({**config, name: value})


@pytest.mark.parametrize("block", ["post", "sandwich", "parallel"])
@pytest.mark.parametrize("half", ["ffn", "mixer"])
def test_half_a_layer_in_another_block_is_refused(half: Any, block: str) -> None:
    with pytest.raises(UnsupportedArch, match=rf"layer 1: a layer with one half in a '{block}' block"):
        arch_with(tiny_shape(), tiny_shape(only_half=half), block=block)
    assert arch_with(tiny_shape(), block=block).block == block


@pytest.mark.parametrize(
    ("half", "changes", "reason"),
    [
        ("mixer", {"experts": Experts(4, 2, 24)}, "experts, and no half for them"),
        ("ffn", {"recurrence": DeltaNet(4, 2, 8, 12, 4), "rope": None}, "an FFN only, and facts"),
        ("ffn", {"kv_source": 0}, "an FFN only, and facts"),
        ("ffn", {"latent": Latent(0, 16, 8, 16, interleaved=False)}, "an FFN only, and facts"),
    ],
    ids=["experts", "recurrence", "keys of another", "latents"],
)
def test_facts_of_the_half_that_a_layer_lacks_are_refused(
    half: Any, changes: dict[str, Any], reason: str
) -> None:
    layer = tiny_shape(only_half=half, **changes)
    assert reason in str(why_layer_unfit(layer))
    assert reason not in str(why_layer_unfit(replace(layer, only_half=None)))
    assert why_layer_unfit(tiny_shape(only_half=half)) is None
    with pytest.raises(UnsupportedArch, match="layer 1: "):
        arch_with(tiny_shape(), layer)


def test_the_keys_and_values_of_an_ffn_are_read_by_no_layer() -> None:
    with pytest.raises(UnsupportedArch, match="layer 1: it reads the keys and values of layer 0, which has"):
        arch_with(tiny_shape(only_half="ffn"), tiny_shape(kv_source=0))
    mixer = tiny_shape(only_half="mixer")
    assert arch_with(mixer, tiny_shape(kv_source=0)).kv_sources == {0}


ON_DISK = {
    "M": {
        "mixer.A_log",
        "mixer.D",
        "mixer.conv1d.bias",
        "mixer.conv1d.weight",
        "mixer.dt_bias",
        "mixer.in_proj.weight",
        "mixer.norm.weight",
        "mixer.out_proj.weight",
    },
    "*": {f"mixer.{each}_proj.weight" for each in "qkvo"},
    "-": {"mixer.up_proj.weight", "mixer.down_proj.weight"},
    "E": {
        "mixer.gate.weight",
        "mixer.gate.e_score_correction_bias",
        *(
            f"mixer.{expert}.{each}_proj.weight"
            for expert in ("shared_experts", "experts.0", "experts.1")
            for each in ("up", "down")
        ),
    },
}
"""The tensors of a layer beside `norm.weight`, from the index of Nemotron 3 Nano on the hub."""


def _biases(letter: str, *, with_biases: bool) -> list[str]:
    """Return the biases that `mlp_bias` gives an FFN, and a shared expert."""
    module = {"-": "mixer.", "E": "mixer.shared_experts."}.get(letter)
    return [f"{module}{each}_proj.bias" for each in ("up", "down")] if with_biases and module else []


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    files = directory.glob("*.safetensors")
    return {name: each for file in files for name, each in load_file(file).items()}


OF_LATENTS = {f"mixer.{name}_latent_proj" for name in ("fc1", "fc2")}
"""The further modules of a mixture in the index of Nemotron 3 Super."""


@pytest.mark.parametrize(
    ("changes", "leaves"),
    [
        ({}, ()),
        ({"moe_latent_size": 12}, ("weight",)),
        ({"moe_latent_size": 40, "mlp_bias": True}, ("weight", "bias")),
    ],
    ids=["without latents", "latents", "latents with biases"],
)
@pytest.mark.parametrize("pattern", ["ME*-", "-*EM"])
def test_tensors_have_the_names_of_the_hub_and_are_read_back(
    pattern: str, changes: dict[str, Any], leaves: tuple[str, ...], tmp_path: Path
) -> None:
    arch = read(stated(pattern, **changes))
    of_letter = {**ON_DISK, "E": ON_DISK["E"] | {f"{name}.{leaf}" for name in OF_LATENTS for leaf in leaves}}
    tensors = tensors_of(tiny_checkpoint(tmp_path, arch))
    assert tensors.keys() == {
        "backbone.embeddings.weight",
        "backbone.norm_f.weight",
        "lm_head.weight",
        *(
            f"backbone.layers.{idx}.{name}"
            for idx, letter in enumerate(pattern)
            for name in ("norm.weight", *of_letter[letter], *_biases(letter, with_biases="bias" in leaves))
        ),
    }
    source = MemorySource(tiny_decoder(arch), dtype=torch.float32)
    stored = Checkpoint(tmp_path)
    assert letters(stored.arch) == pattern
    for idx in range(4):
        found, expected = stored.layer(idx), source.layer(idx)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())  # type: ignore[arg-type]


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    arch = read(stated("M*-"))
    tiny_checkpoint(tmp_path, arch)
    (file,) = tmp_path.glob("*.safetensors")
    expected = logits(Checkpoint(tmp_path))
    more = {**load_file(file), "mtp.layers.0.norm.weight": torch.ones(32)}
    save_file(more, file, metadata={"format": "pt"})
    assert torch.equal(logits(Checkpoint(tmp_path)), expected)
    save_file({**more, "other.norm.weight": torch.ones(32)}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedArch, match=r"other\.norm"):
        Checkpoint(tmp_path)


WHOLE: dict[str, dict[str, Any]] = {
    "attention": {"layers": (tiny_shape(window=5), tiny_shape()), "qk_norm": True, "ffn_bias": True},
    "scaled": {"layers": (tiny_shape(),) * 2, "residual_scale": 0.4, "layer_scalar": True},
    "without gates": {"layers": (tiny_shape(gated=False),) * 2, "activation": "relu2"},
    "gelu without gates": {"layers": (tiny_shape(gated=False),) * 2, "activation": "gelu"},
    "with xielu": {"layers": (tiny_shape(gated=False),) * 2, "activation": "xielu"},
    "mixtures and recurrences": {
        "layers": (
            tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), rope=None),
            tiny_shape(experts=Experts(4, 2, 24, shared_size=40)),
        )
    },
    "experts on latents": {
        "layers": (tiny_shape(experts=Experts(4, 2, 24, shared_size=40, latent_size=16, latent_bias=True)),)
    },
    "keys of another": {"layers": (tiny_shape(), tiny_shape(kv_source=0))},
    "sinks": {"layers": (tiny_shape(), tiny_shape()), "attn_sinks": True, "norm_offset": 1.0},
}


@pytest.mark.parametrize("changes", WHOLE.values(), ids=WHOLE)
def test_two_layers_of_a_half_each_compute_as_the_whole_layer(changes: dict[str, Any]) -> None:
    source = tiny_source(**changes)
    halved = Halved(source)
    assert torch.equal(logits(halved), logits(source))
    scalars = source.arch.num_layers * source.arch.layer_scalar
    assert halved.arch.num_params == source.arch.num_params + scalars
    assert halved.arch.num_active_linear_params == source.arch.num_active_linear_params
    assert halved.arch.cached_numbers == source.arch.cached_numbers
    assert halved_arch(source.arch).state_numbers == source.arch.state_numbers


SCALED: dict[str, dict[str, Any]] = {
    "gated": {"layers": (tiny_shape(window=5), tiny_shape())},
    "experts": {"layers": (tiny_shape(), tiny_shape(experts=Experts(4, 2, 24, shared_size=40)))},
    "without gates": {"layers": (tiny_shape(gated=False),) * 2, "activation": "relu2"},
    "gelu without gates": {"layers": (tiny_shape(gated=False),) * 2, "activation": "gelu"},
    "with xielu": {"layers": (tiny_shape(gated=False),) * 2, "activation": "xielu"},
}


@pytest.mark.parametrize("changes", SCALED.values(), ids=SCALED)
@pytest.mark.parametrize("half", ["mixer", "ffn"])
def test_half_a_layer_computes_as_a_layer_whose_other_half_adds_nothing(
    half: Any, changes: dict[str, Any]
) -> None:
    """Also where the output of each layer is scaled."""
    source = tiny_source(residual_scale=0.4, layer_scalar=True, **changes)
    found = logits(HalfKept(source, half))
    assert torch.equal(found, logits(HalfSilenced(source, half)))
    assert not torch.allclose(found, logits(source), atol=1e-3)


@pytest.mark.parametrize("half", [None, "mixer", "ffn"])
@pytest.mark.parametrize("changes", SCALED.values(), ids=SCALED)
def test_a_layer_runs_through_the_halves_that_it_has(half: Any, changes: dict[str, Any]) -> None:
    source: WeightSource = tiny_source(residual_scale=0.4, layer_scalar=True, **changes)
    decoder = build_decoder(
        source if half is None else HalfKept(source, half), dtype=torch.float32, device=CPU
    )
    attention = FullAttention()
    positions = torch.arange(9)
    for layer in decoder.layers:
        x_BSD = torch.randn(2, 9, 56, generator=torch.Generator().manual_seed(1))
        halves = layer.halves()  # type: ignore[operator]
        assert len(halves) == (2 if half is None else 1)
        with torch.no_grad():
            expected = layer(x_BSD, positions, attention)
            for each in halves:
                x_BSD = each.pass_through(x_BSD, positions, attention, no_tap)
        assert torch.allclose(x_BSD, expected, rtol=1e-5, atol=1e-6)


def test_an_ffn_without_a_gate_squares_what_is_positive() -> None:
    layer = tiny_source(layers=(tiny_shape(gated=False, only_half="ffn"),), activation="relu2")
    decoder = build_decoder(layer, dtype=torch.float64, device=CPU)
    weights = {name: each.double() for name, each in layer.layer(0).items()}  # type: ignore[union-attr]
    tokens_BS = tiny_tokens(layer.arch, 1, 9).long()
    x_SD = decoder.embed(tokens_BS)[0]
    normed_SD = x_SD / (x_SD.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights["ffn_norm.weight"]
    up_SF = normed_SD @ weights["ffn.up.weight"].t()
    expected = x_SD + torch.where(up_SF > 0, up_SF * up_SF, 0.0) @ weights["ffn.down.weight"].t()
    with torch.no_grad():
        found = decoder.head(decoder.norm(expected[None]))
        assert torch.allclose(decoder(tokens_BS).double(), found.double(), atol=1e-5)

"""Gemma 4: widths of layers with full attention in both spellings of `config.json`, values that are keys, and
what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.distill.student import Shape, student_arch
from compress.errors import UnsupportedArch, UsageError
from compress.export.refusals import check_rules
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import Decoder, DecoderLayer
from compress.models.delta_net import DeltaNet
from compress.models.family import family_of
from compress.models.pruning import Widths, resized, with_layers
from compress.models.weights import dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.stages.prune.spec import Prune
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved
from tests.support.tiny_source import tiny_shape, tiny_source

TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
CONFIG: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 5,
    "layer_types": TYPES,
    "max_position_embeddings": 64,
    "hidden_size_per_layer_input": 0,
    "dtype": "float32",
}
OF_FULL = {"head_dim": 16, "num_key_value_heads": 1}


def arch_of(**changes: Any) -> Arch:
    config = {**CONFIG, **changes}
    return family_of(config).read_config({key: each for key, each in config.items() if each is not None})


def by_layer(stated: Any, **changes: Any) -> Arch:
    """Return the facts of a config that states widths by layer, as `transformers` writes it."""
    return arch_of(per_layer_config=stated, global_head_dim=None, num_global_key_value_heads=None, **changes)


def test_layers_keep_widths_that_do_not_change() -> None:
    arch = arch_of()
    assert resized(arch, Widths.of(arch)) == arch
    narrower = resized(arch, replace(Widths.of(arch), intermediate_size=24))
    assert [layer.widths for layer in narrower.layers] == [(4, 2, 8, 24), (4, 2, 8, 24), (4, 1, 16, 24)]


def test_layers_with_full_attention_have_widths_of_their_own_and_no_linear_of_values() -> None:
    arch = arch_of()
    assert [layer.widths for layer in arch.layers] == [(4, 2, 8, 48), (4, 2, 8, 48), (4, 1, 16, 48)]
    assert [layer.keys_are_values for layer in arch.layers] == [False, False, True]
    assert [("attn.v" in layer.linears) for layer in arch.layers] == [True, True, False]
    assert arch.layers[2].groups[0].linears == ("attn.q", "attn.k")
    assert arch.layers[2].rope is not None
    assert arch.layers[2].rope.rotary_dim == 4
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch


def test_own_values_have_the_heads_of_the_other_layers() -> None:
    arch = arch_of(attention_k_eq_v=False)
    assert [layer.num_kv_heads for layer in arch.layers] == [2, 2, 2]
    assert not any(layer.keys_are_values for layer in arch.layers)


@pytest.mark.parametrize("idx", ["2", "002"])
def test_widths_stated_by_layer_are_those_of_full_attention(idx: str) -> None:
    arch = by_layer({idx: OF_FULL, "0": {}})
    assert arch.replace(config={}) == arch_of().replace(config={})
    written = family_of(CONFIG).write_config(arch)
    assert "per_layer_config" not in written
    assert (written["global_head_dim"], written["num_global_key_value_heads"]) == (16, 1)
    assert (written["head_dim"], written["num_key_value_heads"]) == (8, 2)
    assert by_layer({}).layers[2].widths == (4, 2, 8, 48)


@pytest.mark.parametrize(
    ("stated", "types"),
    [
        ({"1": OF_FULL}, TYPES),
        ({"1": OF_FULL, "2": OF_FULL}, TYPES),
        ({"2": {**OF_FULL, "intermediate_size": 24}}, TYPES),
        ({"2": OF_FULL, "1": {"head_dim": 4}}, ["sliding_attention", "full_attention", "full_attention"]),
        ({"2": OF_FULL}, ["sliding_attention", "full_attention", "full_attention"]),
        ({"two": OF_FULL}, TYPES),
    ],
)
def test_other_widths_by_layer_are_refused(stated: Any, types: list[str]) -> None:
    with pytest.raises(UnsupportedArch, match=r"per_layer_config.*the same head_dim and num_key_value_heads"):
        by_layer(stated, layer_types=types)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60}, "= 60; it must be 61"),
        (
            {"num_kv_shared_layers": 1},
            "num_kv_shared_layers = 1; it must be at most as many as leave a layer",
        ),
        (
            {"num_kv_shared_layers": 3},
            "num_kv_shared_layers = 3; it must be at most as many as leave a layer",
        ),
        (
            {"num_kv_shared_layers": 4},
            "num_kv_shared_layers = 4; it must be at most as many as leave a layer",
        ),
        ({"use_double_wide_mlp": "x"}, "use_double_wide_mlp"),
        ({"use_bidirectional_attention": "all"}, "= 'all': the decoder lacks attention to later positions"),
        ({"global_head_dim": 7}, "global_head_dim = 7; it must be even"),
        ({"per_layer_config": [1]}, "per_layer_config = .* a JSON object"),
        ({"per_layer_config": {"2": 5}}, "per_layer_config of .* is 5, not a JSON object"),
    ],
)
def test_variants_that_the_decoder_does_not_compute_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        arch_of(**changes)
    text = {key: each for key, each in {**CONFIG, **changes}.items() if each is not None}
    wrapped = {"model_type": "gemma4", "text_config": text}
    with pytest.raises(UnsupportedArch, match=message):
        family_of(wrapped).read_config(wrapped)


def of_e(**changes: Any) -> Arch:
    """Return the facts of a model like those named E: of six layers, the last three share keys and values."""
    shared = {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 61,
        "num_kv_shared_layers": 3,
        "num_hidden_layers": 6,
        "attention_k_eq_v": False,
        "layer_types": [*TYPES, "sliding_attention", "full_attention", "full_attention"],
    }
    return arch_of(**{**shared, **changes})


def test_the_last_layers_read_the_keys_and_values_of_the_last_of_their_type_before_them() -> None:
    arch = of_e(use_double_wide_mlp=True)
    assert [layer.kv_source for layer in arch.layers] == [None, None, None, 1, 2, 2]
    assert [layer.intermediate_size for layer in arch.layers] == [48, 48, 48, 96, 96, 96]
    assert [layer.intermediate_size for layer in of_e().layers] == [48] * 6
    assert arch.kv_sources == {1, 2}
    assert arch.cached_numbers == sum(layer.cached_numbers for layer in arch.layers[:3])
    assert list(arch.layers[3].linears)[:2] == ["attn.q", "attn.o"]
    of_keys = [layer.keys_are_values for layer in of_e(attention_k_eq_v=True).layers]
    assert of_keys == [False, False, True, False, False, False]


def test_tokens_have_embeddings_for_each_layer() -> None:
    arch = of_e(use_double_wide_mlp=True)
    assert arch.layer_embed_size == 8
    assert arch_of(hidden_size_per_layer_input=None).layer_embed_size == 256  # the default of its class
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
    assert family_of(CONFIG).read_config(family_of(CONFIG).write_config(arch)).layers == arch.layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_source": 3}, "layer 3: it reads the keys and values of layer 3, which has none before it"),
        ({"kv_source": 4}, "layer 3: it reads the keys and values of layer 4, which has none before it"),
        ({"kv_source": 2}, "layer 3: .* of layer 2, whose heads, rope or window differ"),
        (
            {"output_gate": True},
            "layer 3: a layer reads the keys and values, or the latents, of another, and has an output",
        ),
        (
            {"keys_are_values": True},
            "layer 3: a layer reads the keys and values, or the latents, of another, and has",
        ),
    ],
)
def test_keys_and_values_that_cannot_be_read_are_refused(changes: dict[str, Any], message: str) -> None:
    arch = of_e()
    layers = (*arch.layers[:3], replace(arch.layers[3], **changes), *arch.layers[4:])
    with pytest.raises(UnsupportedArch, match=message):
        arch.replace(layers=layers)
    with pytest.raises(UnsupportedArch, match="embeddings for each layer in a 'pre' block"):
        arch.replace(block="pre")


def test_a_delta_net_reads_no_keys_and_gives_none() -> None:
    delta = tiny_shape(recurrence=DeltaNet(2, 1, 8, 8, 2), rope=None)
    for layers in ((tiny_shape(), replace(delta, kv_source=0)), (delta, tiny_shape(kv_source=0))):
        with pytest.raises(UnsupportedArch, match="reads the keys and values"):
            tiny_source(layers=layers)


def test_wide_ffns_beside_experts_are_refused() -> None:
    experts = {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "hidden_size_per_layer_input": 0,
    }
    assert of_e(**experts).layers[4].experts is not None
    with pytest.raises(UnsupportedArch, match="use_double_wide_mlp = True; it must be false in a model with"):
        of_e(**experts, use_double_wide_mlp=True)


def test_the_model_without_towers_has_no_embeddings_for_layers() -> None:
    text = {**CONFIG, "model_type": "gemma4_unified_text"}
    config = {"model_type": "gemma4_unified", "text_config": text}
    assert family_of(config).read_config(config).layer_embed_size == 0
    text["hidden_size_per_layer_input"] = 256
    with pytest.raises(UnsupportedArch, match="hidden_size_per_layer_input = 256"):
        family_of(config).read_config(config)


def test_a_layer_that_reads_the_keys_of_another_may_be_published_with_its_own(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["gemma4-e"])
    plain = Checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    expected = plain.layer(3)
    width = plain.arch.layers[3].head_dim
    names = [plain.family.tensor(f"layers.3.attn.{name}.weight") for name in ("k", "v", "k_norm")]
    extra = {name: torch.ones(width) for name in names}
    save_file({**tensors, **extra}, file, metadata={"format": "pt"})
    again = Checkpoint(tmp_path)
    assert not any(name.startswith(("attn.k", "attn.v")) for name in again.layer(3))
    assert all(torch.equal(dense(each), dense(again.layer(3)[name])) for name, each in expected.items())
    other = plain.family.tensor("layers.0.attn.o.bias")
    save_file({**tensors, other: torch.ones(width)}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedArch, match="holds the tensor"):
        Checkpoint(tmp_path)


def test_text_is_causal_where_images_are_not() -> None:
    assert arch_of(use_bidirectional_attention="vision").replace(config={}) == arch_of().replace(config={})


def test_the_last_layer_has_full_attention_whatever_is_stated() -> None:
    arch = arch_of(layer_types=["full_attention", "sliding_attention", "sliding_attention"])
    assert [layer.window for layer in arch.layers] == [None, 5, None]
    with pytest.raises(UnsupportedArch, match="the last layer has a window"):
        family_of(CONFIG).write_config(with_layers(arch, [0, 1]))


def test_widths_of_one_type_that_differ_are_in_no_config() -> None:
    arch = arch_of()
    narrow = replace(arch.layers[1], num_kv_heads=1)
    with pytest.raises(UnsupportedArch, match="layers of one type differ in width"):
        family_of(CONFIG).write_config(arch.replace(layers=(arch.layers[0], narrow, arch.layers[2])))


def test_ffns_of_one_kind_of_layer_that_differ_are_in_no_config() -> None:
    arch = of_e(use_double_wide_mlp=True)
    wider = replace(arch.layers[4], intermediate_size=192)
    with pytest.raises(UnsupportedArch, match="layers of one type differ in width"):
        family_of(CONFIG).write_config(arch.replace(layers=(*arch.layers[:4], wider, arch.layers[5])))


def test_values_that_other_layers_read_are_not_smoothed() -> None:
    arch = of_e().replace(v_norm=False)
    with torch.device("meta"):
        producers = [
            [pair.producer for pair in DecoderLayer(arch, idx).smoothing_pairs()] for idx in range(6)
        ]
    assert [("attn.v" in each) for each in producers] == [True, *(False,) * 5]


def test_nothing_is_smoothed_from_normed_values_or_values_that_are_keys() -> None:
    arch = arch_of()
    plain = arch.replace(v_norm=False)
    expected = ["attn_norm", "ffn_norm", "ffn.up"]
    with torch.device("meta"):
        for idx in range(3):
            assert [pair.producer for pair in DecoderLayer(arch, idx).smoothing_pairs()] == expected
        assert [pair.producer for pair in DecoderLayer(plain, 2).smoothing_pairs()] == expected
        assert "attn.v" in [pair.producer for pair in DecoderLayer(plain, 0).smoothing_pairs()]
        assert DecoderLayer(arch, 2).smoothing_pairs()[0].linears == ("attn.q", "attn.k")


def test_formats_take_layers_that_differ_as_the_family_states_them() -> None:
    arch = arch_of(hidden_size=128, intermediate_size=256, head_dim=32, global_head_dim=64)
    for name in ("compressed-tensors", "gptq"):
        check_rules(name, arch, ModelScheme(SCHEMES["W4A16_G128"]))


@pytest.mark.parametrize("axis", ["heads", "ffn", "depth"])
def test_models_whose_layers_differ_are_not_pruned_and_have_no_narrower_student(axis: str) -> None:
    spec = Prune.model_validate({axis: {"keep": 0.5}})
    with pytest.raises(UsageError, match="differ in width"):
        spec.check_model(arch_of())
    with pytest.raises(UsageError, match="differ in width"):
        student_arch(arch_of(), Shape(layers=2))

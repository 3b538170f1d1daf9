"""Gemma 3n: FFNs that differ in width, sparsities by layer, layers that share keys and values, tensors that
are passed over, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import UnsupportedArch, UsageError
from compress.export.format_writer import with_dense_matrices
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import DecoderLayer
from compress.models.family import FAMILIES, family_of
from compress.models.weights import build_decoder
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.stages.prune.spec import Prune
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens

CONFIG: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "vocab_size": 61,
    "vocab_size_per_layer_input": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 2,
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def arch_of(**changes: Any) -> Arch:
    config = {**CONFIG, **changes}
    return family_of(config).read_config(config)


def written(arch: Arch) -> dict[str, Any]:
    return FAMILIES.get(arch.family).write_config(arch)


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_a_window_of_null_is_refused_as_transformers_refuses_it(model_type: str) -> None:
    with pytest.raises(UnsupportedArch, match="sliding_window = None; it must be a number of positions"):
        arch_of(model_type=model_type, sliding_window=None)


def test_facts_of_a_config() -> None:
    arch = arch_of()
    assert (arch.altup_streams, arch.laurel_rank) == (4, 4)
    assert (arch.layer_embed_size, arch.layer_embed_vocab) == (8, 50)
    assert arch_of(vocab_size_per_layer_input=61).layer_embed_vocab == 0
    assert [layer.kv_source for layer in arch.layers] == [None, None, 0, 1]
    assert [layer.window for layer in arch.layers] == [5, None, 5, None]
    assert [layer.rope.theta for layer in arch.layers if layer.rope] == [1e4, 1e6, 1e4, 1e6]
    assert (arch.v_norm, arch.attn_scale, arch.tied_head, arch.logit_softcap) == (True, 1.0, True, 30.0)
    assert arch.stream_size == 4 * 32


def test_the_first_ten_of_many_layers_have_sparse_gates() -> None:
    many = arch_of(num_hidden_layers=12, num_kv_shared_layers=0, layer_types=None)
    assert [layer.gate_sparsity for layer in many.layers] == [0.95] * 10 + [None] * 2
    assert [layer.window is None for layer in many.layers] == [idx % 5 == 4 for idx in range(12)]
    assert {layer.gate_sparsity for layer in arch_of().layers} == {None}
    stated = arch_of(activation_sparsity_pattern=[0.5, 0.0, 0.25, 0])
    assert [layer.gate_sparsity for layer in stated.layers] == [0.5, None, 0.25, None]


@pytest.mark.parametrize("sizes", [[48, 48, 48, 48], [48, 64, 32, 64]])
def test_widths_of_ffns_are_read_and_written_by_layer(sizes: list[int]) -> None:
    arch = arch_of(intermediate_size=sizes)
    assert [layer.intermediate_size for layer in arch.layers] == sizes
    assert written(arch)["intermediate_size"] == sizes
    assert FAMILIES.get(arch.family).read_config(written(arch)).layers == arch.layers


def test_one_width_stays_one_width() -> None:
    assert written(arch_of())["intermediate_size"] == 48


def test_other_families_state_one_width() -> None:
    config = {**CONFIG, "model_type": "gemma3_text", "intermediate_size": [48] * 4}
    with pytest.raises(UnsupportedArch, match="intermediate_size"):
        family_of(config).read_config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_active_idx": 1}, "altup_active_idx = 1"),
        ({"altup_correct_scale": False}, "altup_correct_scale = False"),
        ({"altup_num_inputs": 1}, "altup_num_inputs"),
        ({"laurel_rank": 0}, "laurel_rank"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
        ({"vocab_size_per_layer_input": 62}, "at most 61, the vocab_size"),
        ({"intermediate_size": [48, 48]}, "one width, or a list of 4"),
        ({"activation_sparsity_pattern": [0.5, 0.5]}, "a number for each of 4 layers"),
        ({"activation_sparsity_pattern": [1.0, 0, 0, 0]}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": [1e-9, 0, 0, 0]}, "0, or at least 0.001"),
        ({"num_kv_shared_layers": 3}, "at most as many as leave a layer of each type before them"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        arch_of(**changes)


def test_a_bound_of_training_changes_nothing() -> None:
    assert arch_of(altup_coef_clip=3.0).replace(config={}) == arch_of().replace(config={})


def test_tensors_of_keys_that_nothing_reads_are_passed_over(tmp_path: Path) -> None:
    """Published checkpoints store keys, values and norms of keys of layers that read those of others."""
    saved(tmp_path, *CASES["gemma3n-slices"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    before = {name for name in tensors if ".layers.4." in name}
    assert "model.layers.4.self_attn.k_proj.weight" not in before
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        tensors[f"model.layers.4.self_attn.{name}"] = tensors[f"model.layers.1.self_attn.{name}"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    source = Checkpoint(tmp_path)
    build_decoder(source, dtype=torch.float32, device=torch.device("cpu"))(tokens(1, 5))
    out = tmp_path / "out"
    out.mkdir()
    write_checkpoint(out, source)
    assert {name for name in load_file(out / "model.safetensors") if ".layers.4." in name} == before


def test_the_norm_that_laurel_reads_takes_no_scale() -> None:
    arch = arch_of(num_kv_shared_layers=0)
    with torch.device("meta"):
        pairs = DecoderLayer(arch, 0).smoothing_pairs()
    assert [(pair.producer, pair.tap) for pair in pairs] == [("ffn_norm", "ffn_in"), ("ffn.up", "ffn_mid")]


def test_linears_that_no_scheme_reaches_are_named_as_dense() -> None:
    scheme = with_dense_matrices(ModelScheme(SCHEMES["W4A16_G32"]), arch_of())
    dense = {name for name, own in scheme.exceptions if own is None}
    of_layer = (
        "altup.router",
        "altup.predict",
        "altup.correct",
        "laurel.left",
        "laurel.right",
        "layer_embed.gate",
    )
    assert {f"layers.3.{name}" for name in of_layer} <= dense
    assert {"embed.streams.2", "norm.streams.0", "layer_embeds.proj"} <= dense
    assert "embed.streams.3" not in dense


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"ffn": {"keep": 0.5}}, "gates of this gemma3n_text model are sparse"),
        ({"depth": {"keep": 0.75}}, "read keys and values"),
        ({"heads": {"keep": 0.5}}, "share keys and values"),
    ],
)
def test_what_cannot_be_removed_is_refused(axes: dict[str, Any], reason: str) -> None:
    arch = arch_of(activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0])
    with pytest.raises(UsageError, match=reason):
        Prune.model_validate(axes).check_model(arch)


def test_a_config_of_the_whole_model_states_the_text_model_inside() -> None:
    stated = {"model_type": "gemma3n", "text_config": {**CONFIG, "intermediate_size": [48, 64, 32, 64]}}
    arch = family_of(stated).read_config(stated)
    assert (arch.family, arch.altup_streams, arch.tied_head) == ("gemma3n", 4, True)
    again = json.loads(json.dumps(FAMILIES.get("gemma3n").write_config(arch)))
    assert again["text_config"]["intermediate_size"] == [48, 64, 32, 64]
    assert family_of(again).read_config(again).layers == arch.layers

"""dots3-note: published configs, which state widths of layers with a window in fields of their own, what its
table refuses and restates, and the reading of a checkpoint as it was published."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.family import family_of
from compress.models.weights import build_decoder
from tests.golden.test_families import tolerance
from tests.support.tiny_cases import CASES
from tests.support.tiny_cases.facts import DOTS3
from tests.support.tiny_hf import build_config, saved, tokens

CPU = torch.device("cpu")
TYPES = ["full_attention", "sliding_attention", "full_attention"]
PUBLISHED: dict[str, Any] = {
    **DOTS3,
    "model_type": "dots3_note_text",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 64,
    "layer_types": TYPES,
    "rope_theta": 80000000,
    "swa_rope_theta": 5000,
    "sliding_window_size": 7,
    "moe_layer_freq": [0, 1, 1],
    "first_k_dense_replace": 1,
    "moe_shared_expert_intermediate_size": 32,
    "attention_gate_type": "headwise",
    "apply_mla_qkv_lora_rescale": True,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
for name in ("sliding_window", "shared_experts_intermediate_size"):
    del PUBLISHED[name]


def arch_of(**changes: Any) -> Arch:
    stated = {name: value for name, value in (PUBLISHED | changes).items() if value is not ...}
    return family_of(stated).read_config(stated)


def of_transformers(**changes: Any) -> Arch:
    """Return the facts of the config that `transformers` writes of a published one."""
    stated = {name: value for name, value in (PUBLISHED | changes).items() if value is not ...}
    written = json.loads(transformers.Dots3NoteTextConfig(**stated).to_json_string(use_diff=False))
    return family_of(written).read_config(written | {"dtype": "float32"})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ...},
        {"layer_types": ..., "use_sliding_window": False},
        {"use_dsa": False},
        {"moe_layer_freq": 2, "first_k_dense_replace": 0},
        {"moe_layer_freq": ..., "first_k_dense_replace": ...},
        {"swa_qk_rope_head_dim": 6, "swa_head_dim": 18},
        {"sliding_window_size": ..., "moe_shared_expert_intermediate_size": ...},
        {
            "rope_parameters": {
                "indexed_attention": {"rope_type": "default", "rope_theta": 300.0},
                "sliding_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 700.0,
                    "original_max_position_embeddings": 16,
                },
            }
        },
    ],
)
def test_a_published_config_says_what_transformers_makes_of_it(changes: dict[str, Any]) -> None:
    ours = arch_of(**changes)
    theirs = of_transformers(**changes)
    assert ours.layers == theirs.layers
    assert ours.max_position == theirs.max_position == 64


def test_a_published_checkpoint_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    saved(tmp_path, "dots3_note_text", {**DOTS3, "layer_types": TYPES, "sliding_window": 7})
    published = {**PUBLISHED, "moe_shared_expert_intermediate_size": 24, "swa_rope_theta": 50000}
    (tmp_path / "config.json").write_text(json.dumps(published))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        expected = model.eval()(tokens(2, 24)).logits
        actual = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)(tokens(2, 24))
    assert (actual - expected).abs().max() <= tolerance(expected)


def test_a_flat_config_of_the_whole_model_is_that_of_its_text_model() -> None:
    flat = {**PUBLISHED, "model_type": "dots3_note", "architectures": ["Dots3NoteForCausalLM"]}
    flat |= {"vision_config": {"adapter_out_dim": 48}, "audio_config": {}, "image_token_id": 90}
    family = family_of(flat)
    arch = family.read_config(flat)
    assert arch.layers == arch_of().layers
    written = family.write_config(arch)
    assert (written["model_type"], written["architectures"]) == ("dots3_note", ["Dots3NoteForCausalLM"])
    assert family.read_config(written).layers == arch.layers


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"attention_gate_type": "elementwise"}, "attention_gate_type"),
        ({"apply_mla_qkv_lora_rescale": False}, "apply_mla_qkv_lora_rescale"),
        ({"k_rope_only_layernorm": False}, "k_rope_only_layernorm"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"swa_head_dim": 19, "swa_qk_rope_head_dim": 6}, "swa_head_dim"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "first_k_dense_replace"),
        ({"n_shared_experts": 0}, "n_shared_experts"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedArch, match=named):
        arch_of(**changes)


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"0": {"num_attention_heads": 4}}, "widths of a layer of sliding_attention"),
        ({"1": {"hidden_size": 32}}, "widths of a layer of sliding_attention"),
        ({"one": {"num_attention_heads": 4}}, "its number"),
    ],
)
def test_widths_that_single_layers_have_are_those_of_windows(own: dict[str, Any], named: str) -> None:
    config = build_config(*CASES["dots3_note_text"]).to_dict() | {"dtype": "float32"}
    mapping = {str(key): value for key, value in dict(config["per_layer_config"]).items()}
    stated = {**config, "per_layer_config": {**mapping, **own}}
    with pytest.raises(UnsupportedArch, match=named):
        family_of(stated).read_config(stated)
    without = {**config, "layer_types": ["indexed_attention", "full_attention", "indexed_attention"]}
    with pytest.raises(UnsupportedArch, match="all full_attention or all indexed_attention"):
        family_of(without).read_config(without)


def test_exports_state_the_widths_of_both_types_of_layers() -> None:
    arch = arch_of(swa_num_attention_heads=..., swa_num_key_value_heads=...)
    assert [layer.num_heads for layer in arch.layers] == [6, 64, 6]
    written = family_of(arch.config).write_config(arch)
    assert (written["num_attention_heads"], written["num_key_value_heads"]) == (6, 6)
    assert "swa_num_attention_heads" not in written
    assert family_of(written).read_config(written).layers == arch.layers
    of_windows = arch.replace(layers=(arch.layers[1],))
    assert family_of(written).write_config(of_windows)["num_attention_heads"] == 6
    theirs = of_transformers()
    again = family_of(theirs.config).write_config(theirs)
    assert again["per_layer_config"] == theirs.config["per_layer_config"]

"""Hy4: what its configs and checkpoints state, and where the class of `transformers` differs from the
published model. That logits are those of the class otherwise is tested with all families."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.hy_v4 import modeling_hy_v4
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Experts

from compress.errors import UnsupportedArch
from compress.export import open_checkpoint
from compress.export.format_writer import write_format
from compress.models.checkpoint import Checkpoint
from compress.models.experts import SILU_CAPPED
from compress.models.family import family_of
from compress.models.ffn import gated
from compress.models.random_source import RandomSource
from compress.models.weights import build_decoder
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.golden.test_families import tensors_of, tolerance
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import ROTATION_OF_HY_V4, build_config, saved, tokens

CPU = torch.device("cpu")
WIDTHS = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
}


def config_of(**changes: Any) -> dict[str, Any]:
    family, stated = CASES["hy_v4"]
    return {**build_config(family, stated).to_dict(), **changes}


def test_the_class_of_transformers_rotates_otherwise_than_the_published_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once this fails, `transformers` computes the published model, and nothing has to be replaced."""
    model = saved(tmp_path, *CASES["hy_v4"])
    decoder = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    tokens_BS = tokens(2, 20)
    with torch.no_grad():
        expected = model(tokens_BS).logits
        monkeypatch.setattr(modeling_hy_v4, "apply_rotary_pos_emb", ROTATION_OF_HY_V4)
        of_class = model(tokens_BS).logits
    ours = decoder(tokens_BS)
    assert (ours - expected).abs().max() <= tolerance(expected)
    assert (ours - of_class).abs().max() > 1000 * tolerance(expected)


def test_gates_far_beyond_the_caps_are_those_of_transformers() -> None:
    experts = HYV4Experts(build_config(*CASES["hy_v4"]))
    gate_up_TF = 30 * torch.randn(64, 80, generator=torch.Generator().manual_seed(1))
    gate, up = gate_up_TF.chunk(2, dim=-1)
    assert bool((gate > 10).any() and (gate < -10).any() and (up.abs() > 10).any())
    assert torch.equal(gated(SILU_CAPPED, gate, up, 10.0), experts._apply_gate(gate_up_TF))


def test_a_config_that_states_no_lists_has_those_of_transformers() -> None:
    config = config_of(num_hidden_layers=10)
    for name in ("indexer_types", "mlp_layer_types", "layer_types"):
        del config[name]
    arch = family_of(config).read_config(config)
    (_, stated) = CASES["hy_v4"]
    theirs = build_config("hy_v4", {**stated, "num_hidden_layers": 10})
    indexers = [layer.latent is not None and layer.latent.indexer is not None for layer in arch.layers]
    assert indexers == [each == "full" for each in theirs.indexer_types]
    assert [layer.experts is not None for layer in arch.layers] == [
        each == "sparse" for each in theirs.mlp_layer_types
    ]


def test_a_published_spelling_of_types_and_any_number_of_kv_heads_are_read() -> None:
    config = config_of(layer_types=["deepseek_sparse_attention"] * 3, num_key_value_heads=2)
    arch = family_of(config).read_config(config)
    assert {layer.num_kv_heads for layer in arch.layers} == {6}
    assert {layer.window for layer in arch.layers} == {None}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"swiglu_limit": 0.0}, "swiglu_limit"),
        ({"enable_ihc": False}, "enable_ihc"),
        ({"gating_type": "headwise"}, "gating_type"),
        ({"learnable_sink": False}, "learnable_sink"),
        ({"hc_mult": 1}, "hc_mult"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ({"first_k_dense_replace": 2, "mlp_layer_types": None}, "first_k_dense_replace = 2"),
        ({"first_k_dense_replace": 0, "mlp_layer_types": None}, "first_k_dense_replace = 0"),
        ({"indexer_types": ["shared", "full", "full"]}, "indexer_types"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(changes: dict[str, Any], named: str) -> None:
    config = config_of(**changes)
    with pytest.raises(UnsupportedArch, match=named):
        family_of(config).read_config(config)


def test_fewer_layers_keep_which_of_them_are_dense() -> None:
    config = config_of(first_k_dense_replace=1, mlp_layer_types=None)
    family = family_of(config)
    arch = family.read_config(config)
    assert [layer.experts is None for layer in arch.layers] == [True, False, False]
    sparse = arch.replace(layers=arch.layers[1:])
    written = family.write_config(sparse)
    assert [layer.experts is None for layer in family.read_config(written).layers] == [False, False]


def test_a_layer_that_predicts_a_further_token_is_passed_over(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path, *CASES["hy_v4"])
    file = tmp_path / "model.safetensors"
    more = {"model.mtp_layers.0.eh_proj.weight": torch.zeros(48, 96)}
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    assert Checkpoint(tmp_path).arch.num_layers == 3


def test_codes_of_experts_are_written_apart_and_read_again(tmp_path: Path) -> None:
    (_, stated) = CASES["hy_v4"]
    saved(tmp_path / "plain", "hy_v4", {**stated, **WIDTHS})
    source = Checkpoint(tmp_path / "plain")
    scheme = ModelScheme(SCHEMES["W4A16_G32"])
    random = RandomSource(source.arch, device=CPU, dtype=torch.float32, scheme=scheme.layers)
    written = tmp_path / "written"
    written.mkdir()
    write_format("compressed-tensors", written, random, scheme)
    names = tensors_of(written).keys()
    assert "model.layers.1.mlp.experts.3.gate_proj.weight_packed" in names
    assert "model.layers.0.self_attn.linear_gate.weight_packed" in names
    assert "model.layers.0.hc_attn_layer.hc_pre.hc_fn" in names
    again = open_checkpoint(written)
    for idx in range(3):
        ours, theirs = again.layer(idx), random.layer(idx)
        assert ours.keys() == theirs.keys()

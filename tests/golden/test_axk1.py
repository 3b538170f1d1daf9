"""A.X K1 as it was published: a norm of the output of dense layers, too, and no bias of selection. And what
its table refuses and restates."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compress.errors import StorageError, UnsupportedArch
from compress.export.vllm import why_vllm_refuses
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.experts import Experts
from compress.models.family import family_of
from compress.models.weights import build_decoder
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.untrusted.fields import Fields
from tests.golden.test_families import tolerance
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config, saved, tokens
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
BIAS = "mlp.gate.e_score_correction_bias"
NORM = "post_mlp_layernorm.weight"
SCHEME = ModelScheme(SCHEMES["W4A16_G128"])


def as_published(directory: Path, **added: torch.Tensor) -> Path:
    """Save a tiny A.X K1 with a norm for its dense layer and without biases of selection."""
    saved(directory, *CASES["axk1"])
    file = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(BIAS)}
    dense_norm = torch.linspace(0.5, 1.5, len(tensors["model.norm.weight"]))
    save_file({**tensors, f"model.layers.0.{NORM}": dense_norm, **added}, file, metadata={"format": "pt"})
    return directory


def config_of(case: str = "axk1", **changes: Any) -> dict[str, Any]:
    return dict(build_config(*CASES[case]).to_dict() | {"dtype": "float32"} | changes)


def test_the_published_checkpoint_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    source = Checkpoint(as_published(tmp_path))
    biases = [source.layer(idx)["moe.selection_bias"] for idx in (1, 2)]
    assert all(isinstance(each, torch.Tensor) and each.dtype == torch.float32 for each in biases)
    assert not any(bool(each.any()) for each in biases if isinstance(each, torch.Tensor))
    assert "ffn_post_norm.weight" not in source.layer(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        expected = model(tokens(2, 24)).logits
        actual = build_decoder(source, dtype=torch.float32, device=CPU)(tokens(2, 24))
    assert (actual - expected).abs().max() <= tolerance(expected)


def test_what_is_written_has_zeros_for_the_bias_and_no_norm_that_nobody_reads(tmp_path: Path) -> None:
    (tmp_path / "written").mkdir()
    source = Checkpoint(as_published(tmp_path))
    write_checkpoint(tmp_path / "written", source)
    written = load_file(tmp_path / "written" / "model.safetensors")
    stored = load_file(tmp_path / "model.safetensors")
    biases = {f"model.layers.{idx}.{BIAS}" for idx in (1, 2)}
    assert written.keys() - stored.keys() == biases
    assert stored.keys() - written.keys() == {f"model.layers.0.{NORM}"}
    assert not any(bool(written[name].any()) for name in biases)


def test_other_tensors_of_the_same_names_are_refused(tmp_path: Path) -> None:
    other = "model.layers.0.post_attn_layernorm.weight"
    with pytest.raises(UnsupportedArch, match="post_attn_layernorm"):
        Checkpoint(as_published(tmp_path, **{other: torch.ones(48)}))
    file = tmp_path / "model.safetensors"
    kept = {name: each for name, each in load_file(file).items() if name != f"model.layers.2.{NORM}"}
    save_file({name: each for name, each in kept.items() if name != other}, file)
    with pytest.raises(UnsupportedArch, match=r"lacks the tensor 'model\.layers\.2\.post_mlp_layernorm"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
    ],
)
def test_configs_that_compute_something_else_are_refused(changes: dict[str, Any], named: str) -> None:
    config = config_of(**changes)
    with pytest.raises(UnsupportedArch, match=named):
        family_of(config).read_config(config)


def test_exports_state_what_vllm_reads() -> None:
    published = {name: value for name, value in config_of().items() if name != "mlp_layer_types"}
    family = family_of(published)
    arch = family.read_config(published | {"first_k_dense_replace": 2, "topk_method": "greedy"})
    assert [layer.norms_experts for layer in arch.layers] == [False, False, True]
    later = family.write_config(arch.replace(layers=arch.layers[1:]))
    assert (later["first_k_dense_replace"], later["topk_method"]) == (1, "noaux_tc")
    assert [each.norms_experts for each in family.read_config(later).layers] == [False, True]
    assert why_vllm_refuses(arch, SCHEME) is None
    by_types = family.read_config(config_of("axk1-types", first_k_dense_replace=None))
    written = family.write_config(by_types)
    assert written["first_k_dense_replace"] is None
    assert "topk_method" not in written
    assert "first_k_dense_replace" in str(why_vllm_refuses(by_types, SCHEME))


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"block": "sandwich"}, "'sandwich'"),
        ({"block": "parallel"}, "'parallel'"),
        ({"residual_scale": 0.5}, "residual scale"),
        ({"unit_norms": True}, "no weights"),
        ({"norm": "layer", "norm_bias": True}, "a bias"),
    ],
)
def test_a_norm_of_what_experts_add_is_one_of_plain_blocks(facts: dict[str, Any], named: str) -> None:
    layer = tiny_shape(experts=Experts(6, 2, 48, post_norm=True))
    with pytest.raises(UnsupportedArch, match=f"layer 1: the output of its experts is normed.*{named}"):
        tiny_source(layers=(tiny_shape(), layer), **facts)


def test_parameters_are_counted_with_that_norm() -> None:
    layer = tiny_shape(experts=Experts(6, 2, 48, shared_size=48, post_norm=True))
    without = replace(layer, experts=Experts(6, 2, 48, shared_size=48))
    with_norm, plain = (tiny_source(layers=(each, tiny_shape())).arch for each in (layer, without))
    assert with_norm.num_params - plain.num_params == with_norm.hidden_size
    assert [with_norm.ends_in_norm(each) for each in with_norm.layers] == [True, False]


@pytest.mark.parametrize(
    "facts",
    [
        {"score": "sigmoid"},
        {"score": "softmax", "selection_bias": True},
        {"score": "sigmoid", "selection_bias": True, "num_groups": 3, "top_groups": 2},
    ],
)
def test_logits_with_a_bias_are_those_of_sigmoids_without_groups(facts: dict[str, Any]) -> None:
    stored = {"num_experts": 6, "top_k": 2, "expert_size": 48, "biased_logits": True, **facts}
    with pytest.raises(StorageError, match="score"):
        Experts.from_json(Fields(stored, "the experts of a manifest", StorageError))

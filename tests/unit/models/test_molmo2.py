"""Molmo 2: an embedding in two tensors, linears that are stacked or apart, and ropes that differ by layer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.errors import UnsupportedArch
from compress.export import open_checkpoint
from compress.export.format_writer import write_format
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of
from compress.models.layer_shape import Rope
from compress.models.pruning import with_layers
from compress.models.weights import UNTOUCHED, build_decoder, dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import auto_class, build_config, saved, tokens
from tests.support.wrappers import Rounded, wide

EMBED = "model.transformer.wte.embedding"
MORE = "model.transformer.wte.new_embedding"
CASE = CASES["molmo2"]
GOLDEN = Path(__file__).parents[2] / "golden/configs"


def config_of(case: str = "molmo2", **text: Any) -> dict[str, Any]:
    config: dict[str, Any] = build_config(*CASES[case]).to_dict()
    config["text_config"] |= text
    return config


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def written(directory: Path, source: Checkpoint) -> dict[str, Tensor]:
    directory.mkdir()
    write_checkpoint(directory, source)
    return tensors_of(directory)


def test_an_embedding_that_transformers_cut_in_halves_is_the_same(tmp_path: Path) -> None:
    model = saved(tmp_path / "published", *CASE)
    model.save_pretrained(tmp_path / "again")
    published, again = tensors_of(tmp_path / "published"), tensors_of(tmp_path / "again")
    assert (len(published[EMBED]), len(published[MORE])) == (97, 8)
    assert abs(len(again[EMBED]) - len(again[MORE])) <= 1
    ours = written(tmp_path / "written", Checkpoint(tmp_path / "again"))
    assert ours.keys() == published.keys()
    assert all(torch.equal(ours[name], published[name]) for name in published)


def test_modules_by_their_names_in_memory_are_read_and_written_as_published(tmp_path: Path) -> None:
    model = saved(tmp_path / "published", *CASE)
    (tmp_path / "memory").mkdir()
    tensors = {name: each.contiguous() for name, each in model.state_dict().items()}
    text = {name: each for name, each in tensors.items() if ".vision_tower." not in name}
    published = tensors_of(tmp_path / "published")
    tower = {name: each for name, each in published.items() if name.startswith("model.vision_backbone.")}
    text = {name: each for name, each in text.items() if ".multi_modal_projector." not in name}
    assert {"model.language_model.layers.0.self_attn.q_proj.weight", "lm_head.weight"} <= text.keys()
    save_file(text | tower, tmp_path / "memory/model.safetensors")
    (tmp_path / "memory/config.json").write_bytes((tmp_path / "published/config.json").read_bytes())
    ours = written(tmp_path / "written", Checkpoint(tmp_path / "memory"))
    assert ours.keys() == published.keys()
    assert all(torch.equal(ours[name], published[name]) for name in published)


def test_a_model_without_further_tokens_has_an_empty_part(tmp_path: Path) -> None:
    family, changes = CASE
    model = saved(tmp_path / "source", family, {**changes, "additional_vocab_size": 0})
    source = Checkpoint(tmp_path / "source")
    assert not any(name.startswith(f"{UNTOUCHED}model.transformer") for name in source.outer())
    ours = written(tmp_path / "written", source)
    assert (ours[EMBED].shape, ours[MORE].shape) == ((97, 48), (0, 48))
    again, info = auto_class(family).from_pretrained(
        tmp_path / "written", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(MORE), f"no '{MORE}'"),
        (lambda tensors: tensors.update({MORE: tensors[MORE][:-1].clone()}), r"wte\.weight' is \[104, 48\]"),
        (lambda tensors: tensors.update({MORE: tensors[MORE][:, :-1].clone()}), "differ in more than"),
        (lambda tensors: tensors.update({MORE: tensors[MORE].half()}), "or in dtype"),
    ],
)
def test_parts_of_an_embedding_that_do_not_fit_are_refused(change: Any, said: str, tmp_path: Path) -> None:
    saved(tmp_path, *CASE)
    tensors = tensors_of(tmp_path)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedArch, match=said):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"qk_norm_type": "gemma"}, "qk_norm_type"),
        ({"use_qk_norm": False}, "use_qk_norm"),
        ({"rope_scaling_layers": [-1]}, "rope_scaling_layers"),
        ({"auto_map": {"AutoModel": "modeling_other.Other"}}, "auto_map"),
    ],
)
def test_what_the_class_has_not_is_refused(text: dict[str, Any], said: str) -> None:
    config = config_of(**text)
    with pytest.raises(UnsupportedArch, match=said):
        family_of(config).read_config(config)


def test_fewer_than_no_further_tokens_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, *CASE)
    (tmp_path / "config.json").write_text(json.dumps(config_of(additional_vocab_size=-1)))
    with pytest.raises(UnsupportedArch, match="additional_vocab_size"):
        Checkpoint(tmp_path)


def test_a_tied_head_is_refused() -> None:
    """The embedding has more rows than the head."""
    config = {**config_of(), "tie_word_embeddings": True}
    with pytest.raises(UnsupportedArch, match="tie_word_embeddings"):
        family_of(config).read_config(config)


def test_layers_that_are_not_listed_have_the_plain_rope_also_after_some_are_removed() -> None:
    config = config_of("molmo2-olmo")
    arch = family_of(config).read_config(config)
    assert [layer.rope.kind for layer in arch.layers if layer.rope] == ["default", "yarn", "default"]
    assert arch.layers[0].rope == Rope(theta=10000.0)
    fewer = with_layers(arch, [1, 2])
    stated = family_of(config).write_config(fewer)
    assert stated["text_config"]["rope_scaling_layers"] == [0]
    again = family_of(stated).read_config(stated)
    assert again.layers == fewer.layers


@pytest.mark.parametrize(
    ("name", "base", "num_params"),
    [
        ("allenai/Molmo2-8B", "Qwen/Qwen3-8B", 8_190_735_360),
        ("allenai/Molmo2-O-7B", "allenai/Olmo-3-1025-7B", 7_298_011_136),
    ],
)
def test_the_language_models_are_those_that_they_were_made_from(
    name: str, base: str, num_params: int
) -> None:
    rows = {
        row["name"]: row["config"] for each in GOLDEN.glob("*.json") for row in json.loads(each.read_text())
    }
    arch, other = (family_of(rows[each]).read_config(rows[each]) for each in (name, base))
    assert arch.num_params == other.num_params == num_params
    assert [layer.widths for layer in arch.layers] == [layer.widths for layer in other.layers]
    for fact in ("block", "qk_norm", "whole_qk_norm", "norm_eps", "activation", "tied_head"):
        assert getattr(arch, fact) == getattr(other, fact), fact
    assert [layer.rope for layer in arch.layers] == [layer.rope for layer in other.layers]


def test_published_names_of_fields_mean_the_same() -> None:
    config = config_of("molmo2-olmo")
    text = dict(config["text_config"])
    rope = text.pop("rope_parameters")
    text |= {"qkv_bias": text.pop("attention_bias"), "layer_norm_eps": text.pop("rms_norm_eps")}
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": rope, "use_qk_norm": True}
    text |= {"embedding_dropout": 0.0, "residual_dropout": 0.0}
    other = {**config, "text_config": text}
    read, expected = (family_of(each).read_config(each).replace(config={}) for each in (other, config))
    assert read == expected


def test_codes_are_apart_in_compressed_tensors_and_stacked_in_other_forms(tmp_path: Path) -> None:
    wide("molmo2", tmp_path / "source")
    for name in ("codes", "gptq", "dense"):
        (tmp_path / name).mkdir()
    scheme = ModelScheme(SCHEMES["W4A16_G128"])
    write_format(
        "compressed-tensors", tmp_path / "codes", Rounded(Checkpoint(tmp_path / "source"), scheme), scheme
    )
    codes = open_checkpoint(tmp_path / "codes")
    write_format("gptq", tmp_path / "gptq", codes, scheme)
    apart, stacked = (set(tensors_of(tmp_path / name)) for name in ("codes", "gptq"))
    prefix = "model.transformer.blocks.0"
    assert f"{prefix}.self_attn.k_proj.weight_packed" in apart
    assert not any("att_proj" in name or "ff_proj" in name for name in apart)
    assert f"{prefix}.self_attn.att_proj.qweight" in stacked
    assert not any(".q_proj" in name or "up_proj" in name for name in stacked)
    again = open_checkpoint(tmp_path / "gptq")
    cpu = torch.device("cpu")
    one, other = (build_decoder(each, dtype=torch.float32, device=cpu) for each in (codes, again))
    with torch.no_grad():
        assert torch.equal(one(tokens(1, 8)), other(tokens(1, 8)))


def test_stacked_codes_of_other_tools_are_read(tmp_path: Path) -> None:
    """Tools that load the model by its own code have one linear for q, k and v."""
    wide("molmo2", tmp_path / "source")
    (tmp_path / "codes").mkdir()
    scheme = ModelScheme(SCHEMES["FP8_DYNAMIC"])
    write_format(
        "compressed-tensors", tmp_path / "codes", Rounded(Checkpoint(tmp_path / "source"), scheme), scheme
    )
    expected = open_checkpoint(tmp_path / "codes").layer(0)
    tensors = tensors_of(tmp_path / "codes")
    for idx in range(2):
        for stack, parts in (
            ("self_attn.att_proj", [f"self_attn.{each}_proj" for each in "qkv"]),
            ("mlp.ff_proj", ["mlp.up_proj", "mlp.gate_proj"]),
        ):
            for leaf in ("weight", "weight_scale"):
                names = [f"model.transformer.blocks.{idx}.{part}.{leaf}" for part in parts]
                joined = torch.cat([tensors.pop(name).view(torch.uint8) for name in names])
                dtype = torch.float8_e4m3fn if leaf == "weight" else torch.bfloat16
                tensors[f"model.transformer.blocks.{idx}.{stack}.{leaf}"] = joined.view(dtype)
    save_file(tensors, tmp_path / "codes/model.safetensors")
    found = open_checkpoint(tmp_path / "codes").layer(0)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(dense(found[name]), dense(value)), name

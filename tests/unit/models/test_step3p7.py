"""Step 3.7: two kinds of layers, caps of activations, and the fields of published configs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.layer_shape import Rope
from compress.models.pruning import Widths, resized, with_layers
from compress.models.weights import build_decoder
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens

GOLDEN = Path(__file__).parents[2] / "golden" / "configs" / "mixtures.json"
FULL, SLIDING = "full_attention", "sliding_attention"
TEXT: dict[str, Any] = {
    "model_type": "step3p5",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING],
    "sliding_window": 5,
    "attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 6, "head_dim": 16},
    "moe_layers_enum": "1, 2,3",
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 40,
    "moe_router_scaling_factor": 3.0,
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "swiglu_limits": [7, 0.0, 7.0, 0, 0],
    "swiglu_limits_shared": [5.0, None, 0, 16, 0],
    "num_nextn_predict_layers": 1,
}
"""A text config as it is published, whose lists end with a layer that predicts further tokens."""

SIX = {"num_attention_heads": 6}


def config_of(**changes: Any) -> dict[str, Any]:
    stated = {**TEXT, **changes}
    text = {name: value for name, value in stated.items() if value is not None}
    return {"model_type": "step3p7", "text_config": text, "vision_config": {"width": 32}}


def arch_of(**changes: Any) -> Arch:
    config = config_of(**changes)
    return family_of(config).read_config(config)


def written(arch: Arch) -> dict[str, Any]:
    """Return the text config of a written arch, which is that arch again, for `transformers` too."""
    family = family_of(arch.config)
    config = family.write_config(arch)
    assert family.read_config(config).replace(config={}) == arch.replace(config={})
    theirs = transformers.Step3p7Config(**json.loads(json.dumps(config))).text_config
    for layer, own, idx in zip(arch.layers, theirs.per_layer_config, range(arch.num_layers), strict=True):
        assert own.num_attention_heads == layer.num_heads
        assert own.num_key_value_heads == layer.num_kv_heads
        assert (theirs.mlp_layer_types[idx] == "sparse") == (layer.experts is not None)
        assert layer.rope is not None
        assert theirs.rope_parameters[theirs.layer_types[idx]]["rope_theta"] == layer.rope.theta
        assert layer.ffn_cap == (theirs.swiglu_limits_shared[idx] or None)
        if layer.experts is not None:
            assert layer.expert_cap == (theirs.swiglu_limits[idx] or None)
    return dict(config["text_config"])


def test_layers_have_what_a_published_config_states_of_them() -> None:
    layers = arch_of().layers
    assert [layer.num_heads for layer in layers] == [4, 6, 6, 4]
    assert {layer.num_kv_heads for layer in layers} == {2}
    assert [layer.window for layer in layers] == [None, 5, 5, None]
    scaled, plain = Rope(5e6, "linear", factor=2.0, rotary_dim=8), Rope(1e4)
    assert [layer.rope for layer in layers] == [scaled, plain, plain, scaled]
    assert [layer.experts is not None for layer in layers] == [False, True, True, True]
    assert [layer.ffn_cap for layer in layers] == [5.0, None, None, 16.0]
    assert [layer.expert_cap for layer in layers] == [None, None, 7.0, None]
    assert {layer.head_gate for layer in layers} == {"sigmoid"}
    assert arch_of().norm_offset == 1.0
    assert written(arch_of())["moe_layers_enum"] == "1,2,3"


def test_fields_that_transformers_writes_mean_the_same() -> None:
    saved_text = transformers.Step3p7Config(**json.loads(json.dumps(config_of()))).text_config.to_dict()
    config = {**config_of(), "text_config": saved_text}
    assert saved_text["per_layer_config"]
    arch = family_of(config).read_config(config)
    assert arch.replace(config={}, dtype="") == arch_of().replace(config={}, dtype="")
    assert set(written(with_layers(arch, [0, 2, 3]))["per_layer_config"]) == {"1"}


def test_the_published_model_as_transformers_writes_it_has_the_same_layers() -> None:
    """Its keys of layers have as many digits as the last one, `01` and not `1`."""
    rows = json.loads(GOLDEN.read_text(encoding="utf-8"))
    published = next(row["config"] for row in rows if row["config"].get("model_type") == "step3p7")
    config = json.loads(transformers.Step3p7Config(**json.loads(json.dumps(published))).to_json_string())
    stated = config["text_config"]["per_layer_config"]
    assert "01" in stated
    assert max(map(len, stated)) == 2
    arch = family_of(config).read_config(config)
    assert arch.num_layers == 45
    assert arch.layers == family_of(published).read_config(published).layers
    assert written(arch)["per_layer_config"] == stated
    assert set(written(with_layers(arch, [0, 1, 4]))["per_layer_config"]) == {"1"}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"gating": True}, {"gating": "per-head"}), ({}, {"share_expert_dim": None, "share_expert_dims": 40})],
    ids=str,
)
def test_other_spellings_that_transformers_reads_mean_the_same(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    arch = arch_of(**theirs)
    assert arch.replace(config={}) == arch_of(**ours).replace(config={})
    assert written(arch).items() >= {name: each for name, each in theirs.items() if each}.items()


def test_a_manifest_is_read_back_equal_and_counts_the_parameters_of_the_decoder() -> None:
    for arch in (arch_of(), arch_of(mlp_bias=True, attention_bias=True, query_pre_attn_scalar=20)):
        assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
        with torch.device("meta"):
            decoder = Decoder(arch)
        assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())


@pytest.mark.parametrize("kept", [[0, 2, 3], [1, 2], [0, 3], [2, 3]])
def test_layers_that_stay_keep_their_facts(kept: list[int]) -> None:
    arch = arch_of()
    text = written(with_layers(arch, kept))
    for name in ("layer_types", "rope_theta"):  # what follows is of layers that predict further tokens
        assert text[name] == [TEXT[name][idx] for idx in kept] + TEXT[name][arch.num_layers :]
    sparse = [new for new, idx in enumerate(kept) if arch.layers[idx].experts is not None]
    assert text["moe_layers_enum"] == ",".join(map(str, sparse))
    as_numbers = arch_of(moe_layers_enum=[1, 2, 3])
    assert written(with_layers(as_numbers, kept))["moe_layers_enum"] == sparse


def test_fewer_heads_are_stated_for_both_types_of_layers() -> None:
    arch = arch_of(attention_other_setting=None)
    assert {layer.num_heads for layer in arch.layers} == {4}
    text = written(resized(arch, Widths(2, 1, 96, 4)))
    assert text["num_attention_heads"] == text["num_sliding_attention_heads"] == 2
    assert text["num_attention_groups"] == text["num_key_value_heads"] == 1


def test_heads_that_differ_within_a_type_are_stated_by_no_config() -> None:
    arch = arch_of()
    first, *others = arch.layers
    uneven = arch.replace(layers=(replace(first, num_heads=2), *others))
    assert "one type" in str(family_of(arch.config).why_unstated(uneven))
    assert family_of(arch.config).why_unstated(arch) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [FULL, "chunked_attention", FULL, FULL]}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"moe_layers_enum": "1;2"}, "moe_layers_enum"),
        ({"moe_layers_enum": [1, -2]}, "moe_layers_enum"),
        ({"rope_theta": [5e6]}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"swiglu_limits": [0, 0, 7]}, "swiglu_limits"),
        ({"swiglu_limits_shared": [0, 0, 0, "16"]}, "swiglu_limits_shared"),
        ({"num_sliding_attention_heads": 8}, "num_sliding_attention_heads = 8.*6"),
        ({"attention_other_setting": {"num_attention_groups": 4}}, "num_attention_groups = 4"),
        ({"attention_other_setting": {"head_dim": 32}}, "head_dim = 32"),
        ({"attention_other_setting": {"attention_type": FULL}}, "attention_type"),
        ({"per_layer_config": {"1": {"num_attention_heads": 8}}}, "num_attention_heads"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "head_dim"),
        ({"per_layer_config": {"0": []}}, "per_layer_config"),
        ({"per_layer_config": {"1": SIX, "01": SIX, "2": SIX}}, "per_layer_config = '01'"),
        ({"per_layer_config": {"1": SIX, "2": SIX, "-0": {}}}, "per_layer_config = '-0'"),
        ({"per_layer_config": {"1": SIX, "2": SIX, "first": {}}}, "per_layer_config = 'first'"),
        ({"gating": False}, "gating"),
        ({"gating": "elementwise"}, "gating"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate"),
        ({"use_rope_layers": [1, 0, 1, 1]}, "use_rope_layers"),
        ({"yarn_only_types": [FULL, SLIDING]}, "yarn_only_types"),
        ({"moe_every_n_layer": 2}, "moe_every_n_layer"),
        ({"moe_layer_offset": 1}, "moe_layer_offset"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"zero_centered": False}, "zero_centered"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_or_contradicts_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        arch_of(**changes)


def test_lists_of_ropes_are_read_as_transformers_reads_them() -> None:
    """It takes those of the first layer of each type, the same base for all where there is one."""
    assert arch_of(rope_theta=[5e6, 1e4]).layers == arch_of(rope_theta=[5e6, 1e4, 3.0, 3.0]).layers
    bases = [layer.rope.theta for layer in arch_of(rope_theta=2e4).layers if layer.rope is not None]
    assert bases == [2e4] * 4


def test_caps_of_a_tiny_model_are_reached(tmp_path: Path) -> None:
    """So that `test_families.py` compares them with `transformers`."""
    saved(tmp_path, *CASES["step3p7"])
    source = Checkpoint(tmp_path)
    capped = build_decoder(source, dtype=torch.float32, device=torch.device("cpu"))
    expected = capped(tokens(2, 20))
    for idx, layer in enumerate(source.arch.layers):
        for module in capped.layers[idx].get_submodule(layer.ffn).modules():
            if getattr(module, "cap", None) is None:
                continue
            cap, module.cap = module.cap, None
            assert not torch.equal(capped(tokens(2, 20)), expected)
            module.cap = cap
            if module is not capped.layers[idx].get_submodule(layer.ffn):
                break  # one of the experts


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["step3p7"])
    stored = load_file(tmp_path / "model.safetensors")
    before = Checkpoint(tmp_path).layer(2)
    extra = {
        name.replace("layers.2.", "layers.3."): each.clone()
        for name, each in stored.items()
        if "layers.2." in name
    }
    assert extra
    save_file(
        {**stored, **extra, "model.layers.3.eh_proj.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors"
    )
    again = Checkpoint(tmp_path).layer(2)
    assert all(torch.equal(torch.as_tensor(before[name]), torch.as_tensor(again[name])) for name in before)

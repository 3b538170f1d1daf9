"""OLMo Hybrid: where the norms of its layers are, doubled betas, and a convolution in parts on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compress.errors import UnsupportedArch
from compress.export import FORMATS
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import Decoder
from compress.models.delta_net import DeltaNet
from compress.models.family import family_of
from compress.models.pruning import with_layers
from compress.models.random_source import RandomSource
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build, saved
from tests.support.tiny_source import tiny_shape, tiny_source

CONFIG: dict[str, Any] = {
    "model_type": "olmo_hybrid",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
FAMILY, TINY = CASES["olmo_hybrid"]
FILE = "model.safetensors"
CONV = "model.layers.0.linear_attn.{}conv1d.weight"


def arch_of(**changes: Any) -> Arch:
    config = {**CONFIG, **changes}
    return family_of(config).read_config(config)


def delta_of(arch: Arch) -> DeltaNet:
    delta = arch.layers[0].recurrence
    assert isinstance(delta, DeltaNet)
    return delta


def test_norms_precede_the_halves_of_delta_nets_and_follow_those_of_attention() -> None:
    arch = arch_of()
    assert [arch.block_of(layer) for layer in arch.layers] == ["pre", "pre", "pre", "post", "pre"]
    names = dict(Decoder(arch).named_parameters())
    norms = {idx: {name.split(".")[2] for name in names if f"layers.{idx}." in name} for idx in (2, 3)}
    assert norms[2] == {"attn_norm", "ffn_norm", "delta", "ffn"}
    assert norms[3] == {"attn_post_norm", "ffn_post_norm", "attn", "ffn"}
    assert arch.num_params == sum(each.numel() for each in names.values())
    pairs = [[pair.producer for pair in layer.smoothing_pairs()] for layer in Decoder(arch).layers[2:4]]
    assert pairs == [["ffn_norm", "ffn.up"], ["attn.v", "ffn.up"]]
    assert Arch.from_json(*arch.to_json()) == arch


def test_the_norm_of_a_delta_net_has_an_eps_of_its_own() -> None:
    layer = Decoder(arch_of(rms_norm_eps=1e-3)).layers[0]
    assert (layer.delta.norm.eps, layer.attn_norm.eps) == (1e-5, 1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 3},
        {"linear_num_key_heads": 2},
        {"linear_key_head_dim": 20, "linear_num_value_heads": 8},
        {"linear_value_head_dim": 7, "linear_conv_kernel_dim": 2, "linear_allow_neg_eigval": False},
    ],
)
def test_what_a_config_leaves_out_is_what_the_class_has(changes: dict[str, Any]) -> None:
    arch = arch_of(**changes)
    theirs = transformers.OlmoHybridConfig(**{**CONFIG, **changes})
    delta = delta_of(arch)
    assert (delta.num_heads, delta.num_key_heads) == (
        theirs.linear_num_value_heads,
        theirs.linear_num_key_heads,
    )
    assert (delta.key_dim, delta.value_dim) == (theirs.linear_key_head_dim, theirs.linear_value_head_dim)
    assert delta.kernel_size == theirs.linear_conv_kernel_dim
    assert delta.beta_factor == (2 if theirs.linear_allow_neg_eigval else 1)
    types = ["full_attention" if layer.attends else "linear_attention" for layer in arch.layers]
    assert types == theirs.layer_types


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_theta": None}},
        {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_theta": None},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_a_base_of_null_is_no_rope(changes: dict[str, Any]) -> None:
    theirs = transformers.OlmoHybridConfig.from_dict({**CONFIG, **changes}).rope_parameters["rope_theta"]
    rope = arch_of(**changes).layers[3].rope
    assert (None if rope is None else rope.theta) == theirs


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["linear_attention"] * 5}, "layer_types"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 3}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one rope for all layers"),
        ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "share 2 key heads"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedArch, match=words):
        arch_of(**changes)


def test_widths_that_follow_from_others_are_written() -> None:
    arch = arch_of(num_hidden_layers=8)
    fewer = with_layers(arch, [1, 3, 7])
    config = family_of(CONFIG).write_config(fewer.replace(vocab_size=50))
    assert config["layer_types"] == ["linear_attention", "full_attention", "full_attention"]
    assert (config["linear_key_head_dim"], config["linear_value_head_dim"]) == (12, 24)
    assert family_of(config).read_config(config).layers == fewer.layers
    with pytest.raises(UnsupportedArch, match="all layers left are of one type"):
        family_of(CONFIG).write_config(with_layers(arch, [0, 1]))


def test_a_checkpoint_that_was_cut_elsewhere_is_read_and_written_as_published(tmp_path: Path) -> None:
    build(FAMILY, TINY).save_pretrained(tmp_path / "thirds")
    saved(tmp_path / "published", FAMILY, TINY)
    thirds, published = (Checkpoint(tmp_path / name) for name in ("thirds", "published"))
    for idx in range(published.arch.num_layers):
        found = thirds.layer(idx)
        for name, value in published.layer(idx).items():
            assert isinstance(value, torch.Tensor)
            assert torch.equal(value, found[name])  # type: ignore[arg-type]
    (tmp_path / "again").mkdir()
    write_checkpoint(tmp_path / "again", thirds)
    stored, again = (load_file(tmp_path / name / FILE) for name in ("published", "again"))
    assert stored.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in stored.items())
    sizes = [
        [len(tensors[CONV.format(f"{kind}_")]) for kind in "qkv"]
        for tensors in (again, load_file(tmp_path / "thirds" / FILE))
    ]
    assert sizes == [[16, 16, 48], [27, 27, 26]]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda part: part[..., :-1],
        lambda part: part.squeeze(1),
        lambda part: part.sum(),
        lambda part: part.to(torch.float64),
    ],
)
def test_parts_that_are_no_rows_of_one_tensor_are_refused(
    wrong: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    saved(tmp_path, *CASES["olmo_hybrid"])
    parts = load_file(tmp_path / FILE)
    name = CONV.format("k_")
    save_file({**parts, name: wrong(parts[name]).contiguous()}, tmp_path / FILE)
    with pytest.raises(UnsupportedArch, match="differ in more than their number of rows"):
        Checkpoint(tmp_path).layer(0)


def test_layers_of_one_type_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    arch = arch_of()
    kept = [idx for idx, layer in enumerate(arch.layers) if layer.recurrence is not None]
    left = with_layers(arch, kept)
    assert "of one type" in str(family_of({"model_type": "olmo_hybrid"}).why_unstated(left))
    with pytest.raises(UnsupportedArch, match="of one type"):
        write_checkpoint(tmp_path, RandomSource(left, device=torch.device("cpu"), dtype=torch.float32))
    assert not list(tmp_path.iterdir())


def test_a_convolution_may_be_one_tensor_but_not_both(tmp_path: Path) -> None:
    saved(tmp_path, FAMILY, TINY)
    parts = load_file(tmp_path / FILE)
    whole = torch.cat([parts[CONV.format(f"{kind}_")] for kind in "qkv"])
    without = {name: each for name, each in parts.items() if "0.linear_attn.k_conv" not in name}
    save_file(without, tmp_path / FILE)
    with pytest.raises(UnsupportedArch, match=r"a part of 'model.layers.0.linear_attn.conv1d.weight' and no"):
        Checkpoint(tmp_path)
    save_file({**parts, CONV.format(""): whole}, tmp_path / FILE)
    with pytest.raises(UnsupportedArch, match="too"):
        Checkpoint(tmp_path)
    others = {
        name: each for name, each in parts.items() if "layers.0.linear_attn" not in name or "conv" not in name
    }
    save_file({**others, CONV.format(""): whole}, tmp_path / FILE)
    assert torch.equal(Checkpoint(tmp_path).layer(0)["delta.conv.weight"], whole)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scheme", "changes", "words"),
    [
        ("FP8_DYNAMIC", {}, {"transformers": None, "vLLM": None}),
        ("MXFP8", {}, {"transformers": None}),
        ("W4A16_G32", {}, {"transformers": "joins from parts", "vLLM": None}),
        ("INT8_DYNAMIC", {}, {"transformers": "joins from parts", "vLLM": None}),
        ("FP8_DYNAMIC", {"attention_bias": True}, {"transformers": None, "vLLM": "has no biases"}),
    ],
)
def test_an_export_states_who_loads_it(
    scheme: str, changes: dict[str, Any], words: dict[str, str | None]
) -> None:
    form = FORMATS.get("compressed-tensors")
    found = {each.name: each for each in form.consumers(arch_of(**changes), ModelScheme(SCHEMES[scheme]))}
    for name, reason in words.items():
        assert found[name].loads == (reason is None)
        assert reason is None or reason in found[name].note


def test_two_kinds_of_blocks_run_one_after_the_other_and_unscaled() -> None:
    recurrent = tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), rope=None)
    layers = (recurrent, tiny_shape())
    for changes in ({"block": "parallel"}, {"block": "post", "residual_scale": 0.5}):
        with pytest.raises(UnsupportedArch, match="'pre' blocks, and the others"):
            tiny_source(layers=layers, recurrent_block="pre", **changes)
    with pytest.raises(UnsupportedArch, match="a recurrence in a 'post' block"):
        tiny_source(layers=layers, block="sandwich", recurrent_block="post")

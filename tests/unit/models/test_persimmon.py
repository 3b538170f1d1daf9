"""Persimmon: norms of heads with a bias in the facts, in the decoder and in a student, and counts of
parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from compress.distill.student import Shape, sliced_decoder, student_arch
from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.family import family_of, family_of_arch
from compress.models.weights import build_decoder, dense
from tests.golden.test_known_configs import ROWS
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens
from tests.support.tiny_source import tiny_source

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "persimmon",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def read(**changes: Any) -> Arch:
    config = {**CONFIG, **changes}
    return family_of(config).read_config(config)


@pytest.mark.parametrize("name", ["adept/persimmon-8b-base", "adept/persimmon-8b-chat"])
def test_published_models_have_the_parameters_that_they_have_in_transformers(name: str) -> None:
    config = ROWS[name]["config"]
    with torch.device("meta"):
        model = transformers.PersimmonForCausalLM(transformers.PersimmonConfig(**config))
    num_params = sum(each.numel() for each in model.parameters())
    assert family_of(config).read_config(config).num_params == num_params


@pytest.mark.parametrize("stated", [None, True, False])
def test_heads_are_normed_with_a_bias_unless_the_config_says_otherwise(stated: bool | None) -> None:
    arch = read() if stated is None else read(qk_layernorm=stated)
    assert (arch.qk_norm, arch.qk_norm_bias) == (stated is not False,) * 2
    facts, layers = arch.to_json()
    assert ("qk_norm_bias" in facts) == arch.qk_norm_bias
    assert Arch.from_json(facts, layers) == arch
    written = family_of_arch(arch).write_config(arch)
    assert family_of(written).read_config(written).replace(config={}) == arch.replace(config={})


@pytest.mark.parametrize(
    "facts",
    [
        {"norm": "rms", "qk_norm": True},
        {"norm": "layer"},
        {"norm": "layer", "qk_norm": True, "whole_qk_norm": True},
        {"norm": "layer", "qk_norm": True, "own_qk_norm": True},
    ],
    ids=str,
)
def test_a_bias_of_other_norms_of_heads_is_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArch, match="norms of q and k have a bias; the decoder computes it in"):
        tiny_source(**facts, qk_norm_bias=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads = 5"),
        ({"head_dim": 8}, "head_dim = 8; it must be 64 / 4"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ({"hidden_act": "tanh"}, "activation 'tanh'"),
        ({"sliding_window": 3}, "sliding_window = 3"),
    ],
    ids=str,
)
def test_what_is_computed_otherwise_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        read(**changes)


def test_biases_of_heads_have_the_order_of_their_rows(tmp_path: Path) -> None:
    """Of 16 dimensions 8 rotate: those of each half of a head that do come first in it."""
    saved(tmp_path, *CASES["persimmon"])
    source = Checkpoint(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    order = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    layer = source.layer(1)
    for part in "qk":
        for leaf in ("weight", "bias"):
            on_disk = stored[f"model.layers.1.self_attn.{part}_layernorm.{leaf}"]
            assert torch.equal(dense(layer[f"attn.{part}_norm.{leaf}"]), on_disk[order])
    rows = stored["model.layers.1.self_attn.query_key_value.weight"].view(6, 3, 16, 96)
    for idx, part in enumerate("qkv"):
        expected = rows[:, idx, order] if part != "v" else rows[:, idx]
        assert torch.equal(dense(layer[f"attn.{part}.weight"]), expected.flatten(0, 1))


def test_a_student_keeps_the_norms_of_heads(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["persimmon"])
    source = Checkpoint(tmp_path)
    teacher = build_decoder(source, dtype=torch.float32, device=CPU)
    whole = sliced_decoder(source, student_arch(source.arch, Shape()))
    torch.testing.assert_close(whole(tokens(2, 12)), teacher(tokens(2, 12)))
    smaller = sliced_decoder(source, student_arch(source.arch, Shape(layers=1, ffn=32)))
    attention = smaller.layers[0].attn
    assert torch.equal(attention.q_norm.bias, teacher.layers[0].attn.q_norm.bias)  # type: ignore[union-attr]

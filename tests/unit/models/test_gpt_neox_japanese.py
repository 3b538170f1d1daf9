"""GPT-NeoX Japanese: the bias of the last layer alone, its rope, and what no config can state."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import DecoderLayer
from compress.models.family import family_of, family_of_arch
from compress.models.layer_shape import Rope
from compress.models.pruning import why_layers_stay
from compress.models.weights import build_decoder, dense
from tests.golden.test_known_configs import ROWS
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
PUBLISHED: dict[str, Any] = ROWS["abeja/gpt-neox-japanese-2.7b"]["config"]


def read(**changes: Any) -> Arch:
    config = {**PUBLISHED, **changes}
    return family_of(config).read_config(config)


def test_the_published_model_has_the_parameters_that_it_has_in_transformers() -> None:
    with torch.device("meta"):
        model = transformers.GPTNeoXJapaneseForCausalLM(transformers.GPTNeoXJapaneseConfig(**PUBLISHED))
    assert read().num_params == sum(each.numel() for each in model.parameters())


def test_the_last_layer_alone_has_a_bias_of_the_output_of_attention(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["gpt_neox_japanese"])
    source = Checkpoint(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    biases = [source.layer(idx).get("attn.o.bias") for idx in range(3)]
    assert biases[:2] == [None, None]
    assert biases[2] is not None
    name = "gpt_neox_japanese.layers.2.attention.dense_bias"
    assert torch.equal(dense(biases[2]), stored[name])
    assert [each.get("o_bias") for each in source.arch.to_json()[1]] == [None, None, True]
    assert Arch.from_json(*source.arch.to_json()).layers == source.arch.layers
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    found = [each.attn.o.bias for each in decoder.layers if isinstance(each, DecoderLayer)]
    assert [each is None for each in found] == [True, True, False]


def test_a_rope_is_that_of_the_whole_head_by_default() -> None:
    assert read().layers[0].rope == Rope(10000.0)
    assert read(rotary_pct=0.25, rotary_emb_base=500).layers[0].rope == Rope(500.0, rotary_dim=20)


def test_layers_stay_and_a_model_whose_last_layer_has_no_bias_is_not_written() -> None:
    arch = read()
    family = family_of_arch(arch)
    assert "by its place" in (why_layers_stay(arch) or "")
    fewer = arch.replace(layers=arch.layers[-10:])
    assert family.read_config(family.write_config(fewer)).layers == fewer.layers
    with pytest.raises(UnsupportedArch, match="keep the last layer"):
        family.write_config(arch.replace(layers=arch.layers[:-1]))


def test_ffns_of_another_width_than_a_multiple_of_the_hidden_size_are_refused() -> None:
    arch = read(intermediate_multiple_size=3)
    assert arch.layers[0].intermediate_size == 3 * 2560
    narrow = arch.replace(layers=tuple(replace(each, intermediate_size=2000) for each in arch.layers))
    with pytest.raises(UnsupportedArch, match="keep all channels"):
        family_of_arch(arch).write_config(narrow)
    half = arch.replace(layers=tuple(replace(each, intermediate_size=5120) for each in arch.layers))
    assert family_of_arch(arch).write_config(half)["intermediate_multiple_size"] == 2
    with pytest.raises(UnsupportedArch, match=r"intermediate_multiple_size = 2\.5"):
        read(intermediate_multiple_size=2.5)


def test_a_layer_without_attention_has_no_bias_of_its_output() -> None:
    with pytest.raises(UnsupportedArch, match="a bias of its own, and it has no attention"):
        tiny_source(layers=(tiny_shape(only_half="ffn", rope=None, o_bias=True), tiny_shape()))

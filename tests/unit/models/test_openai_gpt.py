"""GPT of 2018: norms that end the halves of layers, the first layer that norms nothing before attention, and
what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import DecoderLayer
from compress.models.family import family_of, family_of_arch
from compress.models.normed_sum import NormedSums
from compress.models.pruning import why_layers_stay
from compress.models.weights import Weights, WeightSource, build_decoder, build_layer, dense
from tests.golden.test_families import tolerance
from tests.golden.test_known_configs import ROWS
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
PUBLISHED: dict[str, Any] = ROWS["openai-community/openai-gpt"]["config"]


class Fewer:
    """A source with some of the layers of another."""

    scheme = None
    kv_format = None

    def __init__(self, source: WeightSource, arch: Arch, kept: tuple[int, ...]) -> None:
        self.arch = arch
        self.outer = source.outer
        self._source = source
        self._kept = kept

    def layer(self, layer_idx: int) -> Weights:
        return self._source.layer(self._kept[layer_idx])


def read(**changes: Any) -> Arch:
    config = {**PUBLISHED, **changes}
    return family_of(config).read_config(config)


def test_the_published_model_has_the_parameters_of_its_checkpoint() -> None:
    """The hub counts 119,680,512 with the masks of 12 layers, 512 x 512 each."""
    assert read().num_params == 119_680_512 - 12 * 512**2


def test_a_norm_that_ends_a_layer_is_that_before_attention_of_the_next_or_the_last_norm(
    tmp_path: Path,
) -> None:
    saved(tmp_path, *CASES["openai-gpt"])
    source = Checkpoint(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "attn_norm.weight" not in source.layer(0)
    for idx in range(3):
        assert torch.equal(
            dense(source.layer(idx)["ffn_norm.weight"]), stored[f"transformer.h.{idx}.ln_1.weight"]
        )
        following = source.outer()["norm.weight"] if idx == 2 else source.layer(idx + 1)["attn_norm.weight"]
        assert torch.equal(dense(following), stored[f"transformer.h.{idx}.ln_2.weight"])
    assert [each.get("bare_input") for each in source.arch.to_json()[1]] == [True, None, None]
    assert Arch.from_json(*source.arch.to_json()).layers == source.arch.layers


def test_a_model_of_fewer_layers_is_written_if_it_has_the_first_but_none_is_removed(tmp_path: Path) -> None:
    """The norm that ends a removed layer ends the layer before it, in place of that one's own."""
    saved(tmp_path / "plain", *CASES["openai-gpt"])
    source = Checkpoint(tmp_path / "plain")
    assert "by its place" in (why_layers_stay(source.arch) or "")
    layers = source.arch.layers
    arch = source.arch.replace(layers=(layers[0], layers[2]))
    fewer = Fewer(source, arch, (0, 2))
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", fewer)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written").eval()
    decoder = build_decoder(fewer, dtype=torch.float32, device=CPU)
    with torch.no_grad():
        expected = model(tokens(2, 24)).logits
    assert (decoder(tokens(2, 24)) - expected).abs().max() <= tolerance(expected)
    with pytest.raises(UnsupportedArch, match="keep the first layer"):
        family_of_arch(arch).write_config(arch.replace(layers=layers[1:]))


def test_names_and_masks_of_the_published_checkpoint_are_read(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["openai-gpt"])
    plain = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    older = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    older |= {f"h.{idx}.attn.bias": torch.ones(1, 1, 64, 64).tril() for idx in range(3)}
    save_file({**older, "position_ids": torch.arange(64)}, file, metadata={"format": "pt"})
    decoder = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    assert torch.equal(decoder(tokens(1, 8)), plain(tokens(1, 8)))


@pytest.mark.parametrize(("stated", "activation"), [("gelu", "gelu_pytorch_tanh"), ("relu", "relu")])
def test_names_of_activations_are_those_of_its_class(stated: str, activation: str) -> None:
    assert read(afn=stated).activation == activation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"afn": "gelu_new"}, "afn = 'gelu_new'; it must be one of gelu, relu"),
        ({"n_head": 7}, "n_head"),
        ({"sliding_window": 8}, "sliding_window"),
    ],
)
def test_what_is_computed_otherwise_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        read(**changes)


def test_ffns_of_another_width_than_four_times_the_hidden_size_are_not_written() -> None:
    arch = read()
    narrow = arch.replace(layers=tuple(replace(each, intermediate_size=768) for each in arch.layers))
    with pytest.raises(UnsupportedArch, match="keep all channels"):
        family_of_arch(arch).write_config(narrow)


def test_a_layer_that_reads_the_residual_as_it_is_has_no_norm_before_attention() -> None:
    source = tiny_source(layers=(tiny_shape(bare_input=True), tiny_shape()))
    layers = [
        build_layer(source.arch, idx, source.layer(idx), dtype=torch.float32, device=CPU) for idx in range(2)
    ]
    assert all(isinstance(each, DecoderLayer) for each in layers)
    assert [isinstance(each.attn_norm, nn.Identity) for each in layers] == [True, False]
    pairs = [[pair.producer for pair in each.smoothing_pairs()] for each in layers]
    assert [each[0] for each in pairs] == ["attn.v", "attn_norm"]
    stored = sum(each.numel() for idx in range(2) for each in map(dense, source.layer(idx).values()))
    assert source.arch.num_params == stored + sum(dense(each).numel() for each in source.outer().values())


@pytest.mark.parametrize(
    ("layer", "facts", "message"),
    [
        (
            {"only_half": "ffn"},
            {},
            "reads the residual as it is, and has a recurrence, gates of norms, or no",
        ),
        (
            {"norm_gate_rank": 4},
            {},
            "reads the residual as it is, and has a recurrence, gates of norms, or no",
        ),
        ({}, {"block": "sandwich"}, "norms have no weights or are in other places"),
        ({}, {"unit_norms": True}, "norms have no weights or are in other places"),
        ({}, {"hyper": NormedSums(2.0, 1.0, 1.0, 1.0, 1.0, 1.0)}, "without factors then"),
    ],
)
def test_facts_that_no_decoder_computes_with_it_are_refused(
    layer: dict[str, Any], facts: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        tiny_source(layers=(tiny_shape(bare_input=True, **layer), tiny_shape()), **facts)

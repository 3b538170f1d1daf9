"""GPT-Neo: the forms in which configs state types of layers, older names of tensors, and layers that go."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of, family_of_arch
from compress.models.pruning import LayerSubset, with_layers
from compress.models.weights import build_decoder
from tests.golden.test_known_configs import ROWS
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "gpt_neo",
    "vocab_size": 61,
    "hidden_size": 64,
    "num_layers": 4,
    "num_heads": 4,
    "max_position_embeddings": 32,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 7,
}


def read(**changes: Any) -> Arch:
    config = {**CONFIG, **changes}
    return family_of(config).read_config({name: each for name, each in config.items() if each is not None})


def windows(arch: Arch) -> list[int | None]:
    return [layer.window for layer in arch.layers]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [None, 7, None, 7]),
        ({"window_size": None}, [None, 256, None, 256]),
        ({"attention_types": [[["global"], 3], [["local"], 1]]}, [None, None, None, 7]),
        ({"attention_types": None, "attention_layers": ["local"] * 4}, [7] * 4),
        ({"attention_types": None, "num_layers": 24}, [None, 7] * 12),
        ({"attention_types": [[["local", "global"], 0], [["global"], 4]]}, [None] * 4),
    ],
)
def test_types_of_layers_are_stated_in_several_forms(
    changes: dict[str, Any], expected: list[int | None]
) -> None:
    arch = read(**changes)
    assert windows(arch) == expected
    assert all(layer.rope is None and layer.widths == (4, 4, 16, 256) for layer in arch.layers)
    assert arch.score_scale(arch.layers[0]) == 1
    written = family_of_arch(arch).write_config(arch)
    assert family_of(written).read_config(written).replace(config={}) == arch.replace(config={})


def test_linears_of_queries_keys_and_values_alone_have_no_biases() -> None:
    arch = read()
    has_bias = {name: arch.has_bias(name) for name in arch.layers[0].linears}
    assert [name for name, each in has_bias.items() if each] == ["attn.o", "ffn.up", "ffn.down"]
    assert len(has_bias) == 6


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("EleutherAI/gpt-neo-125m", 125_198_592),
        ("EleutherAI/gpt-neo-1.3B", 1_315_575_808),
        ("EleutherAI/gpt-neo-2.7B", 2_651_307_520),
    ],
)
def test_published_models_have_their_number_of_parameters(name: str, num_params: int) -> None:
    config = ROWS[name]["config"]
    assert family_of(config).read_config(config).num_params == num_params


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 5}, "has num_layers = 5; it must be 4, the layers whose types attention_types"),
        ({"attention_types": [["global", 4]]}, "has attention_types = .* a list of pairs"),
        ({"attention_types": [[["global"], True]]}, "has attention_types = .* a list of pairs"),
        ({"attention_types": [[["global"], -1]]}, "has attention_types = .* a list of pairs"),
        ({"attention_types": 4}, "has attention_types = 4; it must be a list"),
        ({"attention_types": [[["global"] * 999, 999]]}, "the types of at most"),
        (
            {"attention_types": [[["global", "sparse"], 2]]},
            "has attention_types = .sparse.; it must be global",
        ),
        ({"attention_layers": ["global"] * 4}, "the same types as in attention_layers"),
        ({"window_size": 0}, "has window_size = 0"),
        ({"num_heads": 5}, "num_heads = 5"),
        ({"intermediate_size": 0}, "intermediate_size = 0"),
        ({"activation_function": "tanh"}, "activation 'tanh'"),
        ({"sliding_window": 3}, "sliding_window = 3"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
    ],
    ids=str,
)
def test_what_is_computed_otherwise_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        read(**changes)


@pytest.mark.parametrize("kept", [[0, 2], [1, 2, 3], [3]])
def test_layers_that_stay_keep_their_types(kept: list[int]) -> None:
    arch = read()
    fewer = with_layers(arch, kept)
    expected = [windows(arch)[idx] for idx in kept]
    assert windows(fewer) == expected
    again = with_layers(fewer, [0])
    for each in (fewer, again):
        written = family_of_arch(each).write_config(each)
        assert not written.keys() & {"layer_types", "num_hidden_layers"}
        found = family_of(written).read_config(written)
        assert found.replace(config={}) == each.replace(config={})
    assert windows(again) == expected[:1]


def test_transformers_loads_the_layers_that_stay_and_computes_the_same(tmp_path: Path) -> None:
    import transformers

    for name in ("source", "fewer"):
        (tmp_path / name).mkdir()
    saved(tmp_path / "source", *CASES["gpt_neo"])
    small = LayerSubset(Checkpoint(tmp_path / "source"), [1, 2])
    write_checkpoint(tmp_path / "fewer", small)
    ours = build_decoder(small, dtype=torch.float32, device=CPU)(tokens(2, 20))
    model = transformers.GPTNeoForCausalLM.from_pretrained(tmp_path / "fewer", attn_implementation="eager")
    assert model.config.attention_layers == ["local", "global"]
    with torch.no_grad():
        theirs = model(tokens(2, 20)).logits
    atol = 256 * torch.finfo(torch.float32).eps * 48**0.5 * float(theirs.abs().max())
    assert float((ours - theirs).abs().max()) <= atol


def test_names_without_the_prefix_of_the_whole_and_masks_are_read(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["gpt_neo"])
    plain = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    older = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    older |= {f"h.{idx}.attn.attention.bias": torch.ones(1, 1, 64, 64).tril() for idx in range(3)}
    older |= {f"h.{idx}.attn.attention.masked_bias": torch.tensor(-1e9) for idx in range(3)}
    save_file(older, file, metadata={"format": "pt"})
    decoder = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    assert torch.equal(decoder(tokens(1, 8)), plain(tokens(1, 8)))

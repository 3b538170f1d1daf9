"""GPT-NeoX and StableLM: how their configs state ropes, heads and blocks, a norm for each of two halves that
run side by side, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import UnsupportedArch
from compress.export import FORMATS
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import DecoderLayer
from compress.models.family import family_of
from compress.models.layer_shape import Rope
from compress.models.weights import build_decoder
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.support.tiny_cases import CASES
from tests.support.tiny_decoder import tiny_decoder, tiny_tokens
from tests.support.tiny_hf import saved, tokens
from tests.support.tiny_source import tiny_shape, tiny_source

PYTHIA: dict[str, Any] = {
    "model_type": "gpt_neox",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "dtype": "float32",
}
STABLELM = {**PYTHIA, "model_type": "stablelm", "num_key_value_heads": 2}
BESIDE = {"norm": "layer", "norm_bias": True, "block": "parallel", "own_ffn_norm": True}


def read(config: dict[str, Any], **changes: Any) -> Arch:
    config = {**config, **changes}
    return family_of(config).read_config(config)


@pytest.mark.parametrize(
    ("stated", "rope"),
    [
        ({}, (10000.0, 4)),
        ({"rotary_pct": 0.5, "rotary_emb_base": 500}, (500.0, 8)),
        ({"rotary_pct": 1.0}, (10000.0, 0)),
        ({"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.5}}, (300.0, 8)),
        ({"rope_parameters": {"rope_theta": 300.0}, "rotary_emb_base": 500, "rotary_pct": 0.5}, (300.0, 8)),
        ({"rotary_pct": 0.5, "partial_rotary_factor": 0.5, "rope_theta": 10000}, (10000.0, 8)),
    ],
)
def test_a_rope_is_what_its_config_and_the_fields_beside_it_state(stated: Any, rope: Any) -> None:
    theta, rotary_dim = rope
    assert [layer.rope for layer in read(PYTHIA, **stated).layers] == [Rope(theta, rotary_dim=rotary_dim)] * 2


def test_a_scaled_rope_keeps_the_fields_beside_it() -> None:
    rope = read(PYTHIA, rope_scaling={"type": "linear", "factor": 2.0}, rotary_emb_base=500).layers[0].rope
    assert rope == Rope(500.0, "linear", factor=2.0, rotary_dim=4)


@pytest.mark.parametrize(("name", "value"), [("rope_theta", 500.0), ("partial_rotary_factor", 0.5)])
def test_a_standard_name_that_differs_from_the_rope_is_refused(name: str, value: float) -> None:
    with pytest.raises(UnsupportedArch, match=f"{name} = {value}.*as its rope says"):
        read(PYTHIA, **{name: value})


def test_each_query_head_has_keys_and_values_of_its_own_whatever_is_stated() -> None:
    assert read(PYTHIA, num_key_value_heads=2).layers[0].num_kv_heads == 4


@pytest.mark.parametrize("beside", [True, False])
def test_blocks_of_both_families(beside: bool) -> None:
    pythia, stablelm = (read(each, use_parallel_residual=beside) for each in (PYTHIA, STABLELM))
    assert pythia.block == stablelm.block == ("parallel" if beside else "pre")
    assert (pythia.own_ffn_norm, stablelm.own_ffn_norm) == (beside, False)
    norms = [arch.num_norms(arch.layers[0]) for arch in (pythia, stablelm)]
    assert norms == ([2, 1] if beside else [2, 2])


def test_norms_of_single_heads_of_stablelm_are_refused() -> None:
    assert not read(STABLELM, qk_layernorm=False).qk_norm
    with pytest.raises(UnsupportedArch, match="qk_layernorm = true: the LayerNorm of each head"):
        read(STABLELM, qk_layernorm=True)


@pytest.mark.parametrize("block", ["pre", "post", "sandwich"])
def test_a_norm_of_the_ffn_beside_that_of_attention_is_one_of_parallel_halves(block: str) -> None:
    with pytest.raises(UnsupportedArch, match=f"the FFN has a norm of its own in a '{block}' block"):
        tiny_source().arch.replace(block=block, own_ffn_norm=True)


def test_the_facts_of_such_a_model_come_back_from_a_manifest() -> None:
    arch = read(PYTHIA)
    model, layers = arch.to_json()
    assert model["own_ffn_norm"] is True
    assert layers[0]["gated"] is False
    assert Arch.from_json(model, layers) == arch
    assert "own_ffn_norm" not in read(STABLELM).to_json()[0]


def test_halves_read_the_input_of_their_layer_through_norms_of_their_own() -> None:
    arch = tiny_source(**BESIDE, layers=(tiny_shape(gated=False),), activation="gelu").arch
    decoder = tiny_decoder(arch)
    (layer,) = decoder.layers
    assert isinstance(layer, DecoderLayer)
    assert {pair.producer for pair in layer.smoothing_pairs()} == {"attn_norm", "ffn_norm", "attn.v"}
    tokens_BS = tiny_tokens(arch, 1, 12)
    before = decoder(tokens_BS)
    with torch.no_grad():
        layer.attn.o.weight.zero_()
        layer.attn_norm.weight.normal_()
    without_attention = decoder(tokens_BS)
    with torch.no_grad():
        layer.attn_norm.weight.normal_()
    assert torch.equal(decoder(tokens_BS), without_attention)
    assert not torch.equal(before, without_attention)


def test_masks_in_older_checkpoints_are_no_parameters(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["gpt_neox"])
    plain = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "embed_out.weight" in tensors
    for idx in range(3):
        attention = f"gpt_neox.layers.{idx}.attention."
        tensors[f"{attention}bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
        tensors[f"{attention}masked_bias"] = torch.tensor(-1e9)
        tensors[f"{attention}rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, file, metadata={"format": "pt"})
    decoder = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(decoder(tokens(1, 8)), plain(tokens(1, 8)))


def test_vllm_loads_codes_of_stablelm_but_not_in_gptq() -> None:
    arch = read(STABLELM, intermediate_size=64)
    scheme = ModelScheme(SCHEMES["W4A16_G32"])

    def note(form: str) -> str | None:
        (vllm,) = [each for each in FORMATS.get(form).consumers(arch, scheme) if each.name == "vLLM"]
        return None if vllm.loads else vllm.note

    assert note("compressed-tensors") is None
    assert "StableLM" in str(note("gptq"))

"""Models of speech: whose heads are tied, which are refused, and what Granite Speech computes of text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from compress.errors import UnsupportedArch
from compress.models.checkpoint import Checkpoint
from compress.models.config_notes import unread_note
from compress.models.family import family_of
from compress.models.weights import build_decoder
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config, saved, tokens

TIE = "tie_word_embeddings"
CPU = torch.device("cpu")


def config_of(case: str) -> dict[str, Any]:
    config: dict[str, Any] = build_config(*CASES[case]).to_dict()
    return config


@pytest.mark.parametrize("case", ["voxtral", "qwen2_audio", "vibevoice_asr", "audioflamingo3"])
def test_a_tie_that_the_class_does_not_compute_is_refused(case: str, tmp_path: Path) -> None:
    """`transformers` keeps the two apart, whatever the config states."""
    model = saved(tmp_path, *CASES[case])
    config = json.loads((tmp_path / "config.json").read_text())
    config[TIE] = config["text_config"][TIE] = True
    again = type(model)(type(model.config)(**json.loads(json.dumps(config))))
    again.tie_weights()
    head, embedding = again.get_output_embeddings(), again.get_input_embeddings()
    assert head.weight.data_ptr() != embedding.weight.data_ptr()
    family = family_of(config)
    with pytest.raises(UnsupportedArch, match="a head of its own"):
        family.read_config(config)
    for each in (config, config["text_config"]):
        del each[TIE]
    assert family.states_tie(config)
    assert not family.read_config(config).tied_head


@pytest.mark.parametrize("case", ["qwen3_asr", "glmasr-tied", "granite_speech-tied", "fun_asr_nano"])
def test_a_head_that_neither_a_config_nor_tensors_have_is_the_embedding(case: str, tmp_path: Path) -> None:
    model = saved(tmp_path, *CASES[case])
    config = json.loads((tmp_path / "config.json").read_text())
    for each in (config, config["text_config"]):
        each.pop(TIE, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Checkpoint(tmp_path).arch.tied_head
    again = type(model).from_pretrained(tmp_path)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight


@pytest.mark.parametrize("stated", [True, None])
def test_granite_speech_with_adapters_is_refused(stated: bool | None) -> None:
    config = config_of("granite_speech")
    del config["has_lora_adapter"]
    if stated is not None:
        config["has_lora_adapter"] = stated
    assert transformers.GraniteSpeechConfig(**json.loads(json.dumps(config))).has_lora_adapter
    with pytest.raises(UnsupportedArch, match="has_lora_adapter = True; it must be false: adapters"):
        family_of(config).read_config(config)


def test_granite_speech_divides_logits_as_its_text_model_alone(tmp_path: Path) -> None:
    family, changes = CASES["granite_speech"]
    model = saved(tmp_path, family, {**changes, "logits_scaling": 4.0})
    source = Checkpoint(tmp_path)
    assert "Logits are divided by logits_scaling" in str(unread_note(source.arch))
    text = transformers.GraniteForCausalLM(model.config.text_config).eval()
    prefix = "language_model."
    stored = load_file(tmp_path / "model.safetensors")
    inside = {name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)}
    text.load_state_dict(inside)
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    with torch.no_grad():
        ours = decoder(tokens(2, 16))
        assert torch.allclose(ours, text(tokens(2, 16)).logits, atol=1e-5)
        assert torch.allclose(ours, model(tokens(2, 16)).logits / 4.0, atol=1e-5)


@pytest.mark.parametrize("family", ["voxtral", "glmasr"])
def test_a_text_config_that_states_little_has_the_values_of_one_model(family: str) -> None:
    config = {"model_type": family, "text_config": {"num_hidden_layers": 2, "max_position_embeddings": 128}}
    theirs = transformers.CONFIG_MAPPING[family](**json.loads(json.dumps(config))).text_config
    ours = family_of(config).read_config(config)
    assert (ours.vocab_size, ours.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (ours.num_layers, ours.max_position) == (2, 128)
    assert ours.norm_eps == theirs.rms_norm_eps
    for layer in ours.layers:
        assert layer.rope is not None
        assert layer.rope.theta == theirs.rope_parameters["rope_theta"]
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.intermediate_size) == (
            theirs.num_attention_heads,
            theirs.num_key_value_heads,
            theirs.head_dim,
            theirs.intermediate_size,
        )

"""Where the text config of a wrapper lies, and what a wrapper writes around it."""

from typing import Any

from compress.models.family import family_of
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config

TIE = "tie_word_embeddings"


def config_of(case: str) -> dict[str, Any]:
    config: dict[str, Any] = build_config(*CASES[case]).to_dict()
    return config


def test_a_text_config_deeper_inside_is_read_and_written_where_it_lies() -> None:
    config = config_of("qwen3_omni_moe")
    family = family_of(config)
    arch = family.read_config(config)
    written = family.write_config(arch.replace(layers=arch.layers[:2]))
    thinker = written["thinker_config"]
    assert "text_config" not in written
    assert thinker["text_config"]["num_hidden_layers"] == 2
    assert thinker["vision_config"] == config["thinker_config"]["vision_config"]
    assert thinker[TIE] is False
    assert written["talker_config"] == config["talker_config"]
    assert family.read_config(written).num_layers == 2
    changed = family.changed(written, sliding_window=None)
    assert changed["thinker_config"]["text_config"]["sliding_window"] is None


def test_a_thinker_decides_whether_its_head_is_tied() -> None:
    config = config_of("qwen3_omni_moe")
    config["thinker_config"][TIE] = True
    config[TIE] = False
    family = family_of(config)
    assert family.states_tie(config)
    arch = family.read_config(config)
    assert arch.tied_head
    written = family.write_config(arch)
    assert (written[TIE], written["thinker_config"][TIE]) == (True, True)


def test_parts_that_speak_are_none_of_the_text_model() -> None:
    family = family_of({"model_type": "qwen3_omni_moe"})
    for name in (
        "talker.model.layers.0.mlp.gate.weight",
        "code2wav.decoder.0.bias",
        "thinker.visual.a.weight",
    ):
        assert family.is_untouched(name)
    assert not family.is_untouched("thinker.model.layers.0.mlp.gate.weight")


def test_the_whole_decides_the_tie_by_the_other_name_of_the_field_too() -> None:
    config = config_of("lfm2_vl")
    del config[TIE]
    config["text_config"].pop(TIE, None)
    family = family_of(config)
    assert not family.states_tie(config)
    config = {**config, "tie_embedding": False}
    config["text_config"] = {**config["text_config"], "tie_embedding": True}
    assert family.states_tie(config)
    arch = family.read_config(config)
    assert not arch.tied_head
    written = family.write_config(arch)
    assert (written["tie_embedding"], written["text_config"]["tie_embedding"]) == (False, False)
    assert not family.read_config(written).tied_head


def test_a_text_model_keeps_the_name_that_its_config_states() -> None:
    config = config_of("exaone4_5")
    config["text_config"]["model_type"] = "exaone4_5_text"
    family = family_of(config)
    written = family.write_config(family.read_config(config))
    assert written["text_config"]["model_type"] == "exaone4_5_text"


def test_parts_that_have_another_name_in_memory_are_dense_by_both() -> None:
    names = {kind: family_of({"model_type": kind}).untouched_modules for kind in ("paddleocr_vl", "llava")}
    assert names["paddleocr_vl"] == ("visual", "mlp_AR", "model.projector")
    assert names["llava"] == ("vision_tower", "multi_modal_projector")


def test_a_flat_config_of_hunyuan_ocr_and_one_with_other_names_mean_the_same() -> None:
    config = config_of("hunyuan_vl")
    text = config.pop("text_config")
    arch = family_of(config).read_config({**config, "text_config": text})
    flat = {**text, **config}
    renamed = {**text, "org_vocab_size": text["vocab_size"], "pad_id": 3}
    renamed["attention_head_dim"] = renamed.pop("head_dim")
    for other in (flat, {**config, "text_config": renamed}):
        assert family_of(other).read_config(other).replace(config={}) == arch.replace(config={})

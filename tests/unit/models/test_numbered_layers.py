"""Models whose layers other parts of them know by number or by index, and parts with other names in vLLM."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from compress.errors import UnsupportedArch
from compress.models.family import family_of
from compress.models.pruning import why_layers_stay, with_layers

GOLDEN = Path(__file__).parents[2] / "golden/configs/wrappers.json"
PUBLISHED = {row["config"]["model_type"]: row["config"] for row in json.loads(GOLDEN.read_text())}


@pytest.mark.parametrize("stated", ["full_attn_idxs", "layer_types", "both"])
def test_a_wrapper_without_some_layers_keeps_the_types_of_the_others(stated: str) -> None:
    """`transformers` writes the indices of layers with attention and the types of all beside them."""
    config: dict[str, Any] = json.loads(json.dumps(PUBLISHED["lfm2_vl"]))
    text = config["text_config"]
    indices = text.pop("full_attn_idxs")
    types = ["full_attention" if idx in indices else "conv" for idx in range(text["num_hidden_layers"])]
    text |= {"full_attn_idxs": indices} if stated != "layer_types" else {}
    text |= {"layer_types": types} if stated != "full_attn_idxs" else {}
    family = family_of(config)
    arch = family.read_config(config)
    fewer = with_layers(arch, [idx for idx in range(arch.num_layers) if idx not in (0, 1, 5)])
    written = family.write_config(fewer)
    again = family.read_config(written)
    assert again.layers == fewer.layers
    assert {layer.recurrence is None for layer in again.layers} == {True, False}
    if stated != "full_attn_idxs":  # `transformers` knows the other type by this name
        assert set(written["text_config"]["layer_types"]) == {"conv", "full_attention"}


@pytest.mark.parametrize("model_type", ["granite4_vision", "qwen3_omni_moe"])
def test_layers_that_other_parts_know_by_number_stay(model_type: str) -> None:
    arch = family_of(PUBLISHED[model_type]).read_config(PUBLISHED[model_type])
    assert "by number" in str(why_layers_stay(arch))


@pytest.mark.parametrize(
    ("model_type", "module"),
    [
        ("qwen3_omni_moe", "visual.blocks.0.attn.qkv"),
        ("qwen3_omni_moe", "thinker.visual.blocks.0.attn.qkv"),
        ("lighton_ocr", "vision_tower.transformer.layers.0.attention.wq"),
        ("lighton_ocr", "multi_modal_projector.linear_1"),
        ("lighton_ocr", "model.vision_encoder.layers.0"),
    ],
)
def test_untouched_parts_are_found_by_every_name(model_type: str, module: str) -> None:
    parts = family_of({"model_type": model_type}).untouched_modules
    assert any(re.match(rf"{re.escape(part)}(\.|$)", module) for part in parts)


def test_a_wrapper_without_its_text_config_says_where_it_lies() -> None:
    config = {**PUBLISHED["qwen3_omni_moe"], "thinker_config": {}}
    with pytest.raises(UnsupportedArch, match=r"has no thinker_config\.text_config, which states the text"):
        family_of(config).read_config(config)

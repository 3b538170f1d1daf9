"""PaliGemma: Gemma or Gemma 2 inside, and prompts whose tokens attend in one direction."""

import json
from pathlib import Path

import pytest
import torch

from compress.models.config_notes import unread_note
from compress.models.family import family_of, family_of_arch
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build, tokens

GOLDEN = Path(__file__).parents[2] / "golden/configs/wrappers.json"
PUBLISHED = {row["name"]: row["config"] for row in json.loads(GOLDEN.read_text())}


@pytest.mark.parametrize(
    ("name", "of_gemma", "hidden_size"),
    [
        ("google/paligemma-3b-pt-224", 2_506_172_416, 2048),
        ("google/paligemma2-3b-pt-224", 2_614_341_888, 2304),
        ("google/paligemma2-10b-pt-224", 9_241_705_984, 3584),
        ("google/paligemma2-28b-pt-224", 27_227_128_320, 4608),
    ],
)
def test_the_text_model_is_gemma_with_tokens_of_places(name: str, of_gemma: int, hidden_size: int) -> None:
    """The vocabulary has 1,024 tokens of places, 128 of segments and some more than that of Gemma."""
    arch = family_of(PUBLISHED[name]).read_config(PUBLISHED[name])
    assert arch.num_params == of_gemma + (257216 - 256000) * hidden_size


def test_norms_have_the_names_of_the_family_inside() -> None:
    """The norm before the FFN of Gemma has the name of one after attention, as Gemma 2 has it."""
    names = {}
    for name in ("google/paligemma-3b-pt-224", "google/paligemma2-3b-pt-224"):
        arch = family_of(PUBLISHED[name]).read_config(PUBLISHED[name])
        names[name] = family_of_arch(arch).to_disk("layers.0.ffn_norm").rpartition(".")[2]
    assert list(names.values()) == ["post_attention_layernorm", "pre_feedforward_layernorm"]


@pytest.mark.parametrize(
    ("case", "attention", "causal_without"),
    [("paligemma", "eager", True), ("paligemma", "sdpa", False), ("paligemma-gemma2", "eager", True)],
)
def test_the_note_says_what_transformers_computes(case: str, attention: str, causal_without: bool) -> None:
    """Attention is causal where `token_type_ids` mark a suffix, and eager attention without such ids; where
    they mark a prefix, and with SDPA without them, the last token of it changes the logits of the first."""
    model = build(*CASES[case])
    model.set_attn_implementation(attention)
    assert model.config.text_config._attn_implementation == attention
    tokens_BS = tokens(1, 10)
    others_BS = tokens_BS.clone()
    others_BS[0, -1] = (tokens_BS[0, -1] + 1) % 90
    ones_BS = torch.ones_like(tokens_BS)
    is_causal = {}
    with torch.no_grad():
        for name, types in {"none": None, "suffix": ones_BS, "prefix": 0 * ones_BS}.items():
            one, other = (model(each, token_type_ids=types).logits for each in (tokens_BS, others_BS))
            is_causal[name] = torch.equal(one[:, :-1], other[:, :-1])
    assert is_causal == {"none": causal_without, "suffix": True, "prefix": False}
    config = PUBLISHED["google/paligemma-3b-pt-224"]
    assert "tokens before it" in str(unread_note(family_of(config).read_config(config)))


def test_transformers_has_no_sdpa_for_the_second_model() -> None:
    with pytest.raises(ValueError, match="Gemma2Model does not support"):
        build(*CASES["paligemma-gemma2"]).set_attn_implementation("sdpa")

"""PaliGemma and PaliGemma 2 (arXiv 2407.07726, 2412.03555): the text model is Gemma or Gemma 2. Its tokens
attend to those before them, as those of its answers do. `transformers` lets the tokens of a prompt attend in
both directions if they are marked as its prefix."""

from collections.abc import Mapping
from dataclasses import replace

from compress.models.arch import Arch
from compress.models.archs.gemma import GEMMA
from compress.models.archs.gemma2 import GEMMA2
from compress.models.family import FAMILIES, Family
from compress.models.module_names import SANDWICH_NORMS
from compress.models.wrapper import LLAVA_NAMES, sized, wrapper

_BOTH_WAYS = "use_bidirectional_attention"
_NUM_IMAGE_TOKENS = "num_image_tokens"
PREFIX_NOTE = (
    "Every token attends to the tokens before it. PaliGemma was trained on prompts whose tokens attend to "
    "each other in both directions: transformers computes them so if token_type_ids mark them. Without such "
    "ids it does so in PaliGemma 1 with SDPA, and not with eager attention."
)


def _inside(family: Family) -> Family:
    """Return a text family as it is inside: its field of attention in both directions is that of prompts."""
    fixed = {name: value for name, value in family.fixed_fields.items() if name != _BOTH_WAYS}
    known = family.known_fields | {_BOTH_WAYS, _NUM_IMAGE_TOKENS}
    return replace(family, known_fields=known, fixed_fields=fixed)


def _norms(arch: Arch) -> Mapping[str, str]:
    """Return the names of norms, of which Gemma 2 has others than Gemma."""
    return SANDWICH_NORMS if arch.block == "sandwich" else {}


FAMILIES.add(
    "paligemma",
    wrapper(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        sized(
            _inside(GEMMA),
            vocab_size=256000,
            hidden_size=3072,
            intermediate_size=24576,
            num_hidden_layers=28,
            num_attention_heads=16,
        ),
        sized(
            _inside(GEMMA2),
            vocab_size=256000,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
        ),
        ties_by_default=True,
        names_by_facts=_norms,
        computed_otherwise=PREFIX_NOTE,
        **LLAVA_NAMES,
    ),
)

"""Granite Speech (IBM, arXiv 2505.08699): the text model is `granite`, next to a conformer. Models whose text
model has adapters (LoRA) for audio, in files of their own, are refused."""

from compress.models.archs.granite import GRANITE
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, sized, wrapper
from compress.untrusted.fields import Fields

_ADAPTER = "has_lora_adapter"
_NOTE = (
    "Logits are divided by logits_scaling, as in the text model alone and vLLM; the class of transformers "
    "around it does not, so its probabilities are others where it is not 1."
)
_PARTS = ("encoder", "projector")


def _check_adapter(whole: Fields) -> None:
    """Check that audio is read by the same text model as text.

    Raises:
        UnsupportedArch: the config states an adapter, or leaves it to the default of its class, which is one.
    """
    if whole.flag(_ADAPTER, default=True):
        raise whole.wrong(
            _ADAPTER, True, "false: adapters of weights that change would no longer fit; merge them first"
        )


GRANITE_SPEECH = wrapper(
    "granite_speech",
    "GraniteSpeechForConditionalGeneration",
    sized(
        GRANITE,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
    ),
    ties_by_default=True,
    check_whole=_check_adapter,
    computed_otherwise=_NOTE,
    **{
        **LLAVA_NAMES,
        "in_memory": {
            "language_model.model.": "model.language_model.",
            "language_model.lm_head": "lm_head",
            **{f"{part}.": f"model.{part}." for part in _PARTS},
        },
        "untouched": _PARTS,
    },
)

FAMILIES.add("granite_speech", GRANITE_SPEECH)

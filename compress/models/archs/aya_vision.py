"""Aya Vision (Cohere, arXiv 2505.08751): the text model is that of Command R7B or of Command R."""

from compress.models.archs.cohere import COHERE
from compress.models.archs.cohere2 import COHERE2
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, sized, wrapper

_SIZES = {"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40}
SCALE_NOTE = (
    "Logits are multiplied by logit_scale, as in the text model alone and vLLM; the class of transformers "
    "around it does not, so its probabilities are others where it is not 1."
)
COHERE2_SIZED = sized(COHERE2, **_SIZES, num_attention_heads=64)

FAMILIES.add(
    "aya_vision",
    wrapper(
        "aya_vision",
        "AyaVisionForConditionalGeneration",
        COHERE2_SIZED,
        sized(COHERE, **_SIZES, num_attention_heads=64),
        ties_by_default=True,
        computed_otherwise=SCALE_NOTE,
        **LLAVA_NAMES,
    ),
)

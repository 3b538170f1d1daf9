"""LLaVA 1.5 and Pixtral (arXiv 2310.03744, 2410.07073): the text model is `llama` or `mistral`, whose sizes
may be left to the defaults of their families."""

from compress.models.archs.llama import LLAMA
from compress.models.archs.mistral import MISTRAL
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, sized, wrapper

_SIZES = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_7B = sized(LLAMA, **_SIZES, intermediate_size=11008)
MISTRAL_7B = sized(MISTRAL, **_SIZES, intermediate_size=14336, max_position_embeddings=131072)

FAMILIES.add(
    "llava",
    wrapper(
        "llava",
        "LlavaForConditionalGeneration",
        LLAMA_7B,
        MISTRAL_7B,
        text_ties=True,
        **LLAVA_NAMES,
    ),
)

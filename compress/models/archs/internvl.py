"""InternVL 3 and 3.5 in the form of `transformers` (arXiv 2504.10479, 2508.18265): the text model is `qwen2`,
`qwen3`, `qwen3_moe` or `llama`."""

from compress.models.archs.llava import LLAMA_7B
from compress.models.archs.qwen2 import DEFAULT_SIZES, QWEN2
from compress.models.archs.qwen3 import QWEN3
from compress.models.archs.qwen3_moe import QWEN3_MOE
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, sized, wrapper

FAMILIES.add(
    "internvl",
    wrapper(
        "internvl",
        "InternVLForConditionalGeneration",
        sized(QWEN2, **DEFAULT_SIZES),
        sized(QWEN3, **DEFAULT_SIZES, max_position_embeddings=32768),
        sized(QWEN3_MOE, vocab_size=151936, hidden_size=2048, num_hidden_layers=24, num_attention_heads=32),
        LLAMA_7B,
        ties_by_default=True,
        layer_modules=QWEN3_MOE.layer_modules,
        expert_layouts=QWEN3_MOE.expert_layouts,
        **LLAVA_NAMES,
    ),
)

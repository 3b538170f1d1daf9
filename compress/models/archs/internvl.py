"""InternVL 3 and 3.5 in the form of `transformers` (arXiv 2504.10479, 2508.18265): the text model is `qwen2`,
`qwen3`, `qwen3_moe` or `llama`."""

from compress.models.archs.llama import LLAMA
from compress.models.archs.qwen2 import QWEN2
from compress.models.archs.qwen3 import QWEN3
from compress.models.archs.qwen3_moe import QWEN3_MOE
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, wrapper

FAMILIES.add(
    "internvl",
    wrapper(
        "internvl",
        "InternVLForConditionalGeneration",
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        LLAMA,
        ties_by_default=True,
        layer_modules=QWEN3_MOE.layer_modules,
        expert_layouts=QWEN3_MOE.expert_layouts,
        **LLAVA_NAMES,
    ),
)

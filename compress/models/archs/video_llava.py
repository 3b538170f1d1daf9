"""Video-LLaVA (arXiv 2311.10122): a tower for images and one for videos; the text model is `llama`."""

from compress.models.archs.llava import LLAMA_7B
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, wrapper

_TOWERS = ("image_tower", "video_tower")
_IN_MEMORY = {
    **{name: names for name, names in LLAVA_NAMES["in_memory"].items() if name != "vision_tower."},
    **{f"{tower}.": f"model.{tower}." for tower in _TOWERS},
}

FAMILIES.add(
    "video_llava",
    wrapper(
        "video_llava",
        "VideoLlavaForConditionalGeneration",
        LLAMA_7B,
        **{
            **LLAVA_NAMES,
            "in_memory": _IN_MEMORY,
            "untouched": (*_TOWERS, "multi_modal_projector"),
        },
    ),
)

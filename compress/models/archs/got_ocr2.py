"""GOT-OCR 2.0 (arXiv 2409.01704): the text model is `qwen2`, next to the tower of Segment Anything."""

from compress.models.archs.qwen2 import DEFAULT_SIZES, QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, sized, wrapper

GOT_OCR2 = wrapper(
    "got_ocr2",
    "GotOcr2ForConditionalGeneration",
    sized(QWEN2, **DEFAULT_SIZES),
    ties_by_default=True,
    **LLAVA_NAMES,
)

FAMILIES.add("got_ocr2", GOT_OCR2)

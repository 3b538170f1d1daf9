"""PP-Chart2Table (Baidu, 2025): tables of charts by the class of GOT-OCR 2.0; the text model is `qwen2`."""

from dataclasses import replace

from compress.models.archs.got_ocr2 import GOT_OCR2
from compress.models.family import FAMILIES

FAMILIES.add("pp_chart2table", replace(GOT_OCR2, model_type="pp_chart2table"))

"""MiniMax-M1 (MiniMax, arXiv 2506.13585) as it was published: MiniMax-Text-01 by another name."""

from dataclasses import replace

from compress.models.archs.minimax_text_01 import MINIMAX_TEXT_01
from compress.models.family import FAMILIES

MINIMAX_M1 = replace(MINIMAX_TEXT_01, model_type="minimax_m1", architecture="MiniMaxM1ForCausalLM")

FAMILIES.add("minimax_m1", MINIMAX_M1)

"""Indexers that choose blocks of keys are those of MiniMax-M3 and Qwen4 in `transformers`, in contexts
several times longer than those of which they choose every block."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.models.attention import CachedAttention
from compress.models.checkpoint import Checkpoint
from compress.models.weights import build_decoder
from tests.golden.test_families import tolerance
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens

CPU = torch.device("cpu")
LENGTH = 61
LONG: dict[str, dict[str, Any]] = {
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 3},
    "minimax_m3_vl_text-local": {"index_block_size": 5, "index_topk_blocks": 3, "index_local_blocks": 2},
    "minimax_m3_vl_text-part": {
        "head_dim": 16,
        "rotary_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "index_topk_blocks": 1,
    },
    "qwen4_exp_text": {
        "indexer_budget": 12,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 24,
        "indexer_n_heads": 8,
    },
    "qwen4_exp_text-odd": {
        "indexer_budget": 15,
        "indexer_compress_ratio": 5,
        "indexer_n_heads": 5,
        "indexer_head_dim": 12,
    },
    "qwen4_exp_text-wide": {
        "indexer_budget": 14,
        "indexer_compress_ratio": 7,
        "indexer_head_dim": 8,
        "head_dim": 8,
    },
}


@pytest.mark.parametrize("name", LONG)
def test_logits_beyond_what_is_chosen_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family = name.split("-")[0]
    model = saved(tmp_path, family, {**CASES[family][1], **LONG[name]})
    source = Checkpoint(tmp_path)
    tokens_BS = tokens(2, LENGTH)
    with torch.no_grad():
        expected = model(tokens_BS).logits
        decoder = build_decoder(source, dtype=torch.float32, device=CPU)
        found = decoder(tokens_BS)
        bound = tolerance(expected)
        assert torch.allclose(found, expected, rtol=0, atol=bound)
        attention = CachedAttention()
        parts = [
            decoder(tokens_BS[:, places], places, attention)
            for places in torch.arange(LENGTH).split([17, 1, 20, *([1] * 23)])
        ]
        cached = torch.cat(parts, dim=1)
    assert torch.allclose(cached, expected, rtol=0, atol=bound)

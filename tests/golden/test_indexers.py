"""Indexers over latents in contexts several times longer than what they choose: logits are those of
`transformers`, of whole sequences and in parts with a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.models.attention import CachedAttention
from compress.models.checkpoint import Checkpoint
from compress.models.indexer import Indexer
from compress.models.weights import build_decoder
from tests.golden.test_families import tolerance
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens

CPU = torch.device("cpu")
FEW: dict[str, Any] = {"index_topk": 8, "index_n_heads": 8}
"""Few keys of the 32 that the cases have positions for, and so many heads that scores are never alike."""
INDEXED = (
    "deepseek_v32",
    "deepseek_v32-dense",
    "glm_moe_dsa",
    "glm_moe_dsa-shared-indexers",
    "glm5_next",
    "glm5_next-shared-indexers",
    "axk2",
    "axk2-groups",
    "dots3_note_text",
    "dots3_note",
    "hy_v4",
    "hy_v4-dense-between",
    "mistral_large4",
    "mistral_large4-shared-latents",
)


@pytest.mark.parametrize("case", INDEXED)
@pytest.mark.one_in(3)
def test_logits_beyond_the_chosen_keys_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, stated = CASES[case]
    model = saved(tmp_path, family, {**stated, **FEW})
    decoder = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    assert any(isinstance(layer.indexer, Indexer) for layer in decoder.arch.layers)
    tokens_BS = tokens(2, 31)
    with torch.no_grad():
        expected = model(tokens_BS).logits
        whole = decoder(tokens_BS)
        cache = CachedAttention()
        ends = [5, 20, *range(21, 32)]
        parts = [
            decoder(tokens_BS[:, start:end], torch.arange(start, end), cache)
            for start, end in zip([0, *ends], ends, strict=False)
        ]
    limit = tolerance(expected)
    assert (whole - expected).abs().max() <= limit
    assert (torch.cat(parts, dim=1) - expected).abs().max() <= limit
    without = decoder.arch.replace(max_position=8)
    for layer in decoder.layers:
        if hasattr(getattr(layer, "attn", None), "arch"):
            layer.attn.arch = without
    with torch.no_grad():
        assert (decoder(tokens_BS) - expected)[:, 8:].abs().max() > 100 * limit

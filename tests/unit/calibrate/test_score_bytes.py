"""Planned bytes of scores against what a layer of the decoder allocates, as PyTorch's profiler counts it."""

from typing import Any

import pytest
import torch

from compress.calibrate.estimate import Workload, peak_bytes
from compress.calibrate.score_bytes import score_bytes
from compress.models.alibi import Alibi
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.compressed import Compressed
from compress.models.indexer import BlockIndexer, EntryIndexer, Indexer
from compress.models.latent import Latent
from compress.models.layer_shape import Rope
from compress.models.relative_logits import RelativeLogits
from compress.models.weights import MemorySource, build_layer
from tests.support.allocated import peak_allocated
from tests.support.tiny_source import tiny_shape, tiny_source

SEQ_LEN = 768
WIDTHS: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 48}
TURNS = Rope(1e4, rotary_dim=6)
ONE_KV: dict[str, Any] = {"num_kv_heads": 1, "rope": TURNS, "window": 9}


def latent(rope_dim: int, **facts: Any) -> dict[str, Any]:
    own = Latent(28, 12, rope_dim, 12, interleaved=True, indexer=Indexer(4, 10, 63, **facts))
    return {"num_kv_heads": 8, "rope": TURNS if rope_dim else None, "latent": own}


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cap": ({"attn_softcap": 20.0}, {}),
    "sinks": ({"attn_sinks": True}, {}),
    "terms of distance": ({}, {"rope": None, "relative": RelativeLogits(8, 256)}),
    "terms that grow": ({}, {"rope": None, "relative": RelativeLogits(8, 256, (0.1, 64))}),
    "alibi": ({}, {"rope": None, "alibi": Alibi()}),
    "indexer": ({}, latent(6)),
    "pools": ({}, latent(0, pool_size=4)),
    "blocks": ({}, {"block_indexer": BlockIndexer(2, 16, block_size=16, top_blocks=4)}),
    "blocks of means": ({}, {"block_indexer": BlockIndexer(4, 16, block_size=4, top_blocks=4, pooled=True)}),
    "window": ({"attn_sinks": True}, {**ONE_KV, "compressed": Compressed(20, 6, 2, 12)}),
    "entries": (
        {"attn_sinks": True},
        {
            **ONE_KV,
            "compressed": Compressed(20, 6, 2, 12, 4, overlaps=True, indexer=EntryIndexer(4, 8, 20, 4)),
        },
    ),
}


def source_of(name: str) -> MemorySource:
    facts, layer = LAYERS[name]
    return tiny_source(layers=(tiny_shape(**{**WIDTHS, **layer}),), **facts)


def measured(source: MemorySource, num_samples: int, dtype: torch.dtype) -> int:
    """Return the most bytes that a forward pass of the only layer allocates."""
    device = torch.device("cpu")
    layer = build_layer(source.arch, 0, source.layer(0), dtype=dtype, device=device, narrow=True)
    x_BSD = torch.randn(num_samples, SEQ_LEN, source.arch.hidden_size).to(dtype)
    positions = torch.arange(SEQ_LEN)
    return peak_allocated(lambda: layer(x_BSD, positions, FullAttention()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_planned_is_within_a_quarter_of_what_is_allocated(
    name: str, num_samples: int, dtype: torch.dtype
) -> None:
    source = source_of(name)
    arch = source.arch
    planned = score_bytes(arch, arch.layers[0], num_samples, SEQ_LEN, value_bytes=dtype.itemsize)
    others = measured(tiny_source(layers=(tiny_shape(**WIDTHS),)), num_samples, dtype)
    found = measured(source, num_samples, dtype)
    assert planned < 1.25 * found
    assert found < 1.25 * planned + others


def test_attention_that_holds_no_scores_needs_nothing_more() -> None:
    arch = tiny_source(layers=(tiny_shape(**WIDTHS),)).arch
    assert score_bytes(arch, arch.layers[0], 2, SEQ_LEN, value_bytes=4) == 0
    short = source_of("indexer").arch
    assert score_bytes(short, short.layers[0], 2, 63, value_bytes=4) == 0


def test_the_plan_of_a_run_has_room_for_the_scores_of_a_piece() -> None:
    def work(arch: Arch) -> Workload:
        return Workload(arch, num_samples=32, seq_len=2048, device="cuda")

    arch = source_of("terms of distance").arch
    (layer,) = arch.layers
    plain = tiny_source(layers=(tiny_shape(**{**WIDTHS, "rope": None}),)).arch
    held = score_bytes(arch, layer, 1, 2048, value_bytes=work(arch).value_bytes)
    assert held > 12 * 8 * 2048**2
    # without scores another phase of a layer is the largest
    assert 0.95 * held < peak_bytes(work(arch)) - peak_bytes(work(plain)) <= held

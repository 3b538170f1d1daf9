"""Layers that read the keys and values of an earlier one have its pages, and no other way to serve a request
changes what it computes.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress.errors import UsageError
from compress.export import open_checkpoint
from compress.export.format_writer import write_format
from compress.models.layer_shape import Rope
from compress.models.weights import MemorySource, build_decoder
from compress.quant.kv import FP8_STATIC, KV_SCALES
from compress.quant.scheme import SCHEMES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.speculation import Speculative
from compress.runtime.streamed_model import StreamedModel, why_not_streamed
from compress.stages import PlanFacts
from compress.stages.validate.estimate import estimate
from compress.stages.validate.spec import Validate
from tests.golden.test_export_transformers import quantized
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
SIZE = 16
LOCAL = tiny_shape(window=40, num_kv_heads=1)
WIDE = tiny_shape(head_dim=32, num_kv_heads=1, rope=Rope(1e6, "proportional", rotary_dim=8))
LAYERS = (LOCAL, WIDE, LOCAL, replace(LOCAL, kv_source=2), replace(WIDE, kv_source=1, intermediate_size=176))


def source_of() -> MemorySource:
    return tiny_source(
        block="sandwich",
        qk_norm=True,
        v_norm=True,
        layer_scalar=True,
        layer_embed_size=16,
        embed_scale=7.5,
        layers=LAYERS,
        max_position=1024,
    )


SOURCE = source_of()
BLOCK_BYTES = SIZE * kv_bytes_per_token(SOURCE.arch, "F32")


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(101, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


SHARED = ids(5 * SIZE, 0)
PROMPTS = (SHARED + ids(30, 1), SHARED + ids(9, 2), ids(70, 3), SHARED + ids(30, 1) + ids(40, 4), ids(3, 5))
REQUESTS = [
    Request(str(idx), prompt, SamplingParams(12, ignore_eos=True, logprobs=True, seed=idx))
    for idx, prompt in enumerate(PROMPTS)
]


def tokens_of(**changes: object) -> tuple[list[tuple[int, ...]], Engine]:
    config = EngineConfig(**{"max_model_len": 192, **changes})  # type: ignore[arg-type]
    engine = Engine(SOURCE, device=CPU, config=config)
    return [each.tokens for each in engine.generate(REQUESTS)], engine


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    engine = Engine(SOURCE, device=CPU, config=EngineConfig(max_model_len=192, prefix_cache=False))
    return [engine.generate([each])[0].tokens for each in REQUESTS]


def test_pages_are_held_once() -> None:
    cache = KVCache(SOURCE.arch, num_blocks=3, block_size=SIZE, kv_format="F32", device=CPU)
    assert cache.layer(3) is cache.layer(2)
    assert cache.layer(4) is cache.layer(1)
    own = (cache.layer(idx) for idx in range(3))
    assert cache.block_bytes == BLOCK_BYTES
    assert cache.block_bytes == sum(each[:, 0].nbytes for pages in own for each in pages.tensors)  # type: ignore[union-attr]
    for idx in range(3):
        for tensor in cache.layer(idx).tensors:  # type: ignore[union-attr]
            tensor[:, 1] = torch.randn_like(tensor[:, 1])
    cache.write_blocks(torch.tensor([2]), cache.read_blocks(torch.tensor([1])))
    for idx in range(5):
        for tensor in cache.layer(idx).tensors:  # type: ignore[union-attr]
            assert torch.equal(tensor[:, 2], tensor[:, 1])


def test_a_prefix_of_another_request_serves(alone: list[tuple[int, ...]]) -> None:
    config = EngineConfig(max_model_len=192, prefix_cache=True)
    engine = Engine(SOURCE, device=CPU, config=config)
    found = [engine.generate([each])[0] for each in REQUESTS]
    assert [each.tokens for each in found] == alone
    assert found[1].cached_tokens == len(SHARED)
    assert found[3].cached_tokens > len(SHARED)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 24], ids=["recomputed", "swapped"])
def test_requests_that_lose_their_blocks_go_on(alone: list[tuple[int, ...]], swap_bytes: int) -> None:
    found, engine = tokens_of(kv_cache_bytes=16 * BLOCK_BYTES, swap_bytes=swap_bytes, prefix_cache=False)
    assert engine.num_preemptions > 0
    assert found == alone


@pytest.mark.parametrize("speculative", [Speculative(NGram(), k=3), Speculative(DraftModel(SOURCE), k=2)])
def test_speculation_changes_no_token(alone: list[tuple[int, ...]], speculative: Speculative) -> None:
    assert tokens_of(speculative=speculative)[0] == alone


@pytest.mark.parametrize(
    ("kv_format", "limit"),
    [("FP8_TOKEN_HEAD", 0.005), ("INT8_TOKEN_HEAD", 2e-4), ("INT4_TOKEN_HEAD", 0.1)],
)
def test_caches_of_fewer_bits_have_pages_of_their_own_layers(kv_format: str, limit: float) -> None:
    engine = Engine(SOURCE, device=CPU, config=EngineConfig(max_model_len=192, kv_format=kv_format))
    tokens_BS = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        expected = build_decoder(SOURCE, dtype=torch.float32, device=CPU)(tokens_BS).log_softmax(-1)
    with torch.inference_mode():
        found = engine.runner.score(tokens_BS).log_softmax(-1)
    kl = (expected.exp() * (expected - found)).sum(-1).mean()
    assert 0 < kl < limit


def tensors_of(directory: Path) -> dict[str, Tensor]:
    files = directory.glob("*.safetensors")
    return {name: each for file in files for name, each in load_file(file).items()}


def test_a_checkpoint_has_the_scales_of_a_cache_for_each_layer_that_reads_it(tmp_path: Path) -> None:
    stored, exported = quantized(tmp_path, "gemma4-e", SCHEMES["FP8_DYNAMIC"], kv_scales=True)
    assert stored.arch.layers[1].kv_source == 0
    assert not set(KV_SCALES.values()) & stored.layer(1).keys()
    opened = open_checkpoint(exported)
    assert opened.kv_format == FP8_STATIC
    assert opened.layer(1).keys() == stored.layer(1).keys()
    tensors = tensors_of(exported)
    for scale in KV_SCALES.values():
        own, read = (tensors[opened.family.tensor(f"layers.{idx}.{scale}")] for idx in (0, 1))
        assert torch.equal(own, read)
    (tmp_path / "again").mkdir()
    write_format("compressed-tensors", tmp_path / "again", opened, stored.scheme)
    again = tensors_of(tmp_path / "again")
    assert again.keys() == tensors.keys()
    assert all(
        torch.equal(each.view(torch.uint8), tensors[name].view(torch.uint8)) for name, each in again.items()
    )


def test_layers_that_read_more_than_the_stream_are_not_scored_one_by_one() -> None:
    reason = why_not_streamed(SOURCE.arch)
    assert reason is not None
    with pytest.raises(UsageError, match="is not scored layer by layer: score it loaded"):
        StreamedModel(SOURCE, device=CPU, config=EngineConfig(max_model_len=32))
    facts = PlanFacts(SOURCE.arch, "cpu", {})
    spec = {"apart": {"streamed": True}, "seq_len": 32, "num_samples": 2, "latency": None}
    with pytest.raises(UsageError, match=r"validate: apart: streamed: .* Leave out `streamed`"):
        estimate(Validate.model_validate(spec), facts)
    estimate(Validate.model_validate({**spec, "apart": {}}), facts)

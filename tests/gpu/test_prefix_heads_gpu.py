"""A head beside the prefix cache on a GPU, its steps in graphs: the bits of other decoding with the same
prefixes, and the keys and values that the head has without the cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.models.fresh_eagle3 import random_eagle3
from compress.models.random_mtp import random_mtp
from compress.models.random_source import RandomSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.mtp import Mtp
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from scripts.bench_setup import read_arch
from tests.gpu.test_speculative_gpu import CUDA, VOCAB, make_source

pytestmark = pytest.mark.gpu
K = 3


def published(name: str, num_layers: int, times: int = 1) -> RandomSource:
    """The first layers of a published shape, so often; they are dense, as rounding may change a route."""
    _, arch = read_arch(name)
    arch = arch.replace(layers=arch.layers[:num_layers] * times, vocab_size=VOCAB)
    assert all(layer.experts is None for layer in arch.layers)
    return RandomSource(arch, device=CUDA, dtype=torch.bfloat16)


SOURCES: dict[str, Callable[[], RandomSource]] = {
    "keys and values": lambda: make_source("BF16"),
    "four bits": lambda: make_source("W4A16_G128"),
    "latents": lambda: published("glm-4.7-flash", 1, times=3),
    "delta nets": lambda: published("qwen3.5-9b", 8),
}
CASES = [
    ("eagle3", "keys and values"),
    ("eagle3", "four bits"),
    *(("mtp", name) for name in SOURCES),
]


def head_of(kind: str, source: RandomSource) -> ProposerOptions:
    if kind == "mtp":
        return Mtp(random_mtp(source.arch, device=CUDA, dtype=torch.bfloat16))
    return Eagle3(
        random_eagle3(
            source.arch, device=CUDA, dtype=torch.bfloat16, draft_vocab_size=1024, layer_ids=(1, 2, 3)
        )
    )


def engine_of(source: RandomSource, proposer: ProposerOptions | None, **changes: Any) -> Engine:
    speculative = None if proposer is None else Speculative(proposer, k=K)
    facts = {"prefix_cache": True, "speculative": speculative, "max_model_len": 1024, **changes}
    return Engine(source, device=CUDA, config=EngineConfig(kv_cache_bytes=1 << 29, **facts))


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def groups() -> list[list[Request]]:
    """Requests that are served together. All prompts begin alike and depart 13 tokens after the end of a
    block; 5 tokens or more follow the last full block of each."""
    begin = ids(6 * 64 + 13, 0)
    groups = [[300], [40], [9, 100, 300, 41]] * 2
    requests = []
    for number, group in enumerate(groups):
        requests.append(
            [
                Request(
                    f"{number}-{count}",
                    begin + ids(count, count),
                    SamplingParams(
                        20, temperature=0.8 * (count % 2), seed=count, ignore_eos=True, logprobs=True
                    ),
                )
                for count in group
            ]
        )
    return requests


def facts(finished: Sequence[Finished]) -> list[tuple[Any, ...]]:
    return [(each.cached_tokens, each.tokens, each.logprobs) for each in finished]


@pytest.mark.parametrize(
    ("kind", "name", "kv_format"),
    [
        *((*case, kv_format) for case in CASES for kv_format in (None, "FP8_TOKEN_HEAD")),
        ("eagle3", "keys and values", "FP8_ATTENTION"),
        ("eagle3", "four bits", "INT8_TOKEN_HEAD"),
        ("mtp", "keys and values", "INT4_TOKEN_HEAD"),
    ],
)
def test_a_head_beside_the_prefix_cache_changes_no_bit(kind: str, name: str, kv_format: str | None) -> None:
    """Where a model has states, more rows of prompts go one by one while it speculates, so the bits are those
    of lookup."""
    source = SOURCES[name]()
    lookup = NGram() if source.arch.has_recurrences else None
    plain = engine_of(source, lookup, kv_format=kv_format)
    engine = engine_of(source, head_of(kind, source), kv_format=kv_format)
    for group in groups():
        assert facts(engine.generate(group)) == facts(plain.generate(group))
    assert engine.counts.prefix_hits == plain.counts.prefix_hits > 3000
    assert engine.acceptance is not None
    assert sum(engine.acceptance.proposed) > 0


Steps = dict[tuple[int, int], list[Tensor]]
"""A head's keys and values, or latents, by the seed of a request and the number of its tokens."""


def pages(engine: Engine, requests: Sequence[Request]) -> Steps:
    """Serve requests; return what a head has of all their tokens but the last whenever it has proposed."""
    assert engine._speculation is not None
    proposer: Any = engine._speculation._proposer
    propose = proposer.propose
    found: Steps = {}

    def noted(generations: Any, state: Any) -> Any:
        drafts = propose(generations, state)
        for each in generations:
            parts = [
                tensor[:, each.blocks].flatten(1, 2) for tensor in proposer._kv_caches[0].layer(0).tensors
            ]
            length = len(each.tokens)
            found[each.request.params.seed, length] = [part[:, : length - 1].float() for part in parts]
        return drafts

    proposer.propose = noted
    engine.generate(requests)
    proposer.propose = propose
    return found


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_head_has_the_keys_and_values_that_it_has_without_the_prefix_cache(kind: str, name: str) -> None:
    """Those of a chunk are equal within the rounding of bfloat16; those of another token would be as far away
    as they are long. `sync`: the host's tokens are those of the state."""
    source = SOURCES[name]()
    head = head_of(kind, source)
    plain, engine = (engine_of(source, head, prefix_cache=each, sync=True) for each in (False, True))
    compared = 0
    for group in groups():
        greedy = [
            Request(each.id, each.prompt, SamplingParams(20, seed=each.params.seed, ignore_eos=True))
            for each in group
        ]
        expected, found = pages(plain, greedy), pages(engine, greedy)
        for seed, length in expected.keys() & found.keys():
            # Rounding may have decided a token of the answer, but the prompt is the same.
            num_rows = len(next(each for each in group if each.params.seed == seed).prompt) - 1
            for own, other in zip(found[seed, length], expected[seed, length], strict=True):
                error = (own - other)[:, :num_rows].norm(dim=(0, 2)) / other[:, :num_rows].norm(dim=(0, 2))
                assert float(error.max()) < 0.25
                compared += 1
    assert engine.counts.prefix_hits > 3000
    assert compared > 40

"""An MTP head on a GPU, its steps in graphs: the bits of plain decoding, and what its module says without
cache and graphs.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.models.attention import FullAttention
from compress.models.mtp import MtpHead
from compress.models.random_mtp import random_mtp
from compress.models.random_source import RandomSource
from compress.models.weights import build_decoder, dense
from compress.quant.scheme import SCHEMES, Scheme
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.mtp import Mtp
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.speculation import Speculative
from scripts.bench_setup import read_arch
from tests.gpu.test_speculative_gpu import CUDA, assert_ahead_changes_nothing, make_requests, make_source

pytestmark = pytest.mark.gpu
MODELS = {
    "glm-4.5-air": (4, False),
    "glm-4.7-flash": (4, False),
    "qwen3.5-9b": (8, True),
    "qwen3.5-35b-a3b": (8, True),
}
"""Shape -> how many of its layers, and whether they have states. More rows of prompts go one by one then
while a model speculates, so the bits are those of lookup with as many proposals."""
CASES = [
    (name, scheme)
    for name in MODELS
    for scheme in ("BF16", "W4A16_G128", "FP8_DYNAMIC")
    if (name, scheme) != ("glm-4.5-air", "W4A16_G128")  # its dense layer is no whole groups wide
]
VOCAB = 4096


def source_of(name: str, scheme: Scheme | None) -> RandomSource:
    _, arch = read_arch(name)
    arch = arch.replace(layers=arch.layers[: MODELS[name][0]], vocab_size=VOCAB)
    return RandomSource(arch, device=CUDA, dtype=torch.bfloat16, scheme=scheme)


def head_of(source: RandomSource, scheme: Scheme | None = None) -> MtpHead:
    return random_mtp(source.arch, device=CUDA, dtype=torch.bfloat16, scheme=scheme)


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(max_model_len=512, kv_cache_bytes=1 << 29, **changes)


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_a_head_in_graphs_changes_nothing(name: str, scheme: str, batch_size: int) -> None:
    body = SCHEMES.get(scheme)
    source = source_of(name, body)
    requests = make_requests(4 if batch_size == 1 else 20)
    sizes = config(max_batch_size=batch_size)
    lookup = Speculative(NGram(), k=3) if MODELS[name][1] else None
    plain = Engine(source, device=CUDA, config=replace(sizes, speculative=lookup)).generate(requests)
    speculative = Speculative(Mtp(head_of(source, body)), k=3)
    engine = Engine(source, device=CUDA, config=replace(sizes, speculative=speculative))
    for _ in range(2):  # with graphs captured on the way, and with all of them there
        found = engine.generate(requests)
        assert [each.tokens for each in found] == [each.tokens for each in plain]
        assert [each.logprobs for each in found] == [each.logprobs for each in plain]
    assert engine.acceptance is not None
    assert sum(engine.acceptance.proposed) > 0


def test_steps_of_a_head_launched_ahead_give_what_plain_steps_give(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_source("W4A16_G128").arch
    head = random_mtp(target, device=CUDA, dtype=torch.bfloat16)
    assert_ahead_changes_nothing(Mtp(head), monkeypatch)


@torch.no_grad()
@pytest.mark.parametrize("name", ["glm-4.5-air", "glm-4.7-flash", "qwen3.5-9b"])
def test_most_first_proposals_are_those_of_the_module(name: str) -> None:
    """In bfloat16 two words may be as likely within rounding, so not all."""
    source = source_of(name, None)
    outer = source.outer()
    matrix = dense(outer["embed.weight" if source.arch.tied_head else "head.weight"])
    head = replace(head_of(source), target_head=lambda: matrix)
    # `sync`: the host's tokens are those of the state.
    engine = Engine(
        source,
        device=CUDA,
        config=config(max_batch_size=4, sync=True, speculative=Speculative(Mtp(head), k=4)),
    )
    assert engine._speculation is not None
    proposer = engine._speculation._proposer
    same = list[bool]()
    target = build_decoder(source, dtype=torch.float32, device=CUDA)
    module = head.decoder(dtype=torch.float32, device=CUDA)
    propose = proposer.propose

    def checked(rows: Any, state: Any) -> Any:
        drafts = propose(rows, state)
        for row, proposed in zip(rows, drafts.tokens_RK[:, 0].tolist(), strict=True):
            tokens = torch.tensor([row.tokens], device=CUDA)
            attention = FullAttention()
            positions = torch.arange(tokens.shape[1], device=CUDA)
            x = target.embedded(tokens, positions, attention)
            for layer in target.layers:
                x = layer(x, positions, attention)
            hidden = module.fuse(x)[:, :-1]
            out = module(target.embed(tokens[:, 1:]), hidden, positions[:-1], FullAttention())[:, -1]
            same.append(proposed == int(target.head(out).argmax()))
        return drafts

    proposer.propose = checked  # type: ignore[method-assign]
    engine.generate([Request(str(idx), (idx, 1, 2), SamplingParams(21, ignore_eos=True)) for idx in range(4)])
    assert len(same) > 40
    assert sum(same) > 0.6 * len(same)

"""An EAGLE-3 head on a GPU, its steps in graphs: the bits of plain decoding, and what its module says without
cache and graphs.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.models.attention import FullAttention
from compress.models.eagle3 import Eagle3Head
from compress.models.fresh_eagle3 import random_eagle3
from compress.models.weights import build_decoder
from compress.quant.scheme import SCHEMES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.speculation import Speculative
from tests.gpu.test_speculative_gpu import (
    CUDA,
    TARGETS,
    VOCAB,
    assert_ahead_changes_nothing,
    make_requests,
    make_source,
)

pytestmark = pytest.mark.gpu
HEADS: dict[str, dict[str, Any]] = {
    "BF16": {},
    "W4A16 with an FP8 head": {"scheme": SCHEMES["W4A16_G128"], "head_scheme": SCHEMES["FP8_DYNAMIC"]},
    "FP8": {"scheme": SCHEMES["FP8_DYNAMIC"], "head_scheme": SCHEMES["FP8_DYNAMIC"]},
}


def make_head(target: str, **options: Any) -> Eagle3Head:
    arch = make_source(target).arch
    return random_eagle3(
        arch, device=CUDA, dtype=torch.bfloat16, draft_vocab_size=1024, layer_ids=(1, 2, 3), **options
    )


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(max_model_len=512, kv_cache_bytes=1 << 28, **changes)


@pytest.mark.parametrize(
    ("batch_size", "kv_format"),
    [(1, None), (4, "FP8_TOKEN_HEAD"), (16, "INT8_TOKEN_HEAD"), (48, "INT4_TOKEN_HEAD")],
)
@pytest.mark.parametrize("target", TARGETS)
def test_a_head_in_graphs_changes_no_bit(target: str, batch_size: int, kv_format: str | None) -> None:
    source = make_source(target)
    requests = make_requests(4 if batch_size == 1 else batch_size + batch_size // 4)
    sizes = config(max_batch_size=batch_size, kv_format=kv_format)
    plain = [
        (each.tokens, each.logprobs) for each in Engine(source, device=CUDA, config=sizes).generate(requests)
    ]
    for options in HEADS.values():
        speculative = Speculative(Eagle3(make_head(target, **options)), k=4)
        engine = Engine(source, device=CUDA, config=replace(sizes, speculative=speculative))
        for _ in range(2):  # with graphs captured on the way, and with all of them there
            assert [(each.tokens, each.logprobs) for each in engine.generate(requests)] == plain
        assert engine.acceptance is not None
        assert sum(engine.acceptance.proposed) > 0


def test_steps_of_a_head_launched_ahead_give_what_plain_steps_give(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_ahead_changes_nothing(Eagle3(make_head("W4A16_G128")), monkeypatch)


@torch.no_grad()
def test_most_first_proposals_are_those_of_the_module() -> None:
    """In bfloat16 two words may be as likely within rounding, so not all."""
    source = make_source("BF16")
    head = make_head("BF16")
    # `sync`: the host's tokens are those of the state.
    engine = Engine(
        source,
        device=CUDA,
        config=config(max_batch_size=4, sync=True, speculative=Speculative(Eagle3(head), k=4)),
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
            states = [target.embed(tokens)]
            positions = torch.arange(tokens.shape[1], device=CUDA)
            for layer in target.layers:
                states.append(layer(states[-1], positions, attention))
            hidden = module.fuse(torch.cat([states[depth] for depth in head.facts.layer_ids], dim=-1))[:, :-1]
            out = module(states[0][:, 1:], hidden, positions[:-1], attention)[:, -1]
            same.append(proposed == int(head.vocabulary_W[int(module.head(module.norm(out)).argmax())]))
        return drafts

    proposer.propose = checked  # type: ignore[method-assign]
    engine.generate([Request(str(idx), (idx, 1, 2), SamplingParams(21, ignore_eos=True)) for idx in range(4)])
    assert len(same) > 40
    assert sum(same) > 0.6 * len(same)


def test_rejection_sampling_in_graphs_runs() -> None:
    source = make_source("BF16")
    engine = Engine(
        source,
        device=CUDA,
        config=config(
            max_batch_size=4, speculative=Speculative(Eagle3(make_head("BF16")), k=4, rule="rejection")
        ),
    )
    requests = [
        Request(str(idx), (idx, 1, 2), SamplingParams(41, temperature=1.0, seed=idx, ignore_eos=True))
        for idx in range(8)
    ]
    finished = engine.generate(requests)
    assert all(len(each.tokens) == 41 and max(each.tokens) < VOCAB for each in finished)
    assert engine.acceptance is not None
    assert sum(engine.acceptance.accepted) > 0

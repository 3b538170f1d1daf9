"""Ways to serve requests that change no token, checked of one model: what tests of several kinds of layers
have in common."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compress.models.fresh_eagle3 import random_eagle3
from compress.models.weights import WeightSource, build_decoder
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import kv_bytes_per_token, slot_bytes
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.speculation import Speculative
from compress.runtime.streamed_model import StreamedModel

CPU = torch.device("cpu")
SIZE = 16
LONG = SamplingParams(60, ignore_eos=True)


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(101, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


SHARED = ids(20 * SIZE, 0)
PROMPTS = (SHARED + ids(30, 1), SHARED + ids(9, 2), ids(70, 3), SHARED + ids(41, 4), ids(3, 5))
REQUESTS = [
    Request(str(idx), prompt, SamplingParams(9, ignore_eos=True, logprobs=True, seed=idx))
    for idx, prompt in enumerate(PROMPTS)
]


def engine_of(source: WeightSource, **changes: Any) -> Engine:
    return Engine(source, device=CPU, config=EngineConfig(**{"max_model_len": 512, **changes}))


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    return [each.tokens for each in engine.generate(REQUESTS)]


def alone(source: WeightSource) -> list[tuple[int, ...]]:
    engine = engine_of(source, prefix_cache=False)
    return [engine.generate([each])[0].tokens for each in REQUESTS]


def decoded(source: WeightSource, tokens_BS: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = build_decoder(source, dtype=torch.float32, device=CPU)(tokens_BS)
    return found


def check_cached_prefix(source: WeightSource) -> None:
    """Check that requests which begin alike have their tokens, and that they find the prefix."""
    engine = engine_of(source, prefix_cache=True)
    found = [engine.generate([each])[0] for each in REQUESTS]
    assert [each.tokens for each in found] == alone(source)
    assert found[3].cached_tokens == len(SHARED)
    assert found[2].cached_tokens == 0


def check_preemption(source: WeightSource, *, swap_bytes: int = 0, slots: int = 4) -> None:
    """Check that requests which lose their blocks have the tokens that they have in a cache with room for
    all. The small cache has room for the states of `slots`."""
    block = SIZE * kv_bytes_per_token(source.arch, "F32")
    requests = [replace(each, prompt=ids(40, idx), params=LONG) for idx, each in enumerate(REQUESTS)]
    plain = engine_of(source, prefix_cache=False)
    expected = [each.tokens for each in plain.generate(requests)]
    assert plain.num_preemptions == 0
    engine = engine_of(
        source,
        max_model_len=128,
        max_batch_size=4,
        kv_cache_bytes=14 * block + slots * slot_bytes(source.arch, 1),
        swap_bytes=swap_bytes,
        prefix_cache=False,
    )
    assert [each.tokens for each in engine.generate(requests)] == expected
    assert engine.num_preemptions > 0


def check_speculation(source: WeightSource, kind: str, *, draft: WeightSource | None = None) -> None:
    """Check that no way to propose changes a token; a draft model is the model itself without `draft`."""
    options: Any = NGram() if kind == "ngram" else DraftModel(draft or source)
    if kind == "eagle3":
        head = random_eagle3(
            source.arch, device=CPU, dtype=torch.float32, draft_vocab_size=90, layer_ids=(1, 2, 4), seed=3
        )
        options = Eagle3(head)
    assert tokens_of(engine_of(source, speculative=Speculative(options, k=3))) == alone(source)


def check_scores(source: WeightSource, *, streamed: bool = True) -> None:
    """Check that scores are those of the decoder, and with `streamed` those of layers read one by one."""
    tokens_BS = torch.tensor([ids(75, 8), ids(75, 9)])
    with torch.inference_mode():
        found = engine_of(source).runner.score(tokens_BS)
    assert torch.allclose(found, decoded(source, tokens_BS), rtol=1e-4, atol=1e-4)
    if streamed:
        model = StreamedModel(source, device=CPU, config=EngineConfig(max_model_len=512))
        assert torch.equal(torch.cat(list(model.score(tokens_BS, batch_size=1))), found)

"""What every proposer must keep: a new file under `runtime/speculative/` is held to it, with a line here on
how its options are made.
"""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.fresh_eagle3 import random_eagle3
from compress.models.layer_shape import LayerShape, Rope
from compress.models.random_assistant import random_assistant
from compress.models.random_mtp import random_mtp
from compress.models.random_source import RandomSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative import PROPOSERS
from compress.runtime.speculative.proposer import Drafts
from compress.runtime.speculative.speculation import Speculative

CPU = torch.device("cpu")
K = 3
VOCAB = 23
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "assistant": lambda: {"assistant": random_assistant(source().arch, device=CPU, dtype=torch.float32)},
    "draft_model": lambda: {"source": source(seed=1)},
    "eagle3": lambda: {
        "head": random_eagle3(source().arch, device=CPU, dtype=torch.float32, draft_vocab_size=19)
    },
    "mtp": lambda: {"head": random_mtp(source().arch, device=CPU, dtype=torch.float32)},
}
"""Options that have no default."""
each_proposer = pytest.mark.parametrize("name", PROPOSERS.names())


def source(seed: int = 0) -> RandomSource:
    layer = LayerShape(num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=40, rope=Rope(10000.0))
    facts: dict[str, Any] = {
        "tied_head": False,
        "qkv_bias": False,
        "o_bias": False,
        "ffn_bias": False,
        "qk_norm": False,
        "config": {},
    }
    shape: dict[str, Any] = {
        "family": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position": 96,
        "layers": (layer,),
    }
    return RandomSource(
        Arch(**shape, norm_eps=1e-6, activation="silu", dtype="float32", **facts),
        device=CPU,
        dtype=torch.float32,
        seed=seed,
    )


def requests(temperature: float) -> list[Request]:
    return [
        Request(
            str(idx),
            tuple((torch.arange(2 + 7 * idx) % (3 + idx)).tolist()),
            SamplingParams(9 + 3 * idx, temperature, seed=idx, ignore_eos=True),
        )
        for idx in range(6)
    ]


def options(name: str) -> Any:
    return PROPOSERS.get(name)(**GIVEN.get(name, dict)())


def engine(name: str, **changes: Any) -> Engine:
    config = EngineConfig(
        max_batch_size=4, max_step_tokens=30, speculative=Speculative(options(name), k=K, **changes)
    )
    return Engine(source(), device=CPU, config=config)


@each_proposer
def test_options_are_frozen_and_documented(name: str) -> None:
    made = options(name)
    assert type(made).__doc__
    with pytest.raises(FrozenInstanceError):
        setattr(made, fields(made)[0].name, None)


@each_proposer
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_comes_out_is_what_plain_decoding_gives(name: str, temperature: float) -> None:
    plain = Engine(source(), device=CPU, config=EngineConfig(max_batch_size=4, max_step_tokens=30)).generate(
        requests(temperature)
    )
    assert [each.tokens for each in engine(name).generate(requests(temperature))] == [
        each.tokens for each in plain
    ]


@each_proposer
def test_with_the_prefix_cache_come_the_same_tokens_and_proposals(name: str) -> None:
    found = []
    for prefix_cache in (False, True):
        config = EngineConfig(
            max_batch_size=4, prefix_cache=prefix_cache, speculative=Speculative(options(name), k=K)
        )
        served = Engine(source(), device=CPU, config=config)
        assert served._speculation is not None
        propose = served._speculation._proposer.propose
        proposed: dict[tuple[str, int], list[int]] = {}

        def noted(generations: Any, state: Any, propose: Any = propose, proposed: Any = proposed) -> Drafts:
            drafts: Drafts = propose(generations, state)
            for each, tokens in zip(generations, drafts.tokens_RK.tolist(), strict=True):
                proposed[each.request.id, len(each.tokens)] = tokens
            return drafts

        served._speculation._proposer.propose = noted  # type: ignore[method-assign]
        tokens = [[each.tokens for each in served.generate(requests(0.8))] for _ in range(2)]
        assert tokens[0] == tokens[1]
        assert (served.counts.prefix_hits > 0) is prefix_cache
        found.append((tokens, proposed))
    assert found[0] == found[1]


@each_proposer
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_proposals_are_tokens_within_limits_and_distributions_sum_to_one(name: str, rule: str) -> None:
    served = engine(name, rule=rule)
    speculation = served._speculation
    assert speculation is not None
    propose = speculation._proposer.propose
    seen = 0
    addresses = set()

    def checked(generations: Any, state: Any) -> Drafts:
        nonlocal seen
        drafts = propose(generations, state)
        counts = [K] * len(generations) if drafts.counts is None else drafts.counts
        seen += sum(counts)
        assert drafts.tokens_RK.shape == (len(generations), K)
        for tokens, count in zip(drafts.tokens_RK, counts, strict=True):
            assert 0 <= count <= K
            assert bool(((tokens >= 0) & (tokens < VOCAB)).all())
        if drafts.probs_SKV is not None:
            assert rule == "rejection"
            addresses.add(drafts.probs_SKV.data_ptr())
            probs_RKV = drafts.probs_SKV[: len(generations)]
            torch.testing.assert_close(
                probs_RKV.sum(dim=-1), torch.ones(len(generations), K, dtype=torch.float64)
            )
            assert bool((probs_RKV.gather(2, drafts.tokens_RK.unsqueeze(2)) > 0).all())
        return drafts

    speculation._proposer.propose = checked  # type: ignore[method-assign]
    served.generate(requests(0.8))
    assert seen > 0
    assert len(addresses) <= 1


@each_proposer
def test_results_do_not_depend_on_what_was_served_before(name: str) -> None:
    served = engine(name, rule="rejection")
    wanted = requests(0.8)
    alone = [served.generate([request])[0].tokens for request in wanted]
    assert [each.tokens for each in served.generate(wanted)] == alone
    assert [each.tokens for each in served.generate(wanted[::-1])] == alone[::-1]


@each_proposer
def test_kernels_that_propose_are_reported_behind_those_of_the_model(name: str) -> None:
    rows = engine(name).kernel_report()
    plain = Engine(source(), device=CPU, config=EngineConfig(max_batch_size=4)).kernel_report()
    drafts = [row for row in rows if row["linear"].startswith("draft ")]
    assert len(rows) == len(plain) + len(drafts)
    heads = [
        row
        for row in drafts
        if row["layer"] is None and row["linear"] == "draft head" and row["phase"] == "decode"
    ]
    assert len(heads) == (name in ("assistant", "draft_model", "eagle3"))  # an MTP head has that of the model
    assert bool(drafts) == (name != "ngram")
    assert all(row.keys() == plain[0].keys() for row in drafts)


def test_an_unknown_proposer_is_refused_with_a_neighbour() -> None:
    with pytest.raises(UsageError, match=r"unknown proposer 'n-gram'.*ngram"):
        PROPOSERS.get("n-gram")

"""A proposer for tests that knows how sequences go on, and errs where it is told to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.engine import Engine
from compress.runtime.generation import Generation
from compress.runtime.model_runner import ModelRunner
from compress.runtime.request import Request
from compress.runtime.speculative.proposer import CacheSizes, Drafts, ProposerSetting
from compress.runtime.speculative.speculation import Acceptance
from compress.runtime.speculative.state import SpeculativeState


@dataclass(frozen=True)
class Scripted:
    """`scripts`: whole sequences by the seed of their request. The tokens at positions that `wrong_every`
    divides are wrong.
    """

    scripts: Mapping[int, Sequence[int]]
    wrong_every: int = 0

    def build(self, setting: ProposerSetting) -> "ScriptedProposer":
        return ScriptedProposer(self, setting.k, setting.arch.vocab_size)


class ScriptedProposer:
    weight_bytes = kv_bytes_per_token = bytes_per_request = 0
    feature_layers = ()
    num_rewritten_rows = num_tokens_after = 0
    on_device = False

    def __init__(self, options: Scripted, k: int, vocab_size: int) -> None:
        self._options = options
        self._k = k
        self._vocab_size = vocab_size

    def kernel_report(self) -> list[dict[str, Any]]:
        return []

    def begin(self, sizes: CacheSizes, target: ModelRunner) -> None: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def prefill(self, batch: PrefillBatch, features: Features | None, *, short: bool) -> None: ...

    def verified(self, features: Features, state: SpeculativeState, *, q_len: int) -> None: ...

    def propose(self, generations: Sequence[Generation], state: SpeculativeState) -> Drafts:
        tokens_RK = torch.zeros(len(generations), self._k, dtype=torch.int64)
        for row_idx, each in enumerate(generations):
            script = self._options.scripts[each.request.params.seed]
            for place, token in enumerate(script[len(each.tokens) :][: self._k]):
                every = self._options.wrong_every
                position = len(each.tokens) + place
                tokens_RK[row_idx, place] = (
                    (token + 1) % self._vocab_size if every and position % every == 0 else token
                )
        return Drafts(tokens_RK, [self._k] * len(generations))


def acceptance_of(engine: Engine) -> Acceptance:
    assert engine.acceptance is not None
    return engine.acceptance


def checked_proposals(
    engine: Engine,
    continuation: Callable[[Sequence[int], int], list[int]],
    requests: list[Request],
    k: int,
) -> int:
    """Serve requests, and return the number of rows whose proposals were those of `continuation`, a function
    of the tokens so far and of k."""
    assert engine._speculation is not None
    proposer = engine._speculation._proposer
    num_checked = 0
    propose = proposer.propose

    def checked(rows: Any, state: Any) -> Any:
        nonlocal num_checked
        drafts = propose(rows, state)
        for row, proposed in zip(rows, drafts.tokens_RK.tolist(), strict=True):
            num_checked += 1
            assert proposed == continuation(row.tokens, k), (row.params.seed, len(row.tokens))
        return drafts

    proposer.propose = checked  # type: ignore[method-assign]
    engine.generate(requests)
    return num_checked

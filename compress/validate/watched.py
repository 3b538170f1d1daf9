"""A proposer that is watched: its own proposals, the same with the clock on them, or the same token over and over at no cost.

The last makes a step as expensive as verification alone. What a proposer is asked beside `propose` goes to it as it is.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from compress.runtime.scheduler import Generation
from compress.runtime.speculative.proposer import Drafts, Proposer, ProposerOptions, ProposerSetting
from compress.runtime.speculative.state import SpeculativeState


@dataclass
class Watch:
    """What a watched proposer does from now on, and what each of its timed calls took."""

    mode: Literal["own", "timed", "idle"] = "own"
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Watched:
    options: ProposerOptions
    watch: Watch

    def build(self, setting: ProposerSetting) -> Proposer:
        watched: Any = WatchedProposer(self.options.build(setting), self.watch, setting)
        return watched  # type: ignore[no-any-return]


class WatchedProposer:
    """Whatever its proposer is, but for `propose`."""

    def __init__(self, proposer: Proposer, watch: Watch, setting: ProposerSetting) -> None:
        self._proposer = proposer
        self._watch = watch
        self._device = setting.deployment.device
        self._tokens_RK = torch.zeros(0, setting.k, dtype=torch.int64, device=self._device)
        self._last: Drafts | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, generations: Sequence[Generation], state: SpeculativeState) -> Drafts:
        """Idle, with the last distributions: graphs that read them find what they were captured with."""
        if self._watch.mode == "idle":
            if self._tokens_RK.shape[0] < len(generations):
                self._tokens_RK = self._tokens_RK.new_zeros(len(generations), state.k)
            drafts = Drafts(self._tokens_RK[: len(generations)])
            return drafts if self._last is None else replace(drafts, probs_SKV=self._last.probs_SKV)
        started = self._now()
        self._last = self._proposer.propose(generations, state)
        if self._watch.mode == "timed":
            self._watch.seconds.append(self._now() - started)
        return self._last

    def _now(self) -> float:
        if self._watch.mode == "timed" and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

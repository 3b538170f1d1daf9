"""A proposer that can be timed, or replaced by one that costs nothing, while its engine runs.

A step whose proposals cost nothing is as expensive as verification alone, so that the two parts of a step can
be timed separately.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from compress.runtime.generation import Generation
from compress.runtime.speculative.proposer import Drafts, Proposer, ProposerOptions, ProposerSetting
from compress.runtime.speculative.state import SpeculativeState


@dataclass
class ProposerProbe:
    """The mode of a probed proposer from now on, and the seconds of each call that was timed.

    `own`: it proposes as it is. `timed`: the same, with each call timed. `idle`: it proposes the same token
    again and again.
    """

    mode: Literal["own", "timed", "idle"] = "own"
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class ProbedOptions:
    """Options of a proposer whose mode is changed through `probe`."""

    options: ProposerOptions
    probe: ProposerProbe

    def build(self, setting: ProposerSetting) -> Proposer:
        """Return the proposer of `options`, probed."""
        probed: Any = ProbedProposer(self.options.build(setting), self.probe, setting)
        return probed  # type: ignore[no-any-return]


class ProbedProposer:
    """A proposer whose `propose` obeys a probe; everything else is passed on to the proposer itself."""

    def __init__(self, proposer: Proposer, probe: ProposerProbe, setting: ProposerSetting) -> None:
        self._proposer = proposer
        self._probe = probe
        self._device = setting.deployment.device
        self._tokens_RK = torch.zeros(0, setting.k, dtype=torch.int64, device=self._device)
        self._last: Drafts | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, generations: Sequence[Generation], state: SpeculativeState) -> Drafts:
        """Return the proposals of the mode.

        Idle proposals come with the last distributions: captured graphs read them at the addresses that they
        were captured with.
        """
        if self._probe.mode == "idle":
            if self._tokens_RK.shape[0] < len(generations):
                self._tokens_RK = self._tokens_RK.new_zeros(len(generations), state.k)
            drafts = Drafts(self._tokens_RK[: len(generations)])
            return drafts if self._last is None else replace(drafts, probs_SKV=self._last.probs_SKV)
        started = self._now()
        self._last = self._proposer.propose(generations, state)
        if self._probe.mode == "timed":
            self._probe.seconds.append(self._now() - started)
        return self._last

    def _now(self) -> float:
        if self._probe.mode == "timed" and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

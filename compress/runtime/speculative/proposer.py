"""What a proposer is: it sees prompts as they are prefilled and running sequences as they stand, and proposes how each goes on.

A proposer may keep what it likes for each position in pages of its own: they are addressed by the block tables of the model it proposes
for, so that admission, preemption and the end of a request are the scheduler's business alone. What it holds of rejected tokens is
overwritten when their positions come again.

Shapes: R requests, S rows of the state (R or more), K tokens proposed, V vocabulary, B blocks of the longest sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from compress.models.arch import Arch
from compress.runtime.loader import Target
from compress.runtime.model_runner import PrefillBatch
from compress.runtime.speculative.state import RunningRow, SpeculativeState


@dataclass(frozen=True)
class Setting:
    """What a proposer is built for. `draws`: proposals are drawn with noise of their own, and their probabilities are wanted."""

    arch: Arch
    target: Target
    k: int
    draws: bool


@dataclass(frozen=True)
class Pages:
    """Blocks of the model's cache, which a proposer's own pages share the numbers of."""

    num_blocks: int
    block_size: int
    max_model_len: int


@dataclass(frozen=True)
class Drafts:
    """Proposed tokens int64 [R, K], of which row r has `counts[r]`; the distributions float64 [S, K, V] that they were drawn from, in the
    same memory at every step, or None where a proposal is certain."""

    tokens_RK: Tensor
    counts: Sequence[int]
    probs_SKV: Tensor | None = None


class Proposer(Protocol):
    """Proposes for the requests of one engine. `weight_bytes` a step of it reads, `kv_bytes_per_token` of its pages."""

    weight_bytes: int
    kv_bytes_per_token: int

    def begin(self, pages: Pages) -> None:
        """Called once, when the model's cache has its size."""

    def prefill(self, batch: PrefillBatch, *, short: bool) -> None:
        """The model computed these chunks of prompts."""

    def propose(self, rows: Sequence[RunningRow], state: SpeculativeState) -> Drafts:
        """How each sequence goes on; `state` holds the same rows on the device."""


class ProposerOptions(Protocol):
    """Options of one kind of proposer: a frozen dataclass."""

    def build(self, setting: Setting) -> Proposer:
        """Raises UsageError where it cannot propose for this model."""

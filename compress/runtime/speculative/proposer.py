"""What a proposer is: it sees prompts as they are prefilled and running sequences as they stand, and proposes how each goes on.

A proposer may keep what it likes for each position in pages of its own: they are addressed by the block tables of the model it proposes
for, so that admission, preemption and the end of a request are the scheduler's business alone. What it holds of rejected tokens is
overwritten when their positions come again.

Shapes: R requests, S rows of the state (R or more), K tokens proposed, V vocabulary, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from compress.models.arch import Arch
from compress.runtime.deployment import Deployment
from compress.runtime.model_runner import Features, PrefillBatch
from compress.runtime.speculative.state import RunningRow, SpeculativeState


@dataclass(frozen=True)
class Setting:
    """What a proposer is built for; `block_size` is that of the model's cache. `draws`: proposals are drawn with noise of their own, and
    their probabilities are wanted."""

    arch: Arch
    deployment: Deployment
    k: int
    draws: bool
    block_size: int


@dataclass(frozen=True)
class Pages:
    """Blocks of the model's cache, which a proposer's own pages share the numbers of."""

    num_blocks: int
    block_size: int
    max_model_len: int


@dataclass(frozen=True)
class Drafts:
    """Proposed tokens int64 [R, K], of which row r has `counts[r]`, or all K where that is None; the distributions float64 [S, K, V] that
    they were drawn from, in the same memory at every step, or None where a proposal is certain."""

    tokens_RK: Tensor
    counts: Sequence[int] | None = None
    probs_SKV: Tensor | None = None


class Proposer(Protocol):
    """Proposes for the requests of one engine. `weight_bytes` a step of it reads, `kv_bytes_per_token` of its pages; `feature_layers`:
    after how many of the model's layers it wants to see the hidden states, none at all where it is empty. `on_device`: it reads nothing but
    the state on the device, so that it can propose before the host knows what the last step gave."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_bytes_per_token(self) -> int: ...

    @property
    def feature_layers(self) -> tuple[int, ...]: ...

    @property
    def on_device(self) -> bool: ...

    def kernel_report(self) -> list[dict[str, Any]]:
        """Rows as of `ModelRunner.kernel_report`."""

    def begin(self, pages: Pages, embed_VD: Tensor) -> None:
        """Called once, when the model's cache has its size, with the model's embedding."""

    def prefill(self, batch: PrefillBatch, features: Features | None, *, short: bool) -> None:
        """The model computed these chunks of prompts, with these hidden states if any are wanted."""

    def verified(self, features: Features, state: SpeculativeState, *, q_len: int) -> None:
        """The model fed the last token of each row of `state` and `q_len` - 1 proposed ones behind it, with these hidden states: those of
        rejected tokens among them. Called only where hidden states are wanted, within the step that is captured as a graph."""

    def propose(self, rows: Sequence[RunningRow], state: SpeculativeState) -> Drafts:
        """How each sequence goes on. `state` holds the same rows on the device, and may be a step ahead of them for who is `on_device`."""


class ProposerOptions(Protocol):
    """Options of one kind of proposer: a frozen dataclass."""

    def build(self, setting: Setting) -> Proposer:
        """Raises UsageError where it cannot propose for this model."""

"""The interface of a proposer: it sees prompts as they are prefilled, and proposes how each running request
goes on.

A proposer may keep a cache of its own, in pages that the block tables of the target model address. So
admission, preemption and the end of a request remain the scheduler's business alone. Entries of rejected
tokens are overwritten when their positions come again.

Shapes: R requests, S rows of the state (R or more), K tokens proposed, V vocabulary, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from compress.models.arch import Arch
from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.deployment import Deployment
from compress.runtime.generation import Generation
from compress.runtime.model_runner import ModelRunner
from compress.runtime.speculative.state import SpeculativeState


@dataclass(frozen=True)
class ProposerSetting:
    """The facts a proposer is built from: target model, deployment, k tokens a step, block size of the cache.

    With `draws`, proposals are drawn with noise of their own, and their distributions are wanted.
    """

    arch: Arch
    deployment: Deployment
    k: int
    draws: bool
    block_size: int


@dataclass(frozen=True)
class CacheSizes:
    """The sizes of the target model's cache. A proposer's own pages have the same block numbers."""

    num_blocks: int
    block_size: int
    max_model_len: int
    num_slots: int


@dataclass(frozen=True)
class Drafts:
    """Proposed tokens int64 [R, K], of which the first `counts[r]` of row r count, or all K where that is
    None.

    `probs_SKV` are the float64 distributions that they were drawn from, in the same memory at every step, or
    None where a proposal is certain.
    """

    tokens_RK: Tensor
    counts: Sequence[int] | None = None
    probs_SKV: Tensor | None = None


class Proposer(Protocol):
    """Proposes tokens for the requests of one engine. `weight_bytes` are read by one call of `propose`.

    `on_device`: it reads nothing but the state on the device, so it can propose before the host has read the
    last step.
    """

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of its own pages for one position."""

    @property
    def bytes_per_request(self) -> int:
        """Bytes of the states of its own recurrences for one request."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The indices of the layers of the target model after which it reads the hidden states; empty
        if it reads none.
        """

    @property
    def num_rewritten_rows(self) -> int:
        """The number of last tokens of a sequence whose keys and values in its own pages the next step writes
        again; 0 if it writes none."""

    @property
    def num_tokens_after(self) -> int:
        """The number of tokens after a token on which what it writes of the token depends."""

    @property
    def on_device(self) -> bool: ...

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""

    def begin(self, sizes: CacheSizes, target: ModelRunner) -> None:
        """Allocate its pages. Called once, when the size of the model's cache is known, with the runner
        of the model.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first block of each pair to the second, in its own pages."""

    def prefill(self, batch: PrefillBatch, features: Features | None, *, short: bool) -> None:
        """Read chunks of prompts that the model has prefilled, with their hidden states if it reads any."""

    def verified(self, features: Features, state: SpeculativeState, *, q_len: int) -> None:
        """Read the hidden states of a verification step: of the last token of each row and the `q_len` - 1
        proposals after it.

        Rejected tokens are among them. Called only if `feature_layers` is not empty, within the step that is
        captured as a graph.
        """

    def propose(self, generations: Sequence[Generation], state: SpeculativeState) -> Drafts:
        """Propose how each request goes on.

        `state` holds the same requests on the device. If the proposer is `on_device`, it may be a step ahead
        of `generations`.
        """


class ProposerOptions(Protocol):
    """The options of one kind of proposer: a frozen dataclass."""

    def build(self, setting: ProposerSetting) -> Proposer:
        """Load the proposer.

        Raises:
            UsageError: it cannot propose for this model.
        """

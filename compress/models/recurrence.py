"""The widths of a layer's part that mixes positions by a recurrence, in place of attention: a causal
convolution of its inputs, and for each head a matrix that goes from position to position, if it has any.

In the terms of linear attention, a head has queries and keys of `key_dim` numbers, which neighbouring heads
share, and values of `value_dim`. Its state is of [K, V] numbers, whatever the length of a sequence.

Shapes: B batch, S sequence, H heads, K key dimension, V value dimension, F channels of the convolution, W
positions of the convolution.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models.limits import MAX_SIZE
from compress.untrusted.fields import Fields

MAX_KERNEL = 32
"""The positions of a convolution, whose inputs are saved from one chunk of a prompt."""


@dataclass(frozen=True)
class Recurrence(ABC):
    """The widths of one recurrence. The query and key of a key head serve `num_heads / num_key_heads`
    neighbouring heads."""

    module: ClassVar[str]
    """The module of a layer that computes it; its linears and other parameters have this name first."""
    name: ClassVar[str] = "a recurrence"
    """Its name in messages."""
    least_key_dim: ClassVar[int] = 1
    may_join: ClassVar[bool] = True
    """Whether it may join attention in a layer, and not only take its place."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    @property
    @abstractmethod
    def first_linears(self) -> tuple[str, ...]:
        """The linears that read the stream, in the order in which a runtime stacks them: queries, keys,
        values and the gate of the outputs come first."""

    @property
    def key_size(self) -> int:
        """The numbers of the queries, or of the keys, of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """The numbers of the values, or of the outputs, of all heads."""
        return self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """The channels of the convolution: queries, keys and values, side by side."""
        return 2 * self.key_size + self.value_size

    @property
    def state_numbers(self) -> int:
        """The numbers of the states of all heads, which are float32 whatever the dtype of the model."""
        return self.num_heads * self.key_dim * self.value_dim

    @property
    def of_state(self) -> "Recurrence":
        """The widths of its states: equal where caches may hold states of several layers as one tensor."""
        return self

    @abstractmethod
    def linear_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, int]]:
        """Return [O, I] of the linears that schemes quantize."""

    @abstractmethod
    def dense_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the other parameters."""

    def why_unfit(self) -> str | None:
        """Return why the widths do not fit one another or the runtime, None where they do."""
        if self.kernel_size > MAX_KERNEL:
            return f"a convolution over {self.kernel_size} positions; the runtime has at most {MAX_KERNEL}."
        if self.num_heads % self.num_key_heads:
            return (
                f"{self.num_heads} heads of a recurrence cannot share {self.num_key_heads} key heads evenly."
            )
        return None

    @classmethod
    def from_json(cls, stored: Fields) -> Self:
        """Read what a manifest states; `Fields` raises its error for a value that is missing, of another type
        or out of range."""
        return cls(
            **{
                each.name: _stated(stored, each, cls.least_key_dim if each.name == "key_dim" else 1)
                for each in dataclasses.fields(cls)
            }
        )


def _stated(stored: Fields, field: "dataclasses.Field[Any]", least: int) -> Any:
    """Return a value that a manifest states, an integer not below `least`; values with a default may be left
    out."""
    default = None if field.default is dataclasses.MISSING else field.default
    if field.type is bool:
        return stored.flag(field.name, default=default)
    if field.type is float:
        return stored.number(field.name, 0, MAX_SIZE, default=default)
    return stored.integer(field.name, least if default is None else 0, MAX_SIZE, default=default)


@dataclass(frozen=True)
class RecurrentState:
    """A sequence leaves this for its next position: the last inputs of the convolution [B, W - 1, F], and the
    states of the heads [B, H, K, V], float32; None where heads have none."""

    inputs_BWF: Tensor
    heads_BHKV: Tensor | None


def convolution(
    x_BSF: Tensor, weight_FW: Tensor, past_BWF: Tensor | None, bias_F: Tensor | None = None
) -> Tensor:
    """Return the causal convolution of each channel, [B, S, F]; the inputs before the first are zero where
    there is no past."""
    width = weight_FW.shape[1]
    x_BFS = x_BSF.transpose(1, 2)
    before = F.pad(x_BFS, (width - 1, 0)) if past_BWF is None else torch.cat((past_BWF.mT, x_BFS), dim=-1)
    return F.conv1d(before, weight_FW.unsqueeze(1), bias_F, groups=len(weight_FW)).transpose(1, 2)


def convolved(
    x_BSF: Tensor, weight_FW: Tensor, past_BWF: Tensor | None, bias_F: Tensor | None = None
) -> Tensor:
    """Return silu of the `convolution`, [B, S, F]."""
    return F.silu(convolution(x_BSF, weight_FW, past_BWF, bias_F))


def last_inputs(x_BSF: Tensor, past_BWF: Tensor | None, width: int) -> Tensor:
    """Return the last W - 1 inputs of a convolution over W positions; those before the first are zero."""
    before_BWF = (
        F.pad(x_BSF, (0, 0, width - 1, 0)) if past_BWF is None else torch.cat((past_BWF, x_BSF), dim=1)
    )
    return before_BWF[:, before_BWF.shape[1] - (width - 1) :]

"""The two halves of a layer, attention and FFN, cut at the taps of their linears: how a layer runs whose
linears are compressed one after the other (`calibrate/true_sequential.py`).

Shapes: B batch, S sequence, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from compress.models.attention import AttentionFn
from compress.models.linear_groups import LinearGroup
from compress.models.moe import Moe
from compress.models.tap import Tap

End = Callable[[Tensor, AttentionFn], Tensor]
"""(stream [B, S, D] after a half-layer, attention) -> [B, S, D]: what follows the last half of a layer."""
Inner = Callable[[Tensor, Tensor, AttentionFn, Tap], Tensor]
"""(normed x [B, S, D], positions [S], attention, tap) -> [B, S, D]: attention or the experts of a layer."""
Residual = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]
"""x [B, S, D] -> what the half-layer reads [B, S, D], and the function that returns the stream after it from
its output [B, S, D]. Where the residual is several streams, x and the stream after have n D numbers
(`hyper_connection.py`)."""


@dataclass(frozen=True)
class StagedHalf:
    """The half-layer of a mixture of experts or of latent attention, end(x + post(inner(norm(x)))), with the
    sum of `residual`. The groups of linears of a stage read what those of the stages before it compute: the
    downs of experts follow all gates and ups. `moe` are the experts, where it has them."""

    stages: tuple[tuple[LinearGroup, ...], ...]
    norm: Callable[[Tensor], Tensor]
    inner: Inner
    post: Callable[[Tensor], Tensor]
    residual: Residual
    end: End
    moe: Moe | None = None

    def enter(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """Run to all taps; return x."""
        self.inner(self.norm(self.residual(x_BSD)[0]), positions, attention, tap)
        return x_BSD

    def pass_through(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """Run the whole half-layer."""
        read_BSD, leave = self.residual(x_BSD)
        inner_BSD = self.inner(self.norm(read_BSD), positions, attention, tap)
        return self.end(leave(self.post(inner_BSD)), attention)


@dataclass(frozen=True)
class HalfLayer:
    """end(x + post(out(inner(norm(x))))), attention or the FFN of a layer, with what its two taps part and
    the sum of `residual`."""

    taps: tuple[str, str]
    norm: Callable[[Tensor], Tensor]
    inner: Callable[[Tensor, Tensor, AttentionFn], Tensor]
    out: nn.Linear
    post: Callable[[Tensor], Tensor]
    residual: Residual
    end: End

    def enter(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """To the first tap; x."""
        tap(self.taps[0], self.norm(self.residual(x_BSD)[0]))
        return x_BSD

    def cross(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """To the second tap; the value there."""
        value = self.inner(self.norm(self.residual(x_BSD)[0]), positions, attention)
        tap(self.taps[1], value)
        return value

    def leave(self, x_BSD: Tensor, value: Tensor, attention: AttentionFn) -> Tensor:
        """Run a half-layer from its second tap to its end."""
        return self.end(self.residual(x_BSD)[1](self.post(self.out(value))), attention)

    def pass_through(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """Run a whole half-layer, through both taps."""
        return self.leave(x_BSD, self.cross(x_BSD, positions, attention, tap), attention)


def as_it_is(x: Tensor, attention: AttentionFn) -> Tensor:
    """Return x: the end of a half-layer that has none of its own."""
    del attention
    return x


def add_scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return x + scale * y."""
    return x + y if scale == 1 else x + y * scale


def one_stream(x: Tensor, scale: float) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return x, and the function that adds the output of a half-layer, times `scale`, to it: the `Residual`
    of a model with one stream."""
    return x, lambda y: add_scaled(x, y, scale)

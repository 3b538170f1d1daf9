"""Places in a layer where a scale of each channel can move from one module to those that read it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SmoothingPair:
    """A producer whose output channels may be divided by s while the columns of the `linears` that read
    `tap` are multiplied by s.

    `producer` is a norm (its weight is divided) or a linear (its rows and bias are). With grouped queries
    the columns of `o` repeat the channels of `v`: column h * C + c reads channel (h // repeat) * C + c,
    so one s serves `repeat` query heads. `offset` is what the norm adds to its weight.
    """

    producer: str
    tap: str
    linears: tuple[str, ...]
    head_dim: int = 0
    repeat: int = 1
    offset: float = 0.0

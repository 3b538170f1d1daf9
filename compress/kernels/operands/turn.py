"""The operand of a turn of heads, before attention: norms, rotation (`models/rope.py`), growth.

Shapes: P positions, C head dimension, H heads, K kv heads.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Turn:
    """How queries and new keys are normed and turned, and new values normed.

    `cos_PC` and `sin_PC` are in the model's dtype. `qk_norm` [H + K, C] is a weight for each q and k head, in
    the model's dtype or float32, or None; norms span one head, or all heads if `whole`, around their mean if
    `centered`. `growth_P` multiplies queries by position. Values are normed without a weight if `v_norm`, and
    are the keys before their norm if `keys_are_values`.
    """

    cos_PC: Tensor
    sin_PC: Tensor
    qk_norm: Tensor | None
    eps: float
    whole: bool = False
    centered: bool = False
    growth_P: Tensor | None = None
    v_norm: bool = False
    keys_are_values: bool = False

    @property
    def of_heads_alone(self) -> bool:
        """Whether there is nothing but a rotation and norms of single heads around zero."""
        return self.growth_P is None and not (
            self.whole or self.centered or self.v_norm or self.keys_are_values
        )

"""The operand of coordinate descent over columns: a block of consecutive columns of a weight matrix,
transposed.

Columns are rows in memory ([B, O]), because one step of the descent reads one column of every output. All
tensors are float32.
"""

from dataclasses import dataclass

from torch import Tensor

from compress.quant.scheme import Scheme


@dataclass(frozen=True)
class DescentBlock:
    """B columns of O outputs, under one scale and zero point per output.

    `levels_BO` are codes less their zero points, so that a dequantized value is level * scale. `gradient_BO`
    is half the gradient of the loss at these values. `h_BB` is the block of the damped second moment,
    symmetric; `inv_diag_B` is 1 / diag(H), and 0 for columns whose codes do not change.
    """

    levels_BO: Tensor
    gradient_BO: Tensor
    h_BB: Tensor
    inv_diag_B: Tensor
    scheme: Scheme
    scale_O: Tensor
    zero_O: Tensor | None

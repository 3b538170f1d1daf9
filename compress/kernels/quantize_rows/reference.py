"""Reference quantization of rows to the grid of e4m3 or int8, defined in `kernels/operands/rows.py`."""

from compress.kernels.operands.rows import quantize
from compress.kernels.select import Kernel, anything, register

register(Kernel("quantize_rows", "reference", min_sm=0, priority=0, supports=anything, fn=quantize))

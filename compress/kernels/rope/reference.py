"""Reference rotary embedding (arXiv 2104.09864): dimension c turns with its partner c + C/2; cos and sin come from `models/rope.py`."""

from compress.kernels.select import Kernel, anything, register
from compress.models.rope import rotate

register(Kernel("rope", "reference", min_sm=0, rank=0, supports=anything, fn=rotate))

"""The kinds of recurrences that layers may have in place of attention. A new one is listed here, and has a
module in `decoder.py` and an op in `kernels/problem.py`."""

from compress.models.delta_net import DeltaNet
from compress.models.lightning import Lightning
from compress.models.mamba1 import Mamba1
from compress.models.mamba2 import Mamba2
from compress.models.recurrence import Recurrence
from compress.models.short_conv import ShortConv

RECURRENCES: tuple[type[Recurrence], ...] = (DeltaNet, Lightning, Mamba1, Mamba2, ShortConv)
PREFIXES = tuple(f"{kind.module}." for kind in RECURRENCES)
"""The beginnings of the canonical names of their tensors in a layer."""

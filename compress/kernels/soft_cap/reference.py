"""Reference of capped logits (arXiv 2408.00118, section 2): c tanh(x / c), float32."""

import torch
from torch import Tensor

from compress.kernels.select import Kernel, anything, register


def soft_cap_(logits_TV: Tensor, cap: float) -> Tensor:
    """Cap logits in place and return them."""
    return torch.tanh_(logits_TV.div_(cap)).mul_(cap)


register(Kernel("soft_cap", "reference", min_sm=0, priority=0, supports=anything, fn=soft_cap_))

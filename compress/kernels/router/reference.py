"""Reference router: logits in float32, then the choice that `operands/routing.py` defines.

Products have one shape, so that a row's choice depends on the row alone (`row_product` has the reason).
"""

from torch import Tensor

from compress.kernels.linear.row_product import column_blocks, row_product
from compress.kernels.operands.routing import RouterWeights, Routing, choose
from compress.kernels.select import Kernel, anything, register

ROWS = 4


def route(x_TD: Tensor, router: RouterWeights, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return ids and weights, [T, K]."""
    logits_TE = row_product(x_TD.float(), column_blocks(router.weight_ED.float()), rows=ROWS)
    if router.bias_E is not None:
        logits_TE = logits_TE + router.bias_E
    return choose(logits_TE, routing, router.selection_bias_E)


register(Kernel("router", "reference", min_sm=0, priority=0, supports=anything, fn=route))

"""Reference router: logits in float32, then the choice that `models/moe.py` defines.

Products have one shape, and functions of logits are taken of whole vectors, so that a row's choice depends on
the row alone (`row_product` and `act_mul` have the reasons).
"""

import torch
from torch import Tensor

from compress.kernels.act_mul.reference import in_whole_vectors
from compress.kernels.linear.row_product import column_blocks, row_product
from compress.kernels.operands.routing import RouterWeights
from compress.kernels.select import Kernel, anything, register
from compress.models import moe
from compress.models.experts import Experts

ROWS = 4


def route(
    x_TD: Tensor,
    router: RouterWeights,
    facts: Experts,
    *,
    shared: int = 0,
    tokens_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ids and weights, [T, K]; `tokens_T` are read where a table chooses experts."""
    logits_TE = row_product(x_TD.float(), column_blocks(router.weight_ED.float()), rows=ROWS)
    if router.bias_E is not None:
        logits_TE = logits_TE + router.bias_E
    if facts.router_scale != 1:
        logits_TE = logits_TE * facts.router_scale
    routing = moe.route(
        facts,
        logits_TE,
        router.selection_bias_E,
        router.output_scale_E,
        None if router.table_VK is None or tokens_T is None else router.table_VK[tokens_T],
        computed=in_whole_vectors,
    )
    of_all_TS = torch.arange(shared, device=x_TD.device).expand(len(x_TD), -1)
    ids_TK = torch.cat((routing.experts_TR, facts.num_experts + of_all_TS), dim=1)
    weights_TK = torch.cat((routing.weights_TR, torch.ones_like(of_all_TS, dtype=torch.float32)), dim=1)
    return ids_TK.to(torch.int32), weights_TK


register(Kernel("router", "reference", min_sm=0, priority=0, supports=anything, fn=route))

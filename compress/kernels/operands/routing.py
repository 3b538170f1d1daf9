"""The weights of a router, and of experts before they are repacked. How tokens are routed is in
`models/experts.py` (`Experts`) and `models/moe.py` (`route`).

Shapes: D hidden, E experts, F ffn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.operands.rows import ActivationQuant, input_quant
from compress.models.experts import Experts
from compress.quant.scheme import QuantizedWeight


@dataclass(frozen=True)
class RouterWeights:
    """The dense weight [E, D] of a router, and its biases [E] and factors [E] of the weights of experts,
    float32; the selection bias of experts that every token chooses is infinite. `arrivals` are the zeroed
    counters [`COUNTED_ROWS`] by which a kernel counts the blocks of some rows, and which it leaves
    zeroed. `table_VK` int64 has the experts of each token where a table chooses them."""

    weight_ED: Tensor
    bias_E: Tensor | None
    selection_bias_E: Tensor | None
    output_scale_E: Tensor | None
    arrivals: Tensor
    table_VK: Tensor | None = None


COUNTED_ROWS = 64


def chosen_by_table(
    router: RouterWeights, facts: Experts, num_rows: int, tokens_T: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the tokens of the rows, and the table that chooses their experts, or neither where there is no
    table."""
    if not facts.table_size:
        return None, None
    assert router.table_VK is not None
    assert tokens_T is not None
    assert tokens_T.shape == (num_rows,)
    assert router.table_VK.shape == (facts.table_size, facts.top_k)
    return tokens_T.to(torch.int64).contiguous(), router.table_VK


def router_weights(
    weight_ED: Tensor,
    bias_E: Tensor | None,
    selection_bias_E: Tensor | None,
    output_scale_E: Tensor | None = None,
    table_VK: Tensor | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> RouterWeights:
    """Return the weights of a router on a device, the matrix in the model's dtype."""

    def numbers(given: Tensor | None) -> Tensor | None:
        return None if given is None else given.to(device=device, dtype=torch.float32).contiguous()

    return RouterWeights(
        weight_ED.to(device=device, dtype=dtype).contiguous(),
        numbers(bias_E),
        numbers(selection_bias_E),
        numbers(output_scale_E),
        torch.zeros(COUNTED_ROWS, dtype=torch.int32, device=device),
        None if table_VK is None else table_VK.to(device=device, dtype=torch.int64).contiguous(),
    )


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of one expert: gate and up [F, D], down [D, F], and their biases [F], [F] and [D]; `gate`
    is None where its FFN has none."""

    gate: Tensor | QuantizedWeight | None
    up: Tensor | QuantizedWeight
    down: Tensor | QuantizedWeight
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def gate_up(self) -> tuple[Tensor | QuantizedWeight, ...]:
        """Gate and up, or up alone."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    @property
    def gate_up_bias(self) -> tuple[Tensor | None, ...]:
        """The biases of `gate_up`."""
        return (self.up_bias,) if self.gate is None else (self.gate_bias, self.up_bias)


def expert_inputs(
    experts: Sequence[ExpertWeights], device: torch.device
) -> tuple[ActivationQuant | None, ActivationQuant | None]:
    """Return how the experts of a layer round the input of gate and up, and that of down: all alike, so of
    static scales the largest serves, as in `input_quant`."""
    first = [weight for each in experts for weight in each.gate_up]
    return input_quant(first, device), input_quant([each.down for each in experts], device)

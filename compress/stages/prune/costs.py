"""The cost of a pruned model: parameters, or the time of one decode step in 16 bits.

The time is that of the linear groups of all layers, of the head, of reading a cache of `context` positions,
and of reading and writing the states of recurrences.
"""

from collections.abc import Sequence

from compress.context import Context
from compress.models.arch import Arch
from compress.models.pruning import Widths, resized, with_layers
from compress.stages.budget.times import TIMES_NAME, Times, times_on
from compress.stages.prune.spec import PruningBudget

SEARCH_NAME = "search"


def costs_of(widths: Sequence[Widths], budget: PruningBudget, arch: Arch, ctx: Context) -> list[float]:
    """Return the parameters, or the microseconds of a decode step, of the model resized to each of these
    widths."""
    models = [resized(with_layers(arch, range(each.num_layers)), each) for each in widths]
    if budget.params_frac is not None:
        return [float(each.num_params) for each in models]
    times = times_on(budget.device, budget.rows, ctx.scratch / SEARCH_NAME / TIMES_NAME, ctx)
    return [_step_us(each, budget, times) for each in models]


def _step_us(arch: Arch, budget: PruningBudget, times: Times) -> float:
    of_request = 2 * arch.numbers_cached(budget.context) * budget.context + arch.step_state_bytes
    num_bytes = 2 * arch.vocab_size * arch.hidden_size + budget.rows * of_request
    linears_us = sum(
        times.linear_us(arch, group, None, layer_idx=idx)[0]
        for idx, shape in enumerate(arch.layers)
        for group in shape.groups
    )
    return linears_us + num_bytes / times.bytes_per_us

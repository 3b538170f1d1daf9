"""Removal of whole experts: a mixture with fewer of them is left, every layer with the same number.

An expert goes with its linears, its row of the router, and its numbers among selection biases and output
scales. Tokens that chose it choose the next best of those that stay. Experts that every token chooses all
stay, and count among those kept.

Shapes: E experts.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.arch_params import routes_by_token
from compress.models.family import family_of_arch
from compress.models.weights import Weights, WeightSource
from compress.quant.scheme import QuantizedWeight

_EXPERT = re.compile(r"moe\.experts\.(\d+)\.(.+)")


def with_experts(arch: Arch, num_kept: int) -> Arch:
    """Return the model with so many experts in each layer that has some.

    Raises:
        UsageError: there are no experts, fewer than that, or fewer stay than a token goes to.
    """
    mixtures = [layer.experts for layer in arch.layers if layer.experts is not None]
    if not mixtures:
        raise UsageError("experts: this model has none to prune.")
    if any(each.zero_experts for each in mixtures):
        raise UsageError(
            f"experts: the experts of this {arch.family} model that return their input follow the others by "
            "index, in checkpoints, too; none is removed."
        )
    if family_of_arch(arch).more_experts:
        raise UsageError(
            f"experts: other parts of this {arch.family} model have as many experts as its text, and a "
            "config states one number for both."
        )
    if routes_by_token(arch):
        raise UsageError(
            f"experts: tables choose the experts of tokens in some layers of this {arch.family} model, and "
            "have no other choice for the tokens of an expert that is removed."
        )
    first = mixtures[0]
    if not first.top_k <= num_kept <= first.num_experts:
        raise UsageError(
            f"experts: {num_kept} cannot be kept: the model has {first.num_experts} experts a layer, and "
            f"every token goes to {first.top_k} of them."
        )
    if first.num_groups > 1 and num_kept < first.num_experts:
        raise UsageError("experts: the router of this model chooses among groups of experts of equal size.")
    return arch.replace(
        layers=tuple(
            layer
            if layer.experts is None
            else replace(layer, experts=replace(layer.experts, num_experts=num_kept))
            for layer in arch.layers
        )
    )


def kept_experts(weights: Weights, kept: Sequence[int]) -> dict[str, Tensor | QuantizedWeight]:
    """Return the parameters of a layer with the experts `kept`, in that order, under new indices."""
    place = {old: new for new, old in enumerate(kept)}
    found: dict[str, Tensor | QuantizedWeight] = {}
    for name, value in weights.items():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            if int(match[1]) in place:
                found[f"moe.experts.{place[int(match[1])]}.{match[2]}"] = value
        elif name.startswith("moe.router.") or name in ("moe.selection_bias", "moe.output_scale"):
            assert isinstance(value, Tensor)  # experts that every token chooses have no selection bias
            found[name] = value[[idx for idx in kept if idx < len(value)]].contiguous()
        else:
            found[name] = value
    return found


class ExpertSubset:
    """A source without some of its experts; `kept` has the indices of those that stay, by layer, and is empty
    for a layer without experts."""

    def __init__(self, source: WeightSource, kept: Sequence[Sequence[int]]) -> None:
        self._source = source
        self._kept = tuple(tuple(each) for each in kept)
        self.arch = with_experts(source.arch, max(map(len, self._kept)))
        self.kv_format = source.kv_format

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        weights = self._source.layer(layer_idx)
        return kept_experts(weights, self._kept[layer_idx]) if self._kept[layer_idx] else weights

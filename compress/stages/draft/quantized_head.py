"""An EAGLE-3 head in codes. Every linear is rounded on the inputs that it reads while the head drafts from
the training text, on the target's hidden states and on its own. The head is a single layer, so no rounded
layer changes an input: all are those of the dense head.

Shapes: N windows, B batch, S sequence.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from compress.calibrate.stats import InputStats, Stat
from compress.distill.draft_head import Target, unrolled
from compress.errors import UnsupportedFormat, UsageError
from compress.methods.quantize import Refiner, Rounder
from compress.models.eagle3 import Eagle3Decoder, Eagle3Facts, Eagle3Head, parameter_shapes
from compress.models.linear_groups import LINEAR_GROUPS
from compress.models.weights import dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import QuantizedWeight
from compress.stages.budget.spec import scheme_or_dense
from compress.stages.quantize.schemes import possible_schemes
from compress.stages.quantize.spec import Quantize

INPUTS = {
    "fc": "fc",
    **{f"layers.0.{linear}": group.tap for group in LINEAR_GROUPS.values() for linear in group.linears},
}
"""Linear -> the tap that observes its input."""


def head_scheme(spec: Quantize, facts: Eagle3Facts) -> ModelScheme:
    """Return the scheme that every linear of the head gets.

    Raises:
        UsageError: settings that are for whole models.
        UnsupportedFormat: a linear whose columns are not whole scale groups.
    """
    for name in ("guide", "smooth", "target", "tune"):
        if getattr(spec, name) is not None:
            raise UsageError(
                f"draft: quantize: {name} is for whole models, an EAGLE-3 head takes round and refine. Say "
                f"`{name}: null`."
            )
    if not isinstance(spec.scheme, str) or spec.overrides:
        raise UsageError(
            "draft: quantize: all linears of an EAGLE-3 head have one scheme; leave out mixed precision and "
            "overrides."
        )
    scheme = None if spec.only_cache else scheme_or_dense(spec.scheme)
    if scheme is None or scheme.has_static_inputs or scheme.block_rows > 1:
        raise UsageError(
            f"draft: quantize: an EAGLE-3 head in {spec.scheme} is not offered; take one whose rows have "
            "their own scales."
        )
    for linear in INPUTS:
        columns = parameter_shapes(facts)[f"{linear}.weight"][1]
        if columns % (scheme.group_size or 1):
            raise UnsupportedFormat(
                f"draft: {linear} has {columns} columns, no multiple of {scheme.group_size} as "
                f"{spec.scheme} wants. Take a scheme whose groups divide it or one of channels."
            )
    found = possible_schemes(spec, facts.arch)[0]
    assert found is not None, "the scheme is not dense"
    return found


def rounded_head(
    spec: Quantize,
    head: Eagle3Head,
    target: Target,
    tokens_NS: Tensor,
    num_steps: int,
    *,
    device: torch.device,
) -> Eagle3Head:
    """Return the head with codes. Statistics are gathered one window at a time."""
    scheme = head_scheme(spec, head.facts)
    rounder = cast(Rounder, spec.round)
    refiner = cast(Refiner | None, spec.refine)
    stats = _observed(
        head,
        target,
        tokens_NS,
        num_steps,
        (*rounder.needs(), *(refiner.needs() if refiner else ())),
        device=device,
    )
    weights = dict(head.weights)
    for linear, tap in INPUTS.items():
        name = f"{linear}.weight"
        stored = dense(weights[name])
        weight_OI = stored.to(device, torch.float32)
        found = rounder.round(weight_OI, stats[tap], scheme.layers, scale_dtype=stored.dtype)
        weights[name] = _on_cpu(
            (refiner.refine(weight_OI, found.weight, stats[tap]) if refiner else found).weight
        )
    if scheme.head is not None:
        stored = dense(weights["head.weight"])
        weights["head.weight"] = _on_cpu(nearest_weight(stored.to(device), scheme.head, stored.dtype))
    return Eagle3Head(head.facts, weights, head.vocabulary_W, head.embed_VD)


@torch.no_grad()
def _observed(
    head: Eagle3Head,
    target: Target,
    tokens_NS: Tensor,
    num_steps: int,
    kinds: Sequence[type[Stat]],
    *,
    device: torch.device,
) -> dict[str, InputStats]:
    """Return the statistics of the inputs of the linears, by tap."""
    stats = {tap: InputStats(*(kind() for kind in kinds)) for tap in dict.fromkeys(INPUTS.values())}
    decoder: Eagle3Decoder = head.decoder(dtype=torch.float32, device=device)

    def observe(tap: str, x: Tensor) -> None:
        for stat in stats[tap]:
            stat.update(x.flatten(0, -2))

    for tokens_1S in tokens_NS.split(1):
        embedded, features, _ = (
            each.to(torch.float32) for each in target.features(tokens_1S.to(device=device, dtype=torch.int64))
        )
        observe("fc", features[:, :-1])
        for _ in unrolled(decoder, embedded, features, num_steps, tap=observe):
            pass
    return stats


def _on_cpu(weight: QuantizedWeight) -> QuantizedWeight:
    zero_point_OG = None if weight.zero_point_OG is None else weight.zero_point_OG.cpu()
    return QuantizedWeight(weight.scheme, weight.codes_OI.cpu(), weight.scale_OG.cpu(), zero_point_OG)

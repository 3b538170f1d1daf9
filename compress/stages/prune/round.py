"""One round of pruning: layers are removed first, then heads and channels of those that stay, layer by layer
through the sequential runner.

Every measurement that a decision rests on (influences of layers, predicted losses) is written into the
round's directory before the decision, and a finished round is marked, so that a resumed run decides the same
and repeats no finished round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.artifact.resume import ResumePoint, are_whole, digests
from compress.calibrate.arithmetic import compute_dtype
from compress.calibrate.gradients import visit_gradients
from compress.calibrate.residual import walk
from compress.calibrate.sequential import Compression, run_sequential
from compress.context import Context
from compress.digest import significant
from compress.methods.prune import LAYER_SCORERS, Compensation, Scorer
from compress.methods.prune.prune_pass import Cut, PrunePass
from compress.methods.prune.taylor import UnitLosses
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, layer_name, save_weights
from compress.models.pruning import HeadUnit, LayerSubset, StoredLayers, Widths, resized, with_biases
from compress.models.weights import WeightSource, rounded_to

DONE_NAME = "round.json"
INFLUENCE_NAME = "influence.json"
LOSSES_NAME = "losses.safetensors"


@dataclass(frozen=True)
class PruningMethod:
    """The way units and layers are chosen, and how what stays compensates for those that go."""

    scorer: Scorer
    compensation: Compensation
    unit: HeadUnit
    depth_score: str = "block_influence"

    def cuts(self, before: Arch, widths: Widths) -> tuple[Cut, ...]:
        """Return the linears whose inputs become narrower, with the units that stay."""
        old = Widths.of(before)
        cuts = []
        if widths.num_heads < old.num_heads:
            num_kept = widths.num_kv_heads if self.unit == "kv_group" else widths.num_heads
            cuts.append(Cut("attn.o", self.unit, num_kept))
        if widths.intermediate_size < old.intermediate_size:
            cuts.append(Cut("ffn.down", "channel", widths.intermediate_size))
        return tuple(cuts)


def prune_round(
    method: PruningMethod,
    source: WeightSource,
    widths: Widths,
    tokens_NS: Tensor,
    directory: Path,
    ctx: Context,
    *,
    with_weights: bool = True,
) -> tuple[WeightSource, dict[str, Any]]:
    """Prune the source to these widths on all ranks; return the model, which is stored in the directory, and
    facts of what was removed. Without `with_weights` a finished round need not have its weights any more.

    Raises:
        UsageError: statistics that cannot be factorised.
        Interrupted: the run was asked to stop; the same call resumes there.
    """
    leads = ctx.ranks.rank == 0
    if leads:
        directory.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] | None = ctx.ranks.from_lead(
        lambda: finished(directory, ctx, with_weights=with_weights)
    )
    kept, influence = (
        ctx.ranks.from_lead(
            lambda: _kept_layers(method, source, widths.num_layers, tokens_NS, directory, ctx)
        )
        if facts is None
        else (facts["layers_kept"], facts["influence"])
    )
    subset = LayerSubset(source, kept)
    cuts = method.cuts(source.arch, widths)
    pruned = resized(subset.arch, widths)
    if method.compensation.needs_bias:
        pruned = with_biases(pruned, [cut.linear for cut in cuts])
    stored = StoredLayers(directory, pruned)
    if facts is not None:
        return stored, facts
    rows: list[dict[str, Any]] = []
    dtype = compute_dtype(ctx.device, getattr(torch, source.arch.dtype))
    if cuts:
        losses = ctx.ranks.from_lead(lambda: _losses(method, subset, cuts, tokens_NS, directory, ctx, dtype))
        step = PrunePass(cuts, method.scorer, method.compensation, subset.arch, pruned, ctx.rng, losses)
        rows = run_sequential(
            subset, tokens_NS, Compression([step], pruned=pruned), directory, ctx, compute_dtype=dtype
        )
    elif leads:
        _copy(subset, directory, ctx)
    facts = {"layers_kept": kept, "influence": influence, "layers": rows}
    if leads:
        names = [OUTER_NAME, *map(layer_name, range(pruned.num_layers))]
        _done(directory, ctx).save({"facts": facts, "files": digests(directory, names)})
    return stored, facts


def finished(directory: Path, ctx: Context, *, with_weights: bool = True) -> dict[str, Any] | None:
    """Return the facts of a finished round, None if it is to be done again: it was not finished, or its file
    or (`with_weights`) its weights are gone or damaged."""
    done = _done(directory, ctx).load()
    if done is None or (with_weights and not are_whole(directory, done["files"], ctx.progress.log)):
        return None
    facts: dict[str, Any] = done["facts"]
    return facts


def _done(directory: Path, ctx: Context) -> ResumePoint:
    return ResumePoint(directory / DONE_NAME, ctx.progress.log)


def delete_weights(directory: Path) -> None:
    """Delete the weights of a finished round that no later round reads; its decisions stay."""
    for file in (directory / OUTER_NAME, *directory.glob("layer-*.safetensors")):
        file.unlink(missing_ok=True)


def _kept_layers(
    method: PruningMethod,
    source: WeightSource,
    num_kept: int,
    tokens_NS: Tensor,
    directory: Path,
    ctx: Context,
) -> tuple[list[int], list[float]]:
    """Return the indices of the layers that stay, and where some go the influence of each layer."""
    num_layers = source.arch.num_layers
    point = ResumePoint(directory / INFLUENCE_NAME, ctx.progress.log)
    if num_kept == num_layers:
        return list(range(num_layers)), []
    influence: list[float] | None = point.load()
    if influence is None:
        scorer = LAYER_SCORERS.get(method.depth_score)()
        sums = [0.0] * num_layers

        def add_influence(idx: int, before_TD: Tensor, after_TD: Tensor) -> None:
            sums[idx] += float(scorer.influence(before_TD, after_TD))

        dtype = compute_dtype(ctx.device, getattr(torch, source.arch.dtype))
        walk(
            source,
            tokens_NS,
            ctx,
            compute_dtype=dtype,
            task="the influence of each layer",
            visit=add_influence,
        )
        influence = [significant(each / tokens_NS.numel(), 9) for each in sums]
        point.save(influence)
    order = sorted(range(num_layers), key=lambda idx: (-influence[idx], idx))
    return sorted(order[:num_kept]), influence


def _losses(
    method: PruningMethod,
    source: WeightSource,
    cuts: Sequence[Cut],
    tokens_NS: Tensor,
    directory: Path,
    ctx: Context,
    dtype: torch.dtype,
) -> dict[tuple[int, str], Tensor]:
    """Return (layer, tap) -> predicted loss of every unit, empty for a scorer that needs none."""
    if method.scorer.gradient_samples == 0:
        return {}
    point = ResumePoint(directory / LOSSES_NAME, ctx.progress.log)
    losses = point.load_tensors()
    if losses is None:
        visitor = UnitLosses({cut.tap: cut.units(source.arch.layers[0]) for cut in cuts})
        sampled_NS = tokens_NS[: method.scorer.gradient_samples]
        draws_NS = torch.rand(sampled_NS.shape, generator=ctx.rng("unit losses", "labels"))
        visit_gradients(source, sampled_NS, visitor, ctx, compute_dtype=dtype, draws_NS=draws_NS)
        losses = {f"{idx}.{tap}": loss_U for (idx, tap), loss_U in visitor.loss.items()}
        point.save_tensors(losses)
    named = {name.partition(".")[::2]: loss_U for name, loss_U in losses.items()}
    return {(int(idx), tap): loss_U for (idx, tap), loss_U in named.items()}


def _copy(source: WeightSource, directory: Path, ctx: Context) -> None:
    """Write all weights of a source in the dtype of the model."""
    dtype: torch.dtype = getattr(torch, source.arch.dtype)
    save_weights(directory / OUTER_NAME, rounded_to(source.outer(), dtype))
    for idx in range(source.arch.num_layers):
        ctx.boundary(idx, source.arch.num_layers, f"layer {idx} of {source.arch.num_layers}")
        save_weights(directory / layer_name(idx), rounded_to(source.layer(idx), dtype, where=f"layers.{idx}"))

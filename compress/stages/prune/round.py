"""One round of pruning: layers are removed first, then heads and channels of those that stay, layer by layer
through the sequential runner.

Every measurement that a decision rests on (influences of layers, predicted losses) is written into the
round's directory before the decision, and a finished round is marked, so that a resumed run decides the same
and repeats no finished round.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.artifact.atomic import write_atomic
from compress.artifact.tensors import load_tensors, save_tensors
from compress.calibrate.arithmetic import compute_dtype
from compress.calibrate.gradients import visit_gradients
from compress.calibrate.residual import walk
from compress.calibrate.sequential import Compression, run_sequential
from compress.context import Context
from compress.digest import canonical_json
from compress.methods.prune import LAYER_SCORERS, Compensation, Scorer
from compress.methods.prune.prune_pass import Cut, PrunePass
from compress.methods.prune.taylor import UnitLosses
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, layer_name, save_weights
from compress.models.pruning import HeadUnit, LayerSubset, StoredLayers, Widths, resized, with_biases
from compress.models.weights import WeightSource

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
) -> tuple[WeightSource, dict[str, Any]]:
    """Prune the source to these widths on all ranks; return the model, which is stored in the directory, and
    facts of what was removed.

    Raises:
        UsageError: statistics that cannot be factorised.
        Interrupted: the run was asked to stop; the same call resumes there.
    """
    leads = ctx.ranks.rank == 0
    done = directory / DONE_NAME
    if leads:
        directory.mkdir(parents=True, exist_ok=True)
    kept, influence = ctx.ranks.from_lead(
        lambda: _kept_layers(method, source, widths.num_layers, tokens_NS, directory, ctx)
    )
    subset = LayerSubset(source, kept)
    cuts = method.cuts(source.arch, widths)
    pruned = resized(subset.arch, widths)
    if method.compensation.needs_bias:
        pruned = with_biases(pruned, [cut.linear for cut in cuts])
    stored = StoredLayers(directory, pruned)
    facts: dict[str, Any] | None = ctx.ranks.from_lead(
        lambda: json.loads(done.read_bytes()) if done.exists() else None
    )
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
        write_atomic(done, canonical_json(facts))
    return stored, facts


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
    file = directory / INFLUENCE_NAME
    if num_kept == num_layers:
        return list(range(num_layers)), []
    if not file.exists():
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
        write_atomic(file, canonical_json([float(f"{each / tokens_NS.numel():.9g}") for each in sums]))
    influence: list[float] = json.loads(file.read_bytes())
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
    file = directory / LOSSES_NAME
    if not file.exists():
        visitor = UnitLosses({cut.tap: cut.units(source.arch.layers[0]) for cut in cuts})
        sampled_NS = tokens_NS[: method.scorer.gradient_samples]
        draws_NS = torch.rand(sampled_NS.shape, generator=ctx.rng("unit losses", "labels"))
        visit_gradients(source, sampled_NS, visitor, ctx, compute_dtype=dtype, draws_NS=draws_NS)
        save_tensors(file, {f"{idx}.{tap}": loss_U for (idx, tap), loss_U in visitor.loss.items()})
    named = {name.partition(".")[::2]: loss_U for name, loss_U in load_tensors(file).items()}
    return {(int(idx), tap): loss_U for (idx, tap), loss_U in named.items()}


def _copy(source: WeightSource, directory: Path, ctx: Context) -> None:
    save_weights(directory / OUTER_NAME, source.outer())
    for idx in range(source.arch.num_layers):
        ctx.boundary(idx, source.arch.num_layers, f"layer {idx} of {source.arch.num_layers}")
        save_weights(directory / layer_name(idx), source.layer(idx))

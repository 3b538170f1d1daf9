"""`prune`: remove heads, FFN channels, layers and experts, and let what stays compensate for it. The result
is a smaller dense model of the same family.

Layers are pruned one after the other on the inputs that the pruned layers before them give; a run resumes
after each layer.

spec.py     what a recipe states           widths.py     widths that consumers of the result accept
round.py    one round of pruning           search.py     `target`: how much of each axis goes
costs.py    size or time of the result     estimate.py   for `compress plan`
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from compress.artifact.atomic import place
from compress.artifact.resume import ResumePoint
from compress.artifact.writer import ArtifactWriter
from compress.calibrate.arithmetic import compute_dtype, computes_in
from compress.calibrate.expert_scores import best_experts, expert_scores
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME
from compress.data.tokens import load_token_set
from compress.digest import significant
from compress.errors import UsageError
from compress.export import open_weights
from compress.methods.prune import Compensation, Scorer
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, layer_name
from compress.models.expert_pruning import ExpertSubset, with_experts
from compress.models.pruning import Recast, Widths
from compress.models.weights import WeightSource
from compress.stages import STAGES, Inputs, Port
from compress.stages.budget.times import depends
from compress.stages.prune.estimate import COUNTS_ALL, estimate, reshape
from compress.stages.prune.round import PruningMethod, delete_weights, finished, prune_round
from compress.stages.prune.search import search
from compress.stages.prune.spec import ExpertAxis, Prune
from compress.stages.prune.widths import round_widths

EXPERTS_NAME = "experts.json"
TINY = 1e-30


def _depends(spec: Prune, device: str) -> Mapping[str, str]:
    """Return the dtype that the device computes in, and where measured or tabled times decide the widths,
    what these depend on."""
    times = {}
    if spec.target is not None and spec.target.latency_frac is not None:
        times = depends(spec.target.device, device)
    return {**computes_in(device), **times}


def prune_rounds(spec: Prune, inputs: Inputs, ctx: Context) -> tuple[Path, Arch, dict[str, Any]]:
    """Prune in all rounds on all ranks, into the scratch directory.

    Returns:
        The directory of the last round, the shapes of its model, and facts.
    """
    source = _source(spec, inputs)
    tokens = load_token_set(inputs[Port.CALIB].path / TOKENS_NAME)
    if tokens.counted_NS is not None:
        raise UsageError(COUNTS_ALL)
    tokens_NS = tokens.tokens_NS
    before = source.arch
    found: dict[str, Any] = {}
    if spec.experts is not None:
        source, found = _without_experts(spec.experts, source, tokens_NS, ctx)
        before = source.arch
    scorer = cast(Scorer, spec.score)
    compensation = cast(Compensation, spec.compensate)
    method = PruningMethod(
        scorer, compensation, spec.unit, "block_influence" if spec.depth is None else spec.depth.score
    )
    if spec.target is None:
        goal = spec.explicit_widths(before)
    else:
        goal, searched = search(spec.target, method, source, tokens_NS, ctx, multiple=spec.multiple)
        found |= searched
    steps = round_widths(before, goal, spec.rounds, unit=spec.unit, multiple=spec.multiple)
    steps = steps or [goal]  # only experts go
    directories = [ctx.scratch / f"round-{idx}" for idx in range(len(steps))]
    newest = ctx.ranks.from_lead(lambda: _newest_whole(directories, ctx))
    rounds: list[dict[str, Any]] = []
    for idx, (widths, directory) in enumerate(zip(steps, directories, strict=True)):
        source, facts = prune_round(
            method, source, widths, tokens_NS, directory, ctx, with_weights=idx >= newest
        )
        rounds.append(facts)
        if idx > 0 and ctx.ranks.rank == 0:
            delete_weights(directories[idx - 1])
    return directories[-1], source.arch, {"rounds": rounds, **found}


def _without_experts(
    spec: ExpertAxis, source: WeightSource, tokens_NS: Tensor, ctx: Context
) -> tuple[WeightSource, dict[str, Any]]:
    """Return the source with the best experts of each layer, and facts of the choice; rank 0 scores them."""
    arch = source.arch
    num_kept = spec.num_kept(arch)
    with_experts(arch, num_kept)  # refuses a number that cannot be kept
    point = ResumePoint(ctx.scratch / EXPERTS_NAME, ctx.progress.log)

    def scored() -> list[list[float]]:
        scores: list[list[float]] | None = point.load()
        if scores is None:
            in_dtype = compute_dtype(ctx.device, getattr(torch, arch.dtype))
            found = expert_scores(source, tokens_NS, ctx, compute_dtype=in_dtype)
            scores = [each.tolist() for each in found]
            point.save(scores)
        return scores

    scores = ctx.ranks.from_lead(scored)
    always = max(layer.experts.always for layer in arch.layers if layer.experts is not None)
    kept = [
        best_experts(torch.tensor(each, dtype=torch.float64), num_kept, always) if each else []
        for each in scores
    ]
    lost = [
        significant(1 - sum(each[idx] for idx in stay) / max(sum(each), TINY)) if each else 0.0
        for each, stay in zip(scores, kept, strict=True)
    ]
    facts = {"score": spec.score, "kept": kept, "score_lost": lost, "num_kept": num_kept}
    return ExpertSubset(source, kept), {"experts": facts}


def _newest_whole(directories: Sequence[Path], ctx: Context) -> int:
    """Return the index of the last round that is finished, with its weights and the facts of all before it; 0
    if there is none. The weights of those before it are no longer needed."""
    for idx in reversed(range(1, len(directories))):
        earlier = directories[:idx]
        if finished(directories[idx], ctx) is not None and all(
            finished(each, ctx, with_weights=False) is not None for each in earlier
        ):
            return idx
    return 0


@STAGES.stage(
    "prune",
    version=3,
    takes=(Port.DENSE, Port.CALIB),
    gives=Port.DENSE,
    spec=Prune,
    estimate=estimate,
    depends=_depends,
    on_all_ranks=prune_rounds,
    reshape=reshape,
)
def prune(spec: Prune, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    before = _source(spec, inputs).arch
    spec.check_model(before)
    directory, after, found = prune_rounds(spec, inputs, ctx)
    for name in (OUTER_NAME, *map(layer_name, range(after.num_layers))):
        place(directory / name, out.path / name)
    arch, layers = after.to_json()
    facts = {
        "score": spec.score.model_dump(mode="json"),
        "compensate": spec.compensate.model_dump(mode="json"),
        "before": _size(before),
        "after": _size(after),
        **found,
    }
    out.describe(role="dense", arch=arch, layers=layers, facts={"pruning": facts})


def _source(spec: Prune, inputs: Inputs) -> WeightSource:
    source = open_weights(inputs[Port.DENSE].path)
    return Recast(source, spec.recast(source.arch))


def _size(arch: Arch) -> dict[str, int]:
    widths = Widths.of(arch)
    dtype = getattr(torch, arch.dtype)
    named = {
        "heads": widths.num_heads,
        "kv_heads": widths.num_kv_heads,
        "ffn": widths.intermediate_size,
        "layers": widths.num_layers,
    }
    experts = {each.experts.num_experts for each in arch.layers if each.experts is not None}
    named |= {"experts": max(experts)} if experts else {}
    return {**named, "params": arch.num_params, "size_bytes": dtype.itemsize * arch.num_params}

"""The estimate of pruning for `compress plan`, from shapes alone."""

from typing import cast

from compress.calibrate.estimate import Workload, flops, peak_bytes
from compress.data.card import load_card
from compress.errors import UsageError
from compress.methods.prune import Scorer
from compress.methods.prune.compensations import LeastSquares
from compress.methods.prune.obs import Obs
from compress.models.arch import Arch
from compress.models.arch_params import itemsize_of
from compress.models.expert_pruning import with_experts
from compress.models.pruning import Widths, resized, with_layers
from compress.stages import Estimate, PlanFacts
from compress.stages.calibrate import calibration_of
from compress.stages.prune.spec import Prune
from compress.stages.quantize.schemes import possible_schemes
from compress.stages.quantize.spec import Quantize

COUNTS_ALL = (
    "prune scores what goes by all tokens of the calibration text, and this text counts only answers: set "
    "`count: all` in its data card, or calibrate after pruning in a recipe of its own."
)
"""Refusal of calibration text that counts only some of its tokens."""
LAUNCHES = 20
"""Small operations for each column that a second-order score removes."""
SOLVES = {"cpu": 4.0, "cuda": 20.0}
"""Cost of choosing and solving, which are in float64, in products of a weight with its statistic at the
assumed rate."""


def reshape(spec: Prune, arch: Arch) -> Arch:
    """Return the shapes of the pruned model; with a `target`, which is resolved while running, those of
    the model as it is, which are larger."""
    arch = spec.recast(arch)
    if spec.target is not None:
        return arch
    widths = spec.explicit_widths(arch)
    if spec.experts is not None:
        arch = with_experts(arch, spec.experts.num_kept(arch))
    return resized(with_layers(arch, range(widths.num_layers)), widths)


def estimate(spec: Prune, facts: PlanFacts) -> Estimate:
    """Return what all rounds need: a walk of the sequential runner each, with choices and solves in
    float64 of a few cubes of the widths."""
    arch = spec.recast(facts.arch)
    spec.check_model(arch)
    after = reshape(spec, facts.arch)
    calib = calibration_of(facts)
    if load_card(calib.data).counts_answers:
        raise UsageError(COUNTS_ALL)
    work = Workload(
        arch,
        calib.num_samples,
        calib.seq_len,
        facts.device,
        facts.num_ranks,
        factorises=isinstance(spec.score, Obs) or isinstance(spec.compensate, LeastSquares),
    )
    walk = sum(flops(work, products=SOLVES[facts.device]))
    backward = (
        3
        * 2.0
        * arch.num_active_linear_params
        * min(cast(Scorer, spec.score).gradient_samples, calib.num_samples)
        * calib.seq_len
    )
    one_by_one = isinstance(spec.score, Obs)
    notes = [*_adjusted(spec, arch, after), *_notes(spec, arch, after)]
    if spec.target is not None:
        _check_groups(spec, facts)
        notes.append(
            f"{spec.target.text}: what goes is decided by losses that are measured first; the plan goes on "
            "with the model as it is"
        )
    num_walks = spec.rounds + (0 if spec.target is None else 9)
    return Estimate(
        peak_bytes(work),
        itemsize_of(after) * after.num_params,
        num_walks * (walk + backward),
        num_launches=LAUNCHES
        * (arch.layers[0].intermediate_size - after.layers[0].intermediate_size)
        * sum(layer.has_ffn for layer in arch.layers)
        if one_by_one
        else 0,
        notes=tuple(notes),
        in_tiles=work.in_tiles,
    )


def _check_groups(spec: Prune, facts: PlanFacts) -> None:
    """Refuse a search that may find widths which the later quantization cannot divide into scale groups.

    Raises:
        UsageError: `multiple` is no multiple of a group size.
    """
    quantize = facts.specs.get("quantize")
    if not isinstance(quantize, Quantize) or set(spec.axes) == {"depth"}:
        return
    schemes = [
        each for model in possible_schemes(quantize, facts.arch) if model is not None for each in model.all
    ]
    odd = sorted(
        {each.name for each in schemes if each.group_size is not None and spec.multiple % each.group_size}
    )
    if odd:
        raise UsageError(
            f"prune: `multiple: {spec.multiple}` may leave widths that the groups of {', '.join(odd)} do not "
            "divide. Make it a multiple of "
            "the group size."
        )


def _adjusted(spec: Prune, before: Arch, after: Arch) -> list[str]:
    """Return notes of axes that keep another number than the recipe names."""
    old = Widths.of(before)
    new = Widths.of(after)
    wanted_axes = (
        ("heads", spec.heads, old.num_heads, new.num_heads),
        ("ffn", spec.ffn, old.intermediate_size, new.intermediate_size),
    )
    notes = []
    for axis, cut, whole, found in wanted_axes:
        if (
            cut is not None
            and round(wanted := cut.keep if isinstance(cut.keep, int) else cut.keep * whole) != found
        ):
            notes.append(
                f"{axis}: keep {cut.keep:g} of {whole} is {wanted:g}; {found} is the nearest number that "
                "consumers take"
            )
    return notes


def _notes(spec: Prune, before: Arch, after: Arch) -> list[str]:
    old = Widths.of(before)
    new = Widths.of(after)
    changed = [
        f"{name} {getattr(old, field)} -> {getattr(new, field)}"
        for name, field in (
            ("heads", "num_heads"),
            ("KV heads", "num_kv_heads"),
            ("FFN", "intermediate_size"),
            ("layers", "num_layers"),
        )
        if getattr(old, field) != getattr(new, field)
    ]
    if spec.experts is not None:
        changed.append(f"experts of a layer -> {spec.experts.num_kept(before)}")
    method = f"score: {spec.score.model_dump()['kind']}, compensate: {spec.compensate.model_dump()['kind']}"
    if not changed:
        return [method]
    params = f"{before.num_params / 1e6:,.1f} M -> {after.num_params / 1e6:,.1f} M parameters"
    heads_go = old.num_heads != new.num_heads and before.family == "qwen2"
    vllm = [
        "vLLM takes the head dimension of a Qwen2 from hidden size and heads, and will not load this; "
        "transformers does"
    ]
    return [f"{', '.join(changed)}; {params}", method, *(vllm if heads_go else [])]

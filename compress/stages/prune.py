"""`prune`: heads, FFN channels and layers go; what stays makes up for them, layer by layer on the already pruned input, resumable at each
layer. The result is a smaller dense model of the same family."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, cast

import torch
from pydantic import Field, model_validator

from compress.artifact.context import Context
from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.artifact.workspace import ArtifactWriter
from compress.calibrate.dataset import load_token_set
from compress.calibrate.estimate import Work, flops, peak_bytes
from compress.errors import UnsupportedFormat, UsageError
from compress.export import open_weights
from compress.methods import COMPENSATIONS, SCORERS, Compensation, Scorer
from compress.methods.least_squares import LeastSquares
from compress.methods.obs import Obs
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, layer_name
from compress.models.pruning import HeadUnit, Widths, can_have_bias, is_uniform, resized, with_layers
from compress.models.weights import WeightSource
from compress.recipe import ByKind, Spec
from compress.stages import STAGES, Estimate, Inputs, PlanFacts, Port
from compress.stages.calibrate import TOKENS_NAME, Calibrate
from compress.stages.prune_round import Round, prune_round
from compress.stages.prune_target import Target, search, target_depends
from compress.stages.prune_widths import Depth, Ffn, Heads, between, widths_of


def _specs(methods: Any) -> Mapping[str, type[Spec]]:
    return {name: cast(type[Spec], method) for name, method in methods.items()}


class Prune(Spec):
    """What goes, how it is chosen, and what is done about it."""

    heads: Heads | None = Field(None, description="attention heads that stay; left out, all do")
    ffn: Ffn | None = Field(None, description="FFN channels that stay; left out, all do")
    depth: Depth | None = Field(None, description="layers that stay; left out, all do")
    target: Target | None = Field(None, description="instead of those three: how small or fast the model is to be, and what may go for it")
    multiple: int = Field(
        128, ge=1, description="widths that quantized linears read (heads times their dimension, FFN) stay a multiple of this"
    )
    score: Annotated[Spec, ByKind(lambda: _specs(SCORERS))] = Obs()
    compensate: Annotated[Spec, ByKind(lambda: _specs(COMPENSATIONS))] = LeastSquares()
    rounds: int = Field(1, ge=1, le=32, description="in how many steps: after each, everything is observed anew")

    @model_validator(mode="before")
    @classmethod
    def _kinds_by_name(cls, raw: Any) -> Any:
        """`score: obs` is `score: {kind: obs}`."""
        if not isinstance(raw, Mapping):
            return raw
        return {key: {"kind": value} if key in ("score", "compensate") and isinstance(value, str) else value for key, value in raw.items()}

    @model_validator(mode="after")
    def _something_goes(self) -> Self:
        by_hand = [name for name in ("heads", "ffn", "depth") if getattr(self, name) is not None]
        if self.target is not None and by_hand:
            raise ValueError(f"target decides what {', '.join(by_hand)} would say: give one or the other.")
        if self.target is None and not by_hand:
            raise ValueError("nothing is to go: give heads, ffn or depth, such as `ffn: {keep: 0.75}`, or a target.")
        return self

    def by_hand(self, arch: Arch) -> Widths:
        """Raises UsageError: nothing would go, or no legal number is near."""
        return widths_of(arch, heads=self.heads, ffn=self.ffn, depth=self.depth, multiple=self.multiple)


def _refuse(spec: Prune, arch: Arch) -> None:
    """Raises UsageError, UnsupportedFormat: this model cannot be pruned, or not so."""
    said = arch.config.get("quantization_config")
    if said:
        raise UnsupportedFormat(
            f"the model is quantized already (quant_method '{said.get('quant_method')}'), and pruning puts new weights in the place of "
            "codes. Name the dense model that it was made from, and quantize after pruning."
        )
    if not is_uniform(arch):
        raise UsageError(
            "the layers of this model differ in width; pruning keeps the same numbers in every layer, which it cannot say here."
        )
    compensation = cast(Compensation, spec.compensate)
    linears = [name for name, cut in (("attn.o", spec.heads or spec.target), ("ffn.down", spec.ffn or spec.target)) if cut is not None]
    without = [name for name in linears if not can_have_bias(arch, name)]
    if compensation.needs_bias and without:
        raise UsageError(
            f"compensate: bias needs a bias in {' and '.join(without)}, and the config of a {arch.family} model has no word for one. Take "
            "`compensate: least_squares`, which needs none."
        )


def _reshape(spec: Prune, arch: Arch) -> Arch:
    """With a target, which is found while running, the model as it was: all that comes is smaller."""
    if spec.target is not None:
        return arch
    widths = spec.by_hand(arch)
    return resized(with_layers(arch, range(widths.num_layers)), widths)


def _depends(spec: Prune, device: str) -> Mapping[str, str]:
    """As of `quantize`: the kind of device computes in its own dtype."""
    more = {} if spec.target is None else target_depends(spec.target, device)
    return {"device": torch.device(device).type, **more}


def _estimate(spec: Prune, facts: PlanFacts) -> Estimate:
    """A walk of the sequential runner for each round, whose choices and solves are float64 work of a few cubes of the widths."""
    arch = facts.arch
    _refuse(spec, arch)
    after = _reshape(spec, arch)
    calib = facts.specs.get("calibrate") or Calibrate()
    assert isinstance(calib, Calibrate)
    work = Work(arch, calib.num_samples, calib.seq_len, facts.device, facts.num_ranks)
    in_dtype, solves = flops(work, searches=4)
    width = max(arch.layers[0].intermediate_size, arch.layers[0].num_heads * arch.layers[0].head_dim)
    backward = 3 * 2.0 * arch.num_linear_params * min(cast(Scorer, spec.score).gradient_samples, calib.num_samples) * calib.seq_len
    notes = list(_notes(spec, arch, after))
    if spec.target is not None:
        notes.append(
            f"{spec.target.text}: what goes is decided by losses that are measured first; the plan goes on with the model as it is"
        )
    num_walks = spec.rounds + (0 if spec.target is None else 9)
    return Estimate(
        peak_bytes(work) + 8 * 4 * width**2,
        2 * after.num_params,
        num_walks * (in_dtype + solves + backward),
        notes=tuple(notes),
    )


def _notes(spec: Prune, before: Arch, after: Arch) -> list[str]:
    old, new = Widths.of(before), Widths.of(after)
    changed = [
        f"{name} {getattr(old, field)} -> {getattr(new, field)}"
        for name, field in (("heads", "num_heads"), ("KV heads", "num_kv_heads"), ("FFN", "intermediate_size"), ("layers", "num_layers"))
        if getattr(old, field) != getattr(new, field)
    ]
    method = f"score: {spec.score.model_dump()['kind']}, compensate: {spec.compensate.model_dump()['kind']}"
    if not changed:
        return [method]
    params = f"{before.num_params / 1e6:,.1f} M -> {after.num_params / 1e6:,.1f} M parameters"
    heads_go = old.num_heads != new.num_heads and before.family == "qwen2"
    vllm = ["vLLM takes the head dimension of a Qwen2 from hidden size and heads, and will not load this; transformers does"]
    return [f"{', '.join(changed)}; {params}", method, *(vllm if heads_go else [])]


def prune_rounds(spec: Prune, inputs: Inputs, ctx: Context) -> tuple[Path, Arch, dict[str, Any]]:
    """All rounds into the scratch directory, on all ranks together: where the last one lies, its shapes, and facts."""
    source: WeightSource = open_weights(inputs[Port.DENSE].path)
    tokens_NS = load_token_set(inputs[Port.CALIB].path / TOKENS_NAME).tokens_NS
    before = source.arch
    found: dict[str, Any] = {}
    scorer, compensation = cast(Scorer, spec.score), cast(Compensation, spec.compensate)
    unit: HeadUnit = next((each.unit for each in (spec.heads, spec.target) if each is not None), "kv_group")
    method = Round(scorer, compensation, unit, "block_influence" if spec.depth is None else spec.depth.score)
    if spec.target is None:
        goal = spec.by_hand(before)
    else:
        goal, found = search(spec.target, method, source, tokens_NS, ctx, multiple=spec.multiple)
    rounds: list[dict[str, Any]] = []
    directory = ctx.scratch
    for idx, widths in enumerate(between(before, goal, spec.rounds, unit=unit, multiple=spec.multiple)):
        directory = ctx.scratch / f"round-{idx}"
        source, facts = prune_round(method, source, widths, tokens_NS, directory, ctx)
        rounds.append(facts)
    return directory, source.arch, {"rounds": rounds, **found}


@STAGES.stage(
    "prune",
    version=1,
    takes=(Port.DENSE, Port.CALIB),
    gives=Port.DENSE,
    spec=Prune,
    estimate=_estimate,
    depends=_depends,
    together=prune_rounds,
    reshape=_reshape,
)
def prune(spec: Prune, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    before = open_weights(inputs[Port.DENSE].path).arch
    _refuse(spec, before)
    directory, after, found = prune_rounds(spec, inputs, ctx)
    for name in (OUTER_NAME, *map(layer_name, range(after.num_layers))):
        _place(directory / name, out.path / name)
    arch, layers = after.to_json()
    facts = {
        "score": spec.score.model_dump(mode="json"),
        "compensate": spec.compensate.model_dump(mode="json"),
        "before": _size(before),
        "after": _size(after),
        **found,
    }
    out.describe(role="dense", arch=arch, layers=layers, facts={"pruning": facts})


def pruning_facts(path: Path) -> dict[str, Any] | None:
    """What the manifest of dense weights says of how they were pruned, if they were."""
    if not (path / MANIFEST_NAME).exists():
        return None
    return open_artifact(path).manifest.facts.get("pruning")


def _size(arch: Arch) -> dict[str, int]:
    widths, dtype = Widths.of(arch), getattr(torch, arch.dtype)
    named = {"heads": widths.num_heads, "kv_heads": widths.num_kv_heads, "ffn": widths.intermediate_size, "layers": widths.num_layers}
    return {**named, "params": arch.num_params, "size_bytes": dtype.itemsize * arch.num_params}


def _place(stored: Path, place: Path) -> None:
    """A finished layer becomes part of the artifact without a copy, where the file system knows hard links."""
    try:
        os.link(stored, place)
    except OSError:
        shutil.copyfile(stored, place)

"""A draft that is its target made smaller: a few of its layers, with fewer heads and FFN channels, between
its own embedding and head.

The pruning code chooses what goes and compensates for it, on a few windows of the training text and on the
inputs that the small model itself sees. Embedding and head stay those of the target, and are not trained
unless `train_embeddings` is set.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from compress.artifact.atomic import place
from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.data.tokens import TokenSet
from compress.distill.learn import Measurements, learn
from compress.distill.objective import HeldOut, Objective, Teacher, checkpoint_layers_, measure
from compress.distill.student import evenly
from compress.distill.train import Training
from compress.errors import UsageError
from compress.export import open_weights
from compress.methods.prune import Compensation, Scorer
from compress.methods.prune.compensations import LeastSquares
from compress.methods.prune.scores import Activation
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, layer_name, save_weights
from compress.models.decoder import Decoder
from compress.models.family import family_of_arch
from compress.models.indexer import train_all_but_indexers_
from compress.models.pruning import LayerSubset, Widths, resized, why_heads_stay, why_layers_stay, with_layers
from compress.models.weights import Dense, MemorySource, WeightSource, build_decoder, without_codes
from compress.recipe import MAX_SAMPLES, MAX_SIZE, ByKind, Spec, list_to_tuple
from compress.stages import Estimate, PlanFacts
from compress.stages.calibrate import Calibrate
from compress.stages.distill.estimate import training_estimate
from compress.stages.distill.learning import training_batches
from compress.stages.draft.inits import INITS, DraftTask, LayerIdx, ServedDraft, TrainedDraft
from compress.stages.draft.learning import DraftLearning
from compress.stages.draft.quantized import quantized
from compress.stages.prune.round import PruningMethod, prune_round
from compress.stages.prune.spec import Ffn, Heads, Prune, compensations, kinds_by_name, scorers
from compress.stages.quantize.estimate import estimate as quantize_estimate

PARTS = "parts"
START = "start"
DENSE = "dense"


@INITS.register("pruned")
class Pruned(Spec):
    """Some layers, heads and FFN channels of the target."""

    kind: Literal["pruned"] = "pruned"
    keep_layers: (
        Annotated[int, Field(ge=1, le=MAX_SIZE)]
        | Annotated[
            tuple[LayerIdx, ...],
            BeforeValidator(list_to_tuple),
            Field(min_length=1),
        ]
    ) = Field(
        2,
        description="how many layers, evenly spaced with the first and the last among them; or their "
        "indices, `[0, 15, 31]`",
    )
    heads: Heads | None = Field(None, description="attention heads that stay; left out, all do")
    ffn: Ffn | None = Field(None, description="FFN channels that stay; left out, all do")
    multiple: int = Field(
        128, ge=1, le=MAX_SIZE, description="widths that linears read stay a multiple of this"
    )
    score: Annotated[Spec, ByKind(scorers)] = Field(
        Activation(), description="which heads and channels stay, as of `prune`"
    )
    compensate: Annotated[Spec, ByKind(compensations)] = Field(
        LeastSquares(), description="how what stays makes up for what goes"
    )
    num_samples: int = Field(
        64,
        ge=1,
        le=MAX_SAMPLES,
        description="windows of the training text that choose and make up for what goes",
    )
    train_embeddings: bool = Field(
        False, description="train embedding and head too; left out, they stay the target's"
    )

    @model_validator(mode="before")
    @classmethod
    def _kinds_by_name(cls, raw: Any) -> Any:
        return kinds_by_name(raw)

    def kept(self, arch: Arch) -> list[int]:
        """Return the indices of the layers that stay.

        Raises:
            UsageError: the target has no such layers, or no draft can be cut from it so.
        """
        if parts := family_of_arch(arch).untouched:
            raise UsageError(
                f"draft: a draft cut from a {arch.family} model would need its {' and '.join(parts)}. Take "
                "`init: eagle3`, or a checkpoint of a text model."
            )
        if (reason := why_layers_stay(arch)) is not None:
            raise UsageError(f"draft: {reason} Take `init: eagle3`, or a smaller checkpoint.")
        if self.heads is not None and (reason := why_heads_stay(arch)) is not None:
            raise UsageError(f"draft: heads: {reason} Leave out `heads`.")
        if isinstance(self.keep_layers, int):
            if self.keep_layers > arch.num_layers:
                raise UsageError(
                    f"draft: {self.keep_layers} layers are to stay and the model has {arch.num_layers}."
                )
            return _with_attention(arch, evenly(self.keep_layers, arch.num_layers))
        chosen = sorted(set(self.keep_layers))
        if len(chosen) < len(self.keep_layers) or not 0 <= chosen[0] <= chosen[-1] < arch.num_layers:
            raise UsageError(
                f"draft: keep_layers {list(self.keep_layers)} must name different layers of "
                f"0..{arch.num_layers - 1}, or say how many stay."
            )
        return chosen

    def shape(self, target: Arch) -> Arch:
        """Return the shapes of the draft.

        Raises:
            UsageError, UnsupportedFormat: it would be the target itself, or cannot be pruned so.
        """
        subset = with_layers(without_codes(target), self.kept(target))
        if (pruning := self._pruning()) is None:
            if subset.num_layers == target.num_layers:
                raise UsageError(
                    "draft: all layers, heads and channels stay: it would be the model itself, and as slow. "
                    "Keep fewer layers."
                )
            return subset
        pruning.check_model(subset)
        return resized(subset, replace(pruning.explicit_widths(subset), num_layers=subset.num_layers))

    def _pruning(self) -> Prune | None:
        if self.heads is None and self.ffn is None:
            return None
        return Prune(
            heads=self.heads,
            ffn=self.ffn,
            multiple=self.multiple,
            score=self.score,
            compensate=self.compensate,
        )

    def served(self, facts: PlanFacts) -> ServedDraft:
        arch = self.shape(facts.arch)
        return ServedDraft(arch, arch.num_params)

    def estimate(self, spec: DraftLearning, facts: PlanFacts) -> Estimate:
        arch = self.shape(facts.arch)
        outer = arch.num_outer_params
        frozen = 0 if self.train_embeddings else outer
        found = training_estimate(
            spec, arch, facts.arch, facts, num_trained=arch.num_params - frozen, frozen_bytes=4 * frozen
        )
        notes = [
            f"{arch.num_layers} of {facts.arch.num_layers} layers "
            f"({', '.join(map(str, self.kept(facts.arch)))}): {(arch.num_params - outer) / 1e6:,.1f} M "
            f"parameters between the model's embedding and head, {outer / 1e6:,.1f} M",
            f"{spec.loss.kind}, {spec.extent} of {spec.data}",
        ]
        if spec.quantize is None:
            return replace(found, notes=tuple(notes))
        calib = Calibrate(
            data=spec.data, num_samples=min(self.num_samples, spec.num_windows), seq_len=spec.seq_len
        )
        codes = quantize_estimate(spec.quantize, replace(facts, shapes=arch, specs={"calibrate": calib}))
        return Estimate(
            max(found.peak_bytes, codes.peak_bytes),
            found.disk_bytes + codes.disk_bytes,
            found.flops + codes.flops,
            found.num_launches + codes.num_launches,
            notes=(*notes, *codes.notes),
        )

    def make(self, task: DraftTask, ctx: Context) -> TrainedDraft:
        spec = task.spec
        text = task.text
        device = task.device
        calibration = text.training.beginnings(self.num_samples)
        start, pruned = self._start(task, calibration.tokens_NS, ctx)
        student = build_decoder(start, dtype=torch.float32, device=device)
        train_all_but_indexers_(student)
        positions = () if student.arch.position_offset is None else (student.positions,)
        for outer in (student.embed, *positions, student.head):
            outer.requires_grad_(self.train_embeddings)
        if spec.recompute:
            checkpoint_layers_(student)
        teacher = Teacher(task.decoder, device=device, compile=spec.compile)
        config = spec.train_config(task.dtype)
        objective = Objective(
            spec.loss.divergence(),
            teacher,
            compute_dtype=task.dtype,
            compile=spec.compile,
            weighted=text.training.counted_NS is not None,
        )
        batch_of = training_batches(
            spec, text.training, teacher, ctx, digest=task.target.digest, device=device
        )
        training = Training(student, objective, batch_of, config, device=device, ranks=ctx.ranks)
        measure_student = partial(_measure, teacher, task, ctx)
        curve = learn(
            training,
            config,
            Measurements(lambda: measure_student(student).drafting(), spec.steps_between_measurements),
            ctx,
        )
        stored = self._stored(student, calibration, task, ctx)
        final = measure_student(
            build_decoder(open_weights(stored.path), dtype=torch.float32, device=device)
        ).drafting()
        facts = {
            "kind": "model",
            "params": student.arch.num_params,
            "start": {
                **self.model_dump(mode="json", serialize_as_any=True),
                "layers": self.kept(task.target.weights.arch),
            },
            "pruned": pruned,
            "quantized": None if spec.quantize is None else spec.quantize.method(),
            "before": {key: curve[0][key] for key in final},
            "after": final,
        }
        return TrainedDraft(curve, facts, partial(_write, stored))

    def _start(
        self, task: DraftTask, tokens_NS: Tensor, ctx: Context
    ) -> tuple[WeightSource, list[dict[str, Any]]]:
        """Return the draft before it is trained, and a row for each of its linears that was pruned."""
        weights = Dense(task.target.weights)
        subset = LayerSubset(weights, self.kept(weights.arch))
        pruning = self._pruning()
        if pruning is None:
            return subset, []
        method = PruningMethod(cast(Scorer, self.score), cast(Compensation, self.compensate), pruning.unit)
        start, facts = prune_round(
            method, subset, Widths.of(self.shape(weights.arch)), tokens_NS, ctx.scratch / START, ctx
        )
        ctx.ranks.barrier()  # rank 0 writes the last layer before any rank reads it
        return start, facts["layers"]

    def _stored(self, student: Decoder, calibration: TokenSet, task: DraftTask, ctx: Context) -> Artifact:
        """Return the trained draft as it will be served: on disk in its own dtype, or in codes."""
        parts = Workspace(ctx.scratch / PARTS)
        if ctx.ranks.rank == 0:
            parts.commit(DENSE, "draft", {}, partial(_write_dense, student))
        ctx.ranks.barrier()  # rank 0 writes the artifact before any rank reads it
        dense = parts.get(DENSE)
        assert dense is not None, "rank 0 has just made it"
        if task.spec.quantize is None:
            return dense
        return quantized(task.spec.quantize, dense, calibration, parts, task.source, ctx)


def _measure(teacher: Teacher, task: DraftTask, ctx: Context, student: Decoder) -> HeldOut:
    return measure(
        student,
        teacher,
        task.text.held_out_NS,
        task.device,
        compute_dtype=task.dtype,
        ranks=ctx.ranks,
        counted_NS=task.text.held_out_counted_NS,
    )


def _write_dense(student: Decoder, out: ArtifactWriter) -> None:
    arch = student.arch
    weights = MemorySource(student, dtype=getattr(torch, arch.dtype))
    save_weights(out.path / OUTER_NAME, weights.outer())
    for idx in range(arch.num_layers):
        save_weights(out.path / layer_name(idx), weights.layer(idx))
    described, layers = arch.to_json()
    out.describe(role="dense", arch=described, layers=layers)


def _write(stored: Artifact, out: ArtifactWriter) -> Mapping[str, Any]:
    for record in stored.manifest.files:
        place(stored.path / record.path, out.path / record.path)
    manifest = stored.manifest
    return {"arch": manifest.arch, "layers": manifest.layers, "scheme": manifest.scheme}


def _with_attention(arch: Arch, kept: list[int]) -> list[int]:
    """Return the layers that stay.

    Raises:
        UsageError: none of them has attention, and layers of the model have it.
    """
    attending = [idx for idx, layer in enumerate(arch.layers) if layer.attends]
    if attending and not set(attending) & set(kept):
        raise UsageError(
            f"draft: keep_layers {len(kept)} would keep layers {', '.join(map(str, kept))}, of which none "
            f"has attention; list the layers that stay. Attention is in {', '.join(map(str, attending))}."
        )
    return kept

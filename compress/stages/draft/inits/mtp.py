"""A draft that is the MTP head of the model (arXiv 2412.19437), trained further for the compressed model,
whose hidden states it reads. It goes back into the checkpoint, where other programs read it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.distill.draft_head import Target
from compress.errors import UsageError
from compress.export import codecs, open_weights
from compress.export.mtp import check_place_of_head, exported_mtp
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.family import family_of_arch
from compress.models.mtp import (
    KIND,
    MtpDecoder,
    MtpFacts,
    MtpHead,
    facts_of,
    mtp_facts,
    parameter_shapes,
    save_mtp,
)
from compress.models.mtp_names import modules_of_target
from compress.models.mtp_reader import check_mtp, num_heads, read_mtp
from compress.models.weights import rounded, without_codes
from compress.recipe import Spec
from compress.stages import Estimate, PlanFacts
from compress.stages.distill.estimate import training_estimate
from compress.stages.draft.head_training import train_head
from compress.stages.draft.inits import INITS, DraftTask, ServedDraft, TrainedDraft
from compress.stages.draft.learning import DraftLearning


@INITS.register(KIND)
class Mtp(Spec):
    """The layer of the model's checkpoint that predicts a further token."""

    kind: Literal["mtp"] = "mtp"
    steps: int = Field(
        4,
        ge=1,
        le=7,
        description="steps ahead that it is trained for, on its own hidden states but in the first; it was "
        "trained for one",
    )

    def facts(self, target: Arch) -> MtpFacts:
        """Return the facts of the head.

        Raises:
            UsageError: models of the family are read without such a layer.
        """
        names = family_of_arch(target).mtp
        if names is None:
            raise UsageError(
                f"draft: {target.family} models are read without a layer that predicts a further token; take "
                "`init: {kind: eagle3}` or a smaller model."
            )
        return mtp_facts(target, names)

    def served(self, facts: PlanFacts) -> ServedDraft:
        """Return what the runtime holds of all heads of the checkpoint. A copy of the target's matrix of
        logits is made where it is dense and they have none of their own."""
        head = self.facts(facts.arch)
        count = 1 if facts.source is None else max(num_heads(_checkpoint(facts.source)), 1)
        logits = head.arch.vocab_size * head.arch.hidden_size
        own = logits if head.own_head else 0
        in_codes = getattr(facts.specs.get("quantize"), "head_scheme", None) is not None
        return ServedDraft(
            head.arch,
            count * (_num_params(head) - own),
            num_heads=count,
            own_logits=count * own,
            copied_logits=0 if own or in_codes else logits,
        )

    def estimate(self, spec: DraftLearning, facts: PlanFacts) -> Estimate:
        """Return what training needs: each step ahead costs one layer and the target's head."""
        if spec.loss.top_k is not None or spec.loss.hard_frac or spec.recompute:
            raise UsageError(
                "draft: an MTP head is trained with the target, whose hidden states it reads, on its "
                "distribution alone, and has one layer: leave out loss.top_k, loss.hard_frac and recompute."
            )
        if spec.quantize is not None:
            raise UsageError(
                "draft: an MTP head stays in 16 bits, as programs read it: leave out `quantize`."
            )
        head = self.facts(facts.arch)
        if facts.source is not None:
            source = _checkpoint(facts.source)
            _check_widths(check_mtp(source, codecs()).arch, head.arch)
            self._check_others(source, head)
            export = facts.specs.get("export")
            forms = getattr(export, "formats", ())
            check_place_of_head(exported_mtp(source, facts.arch), forms[0] if forms else "compressed-tensors")
        num_params = _num_params(head)
        steps = head.arch.replace(layers=head.arch.layers * self.steps)
        found = training_estimate(spec, steps, facts.arch, facts, num_trained=num_params, frozen_bytes=0)
        return replace(
            found,
            notes=(
                f"the MTP head of the checkpoint: {num_params / 1e6:,.1f} M parameters",
                f"{spec.loss.kind}, {self.steps} steps ahead, {spec.extent} of {spec.data}",
            ),
        )

    def make(self, task: DraftTask, ctx: Context) -> TrainedDraft:
        own = self.facts(without_codes(task.target.weights.arch))
        source = _checkpoint(task.source.path)
        self._check_others(source, own)
        head = _stored_head(source, own.arch, task.device)
        of_target = modules_of_target(family_of_arch(task.target.weights.arch).mtp)
        for name, parameter in head.named_parameters():
            parameter.requires_grad_(name.partition(".")[0] not in of_target)
        words_W = torch.arange(own.arch.vocab_size)
        depth = task.target.weights.arch.num_layers
        target = Target(task.decoder, (depth,), words_W, device=task.device, compile=task.spec.compile)
        curve, measure = train_head(head, target, self.steps, task, ctx)
        trained = _as_stored(head, own)
        final = measure(trained.decoder(dtype=torch.float32, device=task.device))
        facts = {
            "kind": KIND,
            "params": _num_params(own),
            "start": self.model_dump(mode="json"),
            "head": facts_of(trained),
            "quantized": None,
            "before": {key: curve[0][key] for key in final.drafting()},
            "after": final.drafting(),
            "acceptance_of_steps": list(final.acceptance),
            "covered": final.covered,
        }
        return TrainedDraft(curve, facts, partial(_write, trained))

    def _check_others(self, source: Checkpoint, head: MtpFacts) -> None:
        """Refuse to train the first of several heads for what others do, or apart from those that read it."""
        several = num_heads(source)
        if several > 1 and head.feeds != "target":
            raise UsageError(
                f"draft: the checkpoint has {several} layers that predict further tokens, each of which "
                "reads the one before, and the first alone is trained; take `init: {kind: eagle3}` or a "
                "smaller model."
            )
        if several > 1 and self.steps > 1:
            raise UsageError(
                f"draft: the checkpoint has {several} layers that predict one further token each, and the "
                "first of them is trained; set init.steps to 1."
            )


def _checkpoint(path: Path) -> Checkpoint:
    source = open_weights(path)
    if not isinstance(source, Checkpoint):
        raise UsageError(
            f"draft: {path} is no checkpoint, and MTP heads are read from those; take "
            "`init: {kind: eagle3}` or a smaller model."
        )
    return source


def _check_widths(found: Arch, wanted: Arch) -> None:
    if found.layers != wanted.layers or found.hidden_size != wanted.hidden_size:
        raise UsageError(
            "draft: the MTP head of the checkpoint has other widths than the model has after pruning; take "
            "`init: {kind: eagle3}` or a smaller model."
        )


def _stored_head(source: Checkpoint, arch: Arch, device: torch.device) -> MtpDecoder:
    """Return the head that a checkpoint stores, in float32.

    Raises:
        UsageError: it stores none, or one of other widths than those of the compressed model.
    """
    head = read_mtp(source, codecs())
    _check_widths(head.arch, arch)
    return head.decoder(dtype=torch.float32, device=device)


def _as_stored(head: MtpDecoder, facts: MtpFacts) -> MtpHead:
    dtype = getattr(torch, facts.arch.dtype)
    weights = {
        name: rounded(name, each.detach().cpu(), dtype, where="mtp") for name, each in head.named_parameters()
    }
    return MtpHead(facts, weights)


def _num_params(facts: MtpFacts) -> int:
    return sum(torch.Size(shape).numel() for shape in parameter_shapes(facts).values())


def _write(trained: MtpHead, out: ArtifactWriter) -> Mapping[str, Any]:
    save_mtp(out.path, trained)
    return {"scheme": None}

"""A draft that is an EAGLE-3 head: one layer that continues from the target's own hidden states. Its
vocabulary is the most frequent tokens of the text that it is trained on."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field

from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.distill.draft_head import Target, frequent_tokens
from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.eagle3 import (
    Eagle3Facts,
    Eagle3Head,
    eagle3_facts,
    head_of,
    parameter_shapes,
    save_eagle3,
)
from compress.models.fresh_eagle3 import fresh_eagle3
from compress.models.weights import Dense, without_codes
from compress.quant.model_scheme import ModelScheme
from compress.recipe import MAX_SIZE, Spec, list_to_tuple
from compress.stages import Estimate, PlanFacts
from compress.stages.distill.estimate import training_estimate
from compress.stages.draft.head_training import train_head
from compress.stages.draft.inits import INITS, DraftTask, LayerIdx, ServedDraft, TrainedDraft
from compress.stages.draft.learning import DraftLearning
from compress.stages.draft.quantized_head import head_scheme, rounded_head

CALIBRATION_WINDOWS = 64
"""Windows of the training text on which a head in codes is calibrated."""


@INITS.register("eagle3")
class Eagle3(Spec):
    """One layer over hidden states of the target."""

    kind: Literal["eagle3"] = "eagle3"
    layers: (
        Annotated[
            tuple[LayerIdx, ...],
            BeforeValidator(list_to_tuple),
            Field(min_length=1),
        ]
        | None
    ) = Field(
        None,
        description="after how many of the target's layers hidden states are read, rising; left out, [2, "
        "half, all but 3]",
    )
    vocab: int = Field(
        8192,
        ge=1,
        le=MAX_SIZE,
        description="tokens that it may propose, the most frequent ones of the training text; at most all",
    )
    steps: int = Field(
        4,
        ge=1,
        le=7,
        description="steps ahead that it is trained for, on its own hidden states but in the first",
    )

    def facts(self, target: Arch) -> Eagle3Facts:
        """Return the shapes of the head.

        Raises:
            UsageError: the target has no such layers.
        """
        return eagle3_facts(without_codes(target), draft_vocab_size=self.vocab, layer_ids=self.layers)

    def served(self, facts: PlanFacts) -> ServedDraft:
        head = self.facts(facts.arch)
        return ServedDraft(head.arch, _num_params(head))

    def estimate(self, spec: DraftLearning, facts: PlanFacts) -> Estimate:
        """Return what training needs: each step ahead costs one layer and one head."""
        if spec.loss.top_k is not None or spec.loss.hard_frac or spec.recompute:
            raise UsageError(
                "draft: an EAGLE-3 head is trained with the target, whose hidden states it reads, on its "
                "distribution alone, and has one layer: leave out loss.top_k, loss.hard_frac and recompute."
            )
        head = self.facts(facts.arch)
        if spec.quantize is not None:
            head_scheme(spec.quantize, head)
        steps = head.arch.replace(
            layers=head.arch.layers * self.steps, vocab_size=head.draft_vocab_size * self.steps
        )
        num_params = _num_params(head)
        found = training_estimate(spec, steps, facts.arch, facts, num_trained=num_params, frozen_bytes=0)
        return replace(
            found,
            notes=(
                f"an EAGLE-3 head over hidden states after layers {', '.join(map(str, head.layer_ids))} of "
                f"{facts.arch.num_layers}: {num_params / 1e6:,.1f} M parameters, {head.draft_vocab_size:,} "
                f"of {facts.arch.vocab_size:,} tokens",
                f"{spec.loss.kind}, {self.steps} steps ahead, {spec.extent} of {spec.data}",
            ),
        )

    def make(self, task: DraftTask, ctx: Context) -> TrainedDraft:
        spec = task.spec
        device = task.device
        weights = Dense(task.target.weights)
        head_facts = self.facts(weights.arch)
        tokens_NS = task.text.training.tokens_NS
        words_W = frequent_tokens(tokens_NS, head_facts.draft_vocab_size, vocab_size=weights.arch.vocab_size)
        head = fresh_eagle3(head_facts, weights, words_W, generator=ctx.rng("draft", "eagle3")).to(device)
        target = Target(task.decoder, head_facts.layer_ids, words_W, device=device, compile=spec.compile)
        curve, measure = train_head(head, target, self.steps, task, ctx)
        stored = head_of(head, words_W, dtype=getattr(torch, weights.arch.dtype))
        scheme = None
        if spec.quantize is not None:
            scheme = head_scheme(spec.quantize, head_facts)
            stored = rounded_head(
                spec.quantize, stored, target, tokens_NS[:CALIBRATION_WINDOWS, :-1], self.steps, device=device
            )
        final = measure(stored.decoder(dtype=torch.float32, device=device))
        facts = {
            "kind": "eagle3",
            "params": _num_params(head_facts),
            "start": self.model_dump(mode="json"),
            "head": head_facts.to_json(),
            "quantized": None if spec.quantize is None else spec.quantize.method(),
            "before": {key: curve[0][key] for key in final.drafting()},
            "after": final.drafting(),
            "acceptance_of_steps": list(final.acceptance),
            "covered": final.covered,
        }
        return TrainedDraft(curve, facts, partial(_write, stored, scheme))


def _num_params(facts: Eagle3Facts) -> int:
    return sum(torch.Size(shape).numel() for shape in parameter_shapes(facts).values())


def _write(stored: Eagle3Head, scheme: ModelScheme | None, out: ArtifactWriter) -> Mapping[str, Any]:
    save_eagle3(out.path, stored)
    return {"scheme": None if scheme is None else scheme.to_json()}

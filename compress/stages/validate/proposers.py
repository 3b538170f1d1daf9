"""The proposers that are measured with the candidate: the assistant that the recipe names, the draft of the
candidate, the MTP head of its checkpoint and prompt lookup; and the prompts."""

import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.context import Context
from compress.data.model_tokens import read_tokens
from compress.errors import UsageError
from compress.export import DRAFT_FOLDER, codecs
from compress.export.draft import kind_of_draft, open_draft
from compress.export.mtp import OF_VLLM, checkpoint_with_mtp
from compress.models.assistant import KIND as ASSISTANT
from compress.models.checkpoint import Checkpoint
from compress.models.mtp_reader import read_mtps
from compress.models.weights import WeightSource
from compress.runtime.engine import Engine
from compress.runtime.speculative.mtp import Mtp
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from compress.stages import Inputs, Port
from compress.stages.validate.assistants import named_assistant
from compress.stages.validate.spec import Speculation, Validate
from compress.validate.speculation import Conditions, SpeculationEvidence, measure_speculation

LOOKUP = "ngram"


def draft_path(inputs: Inputs) -> Path | None:
    """Return the folder of the candidate's draft: in its checkpoint, or the draft stage's artifact if nothing
    was exported.
    """
    if Port.CHECKPOINT in inputs.ports:
        path = inputs[Port.CHECKPOINT].path / DRAFT_FOLDER
        return path if path.is_dir() else None
    return inputs[Port.DRAFT].path if Port.DRAFT in inputs.ports else None


def draft_facts(inputs: Inputs) -> dict[str, Any] | None:
    """Return how the draft was made, with its training curve where the recipe made it."""
    port = inputs.ports.get(Port.DRAFT, inputs.ports.get(Port.CHECKPOINT))
    facts = (
        open_artifact(port.path).manifest.facts
        if port is not None and (port.path / MANIFEST_NAME).exists()
        else {}
    )
    return facts.get("draft")


def proposers_of(spec: Speculation | None, inputs: Inputs, *, offline: bool) -> dict[str, ProposerOptions]:
    """Return the proposers by name, first the one that gates look at; none if nothing is to be measured.

    Raises:
        UsageError: an assistant is named, and the candidate carries one, too.
    """
    if spec is None:
        return {}
    path = draft_path(inputs)
    mtp = _with_mtp(inputs)
    assistant = named_assistant(spec, offline=offline)
    if path is None and mtp is None and assistant is None and spec.kind == "draft":
        return {}
    lookup: dict[str, ProposerOptions] = {LOOKUP: NGram()}
    drafts: dict[str, ProposerOptions] = {} if assistant is None else {ASSISTANT: assistant}
    if path is not None:
        kind = kind_of_draft(path)
        if kind in drafts:
            raise UsageError(
                f"speculative.assistant names {spec.assistant}, and the candidate carries an assistant in "
                f"{path}; one assistant is measured: leave speculative.assistant out, or remove that folder."
            )
        drafts["draft" if kind == "draft_model" else kind] = open_draft(path)
    if mtp is not None:
        first, *further = read_mtps(mtp, codecs())
        drafts["mtp"] = Mtp(first, tuple(further))
    return drafts | lookup if spec.kind == "draft" else lookup | drafts


def _with_mtp(inputs: Inputs) -> Checkpoint | None:
    """Return the candidate's checkpoint if it stores an MTP head that is read."""
    ports = inputs.ports
    return checkpoint_with_mtp(ports[Port.CHECKPOINT].path if Port.CHECKPOINT in ports else None)


def draft_method(inputs: Inputs) -> str | None:
    """Return vLLM's name for the kind of draft that the candidate has, None where it has none or vLLM drafts
    with none of its kind."""
    path = draft_path(inputs)
    if path is None:
        mtp = _with_mtp(inputs)
        return "mtp" if mtp is not None and mtp.family.model_type in OF_VLLM else None
    kind = kind_of_draft(path)
    return None if kind == ASSISTANT else kind


def speculate(
    spec: Validate,
    inputs: Inputs,
    weights: WeightSource,
    plain: Engine,
    proposers: Mapping[str, ProposerOptions],
    ctx: Context,
    *,
    step: tuple[int, int],
) -> tuple[SpeculationEvidence, dict[str, Any]]:
    """Return the measurement and its conditions for the report.

    `plain` serves `weights` without proposals; `step` is the number of this step and of all steps of the
    stage.
    """
    own = spec.speculative
    assert own is not None
    prompts = {}
    titles = {}
    for category, card in spec.prompt_data.items():
        sizes = {"num_samples": own.num_prompts, "seq_len": own.prompt_tokens}
        tokens, facts = read_tokens(inputs.source, card, **sizes, seed=ctx.seed, offline=ctx.offline)
        prompts[category] = [tuple(row) for row in tokens.tokens_NS.tolist()]
        titles[category] = facts["title"]
    conditions = Conditions(prompts, own.k, own.rule, own.batch_sizes, own.temperatures, own.output_tokens)

    def engine_for(speculative: Speculative) -> Engine:
        gc.collect()  # the engine before this one
        if plain.device.type == "cuda":
            torch.cuda.empty_cache()  # what is cached is not free for a KV cache
        return Engine(weights, device=plain.device, config=replace(plain.config, speculative=speculative))

    evidence = measure_speculation(
        plain, engine_for, proposers, conditions, lambda note: ctx.boundary(*step, note)
    )
    shown = {
        name: getattr(own, name) for name in ("k", "rule", "num_prompts", "prompt_tokens", "output_tokens")
    }
    return evidence, {**shown, "data": titles}

"""Everything that validation measures: both models, and what was quantized where that is a third, through the
runtime that serves them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from compress.context import Context
from compress.data.model_tokens import read_tokens
from compress.data.tokens import TokenSet
from compress.errors import UsageError
from compress.export import open_weights
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.stages import Inputs, Port
from compress.stages.validate.apart import score_apart
from compress.stages.validate.estimate import check_answers, check_lengths
from compress.stages.validate.generation import generate_texts, long_context
from compress.stages.validate.load import load_models
from compress.stages.validate.proposers import proposers_of, speculate
from compress.stages.validate.spec import Validate
from compress.stages.validate.speed import time_models
from compress.stages.validate.tasks import answer_tasks, text_models
from compress.validate.accuracy import Accuracy, measure_pairs
from compress.validate.generation.texts import GenerationRow
from compress.validate.latency import LatencyRow
from compress.validate.load.compare import LoadRow
from compress.validate.roofline import RooflineRow
from compress.validate.speculation import SpeculationEvidence
from compress.validate.tasks.compare import TaskRow


@dataclass(frozen=True)
class Answers:
    """The answers of both models: to tasks, to prompts, and about long contexts."""

    tasks: list[TaskRow] = field(default_factory=list)
    texts: list[GenerationRow] = field(default_factory=list)
    long_context: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """All measurements.

    Models are `source`, `candidate` (still loaded), and `dense` where other weights than the source's were
    quantized.
    `latency` and `roofs` are empty where the recipe has `latency: null`, and `load` where it has no load;
    `conditions` are those of `speculation`, for the report. `tasks`, `texts` and `long_context` are empty
    where the recipe asks for none. `scoring` has how models were scored one after the other, None where they
    were not; then the candidate alone is timed.
    """

    paths: Mapping[str, Path]
    candidate: Engine
    tokens: TokenSet
    data_facts: dict[str, Any]
    accuracy: dict[tuple[str, str], Accuracy]
    latency: dict[str, list[LatencyRow]]
    roofs: list[RooflineRow]
    load: list[LoadRow]
    speculation: SpeculationEvidence | None
    conditions: dict[str, Any]
    tasks: list[TaskRow]
    texts: list[GenerationRow]
    long_context: dict[str, Any]
    scoring: dict[str, Any] | None = None


def measure(spec: Validate, inputs: Inputs, candidate_path: Path, ctx: Context) -> Measured:
    """Load all models, score the evaluation text with each, time them in turn, and decode with the drafts
    there are.

    Raises:
        UsageError: the models do not share a vocabulary, a sequence is longer than the model, or logits are
        not finite.
    """
    device = torch.device(ctx.device)
    check_answers(spec, offline=ctx.offline)
    paths = {"source": inputs.source.path, **_dense_path(inputs), "candidate": candidate_path}
    proposers = proposers_of(spec.speculative, inputs, offline=ctx.offline)
    num_timed = len(spec.latency.batch_sizes) if spec.latency is not None else 0
    num_answered = bool(spec.tasks) + (spec.generation is not None) + (spec.long_context is not None)
    num_steps = 2 + num_answered + num_timed + (spec.load is not None) + bool(proposers)
    steps = count()
    for path in paths.values():
        check_lengths(spec, open_weights(path).arch, speculates=bool(proposers))
    if spec.apart is None:
        ctx.boundary(next(steps), num_steps, f"loading {len(paths)} models")
        engines = _engines(spec, inputs, paths, device, speculates=bool(proposers))
    tokens, data_facts = read_tokens(
        inputs.source,
        spec.data,
        num_samples=spec.num_samples,
        seq_len=spec.seq_len,
        seed=None,
        offline=ctx.offline,
    )
    scoring: dict[str, Any] | None = None
    if spec.apart is not None:
        config = spec.engine_config(speculates=bool(proposers))
        load = partial(_engine, spec, device=device, config=config)
        accuracy, engines, scoring = score_apart(spec, inputs, paths, tokens, load, config, ctx)
        next(steps)
    ctx.boundary(next(steps), num_steps, f"accuracy on {spec.num_samples} x {spec.seq_len} tokens")
    if spec.apart is None:
        accuracy = _accuracy(engines, tokens, spec.windows_at_once(engines["source"].arch), device)
    candidate = engines["candidate"]
    answers = Answers()
    if num_answered:
        answers = _answers(spec, inputs, engines, candidate_path, ctx, steps=steps, num_steps=num_steps)
    latency: dict[str, list[LatencyRow]] = {}
    roofs: list[RooflineRow] = []
    if spec.latency is not None:
        latency, roofs = time_models(
            engines,
            spec.latency,
            seed=ctx.seed,
            progress=lambda size: ctx.boundary(next(steps), num_steps, f"latency at batch {size}"),
        )
    loads: list[LoadRow] = []
    if spec.load is not None:
        ctx.boundary(next(steps), num_steps, f"load of {spec.load.num_requests} requests")
        loads = load_models(engines, spec.load, seed=ctx.seed)
    del engines  # frees the source: engines that speculate need the memory
    speculation = None
    conditions = dict[str, Any]()
    if proposers:
        step = next(steps), num_steps
        speculation, conditions = speculate(
            spec, inputs, open_weights(candidate_path), candidate, proposers, ctx, step=step
        )
    ctx.progress.update(num_steps, num_steps, "done")
    return Measured(
        paths,
        candidate,
        tokens,
        data_facts,
        accuracy,
        latency,
        roofs,
        loads,
        speculation,
        conditions,
        answers.tasks,
        answers.texts,
        answers.long_context,
        scoring,
    )


def _answers(
    spec: Validate,
    inputs: Inputs,
    engines: Mapping[str, Engine],
    candidate_path: Path,
    ctx: Context,
    *,
    steps: Iterator[int],
    num_steps: int,
) -> Answers:
    """Return the answers of both models to everything that the spec asks them."""
    models = text_models(engines, inputs.source.path)
    answers = Answers()
    if spec.tasks:
        number = next(steps)
        tasks = answer_tasks(
            spec, models, seed=ctx.seed, progress=lambda note: ctx.boundary(number, num_steps, note)
        )
        answers = replace(answers, tasks=tasks)
    if spec.generation is not None:
        ctx.boundary(next(steps), num_steps, f"texts of {spec.generation.num_prompts} prompts")
        answers = replace(answers, texts=generate_texts(spec.generation, models, seed=ctx.seed))
    if spec.long_context is not None:
        ctx.boundary(next(steps), num_steps, f"contexts of {spec.long_context.seq_len} tokens")
        found = long_context(spec, spec.long_context, inputs, models, candidate_path, ctx)
        answers = replace(answers, long_context=found)
    return answers


def _dense_path(inputs: Inputs) -> dict[str, Path]:
    """Return the path of the weights that were quantized, where they are another model than the source."""
    dense = inputs.ports.get(Port.DENSE)
    if dense is None or Port.QUANTIZED not in inputs.ports or dense.digest == inputs.source.digest:
        return {}
    return {"dense": dense.path}


def _engines(
    spec: Validate, inputs: Inputs, paths: Mapping[str, Path], device: torch.device, *, speculates: bool
) -> dict[str, Engine]:
    longest = min(open_weights(path).arch.max_position for path in paths.values())
    config = spec.engine_config(speculates=speculates, max_position=longest)
    engines = {side: _engine(spec, side, path, device=device, config=config) for side, path in paths.items()}
    source = engines["source"].arch
    candidate = engines["candidate"].arch
    if source.vocab_size != candidate.vocab_size:
        raise UsageError(
            f"the source {inputs.source.name} has {source.vocab_size} tokens and the artifact "
            f"{candidate.vocab_size}: it was not made from "
            "this model. Name its own source."
        )
    return engines


def _engine(spec: Validate, side: str, path: Path, *, device: torch.device, config: EngineConfig) -> Engine:
    kv_format = spec.kv_format if side == "candidate" else None
    return Engine(open_weights(path), device=device, config=replace(config, kv_format=kv_format))


def _accuracy(
    engines: Mapping[str, Engine], tokens: TokenSet, batch_size: int, device: torch.device
) -> dict[tuple[str, str], Accuracy]:
    """Return the accuracy of the candidate against the source; with a model in between, also of each step by
    itself.
    """
    sides = list(engines)
    pairs = [
        ("source", "candidate"),
        *([("source", "dense"), ("dense", "candidate")] if "dense" in engines else []),
    ]
    with torch.inference_mode():
        measured = measure_pairs(
            [engine.runner.score for engine in engines.values()],
            [(sides.index(before), sides.index(after)) for before, after in pairs],
            tokens.tokens_NS.to(device),
            num_bytes=tokens.num_scored_bytes,
            batch_size=batch_size,
        )
    return dict(zip(pairs, measured, strict=True))

"""Memory and work of validation, from shapes alone, for `compress plan`."""

import math
from pathlib import Path

from compress.artifact.tensors import TensorFiles
from compress.data.card import load_card
from compress.data.chat import load_chat_template
from compress.data.model_tokens import check_card, check_seq_len
from compress.errors import UsageError, did_you_mean
from compress.machine import READ_BYTES
from compress.models.arch import Arch
from compress.models.config_file import read_config
from compress.models.named_linears import stated_vocab_size
from compress.runtime.kv_cache import kv_bytes_per_token, slot_bytes
from compress.runtime.outer_weights import served_params
from compress.runtime.streamed_model import why_not_streamed
from compress.stages import Estimate, PlanFacts
from compress.stages.validate.apart_estimate import apart_needs
from compress.stages.validate.assistants import served_assistant
from compress.stages.validate.draft_estimate import draft_bytes, exports_mtp
from compress.stages.validate.spec import TASKS, Load, Validate, read_gates
from compress.validate.accuracy import ACCURACY_METRICS
from compress.validate.generation.texts import read_prompts
from compress.validate.latency import LATENCY_METRICS
from compress.validate.load.compare import LOAD_GATES
from compress.validate.transformers_model import check_causal

NUM_MODELS = 2
"""Models that are measured by name: source and candidate."""
NUM_ENGINES = 2
"""Engines of the candidate while it speculates: one proposes nothing."""
SPECULATIVE = ("acceptance_length", "speedup")


def check_lengths(spec: Validate, arch: Arch, *, speculates: bool) -> None:
    """Check that the model has positions for all that is measured with it.

    Raises:
        UsageError: a sequence is longer; names the keys of the recipe, and numbers that fit.
    """
    check_seq_len(spec.seq_len, "validate: seq_len", arch)
    if spec.long_context is not None:
        check_seq_len(spec.long_context.seq_len, "validate: long_context.seq_len", arch)
    if spec.load is not None and spec.load.longest > arch.max_position:
        raise UsageError(
            f"validate: load.prompt_tokens {spec.load.prompt_tokens} and load.output_tokens "
            f"{spec.load.output_tokens} make requests of up to {spec.load.longest} tokens, and the model has "
            f"{arch.max_position} positions. Set smaller ones, or spread: 0."
        )
    parts = {"latency": spec.latency, "speculative": spec.speculative if speculates else None}
    for key, part in parts.items():
        if part is None or part.prompt_tokens + part.output_tokens <= arch.max_position:
            continue
        output_tokens = min(part.output_tokens, arch.max_position // 2)
        raise UsageError(
            f"validate: {key}.prompt_tokens {part.prompt_tokens} and {key}.output_tokens "
            f"{part.output_tokens} are {part.prompt_tokens + part.output_tokens} tokens together, and the "
            f"model has {arch.max_position} positions. Set numbers that fit, such as {key}: {{prompt_tokens: "
            f"{arch.max_position - output_tokens}, output_tokens: {output_tokens}}}, or {key}: null."
        )
    _check_generated(spec, arch)


def _check_generated(spec: Validate, arch: Arch) -> None:
    """Raise UsageError where a generated text is to be as long as the longest sequence of its own part of the
    recipe, which leaves no token for its prompt."""
    texts = {f"the task '{each.name}'": (each.max_generated(), each.max_length) for each in spec.tasks}
    if spec.generation is not None:
        texts["generation"] = (spec.generation.max_tokens, spec.generation.max_length)
    for name, (max_tokens, max_length) in texts.items():
        longest = min(max_length, arch.max_position)
        if max_tokens >= longest:
            raise UsageError(
                f"validate: {name} generates up to {max_tokens} tokens, and its prompt and text together may "
                f"have {longest}: set a smaller max_tokens or a larger max_length (the model has "
                f"{arch.max_position} positions)."
            )


def estimate(spec: Validate, facts: PlanFacts) -> Estimate:
    """Return the peak of all models at once and their float32 logits, and the work: 2 FLOPs a weight and
    token.

    Raises:
        UsageError: sequences that the model is too short for, gates on a draft that nothing makes, or a KV
            cache format that does not fit the model.
    """
    if "quantize_by_name" in facts.specs:
        return estimate_by_name(spec, facts)
    arch = facts.arch
    source_arch = facts.source_arch or facts.arch
    own = spec.speculative
    speculates = own is not None and (
        "draft" in facts.specs or own.kind == "ngram" or own.assistant is not None or exports_mtp(facts)
    )
    for each in (arch, source_arch):
        check_lengths(spec, each, speculates=speculates)
    check_card(spec.data, facts.source)
    if speculates:
        for card in spec.prompt_data.values():
            check_card(card, facts.source)
    elif named := [name for name in spec.gates if name in SPECULATIVE]:
        raise UsageError(
            f"validate: the gate '{named[0]}' needs speculation to be measured: a stage {{kind: draft}} "
            "before export, a checkpoint with an MTP head, speculative: {assistant: ...}, or speculative: "
            "{kind: ngram}."
        )
    for kv_format in spec.kv_formats():
        kv_bytes_per_token(arch, kv_format)  # refuses what the format does not fit
    check_time_gates(spec)
    check_answers(spec, offline=False)
    _check_chat(spec, facts.source)
    num_between = int("quantize" in facts.specs and not facts.specs.keys().isdisjoint(("prune", "distill")))
    num_models = 2 + num_between
    num_params = arch.num_params * (1 + num_between) + source_arch.num_params
    width = 4 if facts.device == "cpu" else 2
    num_tokens = spec.num_samples * spec.seq_len
    logits = 2 * num_models * 4 * spec.windows_at_once(arch) * spec.seq_len * arch.vocab_size
    reading = (
        READ_BYTES[facts.device] if spec.latency is not None else 0
    )  # the buffer that measures the bandwidth
    config = spec.engine_config(
        speculates=speculates, max_position=min(arch.max_position, source_arch.max_position)
    )
    assert config.max_model_len is not None
    of_position = arch.numbers_cached(config.max_model_len) * width
    of_request = config.max_model_len * of_position + slot_bytes(arch, config.num_kept)
    caches = num_models * config.max_batch_size * of_request
    held = served_params(arch) * (1 + num_between) + served_params(source_arch)
    peak = held * width + caches + max(logits, reading)
    of_engine = served_params(arch) * width + config.max_batch_size * of_request
    notes = [f"{spec.num_samples} x {spec.seq_len} tokens of {spec.data}"]
    disk_bytes = 1_000_000
    moved_bytes = 0
    if spec.apart is not None:
        for key in ("load", "tasks", "generation", "long_context"):
            if getattr(spec, key):
                raise UsageError(
                    f"validate: {key} asks source and candidate in turn, and with apart only one of them is "
                    f"in memory: leave out {key} or apart."
                )
        for each in (source_arch, arch) if spec.apart.streamed else ():
            if reason := why_not_streamed(each):
                raise UsageError(f"validate: apart: streamed: {reason} Leave out `streamed`.")
        need = apart_needs(spec, source_arch, arch, facts, num_kept=1 + num_between)
        peak = max(need.source_bytes, need.candidate_bytes + reading)
        of_engine = need.engine_bytes
        disk_bytes += need.kept_bytes
        moved_bytes = need.read_bytes
        notes += need.notes()
    if speculates:
        assert own is not None
        assistant = served_assistant(own, arch)
        of_draft = draft_bytes(facts, config, own.k, assistant=assistant)
        peak = max(peak, NUM_ENGINES * of_engine + of_draft)
        taken = f", with a draft of {of_draft / 1e9:.3f} GB" if of_draft else ""
        notes.append(f"speculation on {', '.join(spec.prompt_data)}{taken}")
        if own.assistant is not None and assistant is None:
            notes.append(f"{own.assistant} is not on this machine: its memory is not counted")
    notes += _other_shapes(spec, facts)
    if not spec.gates:
        notes.append("no gates: nothing can fail")
    flops = 2.0 * num_params * num_tokens
    if (load := spec.load) is not None:
        num_runs = load.repeats * NUM_MODELS
        flops += (
            2.0
            * num_params
            / num_models
            * num_runs
            * load.num_requests
            * (load.prompt_tokens + load.output_tokens)
        )
        notes.append(f"load: {num_runs} runs of {load.num_requests} requests{_schedule(load, num_runs)}")
    notes += [f"task {each.name}, not in the time above" for each in spec.tasks]
    return Estimate(peak, disk_bytes, flops, notes=tuple(notes), moved_bytes=moved_bytes)


_READERS = ("calibrate", "distill", "recover", "draft")
"""Stages that read text that must not be the evaluation text."""


def _other_shapes(spec: Validate, facts: PlanFacts) -> list[str]:
    """Return a note for each stage whose text has another shape than the evaluation text."""
    judged = load_card(spec.data).shape()
    cards = {kind: getattr(facts.specs.get(kind), "data", None) for kind in _READERS}
    shapes = {kind: load_card(card).shape() for kind, card in cards.items() if card is not None}
    return [
        f"WARNING: {kind} reads {shape} and the evaluation text is {judged}"
        for kind, shape in shapes.items()
        if shape != judged
    ]


def _schedule(load: Load, num_runs: int) -> str:
    """Return how long the arrivals alone take, in words; nothing where no rate sets it."""
    if load.request_rate is None:
        return ""
    return f", which arrive over {num_runs * load.num_requests / load.request_rate:.0f} s"


def _check_chat(spec: Validate, source: Path | None) -> None:
    """Raise UsageError where something is asked by the chat template of a model that is at hand and has
    none."""
    asked = [f"the task '{each.name}'" for each in spec.tasks if getattr(each, "chat", False)]
    asked += ["generation"] if spec.generation is not None and spec.generation.chat else []
    if asked and source is not None and load_chat_template(source) is None:
        raise UsageError(
            f"validate: {asked[0]} has `chat: true`, and the model has no chat template. Leave `chat` out."
        )


def check_time_gates(spec: Validate) -> None:
    """Raise UsageError for a gate on a time that neither `latency` nor `load` of this spec measures."""
    for gate in read_gates(spec.gates):
        stage, _, metric = gate.name.rpartition(".")
        if not stage and metric in LATENCY_METRICS and spec.latency is not None:
            continue
        if metric in LATENCY_METRICS and metric not in LOAD_GATES:
            raise UsageError(
                f"validate: the gate '{gate.name}' needs latency to be measured: leave out latency: null, or "
                "the gate."
            )
        if metric in LOAD_GATES and spec.load is None:
            raise UsageError(
                f"validate: the gate '{gate.name}' needs requests under load to be measured: add such "
                "as load: {request_rate: 4}."
            )
        if metric == "goodput" and spec.load is not None and not spec.load.goodput:
            raise UsageError(
                f"validate: the gate '{gate.name}' needs limits of a good request: add such as load: "
                "{goodput: {ttft: 200, tpot: 50}}."
            )


def check_answers(spec: Validate, *, offline: bool) -> None:
    """Check that all tasks can run, and that gates name tasks that there are.

    Raises:
        UsageError: a file of items or prompts is missing or wrong, or a gate names no task.
        EnvironmentUnfit: lm-eval is needed and not installed.
    """
    names = [each.name for each in spec.tasks]
    for gate in read_gates(spec.gates):
        group, _, rest = gate.name.partition(".")
        name = rest.rpartition(".")[0]
        if group == TASKS and name not in names:
            raise UsageError(
                f"validate: the gate '{gate.name}' names no task of this recipe.{did_you_mean(name, names)}"
            )
    for task in spec.tasks:
        task.check(offline=offline)
    if spec.generation is not None:
        read_prompts(Path(spec.generation.prompts), spec.generation.num_prompts)
    own = spec.long_context
    if own is not None and max(own.needle_lengths, default=0) > own.seq_len:
        raise UsageError(
            f"validate: long_context.needle_lengths has {max(own.needle_lengths)}, and there are windows of "
            f"{own.seq_len} tokens. Set a larger seq_len, or shorter lengths."
        )


def estimate_by_name(spec: Validate, facts: PlanFacts) -> Estimate:
    """Return the peak and the work of measuring both models through transformers.

    Raises:
        UsageError: transformers runs no causal language model of this config, or a gate limits what is not
            measured there.
    """
    check_gates_by_name(spec)
    check_card(spec.data, facts.source)
    note = "through transformers, not on the bundled runtime: accuracy alone, no latency"
    if facts.source is None:
        return Estimate(0, 1_000_000, 0.0, notes=(note,))
    config = read_config(facts.source)
    check_causal(config)
    files = TensorFiles(facts.source)
    num_params = sum(math.prod(files.shape(name)) for name in files.names())
    vocab_size = stated_vocab_size(config) or 1
    width = 4 if facts.device == "cpu" else 2
    logits = 2 * NUM_MODELS * 4 * spec.windows_of(vocab_size) * spec.seq_len * vocab_size
    num_tokens = spec.num_samples * spec.seq_len
    notes = [f"{spec.num_samples} x {spec.seq_len} tokens of {spec.data}", note]
    if not spec.gates:
        notes.append("no gates: nothing can fail")
    return Estimate(
        NUM_MODELS * num_params * width + logits,
        1_000_000,
        2.0 * NUM_MODELS * num_params * num_tokens,
        notes=tuple(notes),
    )


def check_gates_by_name(spec: Validate) -> None:
    """Raise UsageError for a gate on something else than accuracy or size, and for tasks, texts and models
    scored apart, which the bundled runtime does."""
    if spec.apart is not None:
        raise UsageError(
            "validate: a model that is quantized by name is measured through transformers, which holds both "
            "models: leave out apart."
        )
    for key in ("tasks", "generation", "long_context"):
        if getattr(spec, key):
            raise UsageError(
                f"validate: `{key}` runs on the bundled runtime, which does not run a model that is "
                "quantized by name. Leave it out."
            )
    for gate in read_gates(spec.gates):
        name = gate.name.rpartition(".")[2]
        if name not in (*ACCURACY_METRICS, "size_ratio"):
            raise UsageError(
                f"validate: the gate '{gate.name}' limits what the bundled runtime measures, which does not "
                "run a model that is quantized by name. Gates that hold there: "
                f"{', '.join(ACCURACY_METRICS)}, size_ratio."
            )

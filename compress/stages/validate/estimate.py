"""Memory and work of validation, from shapes alone, for `compress plan`."""

from compress.data.card import check_at_hand, load_card
from compress.data.model_tokens import check_seq_len
from compress.errors import UsageError
from compress.machine import READ_BYTES
from compress.models.arch import Arch
from compress.stages import Estimate, PlanFacts
from compress.stages.validate.spec import Validate

SPECULATIVE = ("acceptance_length", "speedup")


def check_lengths(spec: Validate, arch: Arch, *, speculates: bool) -> None:
    """Check that the model has positions for all that is measured with it.

    Raises:
        UsageError: a sequence is longer; names the keys of the recipe, and numbers that fit.
    """
    check_seq_len(spec.seq_len, "validate: seq_len", arch)
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


def estimate(spec: Validate, facts: PlanFacts) -> Estimate:
    """Return the peak of all models at once and their float32 logits, and the work: 2 FLOPs a weight and
    token.

    Raises:
        UsageError: sequences that the model is too short for, or gates on a draft that nothing makes.
    """
    arch = facts.arch
    source_arch = facts.source_arch or facts.arch
    own = spec.speculative
    speculates = own is not None and ("draft" in facts.specs or own.kind == "ngram")
    for each in (arch, source_arch):
        check_lengths(spec, each, speculates=speculates)
    check_at_hand(load_card(spec.data))
    if speculates:
        for card in spec.prompt_data.values():
            check_at_hand(load_card(card))
    elif named := [name for name in spec.gates if name in SPECULATIVE]:
        raise UsageError(
            f"validate: the gate '{named[0]}' needs speculation to be measured: a stage {{kind: draft}} "
            "before export, or speculative: "
            "{kind: ngram}."
        )
    num_between = int("quantize" in facts.specs and not facts.specs.keys().isdisjoint(("prune", "distill")))
    num_models = 2 + num_between
    num_params = arch.num_params * (1 + num_between) + source_arch.num_params
    width = 4 if facts.device == "cpu" else 2
    num_tokens = spec.num_samples * spec.seq_len
    logits = 2 * num_models * 4 * spec.windows_at_once(arch) * spec.seq_len * arch.vocab_size
    reading = (
        READ_BYTES[facts.device] if spec.latency is not None else 0
    )  # the buffer that measures the bandwidth
    config = spec.engine_config(speculates=speculates)
    assert config.max_model_len is not None
    kv_bytes_per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in arch.layers) * width
    caches = num_models * config.max_batch_size * config.max_model_len * kv_bytes_per_token
    peak = num_params * width + caches + max(logits, reading)
    notes = [f"{spec.num_samples} x {spec.seq_len} tokens of {spec.data}"]
    if speculates:
        notes.append(f"speculation on {', '.join(spec.prompt_data)}")
    if not spec.gates:
        notes.append("no gates: nothing can fail")
    return Estimate(peak, 1_000_000, 2.0 * num_params * num_tokens, notes=tuple(notes))

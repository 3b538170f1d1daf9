"""What validation will need, from shapes alone, for `compress plan`."""

from compress.calibrate.card import check_at_hand, load_card
from compress.stages import Estimate, PlanFacts
from compress.stages.calibrate import fits
from compress.stages.validate.spec import Validate
from compress.validate.roofline import READ_BYTES


def estimate(spec: Validate, facts: PlanFacts) -> Estimate:
    """Two models side by side, 2 FLOPs a weight and token, and the float32 logits of both with what is computed from them."""
    arch = facts.arch
    fits(spec.seq_len, "validate: seq_len", arch)
    check_at_hand(load_card(spec.data))
    if spec.latency is not None:
        fits(spec.latency.prompt_tokens + spec.latency.output_tokens, "validate: latency prompt and output together", arch)
    num_params = arch.num_params + (facts.source_arch or arch).num_params
    width = 4 if facts.device == "cpu" else 2
    num_tokens = spec.num_samples * spec.seq_len
    logits = 4 * 4 * spec.windows_at_once(arch) * spec.seq_len * arch.vocab_size
    reading = READ_BYTES[facts.device] if spec.latency is not None else 0  # the buffer that measures the bandwidth
    config = spec.engine_config()
    assert config.max_model_len is not None
    kv_bytes_per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in arch.layers) * width
    caches = 2 * config.max_batch_size * config.max_model_len * kv_bytes_per_token
    peak = num_params * width + caches + max(logits, reading)
    notes = [f"{spec.num_samples} x {spec.seq_len} tokens of {spec.data}"]
    if not spec.gates:
        notes.append("no gates: nothing can fail")
    return Estimate(peak, 1_000_000, 2.0 * num_params * num_tokens, notes=tuple(notes))

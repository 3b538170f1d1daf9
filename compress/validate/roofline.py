"""The hardware's floor under prefill and decode, from rates measured on this device, and the advice that
follows from it.

    memory_ms   bytes that must move / read bandwidth     decode: weights + keys and values of every sequence
    compute_ms  arithmetic / matrix-product rate          prefill: 2 x weights x tokens + attention over
                                                          S (S + 1) / 2 pairs a sequence
    floor       the larger of the two; the larger one names the bound

A mixture of experts computes those that a token is routed to, and reads those that some token is. Their
number is the one that is expected if every choice of the routers is equally likely; routers that prefer some
experts read fewer.

Both rates are measured on the device (`compress/machine.py`). Activations and norms are left out: they are
small, and a floor must not lie above the truth.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from compress.models.layer_shape import LayerShape

if TYPE_CHECKING:
    from compress.runtime.engine import Engine

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Work:
    """Bytes and arithmetic that one model needs, independent of the batch.

    A multiply and an add are two FLOPs.
    """

    weight_bytes: int  # read once by every step; of a mixture of experts, by a step of one row
    kv_bytes_per_token: int  # as stored: what several layers read counts once
    flops_per_token: int  # 2 x weights of the linears that every token passes
    head_flops: int  # 2 x weights of the head: once a sequence and step, in prefill too
    attention_flops_per_pair: int  # one query against one key, all layers: 4 x heads x head_dim x layers
    decode_flops_per_pair: int  # the same in decode, which may attend to latents
    expected_weight_bytes: Callable[[int], int] | None = (
        None  # of a mixture of experts: by a step of so many rows
    )
    state_bytes: int = 0  # of the recurrences of one sequence, read and written by every step
    state_flops_per_token: int = 0  # two products with each state, and its update

    def step_weight_bytes(self, num_rows: int) -> int:
        """Return the bytes of weights that a step of so many rows reads."""
        return (
            self.weight_bytes if self.expected_weight_bytes is None else self.expected_weight_bytes(num_rows)
        )


def work_of(engine: "Engine") -> Work:
    """Return the work of the model that an engine serves."""
    arch = engine.arch
    return Work(
        weight_bytes=engine.weight_bytes,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        flops_per_token=2 * arch.num_active_linear_params,
        head_flops=2 * arch.vocab_size * arch.hidden_size,
        attention_flops_per_pair=sum(
            4 * layer.num_heads * layer.head_dim for layer in arch.layers if layer.attends
        ),
        decode_flops_per_pair=sum(_decode_flops(layer) for layer in arch.layers),
        expected_weight_bytes=engine.expected_weight_bytes if arch.has_experts else None,
        state_bytes=arch.step_state_bytes,
        state_flops_per_token=6 * arch.state_numbers,
    )


def _decode_flops(layer: LayerShape) -> int:
    """Return the FLOPs of one query of all heads against one position of the cache."""
    if not layer.attends:
        return 0
    if layer.latent is None:
        return 4 * layer.num_heads * layer.head_dim
    return 2 * layer.num_heads * (layer.latent.cached_width + layer.latent.kv_rank)


@dataclass(frozen=True)
class Needed:
    """Bytes that must move and arithmetic."""

    bytes: int
    flops: int

    def bound_ms(self, *, bandwidth_bytes_per_s: float, flops_per_s: float) -> tuple[float, float]:
        """Return the milliseconds of the bytes, and those of the arithmetic."""
        return self.bytes / bandwidth_bytes_per_s * 1e3, self.flops / flops_per_s * 1e3


def needed(
    work: Work, phase: Phase, *, batch_size: int, prompt_tokens: int, context: float
) -> dict[Literal["products", "attention"], Needed]:
    """Return what a prefill of prompts, or one decode step at a context, needs for the products with weights
    and for attention."""
    if phase == "prefill":
        pairs = prompt_tokens * (prompt_tokens + 1) // 2
        num_tokens = batch_size * prompt_tokens
        return {
            "products": Needed(
                work.step_weight_bytes(num_tokens),
                num_tokens * work.flops_per_token + batch_size * work.head_flops,
            ),
            "attention": Needed(
                num_tokens * work.kv_bytes_per_token + batch_size * work.state_bytes,
                batch_size * pairs * work.attention_flops_per_pair + num_tokens * work.state_flops_per_token,
            ),
        }
    return {
        "products": Needed(
            work.step_weight_bytes(batch_size), batch_size * (work.flops_per_token + work.head_flops)
        ),
        "attention": Needed(
            int(batch_size * (context * work.kv_bytes_per_token + work.state_bytes)),
            int(batch_size * (context * work.decode_flops_per_pair + work.state_flops_per_token)),
        ),
    }


def total(parts: Mapping[Any, Needed]) -> Needed:
    """Return what all parts need."""
    return Needed(sum(each.bytes for each in parts.values()), sum(each.flops for each in parts.values()))


@dataclass(frozen=True)
class RooflineRow:
    """One phase of serving at one batch size."""

    phase: Phase
    batch_size: int
    prompt_tokens: int
    output_tokens: int
    bytes: int
    flops: int
    memory_ms: float
    compute_ms: float
    bound: Literal["memory", "compute"]
    floor_ms: float
    measured_ms: float
    floor_frac: float
    time_frac: float  # of a whole request
    advice: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def roofline(
    work: Work,
    *,
    batch_size: int,
    prompt_tokens: int,
    output_tokens: int,
    ttft_ms: float,
    tpot_ms: float,
    bandwidth_bytes_per_s: float,
    flops_per_s: float,
) -> list[RooflineRow]:
    """Compare prefill and decode of one measured batch with the floor; `ttft_ms` and `tpot_ms` are its
    medians.
    """
    decode_total_ms = (output_tokens - 1) * tpot_ms
    times: tuple[tuple[Phase, float, float], ...] = (
        ("prefill", ttft_ms, ttft_ms / (ttft_ms + decode_total_ms)),
        ("decode", tpot_ms, decode_total_ms / (ttft_ms + decode_total_ms)),
    )
    rates = {"bandwidth_bytes_per_s": bandwidth_bytes_per_s, "flops_per_s": flops_per_s}
    rows: list[RooflineRow] = []
    for phase, measured_ms, time_frac in times:
        parts = needed(
            work,
            phase,
            batch_size=batch_size,
            prompt_tokens=prompt_tokens,
            context=prompt_tokens + output_tokens / 2,
        )
        whole = total(parts)
        memory_ms, compute_ms = whole.bound_ms(**rates)
        floor_ms = max(memory_ms, compute_ms)
        rows.append(
            RooflineRow(
                phase=phase,
                batch_size=batch_size,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                bytes=whole.bytes,
                flops=whole.flops,
                memory_ms=memory_ms,
                compute_ms=compute_ms,
                bound="memory" if memory_ms >= compute_ms else "compute",
                floor_ms=floor_ms,
                measured_ms=measured_ms,
                floor_frac=floor_ms / measured_ms,
                time_frac=time_frac,
                advice=advise(
                    phase,
                    memory_ms=memory_ms,
                    compute_ms=compute_ms,
                    measured_ms=measured_ms,
                    kv_frac=parts["attention"].bytes / max(whole.bytes, 1),
                ),
            )
        )
    return rows


def advise(phase: str, *, memory_ms: float, compute_ms: float, measured_ms: float, kv_frac: float) -> str:
    """Return one sentence of advice; the order of the cases is the order in which effort pays."""
    share = max(memory_ms, compute_ms) / measured_ms
    ratio = max(memory_ms, compute_ms) / max(min(memory_ms, compute_ms), 1e-12)
    times = f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.1f}x"
    if share > 1.05:
        return (
            "Faster than the floor: the weights stay in a cache, or the rates were measured while the "
            "device was busy. Do not read a bound "
            "from this row."
        )
    if share < 0.4:
        explained = f"{share * 100:.0f}" if share >= 0.01 else "under 1"
        return (
            f"Only {explained} % of this time is explained by bytes or arithmetic: look at launches, the "
            "host and slow kernels first; "
            "making the model smaller will buy less than the floor promises."
        )
    if phase == "decode" and memory_ms >= compute_ms:
        if kv_frac > 0.5:
            return (
                f"Memory-bound, and {kv_frac * 100:.0f} % of the bytes are keys and values: quantize the "
                "KV cache or shorten the context "
                "before the weights."
            )
        return (
            f"Memory-bound ({times} more bytes than arithmetic), {(1 - kv_frac) * 100:.0f} % of the bytes "
            "are weights: fewer bits per "
            "weight, speculative decoding or a larger batch pay directly."
        )
    if phase == "decode":
        return (
            f"Compute-bound ({times}): weight-only quantization no longer helps at this batch size; "
            "compute in FP8 or INT8, or use "
            "smaller batches."
        )
    if compute_ms > memory_ms:
        return (
            f"Compute-bound ({times}): weight-only quantization does not shorten it; FP8 or INT8 "
            "activations, pruning or a prefix cache "
            "for shared prompts do."
        )
    return (
        f"Memory-bound ({times}): prompts are too short to fill the arithmetic units; prefill several "
        "requests "
        "together."
    )

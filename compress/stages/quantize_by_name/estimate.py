"""The plan of quantizing by tensor name: which matrices are quantized and which stay dense, bytes before and
after, and the memory that the largest tensor takes."""

from collections.abc import Mapping

from compress.quant.scheme import Scheme
from compress.stages import Estimate, PlanFacts
from compress.stages.quantize_by_name.selection import Selection, select
from compress.stages.quantize_by_name.spec import QuantizeByName
from compress.validate.display import byte_size

ROUNDED_AT_ONCE = 1 << 20
"""Weights that are rounded at once: float32 copies of a whole matrix would be the peak of the stage."""
ROUNDING_BYTES = 20
"""Bytes that rounding takes for each of them."""
PACK_BYTES = 24
"""Bytes that packing takes for a code while it goes through 64-bit integers."""
LIBRARY_BYTES = 50_000_000
"""Bytes that libraries and threads take when they first round."""
MAX_KINDS = 12
"""Kinds of modules that a note names."""
UNPROVEN = (
    "the result is not validated on the bundled runtime; `validate` measures its accuracy "
    "through transformers"
)


def estimate(spec: QuantizeByName, facts: PlanFacts) -> Estimate:
    """Return what the stage reads, writes and holds, and its choice as notes.

    Raises:
        UsageError, UnsupportedFormat, StorageError: as `select`.
    """
    if facts.source is None:
        note = f"{spec.scheme}; which tensors are linears is decided once the checkpoint is on this machine"
        return Estimate(0, 0, 0.0, notes=(note, UNPROVEN))
    selection = select(spec, facts.source)
    largest = max(each.end - each.begin for each in map(selection.files.header, selection.files.names()))
    codes = max(each.matrix[0] * each.matrix[1] for each in selection.quantized)
    return Estimate(
        LIBRARY_BYTES
        + largest
        + ROUNDING_BYTES * min(codes, ROUNDED_AT_ONCE)
        + _code_bytes(spec.weights) * codes,
        selection.written_bytes,
        0.0,
        notes=(*notes_of(selection), *selection.warnings, UNPROVEN),
        moved_bytes=selection.source_bytes + selection.written_bytes,
    )


def notes_of(selection: Selection) -> list[str]:
    """Return the choice as lines: counts and bytes, the kinds that are quantized, and those that stay
    dense."""
    facts = selection.facts()
    spec = selection.spec
    return [
        f"{spec.scheme} as {spec.format}: {facts['quantized']} linears, {byte_size(facts['linear_bytes'])} "
        f"-> {byte_size(facts['code_bytes'])}; all tensors {byte_size(facts['source_bytes'])} -> "
        f"{byte_size(facts['written_bytes'])}",
        f"quantized: {_kinds(selection.quantized_kinds())}",
        *(f"dense, {reason}: {_kinds(kinds)}" for reason, kinds in selection.dense_kinds().items()),
    ]


def _kinds(counts: Mapping[str, int]) -> str:
    shown = [name if count == 1 else f"{name} ({count})" for name, count in counts.items()]
    left_out = len(shown) - MAX_KINDS
    return ", ".join(shown[:MAX_KINDS]) + (f" and {left_out} more kinds" if left_out > 0 else "")


def _code_bytes(scheme: Scheme) -> int:
    """Return the bytes that a code takes at most while it is written."""
    return 2 + (PACK_BYTES if scheme.type == "int" and scheme.activation is None else 0)

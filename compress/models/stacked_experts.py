"""Experts that a checkpoint has in one tensor for each product, as the matrices of which it consists.

    <module>.experts.gate_up_proj [E, 2 F, D], .down_proj [E, D, F]      (Qwen3.5)
    <module>.experts.gate_up_proj [E, D, 2 F], .down_proj [E, F, D]      (Qwen3-VL with experts)

are the matrices `<module>.experts.0.gate_proj`, `.up_proj`, `.down_proj` and so on, which is what checkpoints
call them that have a tensor for each. The shapes of both show which of the two forms it is. Stacks with
biases stay as they are: those of gpt-oss have the rows of gate and up in turns, which no shape shows.

Shapes: E experts, D hidden, F channels of an expert.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from compress.artifact.header import TensorHeader
from compress.models.layout import Place

GATE_UP = "gate_up_proj"
DOWN = "down_proj"
_EXPERTS = ".experts."


@dataclass(frozen=True)
class Stacked:
    """The stack that has a matrix, by the name of its tensor, and the place in it."""

    tensor: str
    place: Place


def stacked_matrices(by_name: Mapping[str, TensorHeader]) -> dict[str, tuple[TensorHeader, Stacked]]:
    """Return name -> header and place of the matrices in all stacks of experts; the names end in `.weight`,
    the bytes are those of the stack."""
    found = {}
    for name, gate_up in by_name.items():
        module, _, last = name.rpartition(".")
        down = by_name.get(f"{module}.{DOWN}")
        if last != GATE_UP or not f".{module}.".endswith(_EXPERTS) or down is None:
            continue
        if any(f"{each}_bias" in by_name for each in (gate_up.name, down.name)):
            continue
        for expert, linear, matrix, stacked in _matrices(gate_up, down):
            each = f"{module}.{expert}.{linear}.weight"
            found[each] = replace(matrix, name=each), stacked
    return found


def _matrices(gate_up: TensorHeader, down: TensorHeader) -> Iterator[tuple[int, str, TensorHeader, Stacked]]:
    """Yield expert, linear, the stack's header with the shape of the matrix, and its place; none where the
    shapes of both stacks do not fit one another."""
    if len(gate_up.shape) != 3 or len(down.shape) != 3 or gate_up.shape[0] != down.shape[0]:
        return
    _, first, second = gate_up.shape
    _, third, fourth = down.shape
    transposed = (first, second) == (fourth, 2 * third)
    if not transposed and (first, second) != (2 * fourth, third):
        return
    hidden, ffn = (first, third) if transposed else (second, fourth)
    for expert in range(gate_up.shape[0]):
        for linear, stack, shape, start in (
            ("gate_proj", gate_up, (ffn, hidden), 0),
            ("up_proj", gate_up, (ffn, hidden), ffn),
            (DOWN, down, (hidden, ffn), 0),
        ):
            place = Place(start, start + shape[0], expert=expert, transposed=transposed)
            yield expert, linear, replace(stack, shape=shape), Stacked(stack.name, place)

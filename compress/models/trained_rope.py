"""Trained frequencies of a rope: a tensor of a checkpoint holds numbers a, and each frequency is multiplied
by exp(a) of its own (`Rope.exponents`).

The tensor is read with the config and becomes a fact of each layer that rotates. It is a buffer in
`transformers`, which no training changes: among the weights it is one of the untouched parts.
"""

from dataclasses import replace

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.family_files import FamilyFiles
from compress.models.layer_shape import LayerShape, Rope
from compress.models.limits import FREQUENCY_EXPONENTS


def with_exponents(arch: Arch, files: FamilyFiles, tensor: str | None) -> Arch:
    """Return the facts of a model with the exponents of its frequencies, of which `tensor` has one for each
    pair of dimensions that rotates; without a tensor the facts as they are.

    Raises:
        UnsupportedArch: the tensor is missing, or has another shape or numbers out of range.
    """
    if tensor is None:
        return arch
    ropes = {layer.rope for layer in arch.layers if layer.rope is not None}
    sizes = {(rope.rotary_dim or layer.head_dim) // 2 for layer in arch.layers if (rope := layer.rope)}
    if tensor not in files:
        raise UnsupportedArch(
            f"this {arch.family} model lacks the tensor '{tensor}', of its rope's frequencies."
        )
    if any(files.shape(tensor) != (size,) for size in sizes):
        raise UnsupportedArch(
            f"tensor '{tensor}' is {list(files.shape(tensor))}, and the ropes of this {arch.family} model "
            f"have {', '.join(map(str, sorted(sizes)))} frequencies."
        )
    exponents = tuple(files.get(tensor).float().tolist())
    least, most = FREQUENCY_EXPONENTS
    if not all(least <= each <= most for each in exponents):
        raise UnsupportedArch(f"tensor '{tensor}' has numbers that are not between {least:g} and {most:g}.")
    trained = {rope: replace(rope, exponents=exponents) for rope in ropes} if any(exponents) else {}
    return arch.replace(layers=tuple(_with_rope(layer, trained) for layer in arch.layers))


def _with_rope(layer: LayerShape, trained: dict[Rope, Rope]) -> LayerShape:
    return layer if layer.rope is None else replace(layer, rope=trained.get(layer.rope, layer.rope))

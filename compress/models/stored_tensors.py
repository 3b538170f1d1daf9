"""Tensors on disk that hold several parameters: which ones, in which order, and where in the tensor."""

from compress.models.arch import Arch
from compress.models.family import Family
from compress.models.layout import Place, expert_places, row_order


def members_of(family: Family, arch: Arch, name: str) -> list[str]:
    """Return the parameters that one tensor on disk holds, in order, given one of them."""
    module, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        return [name]
    stacked_modules = family.stacked_modules(module, num_experts_of(arch, name))
    return [f"{each}.{leaf}" for each in stacked_modules]


def num_experts_of(arch: Arch, name: str) -> int:
    """Return the number of experts of the layer that a parameter belongs to, 0 for none."""
    if not name.startswith("layers."):
        return 0
    experts = arch.layers[int(name.split(".", 2)[1])].experts
    return 0 if experts is None else experts.num_experts


def places_of(family: Family, arch: Arch, names: list[str], num_rows: list[int]) -> list[Place]:
    """Return where parameters lie in the one tensor that holds them all, in its order."""
    if family.holds_all_experts(names[0].rpartition(".")[0]):
        layout = family.expert_layouts[0]
        num_experts = num_experts_of(arch, names[0])
        of_one = num_rows[: len(num_rows) // num_experts]
        return expert_places(
            num_experts, of_one, transposed=layout.transposed, interleaved=layout.interleaved
        )
    places = []
    start = 0
    for name, size in zip(names, num_rows, strict=True):
        order = None
        if name.startswith("layers."):
            _, idx, module = name.rpartition(".")[0].split(".", 2)
            shape = arch.layers[int(idx)]
            order = row_order(shape, module, size, interleaved=family.interleaved_rotary)
        places.append(Place(start, start + size, order))
        start += size
    return places

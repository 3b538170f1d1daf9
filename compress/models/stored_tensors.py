"""Tensors on disk that hold several parameters: which ones, in which order, and where in the tensor."""

from collections.abc import Collection, Mapping
from itertools import accumulate

from torch import Tensor

from compress.models.arch import Arch
from compress.models.delta_net import DeltaNet
from compress.models.family import Family, family_of_arch
from compress.models.layout import Place, expert_places, in_turns, row_order
from compress.models.module_names import EMBED


def members_of(family: Family, arch: Arch, name: str) -> list[str]:
    """Return the parameters that one tensor on disk holds, in order, given one of them."""
    module, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        return [name]
    stacked_modules = family.stacked_modules(module, num_experts_of(arch, name))
    return [f"{each}.{leaf}" for each in stacked_modules]


def other_experts(family: Family, arch: Arch) -> range:
    """Return the indices of the experts that checkpoints store after those that routers choose among: as many
    of other parts of the model, or those that return their input."""
    mixtures = [layer.experts for layer in arch.layers if layer.experts is not None]
    first = max((each.num_experts for each in mixtures), default=0)
    if family.more_experts:
        return range(first, 2 * first)
    if family.unread_experts:
        return range(first, first + max((each.zero_experts for each in mixtures), default=0))
    return range(0)


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
        num_experts = len({each.rpartition(".")[0].rpartition(".")[0] for each in names})
        of_one = num_rows[: len(num_rows) // num_experts]
        transposed = layout.is_transposed(names[0].rpartition(".")[0])
        width = _inputs_of(arch, names[0]) if transposed else sum(of_one)
        return expert_places(
            num_experts,
            of_one,
            transposed=transposed,
            interleaved=layout.interleaved,
            flat_rows=width if layout.flat else None,
        )
    orders: list[Tensor | None] = [None] * len(names)
    if names[0].startswith("layers."):
        _, idx, _ = names[0].split(".", 2)
        shape = arch.layers[int(idx)]
        modules = [name.rpartition(".")[0].split(".", 2)[2] for name in names]
        orders = [
            row_order(
                shape,
                module,
                size,
                interleaved=family.interleaved_rotary,
                turned_back=family.reversed_rotary,
            )
            for module, size in zip(modules, num_rows, strict=True)
        ]
        if family.layer_modules.get(modules[0]) in family.rows_in_turns:
            return in_turns(family.num_turns or shape.num_turns(modules), num_rows, orders)
    stops = list(accumulate(num_rows))
    return [
        Place(stop - size, stop, order) for size, stop, order in zip(num_rows, stops, orders, strict=True)
    ]


def _inputs_of(arch: Arch, name: str) -> int:
    """Return the number of inputs of a linear, given its weight."""
    _, idx, module = name.rpartition(".")[0].split(".", 2)
    return arch.layers[int(idx)].linear_shape(module, arch.hidden_size)[1]


def parts_of(family: Family, arch: Arch, name: str, stored: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors by their names that a checkpoint stores of one that holds a parameter: that one, or
    parts of it. The parts of the convolution of a recurrence are the channels of queries, of keys and of
    values, those of the embedding the rows of tokens with logits and the others."""
    whole = family.tensor(name)
    parts = family.parts(whole)
    if not parts:
        return [(whole, stored)]
    if name == EMBED:
        sizes = (arch.vocab_size, family.more_embeddings)
        return list(zip(parts, stored.split(sizes), strict=True))
    recurrence = arch.layers[int(name.split(".", 2)[1])].recurrence
    assert isinstance(recurrence, DeltaNet)
    return list(zip(parts, stored.split(recurrence.channel_sizes), strict=True))


def as_stored(family: Family, arch: Arch, shapes: Mapping[str, tuple[int, ...]]) -> Family:
    """Return the family with the layout of experts, and with the names of stacked linears, in which tensors
    of these names and shapes are stored; without any of them those that are written."""
    family = _with_linears_as_stored(family, arch, shapes)
    first = next((idx for idx, layer in enumerate(arch.layers) if layer.experts is not None), None)
    if first is None:
        return family
    layouts = [family.with_layout(layout) for layout in family.expert_layouts]
    named = [each for each in layouts if _tensor_of_expert(each, first, "down") in shapes]
    fitting = [each for each in named if _fits(each, arch, first, shapes)]
    return (*fitting, *named, family)[0]


def _with_linears_as_stored(family: Family, arch: Arch, names: Collection[str]) -> Family:
    """Return the family with linears that are stacked, or apart, as tensors of these names hold them."""
    stacked = family_of_arch(arch).layer_modules
    for modules in ({name: stacked[name] for name in family.apart}, family.apart):
        for name in modules:
            prefix = f"{family.with_modules(modules).to_disk(f'layers.0.{name}')}."
            if any(each.startswith(prefix) for each in names):
                return family.with_modules(modules)
    return family


def _tensor_of_expert(family: Family, layer_idx: int, part: str) -> str:
    """Return the name of a tensor that holds a linear of a layer's experts."""
    name = family.tensor(f"layers.{layer_idx}.moe.experts.0.{part}.weight")
    return f"{name}_blocks" if family.expert_layouts[0].mxfp4 else name


def _fits(family: Family, arch: Arch, layer_idx: int, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether the experts of a layer have their inputs where the layout has them, and linears that it
    names in its own way those names. Of layouts whose names of experts are the same one is transposed, and no
    widths hide that in ups and in downs."""
    layout = family.expert_layouts[0]
    for part in ("up", "down"):
        inputs_at = slice(-2, -1) if layout.is_transposed(part) else slice(-1, None)
        inputs = arch.layers[layer_idx].linear_shape(f"moe.experts.0.{part}", arch.hidden_size)[1]
        if inputs not in shapes.get(_tensor_of_expert(family, layer_idx, part), ())[inputs_at]:
            return False
    own = family.expert_layouts[0].modules
    named = (
        family.tensor(f"layers.{idx}.{linear}.weight")
        for idx, layer in enumerate(arch.layers)
        for linear in layer.linears
        if linear in own
    )
    return all(name in shapes for name in named)

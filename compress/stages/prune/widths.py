"""The widths that a pruned model can have: the legal number that is nearest to what a recipe names.

Legal are: heads in whole KV groups, or the same number in every group; heads times their dimension, and FFN
channels, in multiples of the recipe's `multiple`; for a Llama, heads that divide the hidden size, because
`transformers` accepts no others. Keeping all is always legal.
"""

from collections.abc import Sequence
from dataclasses import replace

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.family import family_of_arch
from compress.models.pruning import HeadUnit, Widths, fits_consumers, is_mistral


def legal_heads(arch: Arch, unit: HeadUnit, multiple: int) -> list[int]:
    """Return the legal numbers of query heads, all of them last."""
    shape = arch.layers[0]
    step = shape.num_heads // shape.num_kv_heads if unit == "kv_group" else shape.num_kv_heads
    fewer = range(step, shape.num_heads, step)
    return [
        each for each in fewer if each * shape.value_dim % multiple == 0 and fits_consumers(arch, each)
    ] + [shape.num_heads]


def divisors_hint(arch: Arch) -> str:
    """Return the sentence on a family whose heads must divide the hidden size, with the key by which a Llama
    need not; nothing for another family."""
    if not family_of_arch(arch).heads_divide_hidden:
        return ""
    otherwise = "; with `as_mistral: true` any number is legal" if is_mistral(arch) else ""
    return (
        f" transformers takes only numbers of heads that divide the hidden size of a {arch.family} model, "
        f"{arch.hidden_size}{otherwise}."
    )


def legal_channels(arch: Arch, multiple: int) -> list[int]:
    """Return the legal numbers of FFN channels, all of them last."""
    size = arch.layers[0].intermediate_size
    return [*range(multiple, size, multiple), size]


def with_heads(arch: Arch, widths: Widths, num_heads: int, unit: HeadUnit) -> Widths:
    """Return the widths with that number of query heads; KV heads are removed with them where whole groups
    go."""
    shape = arch.layers[0]
    num_kv_heads = (
        num_heads * shape.num_kv_heads // shape.num_heads if unit == "kv_group" else shape.num_kv_heads
    )
    return replace(widths, num_heads=num_heads, num_kv_heads=num_kv_heads)


def round_widths(arch: Arch, goal: Widths, rounds: int, *, unit: HeadUnit, multiple: int) -> list[Widths]:
    """Return the widths after every round, in equal steps of legal numbers, without rounds that would
    remove nothing."""
    start = Widths.of(arch)
    steps: list[Widths] = []
    for idx in range(1, rounds + 1):

        def part(legal: Sequence[int], first: int, last: int, idx: int = idx) -> int:
            wanted = first - (first - last) * idx / rounds
            return min(
                (each for each in legal if last <= each <= first),
                key=lambda each: (abs(each - wanted), -each),
            )

        widths = Widths(
            num_heads=start.num_heads,
            num_kv_heads=start.num_kv_heads,
            intermediate_size=part(
                legal_channels(arch, multiple), start.intermediate_size, goal.intermediate_size
            ),
            num_layers=part(range(1, start.num_layers + 1), start.num_layers, goal.num_layers),
        )
        steps.append(
            with_heads(
                arch, widths, part(legal_heads(arch, unit, multiple), start.num_heads, goal.num_heads), unit
            )
        )
    return [each for before, each in zip([start, *steps], steps, strict=False) if each != before]


def nearest_legal(
    legal: Sequence[int], keep: float | int, axis: str, multiple: int, *, hint: str = ""
) -> int:
    """Return the legal number nearest to a share or a number; of two equally near ones the larger. `hint` is
    a sentence on how more numbers become legal.

    Raises:
        UsageError: it is all of them, or more than there is.
    """
    whole = legal[-1]
    if isinstance(keep, int) and keep > whole:
        raise UsageError(f"{axis}: {keep} are to stay and the model has {whole}.")
    wanted = keep if isinstance(keep, int) else keep * whole
    found = min(legal, key=lambda each: (abs(each - wanted), -each))
    if found == whole:
        smaller = (
            f"The next smaller legal number is {legal[-2]}"
            if len(legal) > 1
            else "There is no smaller legal number"
        )
        because = f" with `multiple: {multiple}`" if multiple > 1 else ""
        raise UsageError(
            f"{axis}: keep {keep:g} leaves all {whole}: nothing would go. {smaller}{because}.{hint}"
        )
    return found

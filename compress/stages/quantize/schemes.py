"""The scheme that each linear gets, as far as a recipe and the shapes of a model decide it, and the bytes
that follow."""

from collections.abc import Iterable

from compress.errors import UnsupportedFormat, UsageError
from compress.models.arch import Arch
from compress.models.arch_params import itemsize_of, large_dense_params
from compress.models.overrides import decide, overridden
from compress.quant.model_scheme import ModelScheme, commonest
from compress.quant.scheme import Scheme
from compress.stages.budget.costs import GroupSchemes, largest_bytes, matrix_bytes, schemes_by_group
from compress.stages.budget.spec import Mixed, scheme_or_dense
from compress.stages.dequantize import check_dense
from compress.stages.quantize.spec import Quantize

DTYPES_OF_SCALES = ("bfloat16", "float16", "float32")


def check_model(spec: Quantize, arch: Arch) -> None:
    """Refuse a model that cannot be quantized so.

    Raises:
        UnsupportedFormat: the model's weights are codes already or float64, or the head that is to be
            quantized is the embedding.
    """
    check_dense(arch, "codes of codes would add a second error to the first")
    if arch.dtype not in DTYPES_OF_SCALES:
        raise UnsupportedFormat(
            f"config.json states the dtype {arch.dtype}, and scales, which have the model's dtype, are only "
            f"stored in {', '.join(DTYPES_OF_SCALES)}. Save the model in one of them first."
        )
    if spec.head is not None and arch.tied_head:
        raise UnsupportedFormat(
            f"the model's head is tied to its embedding, which stays dense: a head in {spec.head} would be a "
            "second, different matrix, and no format has a place for it. Leave out `head`."
        )


def model_scheme(spec: Quantize, arch: Arch) -> ModelScheme | None:
    """Return the schemes of a recipe without mixed precision, None where all weights stay dense.

    Raises:
        UsageError: an override decides nothing, linears of one group would differ, or scale groups do not
            divide the inputs of a linear.
    """
    assert isinstance(spec.scheme, str), "the schemes of mixed precision are chosen while the stage runs"
    if spec.only_cache:
        return None
    found = overridden(scheme_or_dense(spec.scheme), spec.patterns, arch, head=spec.head_scheme)
    if found is not None:
        linears = [f"layers.{idx}.{name}" for idx, layer in enumerate(arch.layers) for name in layer.linears]
        _check_whole_groups(arch, [(each, found.for_linear(each)) for each in linears], head=found.head)
    return found


def mixed_schemes(spec: Quantize, mixed: Mixed, arch: Arch) -> list[GroupSchemes]:
    """Return every linear group with the schemes that mixed precision chooses from.

    Raises:
        UsageError: an override decides nothing, linears of one group would differ, or scale groups do not
            divide the inputs of a linear.
    """
    groups = schemes_by_group(mixed, decide(spec.patterns, arch), arch)
    choices = [(linear, scheme) for each in groups for linear in each.linears for scheme in each.schemes]
    _check_whole_groups(arch, choices, head=spec.head_scheme)
    return groups


def _check_whole_groups(
    arch: Arch, choices: Iterable[tuple[str, Scheme | None]], *, head: Scheme | None
) -> None:
    """Check that scale groups divide the inputs of every linear, given schemes that linears may get.

    Raises:
        UsageError: those of some do not; the message names the first.
    """
    broken = []
    for linear, scheme in choices:
        if scheme is None or scheme.group_size is None:
            continue
        _, idx, name = linear.split(".", 2)
        in_features = arch.layers[int(idx)].linear_shape(name, arch.hidden_size)[1]
        if in_features % scheme.group_size:
            broken.append((linear, scheme, in_features))
    if head is not None and arch.hidden_size % (head.group_size or 1):
        broken.append(("head", head, arch.hidden_size))
    if not broken:
        return
    linear, scheme, in_features = broken[0]
    num_broken = len({name for name, _, _ in broken})
    also = f" (one of {num_broken} such linears)" if num_broken > 1 else ""
    dense = "leave out `head`" if linear == "head" else "keep those linears `dense` by overrides"
    raise UsageError(
        f"quantize: {scheme.name} needs K to be a multiple of {scheme.group_size}, and {linear}{also} has "
        f"K = {in_features}. Take a scheme whose groups divide it or one of channels, or {dense}."
    )


def possible_schemes(spec: Quantize, arch: Arch) -> list[ModelScheme | None]:
    """Return schemes that the model may get: for mixed precision each scheme in every group, and last all of
    them in turn.

    Raises:
        UsageError: an override decides nothing, linears of one group would differ, or scale groups do not
            divide the inputs of a linear.
    """
    if not isinstance(spec.scheme, Mixed):
        return [model_scheme(spec, arch)]
    groups = mixed_schemes(spec, spec.scheme, arch)
    picks = [
        [each.schemes[min(idx, len(each.schemes) - 1)] for each in groups]
        for idx in range(len(spec.scheme.schemes))
    ]
    picks.append([each.schemes[idx % len(each.schemes)] for idx, each in enumerate(groups)])
    possible = [
        {linear: scheme for each, scheme in zip(groups, picked, strict=True) for linear in each.linears}
        for picked in picks
    ]
    return [commonest(each, head=spec.head_scheme) for each in possible if any(each.values())]


def linear_bytes(arch: Arch, scheme: ModelScheme | None) -> int:
    """Return the bytes of all linears of the layers on disk, in the model's dtype where they are dense."""
    sizes = []
    itemsize = itemsize_of(arch)
    for idx, layer in enumerate(arch.layers):
        for name in layer.linears:
            n, k = layer.linear_shape(name, arch.hidden_size)
            of_linear = None if scheme is None else scheme.for_linear(f"layers.{idx}.{name}")
            sizes.append(matrix_bytes(n, k, of_linear, itemsize=itemsize))
    return sum(sizes)


def most_linear_bytes(spec: Quantize, arch: Arch) -> int:
    """Return the most bytes that all linears of the layers take on disk: for mixed precision its budget,
    where that follows from shapes.

    Raises:
        UsageError: a budget that cannot be kept.
    """
    if not isinstance(spec.scheme, Mixed):
        return linear_bytes(arch, model_scheme(spec, arch))
    groups = mixed_schemes(spec, spec.scheme, arch)
    return largest_bytes(spec.scheme, arch, groups, outer_bytes(arch, spec.head_scheme))


def outer_bytes(arch: Arch, head: Scheme | None, *, itemsize: int | None = None) -> int:
    """Return the bytes on disk of embeddings, of the head, and of the linears of layers that no
    scheme quantizes; all have numbers of `itemsize` bytes, by default of the model's dtype, unless the head
    has a scheme."""
    itemsize = itemsize or itemsize_of(arch)
    dense_bytes = itemsize * (arch.num_outer_params + large_dense_params(arch))
    if arch.tied_head:
        return dense_bytes
    shape = arch.vocab_size, arch.hidden_size
    of_head = matrix_bytes(*shape, head, itemsize=itemsize) - matrix_bytes(*shape, None, itemsize=itemsize)
    return dense_bytes + of_head

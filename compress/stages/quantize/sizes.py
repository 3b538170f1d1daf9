"""Bytes of a quantized model on disk, from shapes alone."""

from compress.models.arch import Arch
from compress.models.overrides import decide
from compress.quant.scheme import ModelScheme, Scheme
from compress.stages.budget.costs import largest_bytes, schemes_by_group
from compress.stages.budget.spec import Mixed
from compress.stages.quantize.spec import Quantize


def linear_bytes(arch: Arch, scheme: ModelScheme | None) -> int:
    """All linears of the layers on disk, in 16 bits where they are dense."""
    sizes = []
    for idx, layer in enumerate(arch.layers):
        for name in layer.linears:
            shape = layer.linear_shape(name, arch.hidden_size)
            of_linear = None if scheme is None else scheme.of(f"layers.{idx}.{name}")
            sizes.append(2 * shape[0] * shape[1] if of_linear is None else of_linear.weight_bytes(*shape))
    return sum(sizes)


def most_linear_bytes(spec: Quantize, arch: Arch) -> int:
    """All linears of the layers on disk, at most: mixed precision keeps a budget.

    Raises:
        UsageError: a budget of bytes that cannot be kept.
    """
    if not isinstance(spec.scheme, Mixed):
        return linear_bytes(arch, spec.model_scheme(arch))
    groups = schemes_by_group(spec.scheme, decide(spec.patterns, arch), arch)
    return largest_bytes(spec.scheme, arch, groups, outer_bytes(arch, spec.head_scheme))


def outer_bytes(arch: Arch, head: Scheme | None) -> int:
    """Embedding and head on disk, in 16 bits unless the head has a scheme."""
    dense_bytes = 2 * arch.vocab_size * arch.hidden_size
    if arch.tied_head:
        return dense_bytes
    return dense_bytes + (
        dense_bytes if head is None else head.weight_bytes(arch.vocab_size, arch.hidden_size)
    )

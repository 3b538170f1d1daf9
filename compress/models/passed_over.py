"""Tensors of a checkpoint that belong to no parameter of the decoder, and that a reader passes over."""

from collections.abc import Iterable

from compress.models.arch import Arch
from compress.models.disk_names import DiskNames
from compress.quant.kv import KV_SCALES


def passed_over(names: DiskNames, arch: Arch, stored: Iterable[str]) -> tuple[str, ...]:
    """Return how the names of tensors begin that a reader of these `stored` names passes over."""
    of_layers = (*_modules_of_others(names, arch), *_norms_of_dense_layers(names, arch))
    return (*prefixes_of_predictors(names, arch, stored), *of_layers)


def prefixes_of_predictors(names: DiskNames, arch: Arch, stored: Iterable[str]) -> tuple[str, ...]:
    """Return how the names of tensors begin that are of layers after the last, each of which joins a hidden
    state and the next token to predict the one after (arXiv 2412.19437), and which the decoder does not
    read."""
    joins = ".eh_proj."
    indices = {
        name.removeprefix(names.layer_prefix).partition(joins)[0]
        for name in stored
        if name.startswith(names.layer_prefix) and joins in name
    }
    after = (idx for idx in indices if idx.isdecimal() and int(idx) >= arch.num_layers)
    return tuple(f"{names.layer_prefix}{idx}." for idx in after)


def _norms_of_dense_layers(names: DiskNames, arch: Arch) -> tuple[str, ...]:
    """Return how the names of tensors begin that are norms of the outputs of dense layers, in models that
    norm those of experts alone: A.X K1 was published with such norms, and nothing reads them."""
    if not any(layer.norms_experts for layer in arch.layers):
        return ()
    dense = [idx for idx, layer in enumerate(arch.layers) if not arch.ends_in_norm(layer)]
    return tuple(f"{names.to_disk(f'layers.{idx}.ffn_post_norm')}." for idx in dense)


def _modules_of_others(names: DiskNames, arch: Arch) -> tuple[str, ...]:
    """Return how the names of tensors begin that belong to keys and values in layers that read those of
    another: the linears with which Gemma 4 was published and which nothing reads, and the scales of the
    other layer, which consumers look up here, too."""
    layers = [idx for idx, layer in enumerate(arch.layers) if layer.kv_source is not None]
    if arch.has_latents:  # readers of latents were published without linears of theirs
        return ()
    modules = [f"layers.{idx}.{name}" for idx in layers for name in ("attn.k", "attn.v", "attn.k_norm")]
    scales = [f"layers.{idx}.{name}" for idx in layers for name in KV_SCALES.values()]
    return (*(f"{names.to_disk(module)}." for module in modules), *(names.tensor(scale) for scale in scales))

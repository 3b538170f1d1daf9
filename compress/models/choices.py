"""Whose choice of keys the layers of a model attend to, where layers share indexers: a layer with latents and
without a window, and without an indexer of its own, attends to the keys that the last layer before it with an
indexer has chosen."""

from compress.models.arch import Arch


def choice_source(arch: Arch, layer_idx: int) -> int | None:
    """Return the layer whose choice of keys a layer without an indexer attends to, None where it attends to
    all keys or has an indexer."""
    layer = arch.layers[layer_idx]
    if layer.latent is None or layer.indexer is not None or layer.window is not None:
        return None
    before = (idx for idx in range(layer_idx - 1, -1, -1) if arch.layers[idx].indexer is not None)
    return next(before, None)


def choice_sources(arch: Arch) -> frozenset[int]:
    """Return the layers to whose choices later layers attend, too."""
    found = (choice_source(arch, idx) for idx in range(arch.num_layers))
    return frozenset(each for each in found if each is not None)

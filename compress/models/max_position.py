"""The reason for a model to have fewer positions here than its config states."""

from compress.models.arch import Arch


def why_no_longer(arch: Arch) -> str:
    """Return the reason for `max_position` in brackets, where it is less than the config states, or
    nothing."""
    chosen = [each.indexer for each in arch.layers]
    if all(each is None or each.top_k > arch.max_position for each in chosen):
        return ""
    text = arch.config.get("text_config") or arch.config
    if text.get("max_position_embeddings", arch.max_position) == arch.max_position:
        return ""
    return (
        " (it was made when longer contexts of indexers were not computed; run the recipe with --from and "
        "its first stage)"
    )

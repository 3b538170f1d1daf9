"""Families that `transformers` has no class for under their name."""

from compress.models.arch import Arch

BY_CODE = ("kimi_k2", "vlm", "phi4mm")


def why_no_class(arch: Arch) -> str | None:
    """Return why transformers loads no checkpoint of a model without its own code, None where it does."""
    if arch.family not in BY_CODE:
        return None
    return f"it knows the model_type {arch.family} by the code of a checkpoint only"

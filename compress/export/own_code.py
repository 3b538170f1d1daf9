"""Models that `transformers` has no class for."""

from compress.models.arch import Arch

BY_CODE = ("kimi_k2", "vlm", "phi4mm")


def why_no_class(arch: Arch) -> str | None:
    """Return why transformers loads no checkpoint of a model without its own code, None where it does."""
    has_query_latent = any(layer.latent is not None and layer.latent.q_rank for layer in arch.layers)
    if arch.family == "bailing_hybrid" and has_query_latent:
        return "its class of Ling 3.0 has no latent of queries"
    if arch.family not in BY_CODE:
        return None
    return f"it knows the model_type {arch.family} by the code of a checkpoint only"

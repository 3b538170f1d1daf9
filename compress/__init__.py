"""compress: one recipe from a Hugging Face checkpoint to a smaller, faster artifact with the proof attached.

`compress.load`, `compress.quantize`, `compress.run` and their types are described in `compress.api`; they are
imported when they are first used, so that `import compress` and the quick commands stay free of torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.api import (
        LLM,
        Message,
        Output,
        Prompt,
        Result,
        SamplingParams,
        Score,
        Stream,
        Timing,
        load,
        quantize,
        run,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Message",
    "Output",
    "Prompt",
    "Result",
    "SamplingParams",
    "Score",
    "Stream",
    "Timing",
    "load",
    "quantize",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import a name of `compress.api` on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'compress' has no attribute '{name}'")
    from compress import api

    return getattr(api, name)


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted([*globals(), *__all__])

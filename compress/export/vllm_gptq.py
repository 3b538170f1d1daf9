"""The models of which vLLM loads no checkpoint in the format `gptq`, and why."""

from compress.export.vllm import RENAMED, renames_mixers
from compress.models.arch import Arch

KEYS_ALONE = "it takes q, k and v for quantized together, and some layers have no v"
"""Why it loads no `gptq` of layers whose values are their keys: 'Detected some but not all shards of
...qkv_proj are quantized.'"""
NO_GPTQ = (
    "its class of {} loads no codes of gate and up ('MergedColumnParallelLinear' object has no "
    "attribute 'data')"
)
OF_NO_GPTQ = {"stablelm": "StableLM", "glm4": "GLM-4"}


def why_vllm_refuses_gptq(arch: Arch) -> str | None:
    """Return why vLLM does not load any `gptq` checkpoint of a model, None where nothing of the model is in
    the way."""
    if any(layer.keys_are_values for layer in arch.layers):
        return KEYS_ALONE
    if arch.family in OF_NO_GPTQ:
        return NO_GPTQ.format(OF_NO_GPTQ[arch.family])
    return RENAMED if renames_mixers(arch) else None

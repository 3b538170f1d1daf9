"""Quantizations that are layouts of numbers which bfloat16 holds exactly: a model that is stored so is read
as a dense one, and has no other weights."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from compress.errors import UnsupportedFormat
from compress.models.arch import Arch
from compress.models.compressed import COMPRESSOR
from compress.models.delta_net import DeltaNet
from compress.models.disk_names import DiskNames
from compress.models.experts import LATENT_IN, LATENT_OUT
from compress.models.mamba1 import Mamba1
from compress.quant.scheme import QuantizedWeight

MXFP4 = "mxfp4"
"""The `quant_method` of gpt-oss, whose experts are four-bit floats with powers of two."""
SCALE_FORMAT = "scale_fmt"
POWERS_OF_TWO = "ue8m0"
"""The `scale_fmt` of DeepSeek-V3.1 to V4, whose codes in FP8 have powers of two for scales."""
EXPERT_DTYPE = "expert_dtype"
"""The field of DeepSeek-V4 that names the codes of experts, in the config or among its quantization."""
FOUR_BITS = "fp4"
"""The `expert_dtype` of experts in four-bit floats."""
_KEY = "quantization_config"


def is_layout(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` states such a quantization."""
    stated = config.get(_KEY)
    if not isinstance(stated, Mapping):
        return False
    return stated.get("quant_method") == MXFP4 or stated.get(SCALE_FORMAT) == POWERS_OF_TWO


def without_layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without such a quantization, and without the `expert_dtype` of one."""
    left = {EXPERT_DTYPE} | ({_KEY} if is_layout(config) else set())
    return {name: value for name, value in config.items() if name not in left}


def check_dtype(arch: Arch) -> None:
    """Check that a model has a dtype that holds the numbers of a layout.

    Raises:
        UnsupportedFormat: it is float16, whose range is less.
    """
    if arch.dtype == "float16":
        raise UnsupportedFormat(
            "the checkpoint is read as a dense one, and float16 does not hold all of its weights, which have "
            "the range of bfloat16. Set dtype to bfloat16 in its config.json."
        )


def check_powers_of_two(weight: QuantizedWeight) -> None:
    """Check that all scales of a weight are powers of two.

    Raises:
        UnsupportedFormat: a scale is no power of two.
    """
    mantissas, _ = torch.frexp(weight.scale_OG.to(torch.float32))
    if not bool((mantissas == 0.5).all()):
        raise UnsupportedFormat(f"its scales are not all powers of two, as {POWERS_OF_TWO} says.")


def dense_in_codes(arch: Arch, names: DiskNames, stored: Iterable[str]) -> list[str]:
    """Return the matrices, by their names on disk, that are stored with scales and stay dense here: of
    indexers, compressors, gates of heads and of norms, the linears around experts that act on latents, and
    those of delta nets whose decays are by channel and of Mamba-1 mixers. Their codes are widened in any
    case."""
    inner = [
        f"layers.{idx}.attn.indexer.{name}"
        for idx, layer in enumerate(arch.layers)
        if layer.indexer is not None
        for name in layer.indexer.matrices
    ]
    inner += [
        f"layers.{idx}.{name}"
        for idx, layer in enumerate(arch.layers)
        if layer.compressed is not None and layer.compressed.rate
        for name in COMPRESSOR
    ]
    inner += [
        f"layers.{idx}.attn.head_gate" for idx, layer in enumerate(arch.layers) if layer.head_gate is not None
    ]
    inner += [
        f"layers.{idx}.{name}.{linear}"
        for idx, layer in enumerate(arch.layers)
        for name in layer.gated_norms
        for linear in ("gate_in", "gate_out")
    ]
    inner += [
        f"layers.{idx}.moe.{name}"
        for idx, layer in enumerate(arch.layers)
        if layer.experts is not None and layer.experts.latent_size
        for name in (LATENT_IN, LATENT_OUT)
    ]
    inner += [
        f"layers.{idx}.{name.removesuffix('.weight')}"
        for idx, layer in enumerate(arch.layers)
        if isinstance(layer.recurrence, Mamba1)
        or (isinstance(layer.recurrence, DeltaNet) and layer.recurrence.by_channel)
        for name, shape in layer.recurrence.dense_shapes(arch.hidden_size).items()
        if len(shape) == 2 and name.endswith(".weight")
    ]
    with_scales = {
        name.rpartition(".")[0] for name in stored if ".weight_scale" in name or name.endswith(".scale")
    }
    return [each for each in map(names.to_disk, inner) if each in with_scales]

"""The `quantization_config` of a checkpoint: the codec that decodes it, the scheme of each linear, and the
format of the KV cache.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from compress.errors import UnsupportedFormat
from compress.models.arch import Arch
from compress.models.family import Family
from compress.models.wide_codes import (
    EXPERT_DTYPE,
    FOUR_BITS,
    MXFP4,
    POWERS_OF_TWO,
    SCALE_FORMAT,
    is_layout,
)
from compress.quant.codec import ForeignCodec
from compress.quant.scheme import Scheme
from compress.untrusted.fields import Fields

_LISTS_OF_MODULES = ("targets", "ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")


def quant_method(config: Mapping[str, Any]) -> str | None:
    """Return the `quant_method` that a config names, None where it names no quantization."""
    quantization = Fields(config, "config.json", UnsupportedFormat).mapping("quantization_config", default={})
    return str(quantization.get("quant_method")) if quantization else None


def codec_of(config: Mapping[str, Any], codecs: Mapping[str, ForeignCodec]) -> ForeignCodec | None:
    """Return the codec of the `quant_method` that a config names, None where it names no quantization.

    Raises:
        UnsupportedFormat: none of the codecs reads this `quant_method`.
    """
    method = quant_method(config)
    if method in (None, MXFP4):
        return None  # a layout of experts
    if method not in codecs:
        known = ", ".join(sorted(codecs)) or "none in this place, which takes dense checkpoints only"
        raise UnsupportedFormat(
            f"the checkpoint is quantized with quant_method '{method:.80}'; formats that are read: {known}."
        )
    return codecs[method]


def schemes_of(
    config: Mapping[str, Any],
    codec: ForeignCodec | None,
    arch: Arch,
    family: Family,
    *,
    others: Sequence[str] = (),
) -> tuple[dict[str, Scheme], str | None]:
    """Return the scheme of each quantized linear by its name on disk, and the format of the KV cache if the
    config names one. The family has the layout of experts that the checkpoint has. `others` are modules that
    are stored in codes, too.

    Raises:
        UnsupportedFormat: the codec does not read a scheme of the config.
    """
    if codec is None:
        return {}, None
    linears = list(dict.fromkeys(disk for _, disk in linears_of(arch, family)))
    # Of two linears of which transformers has one name, the layer has one.
    on_disk = {name: linear for linear in linears for name in family.names_in_memory(linear)}

    def to_disk(name: str) -> str:
        return on_disk.get(name) or family.from_memory(name)

    quantization = _renamed(config["quantization_config"], to_disk)
    if config.get(EXPERT_DTYPE) is not None and quantization.get("quant_method") == "fp8":
        quantization = {EXPERT_DTYPE: config[EXPERT_DTYPE], **quantization}
    if is_layout(config):
        quantization = {name: value for name, value in quantization.items() if name != SCALE_FORMAT}
    elif quantization.get(EXPERT_DTYPE) == FOUR_BITS:
        raise UnsupportedFormat(
            f"the checkpoint has experts in four-bit floats ({EXPERT_DTYPE}: {FOUR_BITS}), which are read "
            f"where {SCALE_FORMAT} of its quantization_config is {POWERS_OF_TWO}. Name a checkpoint that "
            "states it, or one without codes."
        )
    return codec.schemes(quantization, [*linears, *others]), codec.kv_format(quantization)


def linears_of(arch: Arch, family: Family) -> Iterator[tuple[str, str]]:
    """Yield the canonical name and the name on disk of every linear of a model, the head last."""
    for idx, layer in enumerate(arch.layers):
        for linear in layer.linears:
            yield f"layers.{idx}.{linear}", family.to_disk(f"layers.{idx}.{linear}")
    yield "head", family.to_disk("head")


def _renamed(stated: Any, rename: Callable[[str], str]) -> Any:
    """Return a `quantization_config` with the modules that it lists under other names."""
    if not isinstance(stated, Mapping):
        return stated
    return {
        key: [rename(each) if isinstance(each, str) else each for each in value]
        if key in _LISTS_OF_MODULES and isinstance(value, list)
        else _renamed(value, rename)
        for key, value in stated.items()
    }

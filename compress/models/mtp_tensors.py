"""The layers of a checkpoint that predict further tokens, as they go into the exports of its model: dense, by
the names that the checkpoint has, because other programs read them there.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.passed_over import prefixes_of_predictors
from compress.quant.codec import ForeignCodec
from compress.quant.scheme import SCHEMES

_BLOCKS = "_scale_inv"
"""The end of the name of the scales of a weight in blocks of FP8."""


@dataclass(frozen=True)
class MtpTensors:
    """`names` maps the tensors of a checkpoint to their names in an export; `modules` are those of the
    export that are dense with all inside."""

    checkpoint: Checkpoint
    names: dict[str, str]
    modules: tuple[str, ...]
    block_codec: ForeignCodec | None = field(repr=False)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by their names in the export; codes are widened to the dtype of the model."""
        files = self.checkpoint.files
        for name, exported in self.names.items():
            scales = f"{name}{_BLOCKS}"
            if scales not in files:
                yield exported, files.get(name)
                continue
            assert self.block_codec is not None
            leaves = {"weight": files.get(name), f"weight{_BLOCKS}": files.get(scales)}
            weight = self.block_codec.decode(leaves, SCHEMES["FP8_BLOCK"])
            yield exported, weight.dequantize().to(self.checkpoint.dtype)


def mtp_tensors(checkpoint: Checkpoint, target: Arch, block_codec: ForeignCodec) -> MtpTensors | None:
    """Return the layers that predict further tokens for exports of a model that was made of a checkpoint;
    `block_codec` reads weights in blocks of FP8. None where there are none, where the model has other widths
    than the layers, where they are among its untouched parts, or where they are in codes of another kind.
    """
    family, source, files = checkpoint.family, checkpoint.arch, checkpoint.files
    if family.mtp is None:
        return None
    sizes = [(arch.hidden_size, arch.vocab_size, family.mtp.shape(arch)) for arch in (source, target)]
    if sizes[0] != sizes[1]:
        return None
    prefixes = _prefixes(checkpoint)
    shift = target.num_layers - source.num_layers
    layer = re.compile(rf"^{re.escape(family.layer_prefix)}(\d+)\.")

    def moved(name: str) -> str:
        return layer.sub(lambda found: f"{family.layer_prefix}{int(found[1]) + shift}.", name)

    names = {}
    for name in files.names():
        if not name.startswith(prefixes) or family.is_untouched(name) or name.endswith(_BLOCKS):
            continue
        if not files.holds_dense(name) and f"{name}{_BLOCKS}" not in files:
            return None
        names[name] = moved(name)
    modules = tuple(sorted(moved(each).removesuffix(".") for each in prefixes))
    return MtpTensors(checkpoint, names, modules, block_codec) if names else None


def _prefixes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return how the names of tensors of these layers begin."""
    names = checkpoint.family.mtp
    assert names is not None
    if names.layer_prefix is None:
        return prefixes_of_predictors(checkpoint.family, checkpoint.arch, checkpoint.files.names())
    return (names.layer_prefix.removesuffix("layers."),)

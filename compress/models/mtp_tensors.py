"""The layers of a checkpoint that predict further tokens, as they go into the exports of its model: dense, by
the names that the checkpoint has, because other programs read them there.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import TensorWriter
from compress.models.mtp import MtpHead
from compress.models.mtp_reader import has_mtp, mtp_table
from compress.models.passed_over import prefixes_of_predictors
from compress.models.stored_tensors import as_stored
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
    block_codec: ForeignCodec = field(repr=False)
    trained: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """Tensors of a head that was trained, by their names in the export, which go there instead."""

    def with_head(self, head: MtpHead, num_layers: int) -> "MtpTensors":
        """Return the tensors with those of a head that was trained, of a model of so many layers."""
        table = mtp_table(self.checkpoint.family, num_layers)
        files = self.checkpoint.files
        stored = mtp_table(self.checkpoint.family, self.checkpoint.arch.num_layers)
        stored = as_stored(stored, head.arch, {name: files.shape(name) for name in files.names()})
        table = replace(table, expert_layouts=stored.expert_layouts)
        trained: dict[str, Tensor] = {}
        writer = TensorWriter(table, head.arch, trained.__setitem__)
        for name, value in head.weights.items():
            if not name.startswith("target_norm."):
                writer.add(name, value)
        return replace(self, trained=trained)

    @property
    def instead(self) -> dict[str, Tensor]:
        """The trained tensors that are among the untouched parts of the model."""
        own = {*self.names.values()}
        return {name: each for name, each in self.trained.items() if name not in own}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by their names in the export, without those of untouched parts; codes are widened
        to the dtype of the model."""
        files = self.checkpoint.files
        for name, exported in self.names.items():
            scales = f"{name}{_BLOCKS}"
            if exported in self.trained:
                yield exported, self.trained[exported]
                continue
            if scales not in files:
                yield exported, files.get(name)
                continue
            leaves = {"weight": files.get(name), f"weight{_BLOCKS}": files.get(scales)}
            weight = self.block_codec.decode(leaves, SCHEMES["FP8_BLOCK"])
            yield exported, weight.dequantize().to(self.checkpoint.dtype)


def mtp_tensors(checkpoint: Checkpoint, target: Arch, block_codec: ForeignCodec) -> MtpTensors | None:
    """Return the layers that predict further tokens for exports of a model that was made of a checkpoint;
    `block_codec` reads weights in blocks of FP8. None where there are none, where the model has other widths
    than the layers, or where they are in codes of another kind. Those among its untouched parts have no names
    here.
    """
    family = checkpoint.family
    source = checkpoint.arch
    files = checkpoint.files
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
    if not names:
        return MtpTensors(checkpoint, {}, (), block_codec) if has_mtp(checkpoint) else None
    return MtpTensors(checkpoint, names, modules, block_codec)


def _prefixes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return how the names of tensors of these layers begin."""
    names = checkpoint.family.mtp
    assert names is not None
    if names.layer_prefix is None:
        return prefixes_of_predictors(checkpoint.family, checkpoint.arch, checkpoint.files.names())
    return (names.layer_prefix.removesuffix("layers."),)

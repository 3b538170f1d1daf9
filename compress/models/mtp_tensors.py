"""The layers of a checkpoint that predict further tokens, as they go into the exports of its model: dense, by
the names that the checkpoint has, because other programs read them there.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from compress.errors import UnsupportedArch, UsageError
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import TensorWriter
from compress.models.mtp import MtpHead
from compress.models.mtp_names import MtpNames, modules_of_target
from compress.models.mtp_reader import has_mtp, layout_of_head, mtp_table
from compress.models.passed_over import prefixes_of_predictors
from compress.quant.codec import ForeignCodec
from compress.quant.scheme import SCHEMES

_BLOCKS = "_scale_inv"
"""The end of the name of the scales of a weight in blocks of FP8."""


@dataclass(frozen=True)
class MtpTensors:
    """`names` maps the tensors of a checkpoint to their names in an export; `modules` are those of the
    export that are dense with all inside. There are none where `reason` states why they are left out.
    `prefixes` are those of their names, also where they are among the untouched parts of a model."""

    checkpoint: Checkpoint
    prefixes: tuple[str, ...]
    names: dict[str, str]
    modules: tuple[str, ...]
    block_codec: ForeignCodec = field(repr=False)
    reason: str | None = None
    trained: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """Tensors of a head that was trained, by their names in the export, which go there instead."""
    in_vllm: Mapping[str, str] = field(default_factory=dict)
    """Modules of the export -> what vLLM calls them, where that is another name."""

    def with_head(self, head: MtpHead, num_layers: int) -> "MtpTensors":
        """Return the tensors with those of a head that was trained, of a model of so many layers."""
        table = mtp_table(self.checkpoint.family, num_layers)
        stored = mtp_table(self.checkpoint.family, self.checkpoint.arch.num_layers)
        table = replace(
            table, expert_layouts=layout_of_head(stored, head.arch, self.checkpoint).expert_layouts
        )
        trained: dict[str, Tensor] = {}
        writer = TensorWriter(table, head.arch, trained.__setitem__)
        of_target = modules_of_target(self.checkpoint.family.mtp)
        for name, value in head.weights.items():
            if name.partition(".")[0] not in of_target:
                writer.add(name, value)
        return replace(self, trained=trained)

    @property
    def matrices(self) -> tuple[str, ...]:
        """The modules of matrices by their names in an export, with the experts of a layer as one module."""
        files = self.checkpoint.files
        matrices = [exported for name, exported in self.names.items() if len(files.shape(name)) > 1]
        named = [each for name in matrices for each in (name, *self._name_in_vllm(name))]
        return tuple(dict.fromkeys(map(module_of_matrix, named)))

    def _name_in_vllm(self, name: str) -> tuple[str, ...]:
        """Return the name of a tensor in vLLM, where that is another one."""
        return tuple(
            f"{called}{name.removeprefix(on_disk)}"
            for on_disk, called in self.in_vllm.items()
            if name.startswith(f"{on_disk}.")
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by their names in the export; codes are widened to the dtype of the model."""
        files = self.checkpoint.files
        for name, exported in self.names.items():
            scales = f"{name}{_BLOCKS}"
            if exported in self.trained:
                yield exported, self.trained[exported]
            elif scales in files:
                leaves = {"weight": files.get(name), f"weight{_BLOCKS}": files.get(scales)}
                weight = self.block_codec.decode(leaves, SCHEMES["FP8_BLOCK"])
                yield exported, weight.dequantize().to(self.checkpoint.dtype)
            else:
                yield exported, files.get(name)


def mtp_tensors(checkpoint: Checkpoint, target: Arch, block_codec: ForeignCodec) -> MtpTensors | None:
    """Return the layers that predict further tokens for exports of a model that was made of a checkpoint,
    None where it stores none whose names are known; `block_codec` reads weights in blocks of FP8. They are
    left out where the model has other widths, and where they are in codes of another kind.
    """
    family = checkpoint.family
    source = checkpoint.arch
    files = checkpoint.files
    if family.mtp is None or not has_mtp(checkpoint):
        return None
    prefixes = _prefixes(checkpoint, family.mtp)
    stored = [name for name in files.names() if name.startswith(prefixes) and not name.endswith(_BLOCKS)]

    def left_out(reason: str) -> MtpTensors:
        return MtpTensors(checkpoint, prefixes, {}, (), block_codec, reason)

    try:
        sizes = [(arch.hidden_size, arch.vocab_size, family.mtp.shape(arch)) for arch in (source, target)]
    except (UsageError, UnsupportedArch) as error:
        return left_out(str(error))
    if sizes[0] != sizes[1]:
        return left_out("the layer that predicts a further token has other widths than the pruned model")
    for name in stored:
        if not files.holds_dense(name) and f"{name}{_BLOCKS}" not in files:
            return left_out(f"'{name}' of the layer that predicts a further token is in codes")
    shift = target.num_layers - source.num_layers
    layer = re.compile(rf"^{re.escape(family.layer_prefix)}(\d+)\.")

    def moved(name: str) -> str:
        return layer.sub(lambda found: f"{family.layer_prefix}{int(found[1]) + shift}.", name)

    modules = tuple(sorted(moved(each).removesuffix(".") for each in prefixes))
    names = {name: moved(name) for name in stored}
    in_vllm: dict[str, str] = {}
    if family.mtp.in_vllm is not None:
        on_disk, called = family.mtp.in_vllm
        num_heads = len(prefixes) if "{index}" in on_disk else 1
        for idx in range(target.num_layers, target.num_layers + num_heads):
            in_vllm[on_disk.format(index=idx)] = called.format(index=idx)
        modules = tuple(dict.fromkeys((*modules, *in_vllm.values())))
    return MtpTensors(checkpoint, prefixes, names, modules, block_codec, in_vllm=in_vllm)


def _prefixes(checkpoint: Checkpoint, names: MtpNames) -> tuple[str, ...]:
    """Return how the names of tensors of these layers begin."""
    if names.parts:
        return tuple(f"{part}." for part in names.parts)
    if names.layer_prefix is None:
        return prefixes_of_predictors(checkpoint.family, checkpoint.arch, checkpoint.files.names())
    return (names.layer_prefix.removesuffix("layers."),)


def module_of_matrix(name: str) -> str:
    """Return the module of a matrix, given the name of its tensor: of one of an expert, that of all experts
    of the layer."""
    block, of_expert, _ = name.partition(".experts.")
    return f"{block}.experts" if of_expert else name.rpartition(".")[0]

"""The parameters of a model, or of a part of one, in the tensors of a checkpoint: where each lies, with its
shape, dense or as codes."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from compress.errors import UnsupportedArch, UnsupportedFormat
from compress.models.arch import Arch
from compress.models.experts import EXPERTS_OF_TOKENS
from compress.models.family import Family
from compress.models.family_files import FamilyFiles
from compress.models.layout import ROTATED, Place
from compress.models.module_names import EMBED
from compress.models.stored_tensors import members_of, places_of
from compress.models.weights import dense, stored_as
from compress.models.wide_codes import check_powers_of_two
from compress.quant.codec import ForeignCodec
from compress.quant.kv import KV_SCALES, read_kv_scale
from compress.quant.mxfp4 import BLOCK, from_mxfp4
from compress.quant.scheme import QuantizedWeight, Scheme

Shapes = dict[str, tuple[int, ...]]


class StoredWeights:
    """The parameters of `names`, (outer, one mapping a layer) with their shapes, by the table of a family.
    Linears of `schemes`, by their names on disk, are codes; those among `wide` are widened when they are
    read. With `powers_of_two` a scale that is none is refused."""

    def __init__(
        self,
        path: Path,
        files: FamilyFiles,
        family: Family,
        arch: Arch,
        names: tuple[Shapes, list[Shapes]],
        *,
        codec: ForeignCodec | None = None,
        schemes: Mapping[str, Scheme] | None = None,
        wide: Collection[str] = (),
        powers_of_two: bool = False,
    ) -> None:
        self.path = path
        self._files = files
        self.family = family
        self._arch = arch
        self._names = names
        self._codec = codec
        self._schemes = schemes or {}
        self._wide = wide
        self._powers_of_two = powers_of_two
        self._placed: dict[str, dict[str, Place]] = {}

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        """Return the parameters outside of the layers."""
        return {name: self.read(name, {}) for name in self._names[0]}

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        """Return the parameters of one layer, names relative to it."""
        stacks: dict[str, Tensor | QuantizedWeight] = {}
        return {name: self.read(f"layers.{layer_idx}.{name}", stacks) for name in self._names[1][layer_idx]}

    def read(self, name: str, stacks: dict[str, Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
        """Return a parameter; tensors that hold several are kept in `stacks`."""
        place = self._places(name).get(name)
        if place is None:
            return self._read_stored(name)
        tensor = self.family.tensor(name)
        if tensor not in stacks:
            stacks[tensor] = self._read_stored(name)
        try:
            return place.read(stacks[tensor])
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"{self.path}: {tensor} is not read: {error}") from None

    def _places(self, name: str) -> Mapping[str, Place]:
        """Return where the parameters lie in the tensor that holds this one, empty where that is the
        tensor."""
        tensor = self.family.tensor(name)
        if tensor not in self._placed:
            members = members_of(self.family, self._arch, name)
            module = name.rpartition(".")[0]
            is_whole = len(members) == 1 and not module.endswith(ROTATED)
            whole = is_whole and not self.family.holds_all_experts(module)
            sizes = [] if whole else [self.shape_of(each)[0] for each in members]
            places = [] if whole else places_of(self.family, self._arch, members, sizes)
            self._placed[tensor] = dict(zip(members, places, strict=False))
        return self._placed[tensor]

    def _read_stored(self, name: str) -> Tensor | QuantizedWeight:
        """Return the tensor that holds a parameter."""
        module, _, leaf = name.rpartition(".")
        disk = self.family.to_disk(module) if leaf == "weight" else ""
        stored = self.family.tensor(name)
        if self.is_absent(name):
            return torch.zeros(self.shape_of(name), dtype=stored_as(name, getattr(torch, self._arch.dtype)))
        if leaf == "weight" and disk in self._schemes:
            scheme = self._schemes[disk]
            leaves = {leaf: self._files.get(name) for leaf, name in self.leaves(disk).items()}
            assert self._codec is not None
            try:
                weight = self._codec.decode(leaves, scheme)
                wanted = self._stored_shape_of(name)
                wanted = wanted[::-1] if self.family.is_transposed(name) else wanted
                if weight.shape != wanted:
                    raise UnsupportedFormat(f"it is {list(weight.shape)}, its config says {list(wanted)}.")
                if self._powers_of_two:
                    check_powers_of_two(weight)
                if disk in self._wide:
                    return dense(weight, getattr(torch, self._arch.dtype))
                return _scaled_in(self._arch.dtype, weight)
            except UnsupportedFormat as error:
                raise UnsupportedFormat(f"{self.path}: {disk} is not read: {error}") from None
        if name.endswith(tuple(KV_SCALES.values())):
            return read_kv_scale(self._files.get(stored), stored)
        if self._is_mxfp4(name):
            return from_mxfp4(self._files.get(f"{stored}_blocks"), self._files.get(f"{stored}_scales"))
        tensor = self._files.get(stored)
        if self.family.is_transposed(name):
            return tensor.t().contiguous()
        if self.family.rows_with_others(name):
            return tensor[0].clone()
        if name == EMBED:
            return tensor[: self.shape_of(name)[0]]
        is_matrix = self.family.num_rows(self._arch, name, tensor.numel()) is not None
        return tensor.flatten() if is_matrix else tensor

    def _is_mxfp4(self, name: str) -> bool:
        """Return whether a parameter is stored in blocks of four-bit floats."""
        module, _, leaf = name.rpartition(".")
        return (
            leaf == "weight" and self.family.holds_all_experts(module) and self.family.expert_layouts[0].mxfp4
        )

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter, by its canonical name."""
        outer, layers = self._names
        if name in outer:
            return outer[name]
        _, idx, inner = name.split(".", 2)
        return layers[int(idx)][inner]

    def _stored_shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor that holds a parameter."""
        module = name.rpartition(".")[0]
        shapes = [self.shape_of(each) for each in members_of(self.family, self._arch, name)]
        if not shapes[0]:
            return ()
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        if not self.family.holds_all_experts(module):
            if self.family.is_transposed(name):
                return shape[::-1]
            if rows := self.family.rows_with_others(name):
                return (rows, *shape)
            if name == EMBED:
                return (shape[0] + self.family.more_embeddings, *shape[1:])
            num_rows = self.family.num_rows(self._arch, name, shape[0])
            return shape if num_rows is None else (num_rows, shape[0] // num_rows)
        members = members_of(self.family, self._arch, name)
        num_experts = len({each.rpartition(".")[0].rpartition(".")[0] for each in members})
        layout = self.family.expert_layouts[0]
        shape = (shape[0] // num_experts, *shape[1:])
        shape = shape[::-1] if layout.is_transposed(module) else shape
        return (num_experts * shape[0], *shape[1:]) if layout.flat else (num_experts, *shape)

    def leaves(self, disk: str) -> dict[str, str]:
        """Leaf of a quantized linear -> the tensor that holds it."""
        assert self._codec is not None
        found = {}
        for leaf in self._codec.leaves(self._schemes[disk]):
            name = f"{disk}.{leaf}"
            alias = f"{disk}.{self._codec.aliases.get(leaf, leaf)}"
            found[leaf] = alias if alias in self._files and name not in self._files else name
        return found

    def check(self) -> dict[str, tuple[int, ...] | None]:
        """Return what `expected` does, after a check that each of the tensors is there.

        Raises:
            UnsupportedArch: a tensor is missing, or has another shape.
        """
        expected = self.expected()
        for name, shape in expected.items():
            if name not in self._files:
                raise UnsupportedArch(
                    f"{self.path} lacks the tensor '{name}' that a {self.family.model_type} model of its "
                    "config has."
                )
            found = self._files.shape(name)
            is_scalar = shape == () and found == (1,)
            if shape is not None and found != shape and not is_scalar:
                raise UnsupportedArch(
                    f"{self.path}: tensor '{name}' is {list(found)}, its config says {list(shape)}."
                )
        return expected

    def check_dense(self, expected: Mapping[str, tuple[int, ...] | None]) -> None:
        """Check that tensors with a shape in `expected` hold weights as they are.

        Raises:
            UnsupportedFormat: one holds codes.
        """
        tables = {self.family.tensor(name) for name in self.parameters() if name.endswith(EXPERTS_OF_TOKENS)}
        for name, shape in expected.items():
            if name in tables:
                self._check_table(name)
            elif shape is not None and not self._files.holds_dense(name):
                raise UnsupportedFormat(
                    f"{self.path}: tensor '{name}' is {self._files.header(name).dtype}, and its config names "
                    "no quantization by which whole numbers, or numbers of 8 bits, would be weights."
                )

    def _check_table(self, name: str) -> None:
        """Check that a tensor holds indices of experts.

        Raises:
            UnsupportedArch: it holds other numbers.
        """
        table = self._files.get(name)
        most = max(layer.experts.num_experts for layer in self._arch.layers if layer.experts is not None)
        if table.dtype not in (torch.int64, torch.int32) or bool(((table < 0) | (table >= most)).any()):
            raise UnsupportedArch(
                f"{self.path}: tensor '{name}' is {table.dtype} and has numbers from {table.min()} to "
                f"{table.max()}; it must have the indices of {most} experts, as whole numbers."
            )

    def expected(self) -> dict[str, tuple[int, ...] | None]:
        """Return the shapes of the tensors on disk; None for the leaves of a quantized linear, which its
        codec checks, and for the scales of a cache, which their reader does. A scalar may be [] or [1]."""
        expected: dict[str, tuple[int, ...] | None] = {}
        for name in (each for each in self.parameters() if not self.is_absent(each)):
            module, _, leaf = name.rpartition(".")
            disk = self.family.to_disk(module) if leaf == "weight" else ""
            stored = self.family.tensor(name)
            if leaf == "weight" and disk in self._schemes:
                if self.family.holds_all_experts(module):
                    raise UnsupportedFormat(
                        f"{self.path}: {disk} holds the weights of all experts of a layer in one tensor, and "
                        f"codes are read of single linears only."
                    )
                expected.update(dict.fromkeys(self.leaves(disk).values()))
            elif stored not in expected:
                shape = self._stored_shape_of(name)
                if self._is_mxfp4(name):
                    self._check_blocks(stored, shape)
                    expected.update(dict.fromkeys((f"{stored}_blocks", f"{stored}_scales")))
                else:
                    expected[stored] = None if name.endswith(tuple(KV_SCALES.values())) else shape
        return expected

    def is_absent(self, name: str) -> bool:
        """Return whether a parameter is zeros because the checkpoint leaves it out."""
        return self.family.may_be_absent(name) and self.family.tensor(name) not in self._files

    def parameters(self) -> list[str]:
        """Return the canonical names of all parameters."""
        outer, layers = self._names
        return [*outer, *(f"layers.{idx}.{name}" for idx, layer in enumerate(layers) for name in layer)]

    def _check_blocks(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the shapes of the blocks of a weight and of their scales."""
        blocks = (*shape[:-1], shape[-1] // BLOCK)
        for part, wanted in (("blocks", (*blocks, BLOCK // 2)), ("scales", blocks)):
            stored = f"{name}_{part}"
            if stored in self._files and self._files.shape(stored) != wanted:
                raise UnsupportedArch(
                    f"{self.path}: tensor '{stored}' is {list(self._files.shape(stored))}, its config says "
                    f"{list(wanted)}."
                )


def _scaled_in(dtype: str, weight: QuantizedWeight) -> QuantizedWeight:
    """Convert the scales of a weight to the model's dtype where that changes none of them.

    GPTQ and AWQ store float16 for every model, so this restores the scales of a model of another dtype;
    scales that only float16 represents stay in it.
    """
    wanted = getattr(torch, dtype, None)
    scale_OG = weight.scale_OG
    if scale_OG.dtype != torch.float16 or wanted not in (torch.bfloat16, torch.float32):
        return weight
    again = scale_OG.to(wanted)
    return (
        replace(weight, scale_OG=again)
        if torch.equal(again.to(torch.float32), scale_OG.to(torch.float32))
        else weight
    )

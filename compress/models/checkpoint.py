"""Hugging Face checkpoints: import to canonical names, streaming, layer by layer.

`Checkpoint` reads `config.json` (`config_file.py`) and safetensors. Every tensor on disk must be accounted
for and every parameter present with its shape, else an error names the tensor: a checkpoint is understood
wholly or refused. Quantized linears are decoded by the codec handed in for the checkpoint's `quant_method`
(`quantization_config.py`); `checkpoint_writer.py` is the way back.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import UnsupportedArch, UnsupportedFormat
from compress.models.arch import Arch
from compress.models.config_fields import MAX_NAMED, listed
from compress.models.config_file import read_config
from compress.models.experts import FLOAT32_PARAMETERS
from compress.models.family import family_of
from compress.models.family_files import FamilyFiles
from compress.models.layout import ROTATED, Place
from compress.models.passed_over import passed_over
from compress.models.quantization_config import codec_of, linears_of, quant_method, schemes_of
from compress.models.stored_tensors import as_stored, members_of, most_experts, num_experts_of, places_of
from compress.models.trained_rope import with_exponents
from compress.models.weights import UNTOUCHED, check_untouched, dense, names_with_scales, stored_as
from compress.models.wide_codes import check_dtype, check_powers_of_two, dense_in_codes, is_layout
from compress.quant.codec import ForeignCodec
from compress.quant.kv import FP8_STATIC, KV_SCALES, read_kv_scale
from compress.quant.mxfp4 import BLOCK, from_mxfp4
from compress.quant.scheme import QuantizedWeight, Scheme


def arch_of(config: Mapping[str, Any], codecs: Mapping[str, ForeignCodec]) -> Arch:
    """Return the facts of a `config.json` without its tensors, refusing all that `Checkpoint` refuses by the
    config alone.

    Raises:
        UnsupportedArch: the decoder does not support the config.
        UnsupportedFormat: a `quant_method` without a codec, or a scheme that its codec does not read.
    """
    family = family_of(config)
    arch = family.read_config(config)
    family = family.of_arch(arch).in_format(quant_method(config))
    schemes_of(config, codec_of(config, codecs), arch, family)
    return arch


class Checkpoint:
    """A model directory as a `WeightSource`.

    Raises:
        UnsupportedArch: the decoder does not support the config or a tensor, or a tensor is missing or
            misshapen.
        UnsupportedFormat: pickles, or a `quant_method` without a codec here.
    """

    def __init__(
        self, path: Path, *, codecs: Mapping[str, ForeignCodec] | None = None, kv_format: str | None = None
    ) -> None:
        config = read_config(path)
        self.path = path
        self.family = family_of(config)
        arch = self.family.read_config(config)
        self.family = self.family.of_arch(arch).in_format(quant_method(config))
        self._codec = codec_of(config, codecs or {})
        self._files = FamilyFiles(path, self.family)
        self._arch = with_exponents(arch, self._files, self.family.rope_exponents)
        if not self.family.states_tie(config):
            self._arch = self._arch.replace(tied_head=self._stores_no_head())
        shapes = {name: self._files.shape(name) for name in self._files.names()}
        self.family = as_stored(self.family, self._arch, shapes)
        self._num_experts = most_experts(self._arch)
        self._placed: dict[str, dict[str, Place]] = {}
        self._check_num_layers()
        self._is_layout = is_layout(config)
        others = dense_in_codes(self._arch, self.family, self._files.names())
        self._schemes, stated = schemes_of(config, self._codec, self._arch, self.family, others=others)
        self._wide = frozenset(self._schemes if self._is_layout else others)
        self.kv_format = kv_format if stated is None else stated
        self._names = names_with_scales(self._arch, kv_scales=stated == FP8_STATIC)
        self._check_names()
        if not (config.get("dtype") or config.get("torch_dtype")):  # the config means that of the tensors
            dtype = str(self._files.dtype(self._disk_embed())).removeprefix("torch.")
            self._arch = self._arch.replace(dtype=dtype)
        if self._is_layout:
            check_dtype(self._arch)

    @property
    def arch(self) -> Arch:
        return self._arch

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Scheme of each quantized linear by canonical name (`layers.0.attn.q`, `head`); empty for a dense
        checkpoint, and for one that is read so."""
        if self._is_layout:
            return {}
        linears = [
            each
            for each in linears_of(self._arch, self.family)
            if each[0] != "head" or not self._arch.tied_head
        ]
        return {canonical: self._schemes[disk] for canonical, disk in linears if disk in self._schemes}

    def rounding_note(self) -> str | None:
        """Return the sentence that counts the float32 tensors of a model of 16 bits, which are rounded to its
        dtype; None where there is none."""
        if getattr(torch, self._arch.dtype).itemsize >= torch.float32.itemsize:
            return None
        kept = {self.family.tensor(name) for name in self._parameters() if name.endswith(FLOAT32_PARAMETERS)}
        expected = {name for name, shape in self._expected().items() if shape is not None} - kept
        rounded = [name for name in sorted(expected) if self._files.dtype(name) == torch.float32]
        if not rounded:
            return None
        are = "tensors are" if len(rounded) > 1 else "tensor is"
        return (
            f"{len(rounded)} {are} float32 in this {self._arch.dtype} checkpoint and rounded to "
            f"{self._arch.dtype}: {listed(rounded, MAX_NAMED)}."
        )

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        own = {name: self._read(name, {}) for name in self._names[0]}
        parts = {name for name in self._files.names() if self.family.is_untouched(name, self._num_experts)}
        whole = {**own, **{f"{UNTOUCHED}{name}": self._files.get(name) for name in sorted(parts)}}
        if self._is_layout:
            check_untouched(whole)
        return whole

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        stacks: dict[str, Tensor | QuantizedWeight] = {}
        return {name: self._read(f"layers.{layer_idx}.{name}", stacks) for name in self._names[1][layer_idx]}

    def _read(self, name: str, stacks: dict[str, Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
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
            sizes = [] if whole else [self._shape_of(each)[0] for each in members]
            places = [] if whole else places_of(self.family, self._arch, members, sizes)
            self._placed[tensor] = dict(zip(members, places, strict=False))
        return self._placed[tensor]

    def _read_stored(self, name: str) -> Tensor | QuantizedWeight:
        """Return the tensor that holds a parameter."""
        module, _, leaf = name.rpartition(".")
        disk = self.family.to_disk(module) if leaf == "weight" else ""
        stored = self.family.tensor(name)
        if self._is_absent(name):
            return torch.zeros(self._shape_of(name), dtype=stored_as(name, getattr(torch, self._arch.dtype)))
        if leaf == "weight" and disk in self._schemes:
            scheme = self._schemes[disk]
            leaves = {leaf: self._files.get(name) for leaf, name in self._leaves(disk).items()}
            assert self._codec is not None
            try:
                weight = self._codec.decode(leaves, scheme)
                wanted = self._stored_shape_of(name)
                wanted = wanted[::-1] if self.family.is_transposed(name) else wanted
                if weight.shape != wanted:
                    raise UnsupportedFormat(f"it is {list(weight.shape)}, its config says {list(wanted)}.")
                if self._is_layout:
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
        is_matrix = self.family.num_rows(self._arch, name, tensor.numel()) is not None
        return tensor.flatten() if is_matrix else tensor

    def _is_mxfp4(self, name: str) -> bool:
        """Return whether a parameter is stored in blocks of four-bit floats."""
        module, _, leaf = name.rpartition(".")
        return (
            leaf == "weight" and self.family.holds_all_experts(module) and self.family.expert_layouts[0].mxfp4
        )

    def _shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter, by its canonical name."""
        outer, layers = self._names
        if name in outer:
            return outer[name]
        _, idx, inner = name.split(".", 2)
        return layers[int(idx)][inner]

    def _stored_shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor that holds a parameter."""
        module = name.rpartition(".")[0]
        shapes = [self._shape_of(each) for each in members_of(self.family, self._arch, name)]
        if not shapes[0]:
            return ()
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        if not self.family.holds_all_experts(module):
            if self.family.is_transposed(name):
                return shape[::-1]
            if rows := self.family.rows_with_others(name):
                return (rows, *shape)
            num_rows = self.family.num_rows(self._arch, name, shape[0])
            return shape if num_rows is None else (num_rows, shape[0] // num_rows)
        num_experts = num_experts_of(self._arch, name)
        shape = (shape[0] // num_experts, *shape[1:])
        return (num_experts, *(shape[::-1] if self.family.expert_layouts[0].transposed else shape))

    def _leaves(self, disk: str) -> dict[str, str]:
        """Leaf of a quantized linear -> the tensor that holds it."""
        assert self._codec is not None
        found = {}
        for leaf in self._codec.leaves(self._schemes[disk]):
            name = f"{disk}.{leaf}"
            alias = f"{disk}.{self._codec.aliases.get(leaf, leaf)}"
            found[leaf] = alias if alias in self._files and name not in self._files else name
        return found

    def _check_num_layers(self) -> None:
        """Check that each layer of the config has a tensor, before anything is made for each of them."""
        prefix = self.family.layer_prefix
        stored = {
            name.removeprefix(prefix).partition(".")[0]
            for name in self._files.names()
            if name.startswith(prefix)
        }
        absent = next((idx for idx in range(self._arch.num_layers) if str(idx) not in stored), None)
        if absent is not None:
            raise UnsupportedArch(
                f"{self.path} lacks every tensor of layer {absent}, and its config.json has "
                f"num_hidden_layers = {self._arch.num_layers}; copy the checkpoint again, or set the number "
                "of layers that it has."
            )

    def _check_names(self) -> None:
        expected = self._expected()
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
        ignored = re.compile(self.family.ignored_tensors)
        tied = self.family.to_disk("head") + ".weight" if self._arch.tied_head else ""
        prefixes = passed_over(self.family, self._arch, self._files.names())
        for name in self._files.names():
            if (
                name not in expected
                and name != tied
                and not ignored.search(name)
                and not self.family.is_untouched(name, self._num_experts)
                and not name.startswith(prefixes)
                and not self._is_idle_bias(name)
            ):
                raise UnsupportedArch(
                    f"{self.path} holds the tensor '{name}', which the {self.family.model_type} decoder does "
                    "not know."
                )
        for name, shape in expected.items():
            if shape is not None and not _is_dense(self._files.dtype(name)):
                raise UnsupportedFormat(
                    f"{self.path}: tensor '{name}' is {self._files.header(name).dtype}, and its config names "
                    "no quantization by which whole numbers, or numbers of 8 bits, would be weights."
                )
        if tied in self._files and not torch.equal(
            self._files.get(tied), self._files.get(self._disk_embed())
        ):
            raise UnsupportedArch(
                f"{self.path}: config.json ties the head to the embedding, but the stored '{tied}' is "
                "another matrix. Set "
                "tie_word_embeddings to false if the stored head is the right one, or remove the tensor if "
                "it is not."
            )

    def _stores_no_head(self) -> bool:
        """Return whether no head is stored but the embedding."""
        head = self.family.to_disk("head")
        stored = [name for name in self._files.names() if name.startswith(f"{head}.")]
        if stored != [f"{head}.weight"] or self._disk_embed() not in self._files:
            return not stored
        return torch.equal(self._files.get(stored[0]), self._files.get(self._disk_embed()))

    def _is_idle_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros that some tools store for every linear that they
        quantized, with a bias or without."""
        return name.removesuffix(".bias") in self._schemes and not bool(self._files.get(name).any())

    def _disk_embed(self) -> str:
        return self.family.to_disk("embed") + ".weight"

    def _expected(self) -> dict[str, tuple[int, ...] | None]:
        """Return the shapes of the tensors on disk; None for the leaves of a quantized linear, which its
        codec checks, and for the scales of a cache, which their reader does. A scalar may be [] or [1]."""
        expected: dict[str, tuple[int, ...] | None] = {}
        for name in (each for each in self._parameters() if not self._is_absent(each)):
            module, _, leaf = name.rpartition(".")
            disk = self.family.to_disk(module) if leaf == "weight" else ""
            stored = self.family.tensor(name)
            if leaf == "weight" and disk in self._schemes:
                if self.family.holds_all_experts(module):
                    raise UnsupportedFormat(
                        f"{self.path}: {disk} holds the weights of all experts of a layer in one tensor, and "
                        f"codes are read of single linears only."
                    )
                expected.update(dict.fromkeys(self._leaves(disk).values()))
            elif stored not in expected:
                shape = self._stored_shape_of(name)
                if self._is_mxfp4(name):
                    self._check_blocks(stored, shape)
                    expected.update(dict.fromkeys((f"{stored}_blocks", f"{stored}_scales")))
                else:
                    expected[stored] = None if name.endswith(tuple(KV_SCALES.values())) else shape
        return expected

    def _is_absent(self, name: str) -> bool:
        """Return whether a parameter is zeros because the checkpoint leaves it out."""
        return self.family.may_be_absent(name) and self.family.tensor(name) not in self._files

    def _parameters(self) -> list[str]:
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


def _is_dense(dtype: torch.dtype) -> bool:
    """Return whether numbers of a dtype are weights as they are, and no codes that need scales."""
    return dtype.is_floating_point and dtype.itemsize > 1


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

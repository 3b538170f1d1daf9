"""Hugging Face checkpoints: import to canonical names, streaming, layer by layer.

`Checkpoint` reads `config.json` (`config_file.py`) and safetensors. Every tensor on disk must be accounted
for and every parameter present with its shape, else an error names the tensor: a checkpoint is understood
wholly or refused. Quantized linears are decoded by the codec handed in for the checkpoint's `quant_method`
(`quantization_config.py`); `checkpoint_writer.py` is the way back.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.config_fields import MAX_NAMED, listed
from compress.models.config_file import check_merged, read_config
from compress.models.experts import FLOAT32_PARAMETERS
from compress.models.family import family_of
from compress.models.family_files import FamilyFiles
from compress.models.ngram_buffers import check_ngram_buffers
from compress.models.passed_over import passed_over
from compress.models.quantization_config import codec_of, linears_of, quant_method, schemes_of
from compress.models.stored_tensors import as_stored, other_experts
from compress.models.stored_weights import StoredWeights
from compress.models.trained_rope import with_exponents
from compress.models.weights import UNTOUCHED, check_untouched, names_with_scales
from compress.models.wide_codes import check_dtype, dense_in_codes, is_layout
from compress.quant.codec import ForeignCodec
from compress.quant.kv import FP8_STATIC
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
        self.files = FamilyFiles(path, self.family)
        self._arch = with_exponents(arch, self.files, self.family.rope_exponents)
        check_ngram_buffers(self._arch, self.files, self.family)
        if not self.family.states_tie(config):
            self._arch = self._arch.replace(tied_head=self._stores_no_head())
        shapes = {name: self.files.shape(name) for name in self.files.names()}
        self.family = as_stored(self.family, self._arch, shapes)
        self._other_experts = other_experts(self.family, self._arch)
        self._check_num_layers()
        self._is_layout = is_layout(config)
        others = dense_in_codes(self._arch, self.family, self.files.names())
        self._schemes, stated = schemes_of(config, self._codec, self._arch, self.family, others=others)
        if self._is_layout:
            self._schemes = {name: each for name, each in self._schemes.items() if not self._is_dense(name)}
        self.kv_format = kv_format if stated is None else stated
        stated_dtype = config.get("dtype") or config.get("torch_dtype")
        if not stated_dtype and self._disk_embed() in self.files:  # the config means that of the tensors
            dtype = str(self.files.dtype(self._disk_embed())).removeprefix("torch.")
            self._arch = self._arch.replace(dtype=dtype)
        self._stored = StoredWeights(
            path,
            self.files,
            self.family,
            self._arch,
            names_with_scales(self._arch, kv_scales=stated == FP8_STATIC),
            codec=self._codec,
            schemes=self._schemes,
            wide=frozenset(self._schemes if self._is_layout else others),
            powers_of_two=self._is_layout,
        )
        self._check_names()
        if self._is_layout:
            check_dtype(self._arch)

    @property
    def arch(self) -> Arch:
        return self._arch

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        dtype: torch.dtype = getattr(torch, self._arch.dtype)
        return dtype

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
        """Return the sentence that counts the tensors that are rounded to the dtype of the model: those of 64
        bits, and in a model of 16 bits those of float32 and of the other format of 16 bits; None where there
        is none."""
        stated = getattr(torch, self._arch.dtype)
        sentences = []
        narrower = () if stated == torch.float32 else (torch.float32, torch.float16, torch.bfloat16)
        for dtype in (torch.float64, *narrower):
            found = [] if stated == dtype else self._tensors_of(dtype)
            if found:
                are = "tensors are" if len(found) > 1 else "tensor is"
                sentences.append(
                    f"{len(found)} {are} {str(dtype).removeprefix('torch.')} in this {self._arch.dtype} "
                    f"checkpoint and rounded to {self._arch.dtype}: {listed(found, MAX_NAMED)}."
                )
        return " ".join(sentences) or None

    def _tensors_of(self, dtype: torch.dtype) -> list[str]:
        """Return the names of the tensors of this dtype that a model stores in its own, sorted."""
        kept = {
            self.family.tensor(name)
            for name in self._stored.parameters()
            if name.endswith(FLOAT32_PARAMETERS)
        }
        expected = {name for name, shape in self._stored.expected().items() if shape is not None} - kept
        return [name for name in sorted(expected) if self.files.dtype(name) == dtype]

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        parts = {name for name in self.files.names() if self.family.is_untouched(name, self._other_experts)}
        whole = {
            **self._stored.outer(),
            **{f"{UNTOUCHED}{name}": self.files.get(name) for name in sorted(parts)},
        }
        if self.family.more_embeddings:
            embed = self._disk_embed()
            whole[f"{UNTOUCHED}{embed}"] = self.files.get(embed)[self._arch.vocab_size :].clone()
        if self._is_layout:
            check_untouched(whole)
        return whole

    def dense_head(self) -> Tensor | None:
        """Return the matrix of logits [V, D], None where it is in codes."""
        weight = self._stored.read("embed.weight" if self._arch.tied_head else "head.weight", {})
        return weight if isinstance(weight, Tensor) else None

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return self._stored.layer(layer_idx)

    def _check_num_layers(self) -> None:
        """Check that each layer of the config has a tensor, before anything is made for each of them."""
        prefix = self.family.layer_prefix
        stored = {
            name.removeprefix(prefix).partition(".")[0]
            for name in self.files.names()
            if name.startswith(prefix)
        }
        num_stored = self._arch.num_layers // (2 if self.family.layers_in_pairs else 1)
        num_stored += len(self.family.passed_layers)
        absent = next((idx for idx in range(num_stored) if str(idx) not in stored), None)
        if absent is not None:
            check_merged(self.path, self.files.names())
            stated = self.family.spelled.get("num_hidden_layers", "num_hidden_layers")
            raise UnsupportedArch(
                f"{self.path} lacks every tensor of layer {absent} on disk, and its config.json has "
                f"{stated} = {num_stored}; copy the checkpoint again, or set the number of layers that it "
                "has."
            )

    def _check_names(self) -> None:
        expected = self._stored.check()
        ignored = re.compile(self.family.ignored_tensors)
        tied = self.family.to_disk("head") + ".weight" if self._arch.tied_head else ""
        prefixes = passed_over(self.family, self._arch, self.files.names())
        for name in self.files.names():
            if (
                name not in expected
                and name != tied
                and not ignored.search(name)
                and not self.family.is_untouched(name, self._other_experts)
                and not name.startswith(prefixes)
                and not self._is_idle_bias(name)
            ):
                raise UnsupportedArch(
                    f"{self.path} holds the tensor '{name}', which the {self.family.model_type} decoder does "
                    "not know."
                )
        self._stored.check_dense(expected)
        if tied in self.files and not torch.equal(self.files.get(tied), self.files.get(self._disk_embed())):
            raise UnsupportedArch(
                f"{self.path}: config.json ties the head to the embedding, but the stored '{tied}' is "
                "another matrix. Set "
                "tie_word_embeddings to false if the stored head is the right one, or remove the tensor if "
                "it is not."
            )

    def _stores_no_head(self) -> bool:
        """Return whether no head is stored but the embedding."""
        head = self.family.to_disk("head")
        stored = [name for name in self.files.names() if name.startswith(f"{head}.")]
        if stored != [f"{head}.weight"] or self._disk_embed() not in self.files:
            return not stored
        return torch.equal(self.files.get(stored[0]), self.files.get(self._disk_embed()))

    def _is_dense(self, linear: str) -> bool:
        """Return whether a linear has a weight that is no code, and no scales: DeepSeek-V4 lists no linears
        that stay dense."""
        others = (f"{linear}.{leaf}" for leaf in ("scale", "weight_scale_inv", "weight_scale"))
        weight = f"{linear}.weight"
        return (
            weight in self.files
            and self.files.holds_dense(weight)
            and not any(each in self.files for each in others)
        )

    def _is_idle_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros that some tools store for every linear that they
        quantized, with a bias or without."""
        return name.removesuffix(".bias") in self._schemes and not bool(self.files.get(name).any())

    def _disk_embed(self) -> str:
        return self.family.to_disk("embed") + ".weight"

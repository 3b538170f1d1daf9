"""The choice of a checkpoint's linears by tensor name: the matrices that are quantized, the reasons of those
that stay dense, and the form of every tensor of the result. Only `config.json` and the headers of the
safetensors files are read."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from compress.artifact.header import TensorHeader
from compress.artifact.tensor_stream import Form
from compress.artifact.tensors import DTYPES, TensorFiles
from compress.errors import UnsupportedFormat, UsageError
from compress.export import format_by_name
from compress.models.config_file import read_config
from compress.models.named_linears import (
    Choice,
    choose_linears,
    other_matrices,
    stated_vocab_size,
    targets,
    template,
)
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.stages.quantize_by_name.spec import QuantizeByName

STACKS = (
    "Experts in stacks are written as a linear each, which vLLM reads; transformers gathers them for some "
    "classes alone, such as Qwen3.5's. `ignore: ['*.experts.*']` leaves stacks as they are."
)
_QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")


@dataclass(frozen=True)
class Selection:
    """A checkpoint and the choice of its linears."""

    files: TensorFiles
    config: Mapping[str, Any]
    spec: QuantizeByName
    choices: tuple[Choice, ...]
    others: tuple[TensorHeader, ...]
    """Matrices and stacks of them that are no weight of a module."""

    @property
    def quantized(self) -> list[Choice]:
        return [each for each in self.choices if each.reason is None]

    @property
    def dense(self) -> list[Choice]:
        return [each for each in self.choices if each.reason is not None]

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors of the source."""
        return sum(each.end - each.begin for each in map(self.files.header, self.files.names()))

    @property
    def written_bytes(self) -> int:
        """Bytes of all tensors of the result."""
        return _bytes(self.forms(self.files.names()))

    def forms(self, names: Iterable[str]) -> dict[str, Form]:
        """Return dtype and shape of each tensor of the result that these tensors of the source become."""
        found: dict[str, Form] = {}
        for name in names:
            parts = self.parts_of(name)
            if not parts:
                found[name] = self.files.dtype(name), self.files.shape(name)
            for each in parts:
                found.update(self._forms_of_codes(each))
        return found

    def parts_of(self, name: str) -> list[Choice]:
        """Return the matrices of a tensor whose codes are written in its place; none where it is written as
        it is."""
        return self._parts.get(name, [])

    @property
    def warnings(self) -> list[str]:
        """Facts of the result that its readers may not expect."""
        return [STACKS] if any(each.stacked for each in self.quantized) else []

    @cached_property
    def _parts(self) -> dict[str, list[Choice]]:
        found: dict[str, list[Choice]] = {}
        for each in self.quantized:
            found.setdefault(each.tensor, []).append(each)
        return found

    def quantization_config(self) -> dict[str, Any]:
        """Return the `quantization_config` of the result."""
        chosen = [each.module for each in self.quantized]
        stays = [each.module for each in self.dense if len(each.shape) == 2]
        return self.spec.written_as.config_by_name(
            self.spec.weights, quantized=targets(chosen, stays), dense=targets(stays, chosen)
        )

    def facts(self) -> dict[str, Any]:
        """Return what a manifest states of the choice: numbers of matrices, and bytes."""
        reasons = Counter(str(each.reason) for each in self.dense)
        if self.others:
            reasons["no weight of a module"] = len(self.others)
        return {
            "quantized": len(self.quantized),
            "dense": dict(sorted(reasons.items())),
            "linear_bytes": sum(each.size_bytes for each in self.quantized),
            "code_bytes": sum(_bytes(self._forms_of_codes(each)) for each in self.quantized),
            "source_bytes": self.source_bytes,
            "written_bytes": self.written_bytes,
        }

    def quantized_kinds(self) -> dict[str, int]:
        """Return the quantized modules, those that differ in numbers alone counted as one."""
        return dict(Counter(template(each.module) for each in self.quantized))

    def dense_kinds(self) -> dict[str, dict[str, int]]:
        """Return reason -> the modules that stay dense for it, counted alike."""
        found: dict[str, Counter[str]] = {}
        for each in self.dense:
            found.setdefault(str(each.reason), Counter())[template(each.module)] += 1
        for header in self.others:
            found.setdefault("no weight of a module", Counter())[template(header.name)] += 1
        return {reason: dict(kinds) for reason, kinds in sorted(found.items())}

    def _forms_of_codes(self, choice: Choice) -> dict[str, Form]:
        leaves = _leaves_of(self.spec.format, self.spec.weights, choice.matrix, choice.dtype)
        return {f"{choice.module}.{leaf}": form for leaf, form in leaves}


def select(spec: QuantizeByName, path: Path) -> Selection:
    """Return the choice for the checkpoint in a directory.

    Raises:
        UsageError: there is no checkpoint, a pattern matches nothing, or nothing is left to quantize.
        UnsupportedFormat: it is quantized already, or not in safetensors.
        StorageError: a file of it is damaged.
    """
    config = read_config(path)
    stated = next((name for name in _QUANTIZATION_KEYS if config.get(name)), None)
    if stated is not None:
        raise UnsupportedFormat(
            f"{path} is quantized already: its config.json has a {stated}. Start from the dense checkpoint."
        )
    files = TensorFiles(path)
    headers = [files.header(name) for name in files.names()]
    choices = choose_linears(
        headers,
        vocab_size=stated_vocab_size(config),
        include=spec.include,
        ignore=spec.ignore,
        tied=config.get("tie_word_embeddings") is True,
    )
    fitted = _fitted(spec, choices)
    if not any(each.reason is None for each in fitted):
        reasons = ", ".join(sorted({str(each.reason) for each in fitted})) or "it has no matrix"
        raise UsageError(
            f"{path}: no matrix is left to quantize ({reasons}). `include` adds matrices by name, and a "
            "channel scheme such as FP8_DYNAMIC takes any width."
        )
    return Selection(files, config, spec, fitted, tuple(other_matrices(headers)))


def _fitted(spec: QuantizeByName, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the choices, dense where the format does not take a linear of its shape. Of experts in stacks
    one such product leaves all of the layer dense, because servers compute all in one product."""
    reasons = [each.reason or spec.written_as.reason_dense(spec.weights, *each.matrix) for each in choices]
    unfit = {
        each.experts: reason
        for each, reason in zip(choices, reasons, strict=True)
        if each.experts and each.reason is None and reason
    }
    return tuple(
        replace(each, reason=reason or (unfit.get(each.experts) if each.experts else None))
        for each, reason in zip(choices, reasons, strict=True)
    )


@cache
def _leaves_of(
    form: str, scheme: Scheme, matrix: tuple[int, int], dtype: str
) -> tuple[tuple[str, Form], ...]:
    """Return the leaves of the codes of a matrix in a format; those of many experts are the same."""
    encoded = format_by_name(form).codec.encode(_shape_only(scheme, matrix, dtype))
    return tuple((leaf, (each.dtype, tuple(each.shape))) for leaf, each in encoded.items())


def _shape_only(scheme: Scheme, matrix: tuple[int, int], dtype: str) -> QuantizedWeight:
    """Return a quantized weight of the right shapes and dtypes without any number."""
    rows, columns = matrix
    scales = scheme.num_scale_rows(rows), scheme.num_groups(columns)

    def empty(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return QuantizedWeight(
        scheme,
        empty((rows, columns), scheme.code_dtype),
        empty(scales, DTYPES[dtype]),
        None if scheme.symmetric else empty(scales, torch.int8),
    )


def _bytes(forms: Mapping[str, Form]) -> int:
    return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in forms.values())

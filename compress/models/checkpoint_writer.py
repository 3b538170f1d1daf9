"""Hugging Face checkpoints: export by the exact inverse of the table by which `checkpoint.py` imports."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.artifact.tensors import ShardWriter
from compress.errors import UnsupportedFormat
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.config_file import CONFIG_NAME
from compress.models.config_writer import without_predictors
from compress.models.family import Family, family_of_arch
from compress.models.layer_shape import LayerShape
from compress.models.layout import ROTATED, expert_stack, stacked
from compress.models.module_names import EMBED
from compress.models.stored_tensors import members_of, parts_of, places_of
from compress.models.weights import UNTOUCHED, Weights, WeightSource, dense
from compress.quant.codec import Codec
from compress.quant.global_scale import with_one_global_scale
from compress.quant.kv import KV_SCALES
from compress.quant.scheme import QuantizedWeight

MAX_SHARD_BYTES = 5_000_000_000
_PREDICTORS = "mtp"
"""The end of the name of the untouched part of a model that predicts further tokens."""


class TensorWriter:
    """Hands parameters to `write` as tensors of a checkpoint: by the names and in the layout that a family
    has on disk. Those that share a tensor wait for one another."""

    def __init__(
        self, family: Family, arch: Arch, write: Callable[[str, Tensor], None], codec: Codec | None = None
    ) -> None:
        self._family = family
        self._arch = arch
        self._write = write
        self._codec = codec
        self._waiting: dict[str, dict[str, Tensor | QuantizedWeight]] = {}
        self._with_others = {
            family.tensor(f"layers.{idx}.{name}")
            for idx in range(arch.num_layers)
            for name in family.first_rows
        }
        self._untouched: dict[str, Tensor] = {}
        self._embed = family.tensor(EMBED) if family.more_embeddings else None

    def add(self, name: str, value: Tensor | QuantizedWeight) -> None:
        """Write a parameter, or the tensor that it completes.

        Raises:
            UnsupportedFormat: the parameter is quantized and there is no codec.
        """
        family = self._family
        arch = self._arch
        if name.startswith(UNTOUCHED):
            assert isinstance(value, Tensor)
            stored = name.removeprefix(UNTOUCHED)
            if stored in self._with_others:
                self._untouched[stored] = value
            if stored == self._embed:
                self._add_rows(stored, 1, value)
            else:
                self._write(stored, value)
            return
        module = name.rpartition(".")[0]
        stored = family.tensor(name)
        if stored == self._embed:
            self._add_rows(stored, 0, dense(value))
            return
        if family.rows_with_others(name):
            _check_first_row(stored, self._untouched.get(stored), value)
            return
        members = members_of(family, arch, name)
        all_experts = family.holds_all_experts(module)
        if len(members) > 1 or module.endswith(ROTATED) or all_experts:
            found = self._waiting.setdefault(stored, {})
            found[name] = value
            if len(found) < len(members):
                return
            del self._waiting[stored]
            parts = [found[each] for each in members]
            places = places_of(family, arch, members, [part.shape[0] for part in parts])
            value = expert_stack(places, parts, stored) if all_experts else stacked(stored, places, parts)
        if not isinstance(value, QuantizedWeight):
            num_rows = family.num_rows(arch, name, value.numel())
            value = value if num_rows is None else value.view(num_rows, -1)
            value = value.t().contiguous() if family.is_transposed(name) else value
            if name.endswith(tuple(KV_SCALES.values())):
                value = value.reshape(1)  # consumers want [1]
            for each, part in parts_of(family, arch, name, value):
                self._write(each, part)
        elif self._codec is None:
            raise UnsupportedFormat(
                f"'{name}' is quantized and a plain checkpoint holds dense weights only; name an export "
                "format."
            )
        else:
            for each, tensor in self._codec.encode(value).items():
                self._write(f"{family.to_disk(module)}.{each}", tensor)

    def _add_rows(self, stored: str, place: int, rows: Tensor) -> None:
        """Write the embedding of tokens (place 0) with the rows after it (place 1), once both are there."""
        found = self._waiting.setdefault(stored, {})
        found[str(place)] = rows
        if len(found) == 2:
            del self._waiting[stored]
            embed_VD = dense(found["0"])
            whole = torch.cat((embed_VD, dense(found["1"]).to(embed_VD)))
            for each, part in parts_of(self._family, self._arch, EMBED, whole):
                self._write(each, part)

    def check_done(self) -> None:
        """Check that every tensor was written.

        Raises:
            UnsupportedFormat: some wait for parameters, or for rows, that the source does not have.
        """
        if self._waiting:
            raise UnsupportedFormat(
                f"the model that is written lacks parts of the tensors {', '.join(self._waiting)}, which the "
                "checkpoint has that it was made from."
            )


def write_checkpoint(
    directory: Path,
    source: WeightSource,
    *,
    codec: Codec | None = None,
    quantization_config: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    more: Iterable[tuple[str, Tensor]] = (),
    without: tuple[str, ...] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `config.json` and safetensors that `transformers` loads; tensors stream through one shard of
    memory. `fields` are added to the config of the language model, and `more` to its files: the tensors of
    layers that predict further tokens, by the names that they have there. Untouched tensors whose names begin
    as one of `without` are left out. Where no such layer is written, the config states that there is none
    (`without_predictors`).

    Raises:
        UnsupportedFormat: the source has quantized weights and no codec was given.
    """
    arch = source.arch
    family = _family_of_source(source, (quantization_config or {}).get("quant_method"))
    shards = ShardWriter(directory, max_shard_bytes=max_shard_bytes)
    writer = TensorWriter(family, arch, shards.add, codec)
    add = writer.add
    config = family.changed(family.write_config(arch), **(fields or {}))
    predictors = tuple(f"{UNTOUCHED}{part}." for part in family.untouched if part.endswith(_PREDICTORS))
    predicts = False
    for name, value in source.outer().items():
        if not (name.startswith(UNTOUCHED) and name.removeprefix(UNTOUCHED).startswith(without)):
            add(name, value)
            predicts |= name.startswith(predictors)
    kv_scales: dict[int, Weights] = {}
    for idx, shape in enumerate(arch.layers):
        weights = source.layer(idx)
        if idx in arch.kv_sources:
            kv_scales[idx] = {name: weights[name] for name in KV_SCALES.values() if name in weights}
        # Consumers read the pages of another layer with the scales of the one that reads.
        anothers = {} if shape.kv_source is None else kv_scales[shape.kv_source]
        for name, value in with_shared_scales(shape, {**weights, **anothers}).items():
            add(f"layers.{idx}.{name}", value)
    writer.check_done()
    for name, tensor in more:
        shards.add(name, tensor)
        predicts = True
    shards.finish()
    if not predicts:
        config = without_predictors(family, config, arch.num_layers)
    if quantization_config is not None:
        config["quantization_config"] = dict(quantization_config)
    (directory / CONFIG_NAME).write_text(
        json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8"
    )


def with_shared_scales(shape: LayerShape, weights: Weights) -> dict[str, Tensor | QuantizedWeight]:
    """Return the weights of a layer, those of a linear group with one global scale where they have one:
    vLLM multiplies a group as one matrix, and takes the largest of its global scales for all of it. Those
    that were read from another checkpoint stay as they came."""
    shared = dict(weights)
    for group in shape.groups:
        names = [f"{linear}.weight" for linear in group.linears]
        quantized = [each for name in names if isinstance(each := shared.get(name), QuantizedWeight)]
        if len(quantized) == len(names) and all(each.global_scale is None for each in quantized):
            shared |= dict(zip(names, with_one_global_scale(quantized), strict=True))
    return shared


def _check_first_row(name: str, matrix: Tensor | None, value: Tensor | QuantizedWeight) -> None:
    """Check that a matrix that was written as it came has a parameter for its first row.

    Raises:
        UnsupportedFormat: the source has no such matrix, or the parameter is another one by now.
    """
    if matrix is None or not torch.equal(matrix[0].float(), dense(value).float()):
        raise UnsupportedFormat(
            f"the first row of '{name}' is of the language model and its other rows are of parts that stay "
            "as they are; the model that is written has no such matrix, or another first row."
        )


def _family_of_source(source: WeightSource, quant_method: str | None) -> Family:
    """Return the family, with the layout of experts that the `quant_method` asks for, or else the one that
    the source was read in."""
    family = family_of_arch(source.arch)
    asked = family.in_format(quant_method)
    if asked is not family:
        return asked
    if isinstance(source, Checkpoint) and (layouts := source.family.expert_layouts) and not layouts[0].mxfp4:
        return source.family.in_format(quant_method)
    return family

"""The MTP head of a model, read from the model's own checkpoint (`mtp.py`)."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from compress.errors import UnsupportedArch, UsageError
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.config_file import read_config
from compress.models.family import Family, family_of_arch
from compress.models.mtp import LAYER, MtpFacts, MtpHead, mtp_facts, parameter_shapes
from compress.models.quantization_config import codec_of, schemes_of
from compress.models.stored_tensors import as_stored
from compress.models.stored_weights import Shapes, StoredWeights
from compress.models.wide_codes import dense_in_codes, is_layout
from compress.quant.codec import ForeignCodec

NO_HEAD = "draft with a smaller model, an EAGLE-3 head or by n-grams instead."


def has_mtp(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint stores an MTP head of which the names are known."""
    if checkpoint.family.mtp is None:
        return False
    return _stores(checkpoint, mtp_table(checkpoint.family, checkpoint.arch.num_layers))


def check_mtp(checkpoint: Checkpoint, codecs: Mapping[str, ForeignCodec]) -> MtpFacts:
    """Return the facts of the MTP head of a checkpoint without reading its tensors.

    Raises:
        UsageError, UnsupportedArch, UnsupportedFormat: as `read_mtp`.
    """
    return _opened(checkpoint, codecs)[0]


def read_mtp(checkpoint: Checkpoint, codecs: Mapping[str, ForeignCodec]) -> MtpHead:
    """Read the MTP head of a checkpoint, the first one where it stores several. A linear of it that is stored
    without codes is dense, whatever the config states: programs that quantize often leave it as it was.

    Raises:
        UsageError: the checkpoint stores none, or models of its family are read without one.
        UnsupportedArch: a tensor is missing or misshapen, or the layer has one that is not read.
        UnsupportedFormat: codes that are not read.
    """
    return _read(checkpoint, codecs, 0)


def read_mtps(checkpoint: Checkpoint, codecs: Mapping[str, ForeignCodec]) -> tuple[MtpHead, ...]:
    """Read all MTP heads of a checkpoint, which predict one token after the other.

    Raises:
        UsageError, UnsupportedArch, UnsupportedFormat: as `read_mtp`.
    """
    return tuple(_read(checkpoint, codecs, idx) for idx in range(max(num_heads(checkpoint), 1)))


def num_heads(checkpoint: Checkpoint) -> int:
    """Return the number of MTP heads that a checkpoint stores; heads that share the modules outside of their
    layers are one."""
    family = checkpoint.family
    if family.mtp is None:
        return 0
    tables = (mtp_table(family, checkpoint.arch.num_layers, idx) for idx in count())
    if "{layer}" not in family.mtp.modules["fc"]:
        return int(has_mtp(checkpoint))
    return next(idx for idx, table in enumerate(tables) if not _stores(checkpoint, table))


def _read(checkpoint: Checkpoint, codecs: Mapping[str, ForeignCodec], head_idx: int) -> MtpHead:
    facts, stored = _opened(checkpoint, codecs, head_idx)
    layer = {f"{LAYER}{name}": value for name, value in stored.layer(0).items()}
    return MtpHead(facts, {**stored.outer(), **layer}, checkpoint.dense_head)


def _opened(
    checkpoint: Checkpoint, codecs: Mapping[str, ForeignCodec], head_idx: int = 0
) -> tuple[MtpFacts, StoredWeights]:
    """Return the facts of a head and its parameters, none of which is read yet."""
    family = checkpoint.family
    if family.mtp is None:
        raise UsageError(
            f"{checkpoint.path}: {family.model_type} models are read without a layer that predicts a further "
            f"token; {NO_HEAD}"
        )
    files = checkpoint.files
    table = mtp_table(family, checkpoint.arch.num_layers, head_idx)
    if not _stores(checkpoint, table):
        raise UsageError(
            f"{checkpoint.path} stores no layer that predicts a further token (no tensor "
            f"'{table.tensor('fc.weight')}'): take a checkpoint with one, or {NO_HEAD}"
        )
    facts = mtp_facts(checkpoint.arch, family.mtp)
    arch = facts.arch
    table = layout_of_head(table, arch, checkpoint)
    config = read_config(checkpoint.path)
    codec = codec_of(config, codecs)
    outer = ("fc", "head") if facts.own_head else ("fc",)
    wide = [*dense_in_codes(arch, table, files.names()), *map(table.to_disk, outer)]
    schemes, _ = schemes_of(config, codec, arch, table, others=wide)
    coded = {disk: scheme for disk, scheme in schemes.items() if not files.holds_dense(f"{disk}.weight")}
    stored = StoredWeights(
        checkpoint.path,
        files,
        table,
        arch,
        _names(facts),
        codec=codec,
        schemes=coded,
        wide=frozenset(coded if is_layout(config) else wide),
        powers_of_two=is_layout(config),
    )
    expected = stored.check()
    _check_others(checkpoint, table, {*expected})
    stored.check_dense(expected)
    return facts, stored


def layout_of_head(table: Family, arch: Arch, checkpoint: Checkpoint) -> Family:
    """Return the table of a head with the layout in which its experts are stored, which may be another one
    than that of the model's layers."""
    files = checkpoint.files
    layouts = family_of_arch(checkpoint.arch).expert_layouts
    shapes = {name: files.shape(name) for name in files.names()}
    return as_stored(replace(table, expert_layouts=layouts), arch, shapes)


def mtp_table(family: Family, num_layers: int, head_idx: int = 0) -> Family:
    """Return the table of a family with the names of an MTP head of a model of so many layers: those of the
    modules outside of its layer, and of the layer, which has index 0."""
    names = family.mtp
    assert names is not None
    prefix = family.layer_prefix if names.layer_prefix is None else names.layer_prefix
    first = (num_layers if names.layer_prefix is None else 0) + head_idx
    modules = {name: disk.format(layer=f"{prefix}{first}") for name, disk in names.modules.items()}
    outer = {**family.outer_modules, "target_norm": family.outer_modules["norm"], **modules}
    layer = {**family.layer_modules, **names.layer_modules}
    return replace(
        family,
        outer_modules=outer,
        layer_modules=layer,
        layer_prefix=prefix,
        first_layer=first,
        halves_apart=names.halves_apart,
    )


def _check_others(checkpoint: Checkpoint, table: Family, expected: set[str]) -> None:
    """Check that the layer of a head has no tensors that are not read, besides copies of the embedding and of
    the head of the model.

    Raises:
        UnsupportedArch: it has one.
    """
    for idx in range(table.first_layer, table.first_layer + (2 if table.halves_apart else 1)):
        layer = f"{table.layer_prefix}{idx}."
        copies = tuple(f"{layer}{name}.weight" for name in ("embed_tokens", "shared_head.head"))
        ignored = re.compile(table.ignored_tensors)
        others = [
            name
            for name in checkpoint.files.names()
            if name.startswith(layer)
            and name not in {*expected, *copies}
            and not ignored.search(name.removeprefix(layer))
        ]
        if others:
            raise UnsupportedArch(
                f"{checkpoint.path} holds the tensor '{others[0]}', which an MTP head of the "
                f"{table.model_type} decoder does not have."
            )


def _stores(checkpoint: Checkpoint, table: Family) -> bool:
    """Return whether a checkpoint stores what joins a hidden state and an embedding, in codes or dense: every
    head has it."""
    fc = f"{table.to_disk('fc')}."
    return any(name.startswith(fc) for name in checkpoint.files.names())


def _names(facts: MtpFacts) -> tuple[Shapes, list[Shapes]]:
    shapes = parameter_shapes(facts)
    layer = {name.removeprefix(LAYER): shape for name, shape in shapes.items() if name.startswith(LAYER)}
    return {name: shape for name, shape in shapes.items() if not name.startswith(LAYER)}, [layer]

"""`export`: write quantized or pruned weights as a checkpoint that other programs load, with the model's
tokenizer.

Further formats of one export are complete checkpoints in folders of the first one, written from the same
codes. A draft goes into a folder of the checkpoint, whatever the format of the model: a draft model as a
complete checkpoint, dense or compressed-tensors, an EAGLE-3 head in the layout of `speculators`.
"""

from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import BeforeValidator, Field

from compress.artifact.manifest import Artifact, open_artifact
from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.errors import UnsupportedFormat, UsageError
from compress.export import (
    DRAFT_FOLDER,
    FORMATS,
    PROPOSED,
    OneScaleFormat,
    dense_itemsize,
    is_graph,
    kv_note,
    open_weights,
)
from compress.export.format_writer import GRAPH_SHARD_BYTES, write_format
from compress.export.mtp import check_place_of_head, exported_mtp
from compress.export.refusals import TAKE_ONE_SCALE, check_rules
from compress.export.speculators import write_speculators
from compress.methods.quantize import Rounder
from compress.models.arch import Arch
from compress.models.canonical import CanonicalStore
from compress.models.checkpoint_writer import MAX_SHARD_BYTES
from compress.models.eagle3 import draft_head
from compress.models.family import family_of_arch
from compress.models.mtp import KIND, mtp_of_draft
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import Scheme
from compress.recipe import Spec, checked_by, list_to_tuple
from compress.registry.model_source import ModelSource
from compress.stages import STAGES, Estimate, Inputs, PlanFacts, Port
from compress.stages.budget.costs import largest_bytes, matrix_bytes
from compress.stages.budget.spec import Mixed
from compress.stages.quantize.schemes import mixed_schemes, model_scheme, outer_bytes, possible_schemes
from compress.stages.quantize.spec import Quantize


def _known_formats(names: tuple[str, ...]) -> None:
    for name in names:
        FORMATS.get(name)
    if not names or len(set(names)) != len(names):
        raise UsageError("formats: name each format once, and at least one.")


def _name_to_names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else list_to_tuple(value)


DRAFT_FORMAT = "compressed-tensors"
FORMATS_FOLDER = "formats"
"""Folder of a checkpoint with one complete checkpoint for each further format."""


class Export(Spec):
    """The formats of the published checkpoint."""

    formats: Annotated[
        tuple[str, ...],
        checked_by(_known_formats),
        BeforeValidator(_name_to_names, json_schema_input_type=str | tuple[str, ...]),
    ] = Field(
        ("compressed-tensors",),
        description="name of a format, or a list: the checkpoint itself has the first, and folders of it "
        f"(`{FORMATS_FOLDER}/<name>`) the same codes in the others",
    )


def _estimate(spec: Export, facts: PlanFacts) -> Estimate:
    parts = [_estimate_one(name, facts) for name in spec.formats]
    several = len(parts) > 1
    notes = [
        f"{name}: {note}" if several else note
        for name, part in zip(spec.formats, parts, strict=True)
        for note in part.notes
    ]
    return Estimate(
        max(part.peak_bytes for part in parts),
        sum(part.disk_bytes for part in parts),
        0.0,
        notes=tuple(notes),
    )


def _estimate_one(name: str, facts: PlanFacts) -> Estimate:
    """Return what writing one format takes."""
    quantize = facts.specs.get("quantize")
    arch = facts.arch
    itemsize = dense_itemsize(name, arch)
    if quantize is None:
        check_rules(name, arch, None)
        size = itemsize * arch.num_params
        return Estimate(_peak_bytes(name, arch, size, None), size, 0.0, notes=("dense weights",))
    assert isinstance(quantize, Quantize)
    possible = possible_schemes(quantize, arch)
    kv_format = quantize.kv_format()
    for scheme in possible:
        check_rules(name, arch, scheme, kv_format)
        _check_one_scale(name, scheme, quantize, is_trained="recover" in facts.specs)
        _check_scale_dtype(name, scheme, arch)
    head = quantize.head_scheme
    size = _linear_bytes(quantize, arch, itemsize=itemsize) + outer_bytes(arch, head, itemsize=itemsize)
    consumers = [] if possible[-1] is None else FORMATS.get(name).consumers(arch, possible[-1])
    notes = tuple(
        f"{each.name}: {'loads' if each.loads else 'does not load'} ({each.note})" for each in consumers
    )
    notes += () if kv_format is None else (kv_note(arch, kv_format),)
    return Estimate(_peak_bytes(name, arch, size, head), size, 0.0, notes=notes)


def _check_one_scale(name: str, scheme: ModelScheme | None, quantize: Quantize, *, is_trained: bool) -> None:
    """Raise UnsupportedFormat where a format takes one scale for a linear and the recipe makes several."""
    form = FORMATS.get(name)
    if scheme is None or not isinstance(form, OneScaleFormat):
        return
    taking = [each.name for each in scheme.all if form.takes_one_scale(each)]
    if taking and (is_trained or not cast(Rounder, quantize.round).one_scale):
        raise UnsupportedFormat(
            f"[one-scale] {name} stores one scale for all weights of a linear in {taking[0]}, and this "
            f"recipe finds one for each row. {TAKE_ONE_SCALE}"
        )


def _check_scale_dtype(name: str, scheme: ModelScheme | None, arch: Arch) -> None:
    """Raise UnsupportedFormat where a format keeps scales in float16, and those of the model have the 24 bits
    of float32, of which float16 holds hardly any exactly."""
    if scheme is None or arch.dtype != "float32" or FORMATS.get(name).scale_dtype != torch.float16:
        return
    if any(each.scale_type is None for each in scheme.all):
        raise UnsupportedFormat(
            f"[exact-scales] {name} keeps scales in float16, and those of a float32 model have more bits: "
            "they would change, and weights with them. Export compressed-tensors, or save the model in 16 "
            "bits first."
        )


def _linear_bytes(quantize: Quantize, arch: Arch, *, itemsize: int) -> int:
    """Return the most bytes that all linears of the layers take on disk; a dense weight and a scale have
    `itemsize` bytes."""
    if isinstance(quantize.scheme, Mixed):
        groups = mixed_schemes(quantize, quantize.scheme, arch)
        outer_size = outer_bytes(arch, quantize.head_scheme)
        return largest_bytes(quantize.scheme, arch, groups, outer_size, itemsize=itemsize)
    scheme = model_scheme(quantize, arch)
    total = 0
    for idx, layer in enumerate(arch.layers):
        for name in layer.linears:
            own = None if scheme is None else scheme.for_linear(f"layers.{idx}.{name}")
            total += matrix_bytes(*layer.linear_shape(name, arch.hidden_size), own, itemsize=itemsize)
    return total


def _peak_bytes(name: str, arch: Arch, size: int, head: Scheme | None) -> int:
    """Return the memory in bytes that writing `size` bytes takes: one shard at most. Formats with a graph
    have smaller shards, except for an embedding that is larger than one; writing them also holds the
    embedding and the head in the dtype of the format."""
    if not is_graph(name):
        return min(size, MAX_SHARD_BYTES)
    itemsize = dense_itemsize(name, arch)
    shard_size = max(GRAPH_SHARD_BYTES, itemsize * arch.vocab_size * arch.hidden_size)
    return outer_bytes(arch, head, itemsize=itemsize) + min(size, shard_size)


@STAGES.stage(
    "export",
    version=5,
    takes=((Port.QUANTIZED, Port.DENSE),),
    uses=(Port.DRAFT,),
    gives=Port.CHECKPOINT,
    spec=Export,
    estimate=_estimate,
)
def export(spec: Export, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    artifact = open_artifact(inputs.first(Port.QUANTIZED, Port.DENSE)[1].path)
    store = CanonicalStore(artifact)
    scheme = store.scheme
    mtp = exported_mtp(open_weights(inputs.source.path), store.arch)
    draft = open_artifact(inputs[Port.DRAFT].path) if Port.DRAFT in inputs.ports else None
    name, *others = spec.formats
    if draft is not None and draft.manifest.facts["draft"]["kind"] == KIND:
        check_place_of_head(mtp, name)
        assert mtp is not None
        mtp = mtp.with_head(mtp_of_draft(draft), store.arch.num_layers)
    for idx, each in enumerate(spec.formats):
        ctx.boundary(idx, len(spec.formats), f"writing {each}")
        directory = out.path if each == name else out.path / FORMATS_FOLDER / each
        directory.mkdir(parents=True, exist_ok=True)
        inputs.source.copy_text_files(directory)
        write_format(each, directory, store, scheme, mtp=None if is_graph(each) else mtp)
        inputs.source.copy_documents(directory)
    manifest = artifact.manifest
    facts = {"format": name, **{key: value for key, value in manifest.facts.items() if key == "kv_cache"}}
    if mtp is not None and mtp.reason is not None:
        facts["without_mtp"] = mtp.reason
    if others:
        facts["formats"] = {each: f"{FORMATS_FOLDER}/{each}" for each in others}
    if draft is not None:
        facts |= _write_draft(draft, store.arch, inputs.source, out.path / DRAFT_FOLDER)
    out.describe(
        role="checkpoint",
        arch=manifest.arch,
        layers=manifest.layers,
        scheme=manifest.scheme,
        facts=facts,
    )
    ctx.progress.update(len(spec.formats), len(spec.formats), ", ".join(spec.formats))


def _write_draft(artifact: Artifact, target: Arch, source: ModelSource, directory: Path) -> dict[str, Any]:
    """Write the draft into the directory and return its facts, without the curve, which the draft's own
    artifact and the report have.

    Raises:
        UsageError: the draft has other tokens than the model.
        UnsupportedFormat: no checkpoint can hold the draft's scheme.
    """
    scheme = artifact.manifest.scheme
    facts = artifact.manifest.facts["draft"]
    if facts["kind"] == "eagle3":
        architectures = family_of_arch(target).write_config(target).get("architectures", [])
        write_speculators(
            directory,
            draft_head(artifact),
            verifier=source.portable_name,
            architectures=architectures,
            k=PROPOSED,
        )
    elif facts["kind"] != KIND:  # an MTP head is in the checkpoint itself
        store = CanonicalStore(artifact)
        if store.arch.vocab_size != target.vocab_size:
            raise UsageError(
                f"the draft has {store.arch.vocab_size} tokens and the model {target.vocab_size}: no program "
                "could speculate with it. Make the draft of this model."
            )
        directory.mkdir()
        write_format(DRAFT_FORMAT, directory, store, store.scheme)
        source.copy_text_files(directory)
    shown = {key: value for key, value in facts.items() if key != "curve"}
    return {"draft": {**shown, "scheme": None if scheme is None else scheme["name"]}}

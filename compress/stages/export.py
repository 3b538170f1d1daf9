"""`export`: write quantized or pruned weights as a checkpoint that other programs load, with the model's
tokenizer.

A draft goes into a folder of the checkpoint, whatever the format of the model: a draft model as a complete
checkpoint, dense or compressed-tensors, an EAGLE-3 head in the layout of `speculators`.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from compress.artifact.manifest import Artifact, open_artifact
from compress.artifact.workspace import ArtifactWriter
from compress.context import Context
from compress.errors import UsageError
from compress.export import (
    DRAFT_FOLDER,
    FORMATS,
    GRAPH_SHARD_BYTES,
    PROPOSED,
    check_rules,
    dense_itemsize,
    is_graph,
    kv_note,
    write_format,
)
from compress.export.speculators import write_speculators
from compress.models.arch import Arch
from compress.models.canonical import CanonicalStore
from compress.models.checkpoint_writer import MAX_SHARD_BYTES
from compress.models.eagle3 import draft_head
from compress.models.family import family_of
from compress.quant.scheme import Scheme
from compress.recipe import Spec, checked_by, list_to_tuple
from compress.registry.model_source import ModelSource
from compress.stages import STAGES, Estimate, Inputs, PlanFacts, Port
from compress.stages.budget.costs import largest_bytes, matrix_bytes
from compress.stages.budget.spec import Mixed
from compress.stages.quantize.schemes import mixed_schemes, model_scheme, outer_bytes, possible_schemes
from compress.stages.quantize.spec import Quantize


def _one_known_format(names: tuple[str, ...]) -> None:
    for name in names:
        FORMATS.get(name)
    if len(names) != 1:
        raise UsageError(
            f"one format is written by one recipe, not {len(names)}; a second recipe with another format "
            "finds everything before it cached."
        )


def _name_to_names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else list_to_tuple(value)


DRAFT_FORMAT = "compressed-tensors"


class Export(Spec):
    """The format of the published checkpoint."""

    formats: Annotated[
        tuple[str, ...],
        checked_by(_one_known_format),
        BeforeValidator(_name_to_names, json_schema_input_type=str | tuple[str, ...]),
    ] = Field(("compressed-tensors",), description="name of one format, or a list with one name")


def _estimate(spec: Export, facts: PlanFacts) -> Estimate:
    quantize = facts.specs.get("quantize")
    arch = facts.arch
    name = spec.formats[0]
    itemsize = dense_itemsize(name)
    if quantize is None:
        check_rules(name, arch, None)
        size = itemsize * arch.num_params
        return Estimate(_peak_bytes(name, arch, size, None), size, 0.0, notes=("dense weights",))
    assert isinstance(quantize, Quantize)
    possible = possible_schemes(quantize, arch)
    kv_format = quantize.kv_format()
    for scheme in possible:
        check_rules(name, arch, scheme, kv_format)
    head = quantize.head_scheme
    size = _linear_bytes(quantize, arch, itemsize=itemsize) + _outer_bytes(arch, head, itemsize=itemsize)
    consumers = [] if possible[-1] is None else FORMATS.get(name).consumers(arch, possible[-1])
    notes = tuple(
        f"{each.name}: {'loads' if each.loads else 'does not load'} ({each.note})" for each in consumers
    )
    notes += () if kv_format is None else (kv_note(kv_format),)
    return Estimate(_peak_bytes(name, arch, size, head), size, 0.0, notes=notes)


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


def _outer_bytes(arch: Arch, head: Scheme | None, *, itemsize: int) -> int:
    """Return the bytes of embedding and head on disk."""
    embed_size = matrix_bytes(arch.vocab_size, arch.hidden_size, None, itemsize=itemsize)
    head_size = matrix_bytes(arch.vocab_size, arch.hidden_size, head, itemsize=itemsize)
    return embed_size if arch.tied_head else embed_size + head_size


def _peak_bytes(name: str, arch: Arch, size: int, head: Scheme | None) -> int:
    """Return the memory in bytes that writing `size` bytes takes: one shard at most. Formats with a graph
    have smaller shards, except for an embedding that is larger than one; writing them also holds the
    embedding and the head in the dtype of the format."""
    if not is_graph(name):
        return min(size, MAX_SHARD_BYTES)
    itemsize = dense_itemsize(name)
    shard_size = max(GRAPH_SHARD_BYTES, itemsize * arch.vocab_size * arch.hidden_size)
    return _outer_bytes(arch, head, itemsize=itemsize) + min(size, shard_size)


@STAGES.stage(
    "export",
    version=3,
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
    name = spec.formats[0]
    ctx.boundary(0, 1, f"writing {name}")
    write_format(name, out.path, store, scheme)
    inputs.source.copy_text_files(out.path)
    inputs.source.copy_documents(out.path)
    manifest = artifact.manifest
    facts = {"format": name, **{key: value for key, value in manifest.facts.items() if key == "kv_cache"}}
    if Port.DRAFT in inputs.ports:
        facts |= _write_draft(
            open_artifact(inputs[Port.DRAFT].path), store.arch, inputs.source, out.path / DRAFT_FOLDER
        )
    out.describe(
        role="checkpoint",
        arch=manifest.arch,
        layers=manifest.layers,
        scheme=manifest.scheme,
        facts=facts,
    )
    ctx.progress.update(1, 1, name)


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
        architectures = family_of({"model_type": target.family}).write_config(target).get("architectures", [])
        write_speculators(
            directory, draft_head(artifact), verifier=source.name, architectures=architectures, k=PROPOSED
        )
    else:
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

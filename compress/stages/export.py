"""`export`: quantized or pruned weights become a checkpoint that other programs load, with the model's tokenizer beside it.

A draft goes into a folder of the checkpoint, as one that stands alone: whatever the format of the model, dense or compressed-tensors.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from compress.artifact.context import Context
from compress.artifact.manifest import Artifact, open_artifact
from compress.artifact.workspace import ArtifactWriter
from compress.errors import UsageError
from compress.export import DRAFT_FOLDER, FORMATS, check_rules, kv_note, write_format
from compress.models.arch import Arch
from compress.models.canonical import CanonicalStore
from compress.recipe import Spec, checked_by
from compress.stages import STAGES, Estimate, Inputs, PlanFacts, Port
from compress.stages.quantize.sizes import most_linear_bytes, outer_bytes
from compress.stages.quantize.spec import Quantize


def _one_known_format(names: tuple[str, ...]) -> None:
    for name in names:
        FORMATS.get(name)
    if len(names) != 1:
        raise UsageError(
            f"one format is written by one recipe, not {len(names)}; a second recipe with another format finds everything before it cached."
        )


DRAFT_FORMAT = "compressed-tensors"


class Export(Spec):
    """The format of the published checkpoint."""

    formats: Annotated[tuple[str, ...], checked_by(_one_known_format)] = Field(("compressed-tensors",), description="one format by name")


def _estimate(spec: Export, facts: PlanFacts) -> Estimate:
    quantize = facts.specs.get("quantize")
    if quantize is None:
        check_rules(spec.formats[0], facts.arch, None)
        return Estimate(min(2 * facts.arch.num_params, 5_000_000_000), 2 * facts.arch.num_params, 0.0, notes=("dense weights",))
    assert isinstance(quantize, Quantize)
    arch, possible, kv_format = facts.arch, quantize.possible_schemes(facts.arch), quantize.kv_format()
    for scheme in possible:
        check_rules(spec.formats[0], arch, scheme, kv_format)
    size = most_linear_bytes(quantize, arch) + outer_bytes(arch, quantize.head_scheme)
    consumers = [] if possible[-1] is None else FORMATS.get(spec.formats[0]).consumers(arch, possible[-1])
    notes = tuple(f"{each.name}: {'loads' if each.loads else 'does not load'} ({each.note})" for each in consumers)
    notes += () if kv_format is None else (kv_note(kv_format),)
    return Estimate(peak_bytes=min(size, 5_000_000_000), disk_bytes=size, flops=0.0, notes=notes)


@STAGES.stage(
    "export", version=1, takes=((Port.QUANTIZED, Port.DENSE),), uses=(Port.DRAFT,), gives=Port.CHECKPOINT, spec=Export, estimate=_estimate
)
def export(spec: Export, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    artifact = open_artifact(inputs.first(Port.QUANTIZED, Port.DENSE)[1].path)
    store = CanonicalStore(artifact)
    scheme, name = store.scheme, spec.formats[0]
    ctx.boundary(0, 1, f"writing {name}")
    write_format(name, out.path, store, scheme)
    text_files = inputs.source.text_files()
    for file in text_files:
        shutil.copyfile(file, out.path / file.name)
    manifest = artifact.manifest
    facts = {"format": name, **{key: value for key, value in manifest.facts.items() if key == "kv_cache"}}
    if Port.DRAFT in inputs.ports:
        facts |= _write_draft(open_artifact(inputs[Port.DRAFT].path), store.arch, out.path / DRAFT_FOLDER, text_files)
    out.describe(role="checkpoint", arch=manifest.arch, layers=manifest.layers, scheme=manifest.scheme, facts=facts)
    ctx.progress.update(1, 1, name)


def _write_draft(artifact: Artifact, target: Arch, directory: Path, text_files: Sequence[Path]) -> dict[str, Any]:
    """The facts of the draft, without its curve, which the draft's own artifact and the report have.

    Raises:
        UsageError: a draft of other tokens than the model's.
    """
    store = CanonicalStore(artifact)
    if store.arch.vocab_size != target.vocab_size:
        raise UsageError(
            f"the draft has {store.arch.vocab_size} tokens and the model {target.vocab_size}: no program could speculate with it. "
            "Make the draft of this model."
        )
    directory.mkdir()
    write_format(DRAFT_FORMAT, directory, store, store.scheme)
    for file in text_files:
        shutil.copyfile(file, directory / file.name)
    draft = {key: value for key, value in artifact.manifest.facts["draft"].items() if key != "curve"}
    return {"draft": {**draft, "scheme": None if store.scheme is None else store.scheme.name}}

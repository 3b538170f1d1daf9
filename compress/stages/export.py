"""`export`: quantized or pruned weights become a checkpoint that other programs load, with the model's tokenizer beside it."""

import shutil
from typing import Annotated

from pydantic import Field

from compress.artifact.context import Context
from compress.artifact.manifest import open_artifact
from compress.artifact.workspace import ArtifactWriter
from compress.errors import UsageError
from compress.export import FORMATS, check_rules, kv_note, write_format
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


@STAGES.stage("export", version=1, takes=((Port.QUANTIZED, Port.DENSE),), gives=Port.CHECKPOINT, spec=Export, estimate=_estimate)
def export(spec: Export, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    artifact = open_artifact(inputs.first(Port.QUANTIZED, Port.DENSE)[1].path)
    store = CanonicalStore(artifact)
    scheme, name = store.scheme, spec.formats[0]
    ctx.boundary(0, 1, f"writing {name}")
    write_format(name, out.path, store, scheme)
    for file in inputs.source.text_files():
        shutil.copyfile(file, out.path / file.name)
    manifest = artifact.manifest
    kv_cache = {key: value for key, value in manifest.facts.items() if key == "kv_cache"}
    out.describe(role="checkpoint", arch=manifest.arch, layers=manifest.layers, scheme=manifest.scheme, facts={"format": name, **kv_cache})
    ctx.progress.update(1, 1, name)

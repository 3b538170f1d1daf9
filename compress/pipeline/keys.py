"""The key of a step: which ports it reads, and the parts that decide its result."""

from collections.abc import Mapping

from compress.artifact.key_parts import KeyParts
from compress.machine import arithmetic_class
from compress.pipeline.steps import Step, met_by
from compress.registry.model_source import ModelSource
from compress.stages import Port


def source_digests(source: ModelSource) -> dict[Port, str]:
    """Return the digests of the ports that are there before any stage."""
    return {Port.SOURCE: source.digest, Port.DENSE: source.digest}


def ports_read(step: Step, present: Mapping[Port, object]) -> list[Port]:
    """Return the ports that a step reads of those that earlier steps gave, sorted."""
    stage = step.stage
    met = [met_by(need, present.keys()) for need in stage.needs(step.spec)]
    assert all(port is not None for port in met), "build_steps checks needs"
    return sorted(
        {port for port in met if port is not None} | {port for port in stage.uses if port in present}
    )


def key_parts(step: Step, digests: Mapping[Port, str], seed: int, device: str) -> KeyParts:
    """Return the parts of the key of a step, whose inputs have these digests."""
    inputs = {port.value: digests[port] for port in ports_read(step, digests)}
    return KeyParts(
        stage=step.stage.kind,
        version=step.stage.version,
        spec=step.spec.model_dump(mode="json", serialize_as_any=True),
        inputs=inputs | {Port.SOURCE.value: digests[Port.SOURCE]},
        seed=seed,
        extra=dict(step.stage.depends(step.spec, device)),
        machine=arithmetic_class(device),
    )

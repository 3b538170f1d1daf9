"""Stages: what a recipe may name. A stage is one file, or one folder: its Spec, the ports it reads and
writes, and the glue that calls the layers below.

The pipeline gives a stage the artifacts of the ports in `takes`, and stores what it writes under the port
`gives`. A need that is a tuple is met by the first of its ports that a stage before it gave. `version` is
part of the cache key: raise it when the numbers of a stage change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, cast

from compress.artifact.workspace import ArtifactWriter
from compress.context import Context
from compress.models.arch import Arch
from compress.plugins import PluginSet
from compress.recipe import Spec
from compress.registry.model_source import ModelSource


class Port(StrEnum):
    """What flows between stages. SOURCE is the recipe's model and stays; DENSE is the latest dense weights,
    at first the same; DRAFT proposes tokens for the latest of all."""

    SOURCE = "source"
    DENSE = "dense"
    CALIB = "calibration"
    QUANTIZED = "quantized"
    DRAFT = "draft"
    CHECKPOINT = "checkpoint"
    EVIDENCE = "evidence"


Need = Port | tuple[Port, ...]


@dataclass(frozen=True)
class Input:
    """An artifact (or the source model) as a stage sees it."""

    path: Path
    digest: str


@dataclass(frozen=True)
class Inputs:
    """`source` is always there; `ports` holds what the stage's needs were met with."""

    source: ModelSource
    ports: Mapping[Port, Input]

    def __getitem__(self, port: Port) -> Input:
        return self.ports[port]

    def first(self, *ports: Port) -> tuple[Port, Input]:
        """The port among `ports` that is present."""
        port = next(each for each in ports if each in self.ports)
        return port, self.ports[port]


@dataclass(frozen=True)
class Estimate:
    """What a stage is expected to need, before it runs: bytes at its peak, bytes it leaves on disk,
    floating-point operations, and small operations that must run one after the other (GPTQ's columns).
    `in_tiles`: a CPU multiplies in bfloat16 (AMX).
    """

    peak_bytes: int
    disk_bytes: int
    flops: float
    num_launches: int = 0
    notes: tuple[str, ...] = ()
    in_tiles: bool = False


@dataclass(frozen=True)
class PlanFacts:
    """What is known at plan time: shapes as the stages before leave them, the specs of all stages (by kind),
    how many ranks are to share the work, and the shapes of the recipe's own model."""

    arch: Arch
    device: str
    specs: Mapping[str, Spec]
    num_ranks: int = 1
    source_arch: Arch | None = None


class RunStage(Protocol):
    def __call__(self, spec: Any, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None: ...


def _nothing(spec: Any, device: str) -> Mapping[str, str]:
    return {}


def _same(spec: Any, arch: Arch) -> Arch:
    return arch


@dataclass(frozen=True)
class Stage:
    """`uses` are ports that are read when they exist. `depends` names what decides the result besides recipe
    and inputs (data files, the machine of a latency measurement): name -> digest or text, part of the cache
    key. `together` is the part of `run` in which all ranks of a job take part: rank 0 comes to it inside
    `run`, the others are sent there. `reshape` is the model that a stage leaves of one, as far as that is
    known before it runs.
    """

    kind: str
    version: int
    takes: tuple[Need, ...]
    gives: Port
    spec: type[Spec]
    run: RunStage
    estimate: Callable[[Any, PlanFacts], Estimate]
    uses: tuple[Port, ...] = ()
    depends: Callable[[Any, str], Mapping[str, str]] = _nothing
    together: Callable[[Any, Inputs, Context], object] | None = None
    reshape: Callable[[Any, Arch], Arch] = _same


class StageSet(PluginSet[Stage]):
    """The plug-in set of stages, with a decorator that builds the `Stage`."""

    def stage(
        self,
        kind: str,
        *,
        version: int,
        takes: tuple[Need, ...],
        gives: Port,
        spec: type[Spec],
        estimate: Callable[[Any, PlanFacts], Estimate],
        uses: tuple[Port, ...] = (),
        depends: Callable[[Any, str], Mapping[str, str]] = _nothing,
        together: Callable[[Any, Inputs, Context], object] | None = None,
        reshape: Callable[[Any, Arch], Arch] = _same,
    ) -> Callable[[RunStage], RunStage]:
        def decorate(run: RunStage) -> RunStage:
            self.add(
                kind,
                Stage(kind, version, takes, gives, spec, run, estimate, uses, depends, together, reshape),
            )
            return run

        return decorate


STAGES = StageSet("stage", "compress.stages")


def specs_of(plugins: PluginSet[Any]) -> Mapping[str, type[Spec]]:
    """Return the specs that the members of a plug-in set are, by name, for a `ByKind` field."""
    return {name: cast(type[Spec], member) for name, member in plugins.items()}

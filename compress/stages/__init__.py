"""Stages: what a recipe may name. A stage is one file or one package: its spec, the ports that it reads and
writes, and the code that calls the layers below.

The pipeline hands a stage the artifacts of the ports in `takes` and stores what it writes under the port
`gives`. A need that is a tuple of ports is met by the first of them that an earlier stage gave. `version` is
part of the cache key: raise it when the numbers of a stage change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, cast

from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.plugins import PluginSet
from compress.recipe import Spec
from compress.registry.model_source import ModelSource


class Port(StrEnum):
    """The artifacts that flow between stages, by role.

    SOURCE is the recipe's model and never changes. DENSE is the latest dense weights, at first those of
    SOURCE. DRAFT proposes tokens for the latest weights.
    """

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
    """The artifact, or the source model, that a stage reads."""

    path: Path
    digest: str


@dataclass(frozen=True)
class Inputs:
    """The source model, which every stage has, and the artifacts that meet the stage's needs, by port."""

    source: ModelSource
    ports: Mapping[Port, Input]

    def __getitem__(self, port: Port) -> Input:
        return self.ports[port]

    def first(self, *ports: Port) -> tuple[Port, Input]:
        """Return the first of `ports` that has an input, with that input."""
        port = next(each for each in ports if each in self.ports)
        return port, self.ports[port]


@dataclass(frozen=True)
class Estimate:
    """The expected needs of a stage before it runs: bytes at its peak, bytes that it leaves on disk,
    floating-point operations, and small operations that must run one after the other (the columns of GPTQ).

    `in_tiles`: a CPU multiplies in bfloat16 (AMX). `moved_bytes`: bytes read and written, of a stage whose
    time they decide.
    """

    peak_bytes: int
    disk_bytes: int
    flops: float
    num_launches: int = 0
    notes: tuple[str, ...] = ()
    in_tiles: bool = False
    moved_bytes: int = 0


@dataclass(frozen=True)
class PlanFacts:
    """Facts at plan time: shapes as the earlier stages leave them, the specs of all stages by kind, the
    number of ranks that share the work, the shapes of the recipe's own model, and its directory where it is
    on this machine.

    `shapes` is the refusal where the decoder does not support the model; a stage that needs shapes raises it
    by reading `arch`.
    """

    shapes: Arch | UnsupportedArch
    device: str
    specs: Mapping[str, Spec]
    num_ranks: int = 1
    source_arch: Arch | None = None
    source: Path | None = None

    @property
    def arch(self) -> Arch:
        """Shapes of the model.

        Raises:
            UnsupportedArch: the decoder does not support it.
        """
        if isinstance(self.shapes, UnsupportedArch):
            raise self.shapes
        return self.shapes


class RunStage(Protocol):
    """The function of a stage: reads `inputs`, writes the artifact `out` and describes it."""

    def __call__(self, spec: Any, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None: ...


def _nothing(spec: Any, device: str) -> Mapping[str, str]:
    return {}


def _none(spec: Any) -> tuple[Port, ...]:
    return ()


def _same(spec: Any, arch: Arch) -> Arch:
    return arch


@dataclass(frozen=True)
class Stage:
    """A stage as its package declares it.

    Attributes:
        takes: the ports that must be there.
        spares: spec -> the ports of `takes` that a stage with this spec does not read.
        uses: ports that are read where they are there.
        depends: (spec, device) -> name -> digest or text of what decides the result besides recipe and
            inputs, such as data files or the machine of a latency; part of the cache key.
        on_all_ranks: the part of `run` in which all ranks of a job take part. Rank 0 reaches it inside `run`;
            the others are sent there.
        reshape: (spec, shapes of the input) -> shapes of the result, as far as they follow before the stage
            runs.
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
    on_all_ranks: Callable[[Any, Inputs, Context], object] | None = None
    reshape: Callable[[Any, Arch], Arch] = _same
    spares: Callable[[Any], tuple[Port, ...]] = _none

    def needs(self, spec: Any) -> tuple[Need, ...]:
        """Return the ports that must be there for a stage with this spec."""
        spared = self.spares(spec)
        return tuple(need for need in self.takes if need not in spared)


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
        on_all_ranks: Callable[[Any, Inputs, Context], object] | None = None,
        reshape: Callable[[Any, Arch], Arch] = _same,
        spares: Callable[[Any], tuple[Port, ...]] = _none,
    ) -> Callable[[RunStage], RunStage]:
        """Return a decorator that registers a function as the `run` of a stage."""

        def decorate(run: RunStage) -> RunStage:
            self.add(
                kind,
                Stage(
                    kind,
                    version,
                    takes,
                    gives,
                    spec,
                    run,
                    estimate,
                    uses,
                    depends,
                    on_all_ranks,
                    reshape,
                    spares,
                ),
            )
            return run

        return decorate


STAGES = StageSet("stage", "compress.stages")


def specs_of(plugins: PluginSet[Any]) -> Mapping[str, type[Spec]]:
    """Return the specs that the members of a plug-in set are, by name, for a `ByKind` field."""
    return {name: cast(type[Spec], member) for name, member in plugins.items()}

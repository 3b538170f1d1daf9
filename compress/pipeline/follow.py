"""The part of ranks other than 0: wait until rank 0 starts a stage in which all ranks take part, and do their
share of it.

Rank 0 alone has the workspace, the recipe and the registry. A part names what the stage reads by path, so
ranks on several machines need these directories, the workspace's among them, at the same places of a file
system that all share.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.context import Context
from compress.recipe import Spec
from compress.registry.model_source import ModelSource
from compress.stages import STAGES, Input, Inputs, Port

if TYPE_CHECKING:
    from compress.ranks.group import TorchRanks


def share(kind: str, spec: Spec, inputs: Inputs, ctx: Context) -> dict[str, Any]:
    """Return one stage as the JSON document that rank 0 sends to the others."""
    source = {**asdict(inputs.source), "path": str(inputs.source.path.resolve())}
    ports = {
        port.value: {"path": str(each.path.resolve()), "digest": each.digest}
        for port, each in inputs.ports.items()
    }
    kept = None if ctx.kept is None else str(ctx.kept.resolve())
    context = {"seed": ctx.seed, "scratch": str(ctx.scratch.resolve()), "offline": ctx.offline, "kept": kept}
    return {
        "kind": kind,
        "spec": spec.model_dump(mode="json", serialize_as_any=True),
        "source": source,
        "ports": ports,
        **context,
    }


def follow(ranks: "TorchRanks", device: str) -> None:
    """Take part in whatever rank 0 runs, until it is done.

    Raises:
        CompressError: of the stage, or RankStopped when another rank failed.
    """
    for work in ranks.receive_work():
        stage = STAGES.get(work["kind"])
        assert stage.on_all_ranks is not None, "rank 0 dispatches only stages that all ranks take part in"
        source = ModelSource(**{**work["source"], "path": Path(work["source"]["path"])})
        inputs = Inputs(
            source,
            {Port(port): Input(Path(each["path"]), each["digest"]) for port, each in work["ports"].items()},
        )
        kept = None if work["kept"] is None else Path(work["kept"])
        context = Context(
            device, work["seed"], Path(work["scratch"]), offline=work["offline"], ranks=ranks, kept=kept
        )
        stage.on_all_ranks(stage.spec.model_validate(work["spec"]), inputs, context)

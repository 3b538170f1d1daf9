"""`compress bench --profile`: where the time of the engines in this process goes."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from compress.cli.output import note, table
from compress.errors import UsageError

if TYPE_CHECKING:
    from compress.runtime.engine import Engine
    from compress.validate.load.target import LoadTarget
    from compress.validate.load.workload import Workload


def check_directory(path: Path, *, has_urls: bool) -> None:
    """Raise UsageError where the directory of traces exists, or a target is a server."""
    if has_urls:
        raise UsageError("--profile looks into engines of this process; leave URLs out.")
    if path.exists():
        raise UsageError(f"{path} exists; name a new directory with --profile.")


def profile_targets(
    targets: "Mapping[str, LoadTarget]", workload: "Workload", directory: Path
) -> list[dict[str, Any]]:
    """Return the profiles of prefill and decode of each engine, at the median prompt of a workload. Their
    traces are in the directory, which is new.
    """
    import statistics

    from compress.machine import measure_bandwidth, measure_matmul_rate
    from compress.validate.load.engine_target import EngineTarget
    from compress.validate.profile.phases import Rates, profile_engine

    directory.mkdir(parents=True, exist_ok=True)
    found = []
    prompt_tokens = round(statistics.median(len(each.prompt) for each in workload.requests))
    for name, target in targets.items():
        engine = cast("Engine", cast(EngineTarget, target).engine)
        rates = Rates(measure_bandwidth(engine.device), measure_matmul_rate(engine.device, engine.dtype))
        phases = profile_engine(
            engine,
            rates,
            prompt_tokens=prompt_tokens,
            batch_size=len(workload.requests),
            traces=directory / re.sub(r"[^\w.-]+", "-", name),
        )
        found += [{"target": name, **each.as_json()} for each in phases]
    note(f"traces in {directory}, for https://ui.perfetto.dev")
    return found


def profile_text(profiles: Sequence[Mapping[str, Any]]) -> str:
    """Return a table and a sentence for each profile."""
    blocks = []
    for each in profiles:
        size = f"{each['batch_size']} x {each['prompt_tokens']} tokens"
        head = [f"{each['target']}, {each['phase']}, {size}", "ms", "share", "floor ms", "bound"]
        body = [
            [
                op["kind"],
                f"{op['ms']:.3f}",
                f"{100 * op['share']:.0f} %",
                "–" if op["floor_ms"] is None else f"{op['floor_ms']:.3f}",
                op["bound"] or "–",
            ]
            for op in each["ops"]
        ]
        whole = [f"whole, {each['gap_ms']:.3f} ms of it without a kernel", f"{each['ms']:.3f}", "", "", ""]
        whole[3:] = [f"{max(each['memory_ms'], each['compute_ms']):.3f}", each["verdict"]]
        blocks.append(f"{table([head, *body, whole], right=range(1, 4))}\n{each['advice']}")
    return "\n\n".join(blocks)

"""The whole journey of a recipe: `steps` checks it, `run` loops over its stages, `job` is what one command
does from lock to push.
"""

from compress.pipeline.device import device_kind, pick_device, visible_gpus
from compress.pipeline.follow import follow
from compress.pipeline.job import Job, execute
from compress.pipeline.lookup import Lookup, lookups
from compress.pipeline.reached import reached, run_directories
from compress.pipeline.result import Result
from compress.pipeline.run import (
    RunOptions,
    RunResult,
    StepResult,
    Watch,
    publish,
    run,
    unchanged,
)
from compress.pipeline.run_dir import LOCK_NAME, RunDir
from compress.pipeline.steps import (
    Step,
    build_steps,
    check_selection,
    estimates,
    lock_of,
    reads_calibration,
    resolve_source,
    shapes_of,
)

__all__ = [
    "LOCK_NAME",
    "Job",
    "Lookup",
    "Result",
    "RunDir",
    "RunOptions",
    "RunResult",
    "Step",
    "StepResult",
    "Watch",
    "build_steps",
    "check_selection",
    "device_kind",
    "estimates",
    "execute",
    "follow",
    "lock_of",
    "lookups",
    "pick_device",
    "publish",
    "reached",
    "reads_calibration",
    "resolve_source",
    "run",
    "run_directories",
    "shapes_of",
    "unchanged",
    "visible_gpus",
]

"""The peak memory of one stage, run in a process of its own:

python -m tests.support.stage_peak KIND SPEC MODEL TOKENS SCRATCH
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.registry.model_source import ModelSource
from compress.stages import STAGES, Input, Inputs, Port


def peak_bytes_of_stage(kind: str, spec: dict[str, Any], model: Path, tokens: Path, scratch: Path) -> int:
    """Return the peak resident size of the stage in a new process, less the size after its imports."""
    paths = [str(each) for each in (model, tokens, scratch)]
    return alone("tests.support.stage_peak", kind, json.dumps(spec), *paths)


def alone(module: str, *arguments: str) -> int:
    """Return the number that a module prints when it is run in a process of its own."""
    command = [sys.executable, "-m", module, *arguments]
    root = Path(__file__).parents[2]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # each thread would have buffers of its own
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=root, env=environ)
    return int(done.stdout)


def resident(line: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    (found,) = (each for each in status if each.startswith(f"{line}:"))
    return int(found.split()[1]) * 1024


def _run(kind: str, spec: str, model: Path, tokens: Path, scratch: Path) -> int:
    stage = STAGES.get(kind)
    parsed = stage.spec.model_validate_json(spec)
    for name in ("scratch", "out"):
        (scratch / name).mkdir(parents=True)
    inputs = Inputs(
        ModelSource(model, "random", None, ""), {Port.DENSE: Input(model, ""), Port.CALIB: Input(tokens, "")}
    )
    after_import = resident("VmRSS")
    stage.run(parsed, inputs, ArtifactWriter(scratch / "out"), Context("cpu", 0, scratch / "scratch"))
    return resident("VmHWM") - after_import


if __name__ == "__main__":
    kind, spec, *paths = sys.argv[1:]
    print(_run(kind, spec, *map(Path, paths)))

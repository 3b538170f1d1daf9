"""One row: a method of this project through the pipeline of a recipe, or another tool in its own environment,
with the same calibration tokens, the same evaluation text and the same comparison.

`seconds` is the quantizing alone, `cpu_seconds` the processor time of it: on a machine that others use too,
the second is the one to compare. This project's include writing the result, the other tools' do not.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress.artifact.workspace import Workspace
from compress.context import Progress, SilentProgress
from compress.data.model_tokens import TOKENS_NAME, read_tokens
from compress.export import open_weights
from compress.pipeline import RunOptions, StepResult, build_steps, resolve_source, run
from compress.recipe import Recipe, SourceMap, StageEntry
from compress.registry.model_source import ModelSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.validate.accuracy import measure_accuracy
from scripts.peer_quantize import TOOLS
from scripts.quality_bench.methods import METHODS, MIXED


class Quiet:
    """A watch that shows nothing; the table is the output."""

    def stage(self, kind: str, *, cached: bool) -> AbstractContextManager[Progress]:
        return contextlib.nullcontext(SilentProgress())


@dataclass(frozen=True)
class Setting:
    """What all rows of a table share."""

    model: str
    calibration: str
    evaluation: str
    num_samples: int
    seq_len: int
    eval_samples: int
    device: str

    def facts(self) -> dict[str, Any]:
        """The part of a row that says under which conditions it was measured."""
        return {
            "num_samples": self.num_samples,
            "seq_len": self.seq_len,
            "eval_tokens": self.eval_samples * self.seq_len,
            "calibration": self.calibration,
            "evaluation": self.evaluation,
        }

    def recipe(self, method: str, scheme: str, seed: int) -> Recipe:
        stages = [
            (
                "calibrate",
                {"data": self.calibration, "num_samples": self.num_samples, "seq_len": self.seq_len},
            ),
            ("quantize", {"scheme": MIXED.get(scheme, scheme), **METHODS[method]}),
            (
                "validate",
                {
                    "data": self.evaluation,
                    "num_samples": self.eval_samples,
                    "seq_len": self.seq_len,
                    "latency": None,
                },
            ),
        ]
        nowhere = SourceMap(file="bench_quality", positions={})
        entries = tuple(StageEntry(kind, idx, raw, nowhere) for idx, (kind, raw) in enumerate(stages))
        return Recipe(1, self.model, seed, entries, None, "bench_quality")


def measure(setting: Setting, method: str, scheme: str, seed: int, workspace: Workspace) -> dict[str, Any]:
    """A row of this project."""
    recipe = setting.recipe(method, scheme, seed)
    run_until(setting, recipe, workspace, until="calibrate")
    cpu_started_s = time.process_time()
    quantized = run_until(setting, recipe, workspace, until="quantize")
    cpu_seconds = time.process_time() - cpu_started_s
    evidence = run_until(setting, recipe, workspace, until="validate").artifact
    accuracy = json.loads(evidence.file("report.json").read_text())["accuracy"]
    return _row(setting, "compress", method, scheme, seed, accuracy, quantized.seconds, cpu_seconds)


def measure_peer(
    setting: Setting, name: str, seed: int, workspace: Workspace, python: Path
) -> dict[str, Any]:
    """A row of another tool; its checkpoint is read by this project's import.

    Raises:
        RuntimeError: the tool failed; the end of what it said.
    """
    tool = TOOLS[name]
    source = resolve_source(setting.model)
    tokens = (
        run_until(
            setting, setting.recipe("rtn", tool.scheme, seed), workspace, until="calibrate"
        ).artifact.path
        / TOKENS_NAME
    )
    with tempfile.TemporaryDirectory() as directory:
        question, answer, out = (
            Path(directory, each) for each in ("question.json", "answer.json", "checkpoint")
        )
        question.write_text(
            json.dumps({"tool": name, "model": str(source.path), "tokens": str(tokens), "out": str(out)})
        )
        command = [
            str(python),
            str(Path(__file__).parents[1] / "peer_quantize.py"),
            str(question),
            str(answer),
        ]
        done = subprocess.run(
            command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(
                f"{name} failed (exit code {done.returncode}); the end of what it "
                f"said:\n{done.stderr[-4000:]}"
            )
        said = json.loads(answer.read_text())
        accuracy = score(setting, source, out)
    versions = said["versions"]
    label = f"{tool.package} {versions[tool.package]}"
    row = _row(setting, label, tool.method, tool.scheme, seed, accuracy, said["seconds"], said["cpu_seconds"])
    return row | {"threads": said["threads"], "versions": versions}


def run_until(setting: Setting, recipe: Recipe, workspace: Workspace, *, until: str) -> StepResult:
    """The last step; those before it come from the workspace if they were run."""
    options = RunOptions(setting.device, until=until)
    return run(recipe, build_steps(recipe), resolve_source(setting.model), workspace, Quiet(), options).steps[
        -1
    ]


def score(setting: Setting, source: ModelSource, candidate: Path) -> dict[str, Any]:
    """What the validate stage measures of an artifact of ours, for a checkpoint of anybody."""
    device = torch.device(setting.device)
    tokens, _ = read_tokens(
        source,
        setting.evaluation,
        num_samples=setting.eval_samples,
        seq_len=setting.seq_len,
        seed=None,
        offline=False,
    )
    config = EngineConfig(max_batch_size=1, max_model_len=setting.seq_len)
    before, after = (
        Engine(open_weights(path), device=device, config=config) for path in (source.path, candidate)
    )
    with torch.inference_mode():
        scores = measure_accuracy(
            before.runner.score,
            after.runner.score,
            tokens.tokens_NS.to(device),
            num_bytes=tokens.num_scored_bytes,
        )
    return scores.as_json()


def _row(
    setting: Setting,
    tool: str,
    method: str,
    scheme: str,
    seed: int,
    accuracy: dict[str, Any],
    seconds: float,
    cpu_seconds: float,
) -> dict[str, Any]:
    kl = accuracy["kl_mean"]
    return {
        "tool": tool,
        "model": setting.model.removeprefix("builtin://"),
        "method": method,
        "scheme": scheme,
        "kl_mean": kl["value"],
        "kl_interval": [kl["lower"], kl["upper"]],
        "kl_p99": accuracy["kl_p99"]["value"],
        "top1": accuracy["top1"]["value"],
        "ppl_ratio": accuracy["ppl_ratio"]["value"],
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "threads": torch.get_num_threads(),
        "seed": seed,
        **setting.facts(),
    }

"""The recovery table: what quantization costs in points of public benchmarks, with intervals and verdicts,
and whether lm-eval on this engine gives what lm-eval gives on its own `hf` backend.

    python -m scripts.bench_tasks --folder DIR --out benchmarks/tasks.json

DIR holds arc_easy, hellaswag, piqa and lambada as .jsonl.xz (`eval_tasks.py` states their keys). One row a
task and way of quantizing, in the schema of `TaskRow`. With `--beside-hf N`, also one row a task with N
items of lm-eval on both backends: how many items agree, the largest difference of a log probability, and
the seconds of each.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.artifact.workspace import Workspace
from compress.export import open_weights
from compress.pipeline import pick_device, resolve_source
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.validate.parts.tasks import recovery_table
from compress.validate.tasks.compare import TaskRow, task_rows
from compress.validate.tasks.items import Item
from compress.validate.tasks.kinds.jsonl import CHUNK, JsonlTask
from compress.validate.tasks.kinds.lm_eval import LmEvalTask
from compress.validate.tasks.task import TaskScores
from compress.validate.tasks.text_model import TextModel
from scripts.bench_setup import write_results
from scripts.eval_tasks import BENCHMARKS
from scripts.quality_bench.measure import Setting, run_until

WAYS = {
    "fast": ("W4A16_G128", "rtn+search"),
    "balanced": ("W4A16_G128", "balanced"),
    "FP8": ("FP8_DYNAMIC", "rtn"),
}
"""Name of a row -> scheme and method (`quality_bench/methods.py`; `preset: fast` is rtn+search)."""
NUM_ITEMS = {"arc_easy": 100, "hellaswag": 50, "piqa": 200, "lambada": 150}


def text_model(path: Path, tokenizer_dir: Path, device: str) -> TextModel:
    """Return a model with an engine that holds the sequences of these tasks."""
    config = EngineConfig(max_batch_size=4, max_model_len=min(1024, open_weights(path).arch.max_position))
    return TextModel(Engine(open_weights(path), device=torch.device(device), config=config), tokenizer_dir)


def read_tasks(
    folder: Path, seed: int, num_items: Mapping[str, int]
) -> dict[str, tuple[JsonlTask, list[Item], int]]:
    """Return each task, the items of it that are drawn, and how many there are."""
    found = {}
    for name, benchmark in BENCHMARKS.items():
        task = JsonlTask.model_validate(benchmark.recipe_task(folder))
        items = task.items()
        order = np.sort(np.random.default_rng(seed).permutation(len(items))[: num_items[name]])
        found[name] = (task, [items[idx] for idx in order], len(items))
    return found


def answer(
    model: TextModel, tasks: Mapping[str, tuple[JsonlTask, list[Item], int]], label: str
) -> dict[str, np.ndarray]:
    """Return the scores of a model on all items."""
    scores = {}
    for name, (task, items, _) in tasks.items():
        started_s = time.perf_counter()
        found = []
        for start in range(0, len(items), CHUNK):
            found += [each.score for each in task.answers(model, items[start : start + CHUNK])]
        scores[name] = np.array(found)
        print(f"{label}, {name}: {time.perf_counter() - started_s:.0f} s", file=sys.stderr, flush=True)
    return scores


def recovery_rows(args: argparse.Namespace, device: str) -> dict[str, list[TaskRow]]:
    """Return the rows of all tasks for each way of quantizing."""
    source = resolve_source(args.model)
    tasks = read_tasks(args.folder, args.seed, {name: args.items or num for name, num in NUM_ITEMS.items()})
    before = answer(text_model(source.path, source.path, device), tasks, "source")
    setting = Setting(
        args.model, args.calibration, "builtin://python-eval", args.num_samples, args.seq_len, 2, device
    )
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        workspace = Workspace(Path(scratch))
        with workspace.lock():
            for way in args.ways:
                scheme, method = WAYS[way]
                recipe = setting.recipe(method, scheme, args.seed)
                quantized = run_until(setting, recipe, workspace, until="quantize").artifact
                after = answer(text_model(quantized.path, source.path, device), tasks, way)
                scores = {
                    name: TaskScores(BENCHMARKS[name].metric, before[name], after[name], num)
                    for name, (_, _, num) in tasks.items()
                }
                found[way] = task_rows(
                    scores, {name: task.margin for name, (task, _, _) in tasks.items()}, seed=args.seed
                )
    return found


def beside_hf(args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Return one row a task: items of lm-eval on this engine and on its own backend, one after the other."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    source = resolve_source(args.model)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for benchmark in BENCHMARKS.values():
            items = benchmark.rows(args.folder, args.beside_hf)
            benchmark.write_lm_eval_task(items, Path(scratch), prefix="shared")
        manager = TaskManager(include_path=scratch, include_defaults=False)
        model = text_model(source.path, source.path, device)
        theirs = HFLM(pretrained=str(source.path), device=device, batch_size=8, dtype="float32")
        for name, benchmark in BENCHMARKS.items():
            task = f"shared_{name}"
            started_s = time.perf_counter()
            mine = LmEvalTask(name=task).evaluate(model, seed=0, manager=manager)["samples"][task]
            between_s = time.perf_counter()
            other = simple_evaluate(
                model=theirs, tasks=[task], task_manager=manager, bootstrap_iters=0, log_samples=True
            )["samples"][task]
            ended_s = time.perf_counter()
            differences = [
                abs(float(a[0]) - float(b[0]))
                for ours, hf in zip(mine, other, strict=True)
                for mine_resp, hf_resp in zip(ours["resps"], hf["resps"], strict=True)
                for a, b in zip(mine_resp, hf_resp, strict=True)
            ]
            metric = benchmark.lm_eval_metric
            rows.append(
                {
                    "kind": "adapter",
                    "name": name,
                    "num_items": len(mine),
                    "num_equal": sum(a[metric] == b[metric] for a, b in zip(mine, other, strict=True)),
                    "largest_difference": max(differences),
                    "seconds": between_s - started_s,
                    "seconds_hf": ended_s - between_s,
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="directory of the four benchmarks")
    parser.add_argument("--model", default="builtin://reference")
    parser.add_argument("--calibration", default="builtin://python", help="calibration text: a data card")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument(
        "--items", type=int, default=None, help="of each task; by default fewer of longer ones"
    )
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument(
        "--beside-hf", type=int, default=0, help="items of each task on both backends of lm-eval"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument(
        "--commit", default=None, help="of the code that is measured; the checkout's by default"
    )
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    args = parser.parse_args()
    device = pick_device(args.device)
    rows: list[dict[str, Any]] = []
    for way, found in recovery_rows(args, device).items():
        scheme, method = WAYS[way]
        own = [row.as_json() for row in found]
        print(f"{way}\n{recovery_table(own)}\n", flush=True)
        rows += [{"kind": "recovery", "way": way, "scheme": scheme, "method": method, **each} for each in own]
    if args.beside_hf:
        rows += beside_hf(args, device)
    if args.out is not None:
        facts = {
            "model": resolve_source(args.model).name,
            "seed": args.seed,
            "num_samples": args.num_samples,
            "seq_len": args.seq_len,
            "threads": torch.get_num_threads(),
        }
        write_results(args.out, rows, device=torch.device(device), commit=args.commit, facts=facts)


if __name__ == "__main__":
    main()

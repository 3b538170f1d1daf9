"""How much faster tasks are scored by this engine than by a plain loop over transformers: the same items, one
after the other on the same device.

    python -m scripts.bench_scoring --folder DIR --out benchmarks/h200/scoring.json

DIR holds arc_easy, hellaswag, piqa and lambada as .jsonl.xz (`eval_tasks.py` states their keys). The loop is
what a script without a serving engine does: for each answer of each item one call of
`AutoModelForCausalLM` on question and answer, float32 log probabilities of the answer's tokens, no batch and
no cache. Both read the same tokens, of the bundled tokenizer, from the same checkpoint in the same dtype:
the bundled model, or random weights of a named shape, whose scores say nothing and whose time does.

Each side answers the items of a warm-up before it is timed. `num_equal` counts items with the same score;
in bfloat16 two answers that are nearly as likely may change places.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from compress.export import open_weights
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.random_source import RandomSource
from compress.pipeline import resolve_source
from compress.runtime.continuation_logprobs import ContinuationLogprob
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.validate.tasks.items import Item
from compress.validate.tasks.kinds.jsonl import JsonlTask
from compress.validate.tasks.text_model import TextModel
from scripts.bench_setup import markdown, model_dtype, parse_arguments, pick_device, read_arch, write_results
from scripts.bench_tasks import read_tasks
from scripts.eval_tasks import BENCHMARKS

BUNDLED = "builtin://reference"
WARM_UP_ITEMS = 8
LONGEST = 1024
"""Tokens of a question with its answer, at most."""
Tasks = Mapping[str, tuple[JsonlTask, list[Item], int]]
"""Each task by name, the items that are drawn of it, and how many there are."""


class PlainLoop:
    """A transformers model that scores texts one by one, with the tokens of a `TextModel`."""

    def __init__(self, model_dir: Path, text: TextModel, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device).eval()
        self._text = text
        self._device = device

    @torch.inference_mode()
    def score(self, pairs: Sequence[tuple[str, str]]) -> list[ContinuationLogprob]:
        """Return how likely each continuation is after its context, and whether it is the likeliest."""
        found = []
        for each in pairs:
            context, continuation = self._text.encode_pair(*each)
            ids = torch.tensor([[*context, *continuation]], device=self._device)
            logits_TV = self._model(ids).logits[0, len(context) - 1 : -1].float()
            target_T = ids[0, len(context) :]
            logprob = logits_TV.log_softmax(-1).gather(1, target_T.unsqueeze(1)).sum()
            greedy = bool((logits_TV.argmax(-1) == target_T).all())
            found.append(ContinuationLogprob(float(logprob), greedy))
        return found

    def generate(self, prompts: Sequence[str], params: object, *, stop: Sequence[str] = ()) -> list[object]:
        """Return nothing: no task here generates."""
        del params, stop
        assert not prompts
        return []


def timed(
    model: TextModel | PlainLoop, tasks: Tasks, device: torch.device
) -> dict[str, tuple[list[float], float]]:
    """Return the score of each item, and the seconds that all of a task took."""
    answering = cast(TextModel, model)
    for task, items, _ in tasks.values():
        task.answers(answering, items[:WARM_UP_ITEMS])
    found = {}
    for name, (task, items, _) in tasks.items():
        if device.type == "cuda":
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        scores = [each.score for each in task.answers(answering, items)]
        found[name] = scores, time.perf_counter() - started_s
    return found


def measure(model: str, path: Path, tokenizer: Path, tasks: Tasks) -> list[dict[str, Any]]:
    """Return one row a task of a checkpoint on disk, and one of all tasks."""
    device = pick_device()
    dtype = model_dtype(device)
    config = EngineConfig(
        dtype=dtype, max_batch_size=64, max_model_len=min(LONGEST, open_weights(path).arch.max_position)
    )
    text = TextModel(Engine(open_weights(path), device=device, config=config), tokenizer)
    ours = timed(text, tasks, device)
    loop = timed(PlainLoop(path, text, device, dtype), tasks, device)
    rows = []
    for name, (scores, seconds) in ours.items():
        others, seconds_loop = loop[name]
        num_equal = sum(a == b for a, b in zip(scores, others, strict=True))
        rows.append(row_of(model, name, len(scores), num_equal, seconds, seconds_loop))
    totals = (sum(row[key] for row in rows) for key in ("num_items", "num_equal", "seconds", "seconds_loop"))
    rows.append(row_of(model, "all", *totals))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def row_of(
    model: str, name: str, num_items: int, num_equal: int, seconds: float, seconds_loop: float
) -> dict[str, Any]:
    return {
        "tool": "compress",
        "model": model,
        "task": name,
        "num_items": num_items,
        "num_equal": num_equal,
        "seconds": seconds,
        "seconds_loop": seconds_loop,
        "times_faster": seconds_loop / seconds,
    }


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["model, task", "items", "same score", "s, this engine", "s, plain loop", "times faster"]
    cells = [
        [
            f"{row['model']}, {row['task']}",
            str(row["num_items"]),
            str(row["num_equal"]),
            f"{row['seconds']:.2f}",
            f"{row['seconds_loop']:.2f}",
            f"{row['times_faster']:.1f}",
        ]
        for row in rows
    ]
    return markdown(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=None, help="directory of the four benchmarks")
    parser.add_argument(
        "--models", nargs="+", default=[BUNDLED, "llama-3.1-8b"], help="the bundled model, or shapes"
    )
    parser.add_argument("--items", type=int, default=200, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--place", type=Path, default=None, help="a directory on a disk with room")
    parser.add_argument(
        "--commit", default=None, help="of the code that is measured; the checkout's by default"
    )
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    parser.add_argument(
        "--show", type=Path, default=None, help="print the tables of a result file and measure nothing"
    )
    args = parse_arguments(parser, lambda document: tables(document["rows"]))
    if args.folder is None:
        parser.error("--folder names the directory of the four benchmarks")
    device = pick_device()
    bundled = resolve_source(BUNDLED).path
    tasks = read_tasks(args.folder, args.seed, dict.fromkeys(BENCHMARKS, args.items))
    rows: list[dict[str, Any]] = []
    for model in args.models:
        started_s = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=args.place) as place:
            path = bundled
            if model != BUNDLED:
                path = Path(place)
                _, arch = read_arch(model)
                write_checkpoint(path, RandomSource(arch, device=device, dtype=model_dtype(device)))
            rows += measure(model, path, bundled, tasks)
        print(f"{model}: {time.perf_counter() - started_s:.0f} s", file=sys.stderr, flush=True)
    if args.out is not None:
        facts = {"seed": args.seed, "dtype": str(model_dtype(device)).removeprefix("torch.")}
        write_results(args.out, rows, device=device, commit=args.commit, facts=facts)
    print(tables(rows))


if __name__ == "__main__":
    main()

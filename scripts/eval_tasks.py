"""Four public benchmarks as tasks of both harnesses, from JSON lines of {query, choices, gold} or {context,
target}:
the keys of a recipe, and the task files that lm-eval reads.
"""

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUESTION = {"question": "query", "answer": "gold"}
LAST_WORD = {"question": "context", "reference": "target"}


def folder_at_hand(root: Path) -> Path | None:
    """Return the directory of the four benchmarks, in the checkout's `runs/eval` or beside the checkout;
    None where they are not at hand."""
    folders = (root / "runs" / "eval", root.parent / "shared" / "data" / "eval")
    return next((each for each in folders if (each / "arc_easy.jsonl.xz").is_file()), None)


@dataclass(frozen=True)
class Benchmark:
    """A file of a directory of benchmarks, and how its items are asked. `lm_eval_metric` is the one of
    lm-eval that scores as `metric` does."""

    name: str
    fields: dict[str, str]
    metric: str
    lm_eval_metric: str
    question: str = "{{query}}"
    delimiter: str = " "

    def rows(self, folder: Path, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the first rows of the file."""
        with lzma.open(folder / f"{self.name}.jsonl.xz", "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line, _ in zip(lines, range(limit or 1 << 30), strict=False)]

    def recipe_task(self, folder: Path, **keys: Any) -> dict[str, Any]:
        """Return the task as a recipe states it."""
        return {
            "kind": "jsonl",
            "name": self.name,
            "data": str(folder / f"{self.name}.jsonl.xz"),
            "fields": self.fields,
            "metric": self.metric,
            "delimiter": self.delimiter,
            **keys,
        }

    def write_lm_eval_task(self, rows: list[dict[str, Any]], out: Path, *, prefix: str) -> None:
        """Write the task file of lm-eval, `<prefix>_<name>.yaml`, and the items that it names."""
        name = f"{prefix}_{self.name}"
        data = out / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        is_choice = "choices" in rows[0]
        lines = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": "multiple_choice" if is_choice else "loglikelihood",
            "doc_to_text": self.question,
            "doc_to_target": "gold" if is_choice else "{{target}}",
            **({"doc_to_choice": "choices"} if is_choice else {}),
            "target_delimiter": self.delimiter,
            "metric_list": [{"metric": self.lm_eval_metric, "aggregation": "mean", "higher_is_better": True}],
            "metadata": {"version": 1},
        }
        (out / f"{name}.yaml").write_text(json.dumps(lines), encoding="utf-8")  # JSON is YAML


BENCHMARKS = {
    each.name: each
    for each in (
        Benchmark("arc_easy", QUESTION, "accuracy", "acc", "Question: {{query}}\nAnswer:"),
        Benchmark("hellaswag", QUESTION, "accuracy_per_char", "acc_norm"),
        Benchmark("piqa", QUESTION, "accuracy", "acc"),
        Benchmark("lambada", LAST_WORD, "greedy_match", "acc", "{{context}}", ""),
    )
}

"""The adapter of lm-eval, held to lm-eval's own `hf` backend item by item: the bundled model, in both.
Skipped where lm-eval is not installed; the public benchmarks where they are not at hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import EnvironmentUnfit, UsageError
from compress.export import open_weights
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.validate.tasks.kinds import lm_eval as kind
from compress.validate.tasks.kinds.lm_eval import LmEvalTask
from compress.validate.tasks.text_model import TextModel
from scripts.eval_tasks import BENCHMARKS, folder_at_hand

pytest.importorskip("lm_eval")
ROOT = Path(__file__).parents[4]
REFERENCE = ROOT / "compress" / "reference"
OWN = {
    "arc_easy": [
        {
            "query": f"In Python, what gives the {word} of a list?",
            "choices": [right, "import", "#"],
            "gold": 0,
        }
        for word, right in (("length", "len"), ("sum", "sum"), ("end", "x[-1]"), ("copy", "x[:]"))
    ],
    "lambada": [
        {"context": "for i in range(10):\n    print(", "target": "i"},
        {"context": "if x is not", "target": " None"},
        {"context": "import", "target": " os"},
    ],
}
GENERATED = {
    "task": "own_generated",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{context}}",
    "doc_to_target": "{{target}}",
    "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
ROLLING = {
    "task": "own_rolling",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{context}}{{target}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}


@pytest.fixture(scope="module")
def model() -> TextModel:
    config = EngineConfig(max_batch_size=4, max_model_len=1024)
    engine = Engine(open_weights(REFERENCE), device=torch.device("cpu"), config=config)
    return TextModel(engine, REFERENCE)


@pytest.fixture(scope="module")
def theirs() -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(REFERENCE), device="cpu", batch_size=4, dtype="float32")


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The four kinds of requests of lm-eval as small tasks, and the public benchmarks where they are at
    hand."""
    import json

    from lm_eval.tasks import TaskManager

    out = tmp_path_factory.mktemp("tasks")
    for name, rows in OWN.items():
        BENCHMARKS[name].write_lm_eval_task(rows, out, prefix="own")
    for each in (GENERATED, ROLLING):
        data = {"test": str(out / "own_lambada.jsonl")}
        text = json.dumps({**each, "dataset_kwargs": {"data_files": data}})
        (out / f"{each['task']}.yaml").write_text(text, encoding="utf-8")
    if SHARED is not None:
        for benchmark in BENCHMARKS.values():
            benchmark.write_lm_eval_task(benchmark.rows(SHARED, 5), out, prefix="shared")
    return TaskManager(include_path=str(out), include_defaults=False)


def run_theirs(theirs: Any, manager: Any, name: str) -> Mapping[str, Any]:
    from lm_eval.evaluator import simple_evaluate

    found: Mapping[str, Any] = simple_evaluate(
        model=theirs, tasks=[name], task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    return found


NAMES = ["own_arc_easy", "own_lambada", "own_generated", "own_rolling"]
SHARED = folder_at_hand(ROOT)
SHARED_NAMES = [f"shared_{name}" for name in BENCHMARKS]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SHARED_NAMES]


@pytest.mark.parametrize("name", [*NAMES, *SLOW])
@pytest.mark.one_in(16)
def test_every_item_is_that_of_the_hf_backend(name: str, model: TextModel, theirs: Any, manager: Any) -> None:
    if name in SHARED_NAMES and SHARED is None:
        pytest.skip("the public benchmarks are not at hand")
    ours = LmEvalTask(name=name).evaluate(model, seed=0, manager=manager)["samples"][name]
    other = run_theirs(theirs, manager, name)["samples"][name]
    assert len(ours) == len(other) > 0
    for mine, their in zip(ours, other, strict=True):
        for mine_resp, their_resp in zip(mine["resps"], their["resps"], strict=True):
            for a, b in zip(mine_resp, their_resp, strict=True):
                if isinstance(a, str):
                    assert a == b
                elif isinstance(a, tuple):
                    assert float(a[0]) == pytest.approx(float(b[0]), rel=1e-4, abs=1e-3)
                    assert a[1] == b[1]
                else:
                    assert float(a) == pytest.approx(float(b), rel=1e-4, abs=1e-3)
        for metric in mine["metrics"]:
            assert mine[metric] == pytest.approx(their[metric], rel=1e-4)


def test_scores_are_paired_by_item_and_the_metric_is_named(model: TextModel, manager: Any) -> None:
    own = LmEvalTask(name="mine", task="own_arc_easy")
    result = own.evaluate(model, seed=0, manager=manager)
    found = own.scores({"source": result, "candidate": result})
    assert found.metric == "acc"
    assert len(found.source_N) == 4
    assert found.drops.tolist() == [0.0] * 4
    with pytest.raises(UsageError, match="has no metric 'f1'; it has acc"):
        own.model_copy(update={"metric": "f1"}).scores({"source": result, "candidate": result})
    with pytest.raises(UsageError, match="no filter 'strict'"):
        own.model_copy(update={"filter": "strict"}).scores({"source": result, "candidate": result})


def test_a_metric_that_is_no_score_of_an_item_is_refused(model: TextModel, manager: Any) -> None:
    own = LmEvalTask(name="own_rolling", metric="bits_per_byte")
    result = own.evaluate(model, seed=0, manager=manager)
    with pytest.raises(UsageError, match="not a score from 0 to 1"):
        own.scores({"source": result, "candidate": result})


def test_a_task_that_cannot_run_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="downloads its data set"):
        LmEvalTask(name="arc_easy").check(offline=True)
    monkeypatch.setattr(kind, "installed_version", lambda package: None)
    with pytest.raises(EnvironmentUnfit, match=r"pip install 'compress\[eval\]'"):
        LmEvalTask(name="arc_easy").check()

"""The benchmark of pruning scores: every method it names is a recipe, and its table is about means and
spreads over seeds.
"""

from typing import Any

from compress.methods.prune import SCORERS
from compress.pipeline import build_steps
from scripts import bench_pruning


def row(method: str, kl: float, seed: int) -> dict[str, Any]:
    numbers = {"bpb_source": 0.8, "bpb_pruned": 0.8 + kl, "ppl_ratio": 1 + kl, "top1": 1 - kl, "seconds": 2.0}
    return {
        "model": "m",
        "heads_keep": 1.0,
        "ffn_keep": 0.75,
        "params_frac": 0.86,
        "method": method,
        "kl_mean": kl,
        "seed": seed,
        **numbers,
    }


def test_every_method_is_a_recipe_and_every_score_is_measured() -> None:
    setting = bench_pruning.Setting(
        "builtin://reference", "builtin://python", "builtin://python-eval", 3, 24, 2, "cpu"
    )
    assert {method.partition("+")[0] for method in bench_pruning.METHODS} == set(SCORERS.names())
    for method in bench_pruning.METHODS:
        _, prune = build_steps(bench_pruning.recipe(setting, method, {"heads": 1.0, "ffn": 0.75}, 1, 0))
        said = prune.spec.model_dump(mode="json", serialize_as_any=True)
        assert (said["score"]["kind"], said["compensate"]["kind"]) == (*method.split("+"), "none")[:2]
        assert said["heads"] is None


def test_the_table_has_means_and_the_spread_of_seeds_by_falling_kl() -> None:
    rows = [row("obs", 0.1, 0), row("random", 0.5, 0), row("random", 0.7, 1)]
    head, _, *lines = bench_pruning.table(rows).splitlines()
    assert "FFN x 0.75" in head
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| random", "| obs"]
    assert "| 0.6000 | 0.5000 .. 0.7000 |" in lines[2]

"""What the benchmarks of `scripts/` share: their files are shown, and wrong schemes end them at once."""

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from scripts import bench_setup
from scripts.bench_setup import schemes_of
from tests.support.scripts import run_script

ROOT = Path(__file__).parents[3]
FILES = {
    "bench_cpu_decode": "cpu_decode.json",
    "bench_delta_net": "delta_net_cpu.json",
    "bench_in_place": "h200/in_place.json",
    "bench_int8": "h200/int8.json",
    "bench_kernels": "h200/kernels.json",
    "bench_kv_attention": "h200/kv_attention.json",
    "bench_long_context": "h200/long_context.json",
    "bench_moe": "h200/moe.json",
    "bench_pruned_speed": "h200/pruned_speed.json",
    "bench_quantize": "h200/moe_quantize.json",
    "bench_runtime": "h200/runtime.json",
    "bench_scoring": "h200/scoring.json",
    "bench_serving": "h200/serving.json",
    "bench_speculative_cost": "h200/speculative_cost.json",
    "bench_streamed": "streamed.json",
    "bench_waterfall": "h200/waterfall.json",
}


def fail(*_: Any) -> NoReturn:
    raise AssertionError("it measures")


@pytest.mark.parametrize("name", FILES)
def test_a_result_file_is_shown_and_nothing_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "benchmarks" / FILES[name]
    monkeypatch.setattr(bench_setup, "read_arch", fail)
    shown = run_script(monkeypatch, capsys, name, "--show", path)
    table_lines = [line for line in shown.splitlines() if line.startswith("| ")]
    assert len(table_lines) > 1
    assert json.loads(path.read_text())["rows"]


@pytest.mark.parametrize("name", ["bench_moe", "bench_pruned_speed", "bench_runtime", "bench_serving"])
def test_an_unknown_scheme_ends_a_benchmark_before_it_begins(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match=r"unknown scheme 'FP8'\. Did you mean"):
        run_script(monkeypatch, capsys, name, "--schemes", "W4A16_G128", "FP8")


def test_a_text_names_the_scheme_of_linears_and_that_of_the_head() -> None:
    linears, head = schemes_of("W4A16_G128+FP8_DYNAMIC")
    assert (linears.name, head.name) == ("W4A16_G128", "FP8_DYNAMIC")  # type: ignore[union-attr]
    assert schemes_of("BF16") == schemes_of("dense") == (None, None)

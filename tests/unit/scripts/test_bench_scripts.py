"""The speed benchmarks on the CPU, at a tiny shape: every op is checked and timed, wrong results are seen,
files state their conditions.
"""

import dataclasses
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, quantize
from compress.kernels.problem import OPS, RECURRENCE_OPS, Op
from compress.kernels.select import candidates
from compress.validate.profile.steps import covered_us, short_name
from scripts import bench_indexers, bench_kernels, bench_quantize, bench_runtime
from scripts.bench_setup import read_arch
from scripts.kernel_bench import case, linear, timer
from tests.support.scripts import run_script
from tests.support.tiny_decoder import QWEN3, tiny_arch

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
SHAPE = {
    **QWEN3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
CONFIG = {**SHAPE, "attention_bias": False, "tie_word_embeddings": False}

PEER = """#!{python}
import json, shutil, sys
from pathlib import Path
from safetensors import safe_open
question = json.load(open(sys.argv[2]))
shutil.copy(sys.argv[2], "{seen}")
assert (Path(question["model"]) / "tokenizer.json").exists() and \
(Path(question["model"]) / "config.json").exists()
with safe_open(question["tokens"], "pt") as tokens:
    assert tokens.get_tensor("tokens").shape == (2, 16)
starts = [3, 0, 0]  # the first call of a process
runs = [{{"seconds": start + 2 * layers, "peak_device_bytes": None}} \
for start, layers in zip(starts, question["layers"])]
answer = {{"runs": runs, "package": "llmcompressor", "method": "gptq", \
"versions": {{"llmcompressor": "9.9"}}}}
json.dump(answer, open(sys.argv[3], "w"))
"""


class Bench:
    """Runs a benchmark on the tiny shape and reads its file."""

    def __init__(self, run: Callable[..., str], directory: Path) -> None:
        self._run = run
        self._directory = directory

    def __call__(self, name: str, *arguments: object, facts: dict[str, Any] = CONFIG) -> dict[str, Any]:
        config = self._directory / "tiny" / "config.json"
        out = self._directory / "results.json"
        config.parent.mkdir()
        config.write_text(json.dumps(facts))
        printed = self._run(name, "--model", config, "--commit", "abc", "--out", out, *arguments)
        document: dict[str, Any] = json.loads(out.read_text())
        assert self._run(name, "--show", out).strip() in printed
        assert document["commit"] == "abc"
        conditions = {"device", "driver", "clocks", "host", "versions", "date", "command"}
        assert {*conditions, "bandwidth_bytes_per_s"} <= document.keys()
        return document


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    return partial(run_script, monkeypatch, capsys)


@pytest.fixture
def bench(script: Callable[..., str], tmp_path: Path) -> Bench:
    return Bench(script, tmp_path)


@pytest.mark.slow
def test_every_op_is_checked_and_timed(bench: Bench) -> None:
    arguments = [
        "--m",
        "1",
        "3",
        "130",
        "--batch-sizes",
        "1",
        "3",
        "--contexts",
        "37",
        "--lengths",
        "70",
        "--alone",
    ]
    rows = bench("bench_kernels", *arguments)["rows"]
    of_few_models = {"router", "experts", "post_norm", "soft_cap", "head_linear"}
    of_few_models |= {*RECURRENCE_OPS.values()}  # whole models time them
    of_few_models |= {"latent_store", "latent_attention", "latent_heads"}  # `bench_experts`, `bench_moe`
    of_few_models |= {"hyper_mix", "hyper_spread", "gated_mix", "compressed_store", "compressed_attention"}
    of_few_models |= {op for op in OPS if op.startswith("altup_")}
    of_few_models |= {"index_store", "index_choice", "pool_choice", "block_choice"}
    assert {row["op"] for row in rows} == {*OPS, "sample"} - of_few_models
    assert all(row["passed"] for row in rows)
    assert all(row["us_p10"] <= row["us"] <= row["us_p90"] for row in rows)
    assert all(math.isclose(row["tb_per_s"] * row["us"], row["bytes"] / 1e6) for row in rows)
    unchecked = {
        (row["op"], row["name"]) for row in rows if row["tool"] == "compress" and row["error"] is None
    }
    assert unchecked == {("sample", "drawn"), ("sample", "top-p")}
    linears = [row for row in rows if row["op"] == "linear" and row["tool"] == "compress"]
    assert {row["scheme"] for row in linears} == {
        "F32",
        "FP8_DYNAMIC",
        "INT8_DYNAMIC",
        "W4A16_G128",
        "W4A16_G128_ASYM",
    }
    assert {(row["name"], row["m"]) for row in linears} == {
        (name, m)
        for name in ("qkv", "o", "gate_up", "down", "head")
        for m in (1, 3, 130)
        if (name, m) != ("head", 130)
    }
    assert all(row["same_bits"] for row in linears if row["m"] == 3)


@pytest.mark.slow
def test_the_runtime_is_measured_scheme_by_scheme(bench: Bench) -> None:
    schemes = ["dense", "W4A16_G128+FP8_DYNAMIC"]
    sizes = [
        "--batch-sizes",
        "1",
        "3",
        "--prompt-tokens",
        "20",
        "--output-tokens",
        "10",
        "--contexts",
        "40",
        "--ttft-tokens",
        "64",
    ]
    document = bench("bench_runtime", "--schemes", *schemes, *sizes, "--repeats", "2", "--baseline")
    rows = [row for row in document["rows"] if row["tool"] == "compress"]
    shown = ["F32", "W4A16_G128+FP8_DYNAMIC"]
    expected = [
        (scheme, batch, prompt)
        for scheme in shown
        for batch, prompt in ((1, 20), (3, 20), (1, 40), (3, 40), (1, 64))
    ]
    assert [(row["scheme"], row["batch_size"], row["prompt_tokens"]) for row in rows] == expected
    assert all(row["tpot_ms_p50"] > 0 and row["floor_ms"] > 0 and row["kernels"] for row in rows)
    steady = [row for row in rows if row["prompt_tokens"] != 64]
    assert all(0 < row["host_us_p50"] <= row["step_ms_p50"] * 1e3 for row in steady)
    assert all(
        row[f"{name}_p10"] <= row[f"{name}_p50"] <= row[f"{name}_p90"]
        for row in steady
        for name in ("step_ms", "host_us")
    )
    assert {row["max_step_tokens"] for row in rows} == {2048}
    assert [row["ttft_floor_ms"] > 0 for row in rows if row["prompt_tokens"] == 64] == [True, True]
    profiled = [(each["scheme"], each["phase"], each["batch_size"]) for each in document["profiles"]]
    assert profiled == [
        (scheme, *what) for scheme in schemes for what in (("decode", 1), ("decode", 3), ("prefill", 1))
    ]
    assert all(
        sum(kernel["share"] for kernel in each["kernels"]) <= 1 + 1e-9 for each in document["profiles"]
    )
    baseline = [row for row in document["rows"] if row["tool"] != "compress"]
    assert [row["tool"].rpartition("eager")[1] for row in baseline] == ["eager", ""]
    assert all(row["tpot_ms_p50"] > 0 for row in baseline)


def test_a_step_holds_all_prompts_of_a_batch_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))

    def budget(*options: str) -> int:
        monkeypatch.setattr(
            sys, "argv", ["bench_runtime.py", "--model", str(config), "--batch-sizes", "1", "9", *options]
        )
        bench = bench_runtime.Bench.__new__(bench_runtime.Bench)
        bench.args = bench_runtime.arguments()
        bench.device = CPU
        bench.dtype = torch.float32
        bench.arch = tiny_arch(CONFIG)
        return int(bench._engine("dense").config.max_step_tokens)

    sizes = ["--prompt-tokens", "300", "--output-tokens", "4", "--ttft-tokens", "8"]
    assert budget(*sizes) == 9 * 300
    assert budget(*sizes, "--max-step-tokens", "64") == 64


def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    out = tmp_path / "results.json"
    config.write_text(json.dumps(CONFIG))

    def cases(args: Any, bench: Any) -> Iterator[Any]:
        yield from bench_kernels.sample_cases(bench, [1])
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(bench_kernels, "cases", cases)
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--model", str(config), "--out", str(out)])
    with pytest.raises(RuntimeError, match="gone"):
        bench_kernels.main()
    assert len(json.loads(out.read_text())["rows"]) == 4


def test_a_wrong_result_and_an_unwritten_element_fail_their_case() -> None:
    bench = case.Bench(tiny_arch(CONFIG), CPU, torch.float32, (1,))
    right = next(iter(linear.linear_cases(bench, ["W4A16_G128"], ["o"])))
    rates = bench_kernels.Rates(1e9, 1e9)

    def passes(output: torch.Tensor) -> bool:
        wrong = dataclasses.replace(right, launches=[lambda: output])
        return bool(
            bench_kernels.measure(wrong, bench, rates, bench_kernels.BitsOfRows(), alone=False)["passed"]
        )

    output = right.launches[0]()
    assert passes(output)
    assert not passes(output * 1.001)
    assert not passes(output.clone().index_fill_(1, torch.tensor([5]), math.nan))
    with timer.poisoned_memory():
        assert bool(torch.empty(64).isnan().all())


def test_rows_that_change_bits_in_company_are_seen() -> None:
    facts: dict[str, Any] = {
        "tool": "compress",
        "name": "n",
        "scheme": "s",
        "m": 1,
        "kernel": "k",
        "num_bytes": 1,
        "flops": 1,
    }
    decode = case.Case(op="linear", launches=[], error=None, limit=0.0, **facts)
    bits = bench_kernels.BitsOfRows()
    rows = torch.randn(4, 64)
    assert bits.kept(decode, rows[:2]) is None
    assert bits.kept(decode, rows[:3]) is True
    assert bits.kept(decode, rows + 1e-6) is False
    assert bits.kept(dataclasses.replace(decode, phase="prefill"), rows) is None
    quantized = dataclasses.replace(decode, op="rms_norm")
    whole = quantize(rows, ActivationQuant())
    assert bits.kept(quantized, QuantizedRows(whole.values_TK[:1], whole.scale_T[:1])) is None
    assert bits.kept(quantized, whole) is True


def test_a_walk_is_cold_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timer.COLD_BYTES, "cpu", 1000)
    assert [timer.num_copies(num_bytes, CPU) for num_bytes in (1, 100, 300, 1000, 5000)] == [
        timer.MAX_LAUNCHES,
        10,
        4,
        1,
        1,
    ]
    order: list[int] = []
    timing = timer.time_launches(
        timer.walk([lambda: order.append(0), lambda: order.append(1)], at_least=3), CPU, replays=5
    )
    assert order == [0, 1] * 2 * (5 + timer.WARM_REPLAYS)
    assert timing.us_p10 <= timing.us <= timing.us_p90


def test_overlapping_kernels_cover_their_union_once() -> None:
    assert covered_us([(0.0, 4.0), (2.0, 5.0), (3.0, 4.0), (7.0, 8.0)]) == 6.0
    assert covered_us([]) == 0.0
    assert (
        short_name(
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(at::native::ReduceOp<float>)"
        )
        == "reduce_kernel"
    )
    assert (
        short_name("void at::native::(anonymous namespace)::indexSelect<float, 2>(at::TensorInfo<float>)")
        == "indexSelect"
    )
    assert short_name("_rms_norm") == "_rms_norm"


def test_mixtures_are_timed_with_the_experts_that_a_step_hits(bench: Bench) -> None:
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    facts = {**CONFIG, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **mixture}
    sizes = ["--batch-sizes", "1", "3", "--prompt-tokens", "4", "--output-tokens", "16", "--ttft-tokens", "8"]
    rows = bench("bench_moe", "--schemes", "BF16", "--repeats", "2", *sizes, facts=facts)["rows"]
    alone, together, prompt = rows
    assert alone["experts_hit"] == 2 < together["experts_hit"] <= 4
    assert alone["floor_ms"] < together["floor_ms"]
    assert prompt["prompt_tokens"] == 8
    assert all(row["ttft_ms_p50"] > 0 for row in rows)


def test_the_streams_of_gated_residuals_are_timed_in_both_phases(bench: Bench) -> None:
    rows = bench("bench_streams", "--shapes", "tiny", "--rows", "1", "3", "130", "--replays", "2")["rows"]
    assert [(row["rows"], row["phase"], row["op"]) for row in rows] == [
        (num_rows, phase, op)
        for num_rows, phase in ((1, "decode"), (3, "decode"), (130, "prefill"))
        for op in ("gated_mix", "hyper_spread")
    ]
    assert all(row["error"] <= row["limit"] < 1e-4 for row in rows)
    assert all(row["us_p10"] <= row["us"] <= row["us_p90"] for row in rows)


TINY_INDEXERS = ("tiny", "tiny blocks", "tiny pooled")


def test_choices_of_indexers_are_timed_in_tables_of_the_longest_context(bench: Bench) -> None:
    sizes = ["--contexts", "40", "200", "--rows", "1", "3", "--prompt-rows", "8", "--replays", "2"]
    rows = bench("bench_indexers", "--indexers", *TINY_INDEXERS, *sizes)["rows"]
    assert [(row["indexer"], row["context"], row["rows"], row["table_positions"]) for row in rows] == [
        (name, context, num_rows, context if num_rows == 8 else 200)
        for name in TINY_INDEXERS
        for context in (40, 200)
        for num_rows in (1, 3, 8)
    ]
    assert all(row["us_p10"] <= row["us"] <= row["us_p90"] for row in rows)
    assert all(row["margin"] < 1e-5 for row in rows)


@pytest.mark.parametrize("name", TINY_INDEXERS)
def test_a_choice_of_an_indexer_that_is_none_of_the_largest_is_found(name: str) -> None:
    case = bench_indexers.case_of(bench_indexers.INDEXERS[name], 200, 2, 200, torch.device("cpu"))
    op: Op = "index_choice" if name == "tiny" else "block_choice"
    reference = next(each for each in candidates(op) if each.name == "reference")

    def others(*arguments: Any, **options: Any) -> Tensor:  # whose queries point away
        slots: Tensor = reference.fn(-arguments[0], *arguments[1:], **options)
        return slots

    def twice(*arguments: Any, **options: Any) -> Tensor:
        slots: Tensor = reference.fn(*arguments, **options)
        return torch.zeros_like(slots) + slots[..., :1]

    assert bench_indexers.margin(case, reference) < 1e-5
    assert bench_indexers.margin(case, dataclasses.replace(reference, fn=others)) > bench_indexers.MARGIN
    assert bench_indexers.margin(case, dataclasses.replace(reference, fn=twice)) == math.inf


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(Exception, match="llama-3\\.1-8b"):
        read_arch("no-such-model")


@pytest.mark.slow
def test_kv_cache_formats_are_compared_with_the_cache_as_it_is(
    script: Callable[..., str], tmp_path: Path
) -> None:
    out = tmp_path / "kv.json"
    sizes = ["--num-samples", "2", "--seq-len", "48", "--calibration-samples", "2", "--outliers", "20"]
    printed = script("bench_kv", "--device", "cpu", *sizes, "--commit", "abc", "--out", out)
    healthy: dict[str, Any] = {}
    collapsing: dict[str, Any] = {}
    for row in json.loads(out.read_text())["rows"]:
        (healthy if row["model"] == "as it is" else collapsing)[row["kv_format"]] = row
    kl = {name: row["kl_mean"] for name, row in healthy.items()}
    assert (
        0
        < kl["BF16"]
        < kl["INT8_TOKEN_HEAD"]
        < kl["FP8_TOKEN_HEAD"]
        < kl["FP8_STATIC"]
        < kl["INT4_TOKEN_HEAD"]
    )
    assert (
        healthy["INT4_TOKEN_HEAD"]["bytes_per_token"]
        < healthy["FP8_STATIC"]["bytes_per_token"]
        == healthy["BF16"]["bytes_per_token"] / 2
    )
    assert collapsing["DENSE"]["kl_mean"] == 0
    assert collapsing["FP8_STATIC"]["kl_mean"] > 20 * kl["FP8_STATIC"]
    assert collapsing["FP8_STATIC"]["error"] > 0.9 > 0.03 > healthy["FP8_STATIC"]["error"]
    assert all(collapsing[name]["kl_mean"] == kl[name] for name in kl if name != "FP8_STATIC")
    assert all(name in printed for name in healthy)


@pytest.mark.slow
def test_memory_is_measured_beside_its_bound_and_its_plan(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    sizes = [
        "--hidden-size",
        "128",
        "--intermediate-size",
        "256",
        "--layers",
        "2",
        "--num-samples",
        "3",
        "--seq-len",
        "16",
    ]
    command = [sys.executable, "-m", "scripts.bench_memory", *sizes, "--methods", "rtn", "--out", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["layer_bytes"] == 2 * (4 * 128 * 128 + 3 * 128 * 256)
    assert row["bound_bytes"] == row["after_import_bytes"] + 6 * row["layer_bytes"] + 4 * 3 * 16 * 128
    assert row["after_import_bytes"] < row["peak_bytes"]
    assert math.isclose(row["disk_bytes"], row["disk_planned_bytes"], rel_tol=0.3)
    assert f"{row['bound_bytes'] / 1e6:.0f} MB" in done.stdout


@pytest.mark.slow
def test_streamed_scoring_is_measured_beside_its_plan(script: Callable[..., str], tmp_path: Path) -> None:
    config = tmp_path / "tiny" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    out = tmp_path / "streamed.json"
    sizes = ["--layers", "2", "--seq-len", "16", "--top-k", "8", "--place", tmp_path]
    printed = script("bench_streamed", "--model", config, *sizes, "--out", out)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["num_layers"] == 2
    assert 2 * row["num_params"] <= row["checkpoint_bytes"] < 2.1 * row["num_params"]
    assert row["read_bytes"] == 2 * row["num_params"]
    assert 0 < row["peak_bytes"] < 1 << 30
    assert script("bench_streamed", "--show", out).strip() in printed


@pytest.mark.slow
def test_other_tools_quantize_the_same_checkpoint_and_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool that takes three seconds to start and two a layer, as it says itself."""
    python = tmp_path / "bin" / "python"
    seen = tmp_path / "seen.json"
    python.parent.mkdir()
    python.write_text(PEER.format(python=sys.executable, seen=str(seen)))
    python.chmod(0o755)
    config = tmp_path / "config.json"
    out = tmp_path / "quantize.json"
    config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 7}))
    sizes = ["--num-samples", "2", "--seq-len", "16", "--scratch", str(tmp_path), "--out", str(out)]
    tool = ["--tools", "llmcompressor-gptq", "--peers", str(tmp_path)]
    for few, runs in (([], [7]), (["--peer-layers", "3"], [1, 1, 3])):
        monkeypatch.setattr(
            sys,
            "argv",
            ["bench_quantize.py", "--model", str(config), "--methods", "fp8-static", *tool, *sizes, *few],
        )
        bench_quantize.main()
        ours, theirs = json.loads(out.read_text())["rows"]
        assert (ours["tool"], theirs["tool"], theirs["method"]) == ("compress", "llmcompressor 9.9", "gptq")
        assert (
            [each["layers"] for each in theirs["measured"]] == json.loads(seen.read_text())["layers"] == runs
        )
        assert (theirs["seconds"], theirs["num_layers"]) == (3 + 2 * 7, 7)
        assert ours["artifact_bytes"] > 0
    assert "(from 3 layers)" in bench_quantize.table([ours, theirs])
    with pytest.raises(RuntimeError, match="peer_speed"):  # the environment of the tests lacks the tool
        bench_quantize.quantize_elsewhere(
            tmp_path, "llmcompressor-gptq", Path(sys.executable), CPU, tiny_arch(CONFIG), None
        )


def test_a_result_of_int8_with_other_bits_is_marked() -> None:
    pytest.importorskip("triton")
    bench_int8 = importlib.import_module("scripts.bench_int8")
    right = torch.ones(2, 3)
    for expected, passed in ((right, True), (right + 1, False), (None, True)):
        found = bench_int8.measure("_int_mm", lambda _: right, expected, CPU)
        assert found["passed"] is passed
    rows = [{"name": "o", "m": 512, "kernel": "a", "us": 1.0, "tflop_per_s": 2.0, "passed": False}]
    assert "1.0 2 WRONG" in bench_int8.table(rows)

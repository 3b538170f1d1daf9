"""The serving benchmark on the CPU, at a tiny shape: every experiment has rows, and the file is shown
again.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from scripts.bench_serving import EXPERIMENTS, LAW_SEED, OUTPUT_LAW, PROMPT_LAW, scaled
from scripts.slow_host import launch_points, slow_host
from tests.support.scripts import run_script
from tests.unit.scripts.test_bench_scripts import CONFIG

SMALL = [
    *(
        "--schemes",
        "dense",
        "--num-requests",
        4,
        "--length-scale",
        0.05,
        "--repeats",
        2,
        "--hosts",
        "plain",
        "slow",
    ),
    *("--max-running", 2, "--policies", "continuous", "static", "--max-step-tokens", 64),
    *("--ttft-tokens", 40, "--prefix-fracs", 0.0, 0.8, "--bursts", 2, "--ttft-repeats", 2),
    *("--heads", "none", "eagle3", "--k", 2),
    *(
        "--mixed-step-tokens",
        16,
        "--decodes",
        2,
        "--decode-prompt",
        8,
        "--decode-tokens",
        18,
        "--long-tokens",
        60,
    ),
    *("--trace-rate", 200),
]


@pytest.mark.slow
def test_every_experiment_has_rows_with_their_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tiny" / "config.json"
    out = tmp_path / "serving.json"
    config.parent.mkdir()
    config.write_text(json.dumps(CONFIG))
    printed = run_script(
        monkeypatch, capsys, "bench_serving", "--model", config, "--commit", "abc", "--out", out, *SMALL
    )
    assert run_script(monkeypatch, capsys, "bench_serving", "--show", out) == printed
    document = json.loads(out.read_text())
    assert {"device", "driver", "versions", "commit", "date", "command", "workload_digest"} <= document.keys()
    rows = {name: [row for row in document["rows"] if row["experiment"] == name] for name in EXPERIMENTS}
    assert {name: len(each) for name, each in rows.items()} == {
        "workload_512": 4,
        "ttft": 8,
        "itl_mixed": 2,
        "trace": 4,
    }
    assert {row["tool"] for row in document["rows"]} == {"compress"}
    for row in rows["workload_512"]:
        keys = {"scheme", "max_running", "policy", "host", "cached_tokens", "req_s", "output_tok_s"}
        assert keys | {"itl_ms_p50", "itl_ms_p99", "kv_utilization"} <= row.keys()
        assert row["failed"] == 0
        assert row["req_s_least"] <= row["req_s"] <= row["req_s_largest"]
    # Prompts depart at the end of a block, whose rows of a head depend on the token after it.
    for head, cached in (("none", 32), ("eagle3", 16)):
        cold, warm = (row for row in rows["ttft"] if (row["host"], row["head"]) == ("plain", head))
        assert (cold["prefix_tokens"], cold["cached_tokens"]) == (0, 0)
        assert (warm["prefix_tokens"], warm["cached_tokens"]) == (32, cached)
    for row in rows["itl_mixed"]:
        assert {"scheme", "policy", "step_tokens", "itl_ms_p50", "itl_ms_max", "long_ttft_ms"} <= row.keys()
    assert {row["request_rate"] for row in rows["trace"]} == {200.0}


def test_the_slow_host_ends_with_the_block() -> None:
    before = [getattr(owner, name) for owner, name in launch_points()]
    cores = os.sched_getaffinity(0)
    with slow_host():
        assert len(os.sched_getaffinity(0)) == 1
        assert torch.cuda.CUDAGraph.replay is not before[0]
        assert all(
            getattr(owner, name) is not old
            for (owner, name), old in zip(launch_points(), before, strict=True)
        )
    assert [getattr(owner, name) for owner, name in launch_points()] == before
    assert os.sched_getaffinity(0) == cores


def test_a_scaled_law_keeps_its_form() -> None:
    assert scaled(PROMPT_LAW, 1.0) is PROMPT_LAW
    assert scaled(OUTPUT_LAW, 0.05).most == 51
    assert LAW_SEED == 20261122

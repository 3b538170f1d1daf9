"""Several ranks on CPUs (gloo), each its own process: the same bits as one rank, one end for all of them."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import UsageError
from compress.ranks.group import Launch
from tests.support.processes import MAIN, Ended, run_each
from tests.support.slow import slow
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
METHODS: dict[str, dict[str, Any]] = {
    "data-free": {"scheme": "FP8_BLOCK", "round": {"kind": "rtn"}},
    "balanced": {"preset": "balanced", "refine": {"kind": "descent", "sweeps": 2}},
    "at once": {"preset": "balanced", "refine": {"kind": "descent", "sweeps": 2}, "true_sequential": False},
    "awq": {"smooth": {"kind": "awq", "num_ratios": 4}, "round": {"kind": "rtn", "scale": "hessian"}},
    "smoothquant": {
        "scheme": "INT8_DYNAMIC",
        "smooth": {"kind": "smoothquant"},
        "round": {"kind": "gptq"},
        "kv_cache": "fp8",
    },
}


def stages(method: str, num_samples: int = 8) -> list[dict[str, Any]]:
    return [{**RECIPE["stages"][0], "num_samples": num_samples}, {"kind": "quantize", **METHODS[method]}]


def launch(size: int, *argv: object, code: str = MAIN) -> list[Ended]:
    """What every rank did: started as torchrun starts them, without its supervision."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return run_each([{**job, "RANK": str(rank)} for rank in range(size)], *argv, code=code)


def digest(result: Ended | subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return str(json.loads(result.stdout)["artifact"]["digest"])


def alone(command: Command, path: Path) -> str:
    code, out, err = command("run", path, "--workspace", "alone", "--json")
    assert code == 0, err
    return str(json.loads(out)["artifact"]["digest"])


@pytest.mark.parametrize(
    ("size", "method"),
    [
        (2, "balanced"),
        (3, "awq"),
        (2, "data-free"),
        slow(2, "at once"),
        slow(2, "smoothquant"),
    ],
)
@pytest.mark.one_in(3)
def test_ranks_give_the_artifact_of_one_rank(
    size: int, method: str, recipe: Recipe, command: Command
) -> None:
    path = recipe(stages=stages(method, num_samples=11))
    results = launch(size, "run", path, "--workspace", "many", "--json")
    assert digest(results[0]) == alone(command, path)
    assert [(each.returncode, each.stdout, each.stderr) for each in results[1:]] == [(0, "", "")] * (size - 1)


@pytest.mark.slow
def test_a_rank_without_a_sample_still_takes_groups(recipe: Recipe, command: Command) -> None:
    path = recipe(stages=stages("balanced", num_samples=2))
    assert digest(launch(3, "run", path, "--workspace", "many", "--json")[0]) == alone(command, path)


STOPPED_AT_FIRST = """
import os, signal, sys
import compress.calibrate.sequential as sequential
from compress.cli.app import main
store = sequential.store_layer
def stored(out, idx, *rest):
    store(out, idx, *rest)
    if idx == 0:
        os.kill(os.getpid(), signal.SIGTERM)
sequential.store_layer = stored
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ranks_stop_together_and_another_number_of_them_goes_on(
    recipe: Recipe, command: Command, work: Path
) -> None:
    path = recipe(stages=stages("balanced"))
    stopped = launch(2, "run", path, "--workspace", "many", code=STOPPED_AT_FIRST)
    assert [each.returncode for each in stopped] == [128 + signal.SIGTERM] * 2
    assert "resumes here" in stopped[0].stderr
    assert stopped[1].stderr == ""
    assert len(list((work / "many").glob("scratch/*/layer-*.safetensors"))) == 1
    assert digest(launch(3, "run", path, "--workspace", "many", "--json")[0]) == alone(command, path)


FAILS_ON_RANK_1 = """
import os, signal, sys
import compress.calibrate.true_sequential as true_sequential
from compress.cli.app import main
from compress.errors import UnsupportedFormat
def fails(*args, **kwargs):
    {how}
if os.environ["RANK"] == "1":
    true_sequential.observe = fails
sys.exit(main(sys.argv[1:]))
"""


def test_a_rank_that_fails_ends_all_with_its_sentence_and_code(recipe: Recipe) -> None:
    code = FAILS_ON_RANK_1.format(how="raise UnsupportedFormat('the disk of this rank lacks a shard.')")
    results = launch(3, "run", recipe(stages=stages("balanced")), code=code)
    assert [each.returncode for each in results] == [2, 2, 2], [each.stderr for each in results]
    assert results[0].stderr.splitlines()[-1] == "compress: rank 1 of 3: the disk of this rank lacks a shard."
    assert [each.stderr for each in results[1:]] == ["", ""]


def test_a_rank_that_is_killed_ends_all(recipe: Recipe) -> None:
    results = launch(
        2,
        "run",
        recipe(stages=stages("balanced")),
        code=FAILS_ON_RANK_1.format(how="os.kill(os.getpid(), signal.SIGKILL)"),
    )
    assert [each.returncode for each in results] == [4, -signal.SIGKILL]
    assert "lost another rank" in results[0].stderr.splitlines()[-1]


def test_a_refused_recipe_is_refused_once(recipe: Recipe) -> None:
    results = launch(2, "run", recipe(stages=[{"kind": "quantize", "scheme": "W5"}]))
    assert [each.returncode for each in results] == [2, 2]
    assert "W5" in results[0].stderr
    assert results[1].stderr == ""


@pytest.mark.slow
def test_torchrun_starts_them(recipe: Recipe, command: Command) -> None:
    path = recipe(stages=stages("balanced"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [*torchrun, "-m", "compress", "run", path, "--json"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert digest(done) == alone(command, path)


def test_more_ranks_than_shards_are_refused() -> None:
    environ = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with pytest.raises(UsageError, match="Start 8 at most"):
        Launch.from_environ({**environ, "WORLD_SIZE": "9"})
    assert Launch.from_environ({**environ, "WORLD_SIZE": "1"}) is None
    assert Launch.from_environ({**environ, "WORLD_SIZE": "8"}) == Launch(0, 8, 0)

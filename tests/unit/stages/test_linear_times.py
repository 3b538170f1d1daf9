"""What a linear takes: the table that ships is the measurement that it names, and beyond it bytes of the
kernel that would serve.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.family import family_of
from compress.models.known import known_config
from compress.models.linear_groups import LINEAR_GROUPS
from compress.quant.scheme import SCHEMES
from compress.runtime.deployment import Deployment
from compress.stages.budget.costs import GroupSchemes, costs_of
from compress.stages.budget.spec import Budget
from compress.stages.budget.tables import TABLES, known_devices, latency_table
from compress.stages.budget.times import TableTimes
from compress.stages.budget.timing import measure_linear_us
from scripts import latency_table as latency_table_script

ROOT = Path(__file__).parents[3]
BF16 = torch.bfloat16


def arch() -> Arch:
    config = known_config("llama-3.1-8b")
    assert config is not None
    return family_of(config).read_config(config)


def test_the_table_that_ships_is_what_the_script_makes_of_the_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["latency_table.py", str(ROOT / "benchmarks" / "h200" / "kernels.json"), str(tmp_path / "made.json")],
    )
    latency_table_script.main()
    made, shipped = (
        json.loads(path.read_text()) for path in (tmp_path / "made.json", TABLES / "nvidia-h200.json")
    )
    assert made == shipped
    assert known_devices() == ["NVIDIA H200"]


def test_a_shape_that_was_measured_has_its_measurement() -> None:
    table = latency_table("NVIDIA H200")
    rows = json.loads((ROOT / "benchmarks" / "h200" / "kernels.json").read_text())["rows"]
    expected = {
        (row["scheme"], row["m"]): row["us"]
        for row in rows
        if (row["tool"], row["name"]) == ("compress", "down")
    }
    for name in ("FP8_DYNAMIC", "W4A16_G128"):
        for m in (1, 16):
            us, origin = table.linear_us("down", 4096, 14336, SCHEMES[name], rows=m, dtype=BF16)
            assert (us, origin) == (pytest.approx(expected[name, m], abs=1e-3), "table")
    assert table.linear_us("down", 4096, 14336, None, rows=1, dtype=BF16)[0] == pytest.approx(
        expected["BF16", 1], abs=1e-3
    )
    between = table.linear_us("down", 4096, 14336, None, rows=9, dtype=BF16)
    assert between == table.linear_us("down", 4096, 14336, None, rows=16, dtype=BF16)


def test_beyond_the_table_time_is_bytes_of_the_kernel_that_would_serve() -> None:
    table = latency_table("NVIDIA H200")

    def us(name: str | None, n: int, k: int) -> float:
        found, origin = table.linear_us("o", n, k, SCHEMES[name] if name else None, rows=1, dtype=BF16)
        assert origin == "bytes"
        return found

    assert us("W4A16_G128", 8192, 8192) < us("FP8_DYNAMIC", 8192, 8192) < us(None, 8192, 8192)
    assert us("W4A16_G128", 8192, 8192) < us("W4A16_G64", 8192, 8192) < us("FP8_DYNAMIC", 8192, 8192)
    assert us("FP8_DYNAMIC", 8192, 8192) < us("W8A16", 8192, 8192) * 1.01 < us(None, 8192, 8192)
    assert us("NVFP4_W4A4", 8192, 8192) == pytest.approx(us("NVFP4", 8192, 8192), rel=1e-6)
    assert us("MXFP8", 8192, 8192) == us(None, 8192, 8192)  # no kernel for its codes: dequantized
    assert us(None, 8192, 8192) - us(None, 4096, 8192) == pytest.approx(2 * 4096 * 8192 / table.bytes_per_us)


def test_bytes_come_close_to_what_was_measured() -> None:
    """The fit against the table's own rows: what is said of other shapes is worth that much."""
    table = latency_table("NVIDIA H200")
    for (_, n, k, scheme, m), us in table.us.items():
        if m == 1 and scheme in ("BF16", "FP8_DYNAMIC", "W4A16_G128"):
            num_bytes = SCHEMES[scheme].weight_bytes(n, k) if scheme in SCHEMES else 2 * n * k
            assert table.launch_us + num_bytes / table.bytes_per_us == pytest.approx(us, rel=0.3)


def test_a_device_without_a_table_names_those_with_one() -> None:
    with pytest.raises(UsageError, match=r"'NVIDIA A100'.*NVIDIA H200"):
        latency_table("NVIDIA A100")


@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("scheme", [None, "FP8_DYNAMIC", "W4A16_G128"])
def test_a_linear_group_is_timed_as_the_loader_places_it(name: str, scheme: str | None) -> None:
    config = known_config("llama-3.1-8b")
    assert config is not None
    small = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    tiny = family_of(config).read_config({**config, **small, "head_dim": 32})
    deployment = Deployment(torch.device("cpu"), torch.float32, max_batch_size=2, max_step_tokens=128)
    us = measure_linear_us(
        tiny, 0, LINEAR_GROUPS[name], SCHEMES[scheme] if scheme else None, rows=2, deployment=deployment
    )
    assert 0 < us < 1e6


@pytest.mark.parametrize("bits", ["W3A16", "W2A16"])
def test_fewer_than_four_bits_take_the_time_of_four(bits: str) -> None:
    """Kernels hold their codes in four bits, so that a budget of time buys nothing with them."""
    table = latency_table("NVIDIA H200")

    def us(name: str) -> float:
        return table.linear_us("down", 4096, 12288, SCHEMES[name], rows=1, dtype=BF16)[0]

    assert us(f"{bits}_G64") == us("W4A16_G64")


def test_the_linear_that_decode_absorbs_takes_the_time_of_16_bits_in_any_scheme() -> None:
    config = known_config("deepseek-v2-lite")
    assert config is not None
    arch = family_of(config).read_config(config)
    groups = {each.name: each for each in arch.layers[0].attention_groups}
    schemes = (SCHEMES["W4A16_G128"], SCHEMES["FP8_DYNAMIC"], None)
    own = [GroupSchemes(0, (groups[name],), schemes) for name in ("kv_up", "o")]
    budget = Budget.model_validate({"latency_ratio": 1.0, "device": "NVIDIA H200"})
    times = TableTimes(latency_table("NVIDIA H200"), 1)
    found = costs_of(budget, own, arch, outer_bytes=0, times=times)
    assert found.us is not None
    absorbed, o = found.us
    assert len(set(absorbed.values())) == 1
    assert len(set(o.values())) > 1

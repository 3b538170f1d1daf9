"""What `plan` says the layer-by-layer runner takes: laws that hold for every shape."""

import json
from pathlib import Path

import pytest

from compress.calibrate.estimate import Workload, flops, host_bytes, num_columns, peak_bytes
from compress.cli.plan import seconds_of
from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.config_file import read_config
from compress.models.family import family_of
from compress.models.known import known_config
from compress.pipeline import resolve_source
from compress.stages import STAGES, PlanFacts
from compress.stages.calibrate import Calibrate
from compress.stages.quantize.schemes import possible_schemes
from scripts import bench_quantize
from scripts.quality_bench import methods
from tests.support.tiny_decoder import tiny_arch

ROOT = Path(__file__).parents[3]
H200_FILES = (
    ROOT / "benchmarks" / "h200" / "quantize.json",
    ROOT / "benchmarks" / "h200" / "quantize_balanced.json",
)
H200_ROWS = [row for file in H200_FILES for row in json.loads(file.read_text())["rows"]]
CPU_ROWS = json.loads((ROOT / "benchmarks" / "quality_peers.json").read_text())["rows"]
MEASURED = [row for row in H200_ROWS if row.get("tool", "compress") == "compress"]
MEASURED_ON_A_CPU = [
    row for row in CPU_ROWS if row["tool"] == "compress" and row["method"] != "best"
]  # scales that train are another loop


def known(name: str) -> Arch:
    config = known_config(name)
    assert config is not None
    return family_of(config).read_config(config)


@pytest.mark.parametrize(
    ("keys", "linear"),
    [
        (
            {"scheme": "W4A16_G128"},
            "W4A16_G128 .* layers.0.attn.q .one of 12 such linears. has K = 192.*`dense` by overrides",
        ),
        ({"scheme": "W4A16_G64"}, "multiple of 64, and layers.0.attn.o .one of 2 .* has K = 96.*`dense`"),
        (
            {"scheme": {"kind": "mixed", "schemes": ["W4A16_G64", "W8A16"], "budget": {"size_ratio": 0.4}}},
            "multiple of 64, and layers.0.attn.o",
        ),
        ({"scheme": "W4A16_G32", "head": "FP8_BLOCK"}, "and head has K = 192.*leave out `head`"),
    ],
)
def test_a_linear_that_groups_do_not_divide_is_named_with_the_way_out(
    keys: dict[str, object], linear: str
) -> None:
    spec = STAGES.get("quantize").spec.model_validate(keys)
    arch = tiny_arch(
        hidden_size=192, intermediate_size=256, num_hidden_layers=2, num_attention_heads=6, head_dim=16
    )
    with pytest.raises(UsageError, match=linear):
        possible_schemes(spec, arch)
    assert possible_schemes(spec, arch.replace(hidden_size=256, layers=known("llama-3.1-8b").layers[:2]))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_does_not_grow_with_the_number_of_layers_and_time_does(device: str) -> None:
    small, deep = (Workload(tiny_arch(num_hidden_layers=num, vocab_size=8), 8, 32, device) for num in (3, 30))
    assert peak_bytes(small) == peak_bytes(deep)
    assert host_bytes(small) == host_bytes(deep)
    assert num_columns(deep) == 10 * num_columns(small)
    for few, many in zip(flops(small, products=4), flops(deep, products=4), strict=True):
        assert many == pytest.approx(10 * few)


def test_ranks_share_samples_and_groups() -> None:
    arch = known("llama-3.1-70b")
    works = [Workload(arch, 128, 2048, "cuda", ranks) for ranks in (1, 2, 4, 8)]
    peaks = [peak_bytes(work) for work in works]
    assert peaks == sorted(peaks, reverse=True)
    in_dtype, in_float32 = zip(*(flops(work, products=10) for work in works), strict=True)
    assert [in_dtype[0] / each for each in in_dtype] == pytest.approx([1, 2, 4, 8])
    assert list(in_float32) == sorted(in_float32, reverse=True)
    down = (
        2.0 * 10 * arch.num_layers * 8192 * 28672**2
    )  # the costliest group is one rank's, however many there are
    assert in_float32[2] == in_float32[3] == pytest.approx(down)


def test_a_model_larger_than_a_gpu_is_planned_on_one() -> None:
    arch = known("llama-3.1-70b")
    assert 2 * arch.num_params > 140e9
    assert peak_bytes(Workload(arch, 128, 2048, "cuda")) < 80e9


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row["method"])
def test_a_plan_is_within_thirty_percent_of_what_was_measured(row: dict[str, object]) -> None:
    stage = STAGES.get("quantize")
    calib = Calibrate(num_samples=row["num_samples"], seq_len=row["seq_len"])
    facts = PlanFacts(known(str(row["shape"])), "cuda", {"calibrate": calib})
    planned = stage.estimate(stage.spec.model_validate(bench_quantize.METHODS[str(row["method"])]), facts)
    assert facts.arch.num_layers == row["num_layers"]
    assert seconds_of(planned, "cuda") == pytest.approx(row["seconds"], rel=0.3)
    assert planned.peak_bytes == pytest.approx(row["peak_device_bytes"], rel=0.25)
    assert planned.disk_bytes == pytest.approx(row["artifact_bytes"], rel=0.02)


@pytest.mark.parametrize("row", MEASURED_ON_A_CPU, ids=lambda row: row["method"])
def test_a_plan_for_a_cpu_with_amx_is_within_thirty_percent_of_what_was_measured(
    row: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.calibrate.arithmetic.has_bfloat16_tiles", lambda: True)
    stage = STAGES.get("quantize")
    source = read_config(resolve_source("builtin://reference").path)
    facts = PlanFacts(
        family_of(source).read_config(source), "cpu", {"calibrate": Calibrate(num_samples=128, seq_len=512)}
    )
    settings = {"scheme": row["scheme"], **methods.METHODS[str(row["method"])]}
    spec = stage.spec.model_validate({**settings, "measure_error": True})  # as every method was when measured
    assert seconds_of(stage.estimate(spec, facts), "cpu") == pytest.approx(row["seconds"], rel=0.3)


def test_too_few_samples_to_tune_scales_are_refused_before_any_layer_is_rounded() -> None:
    stage = STAGES.get("quantize")
    spec = stage.spec.model_validate({"scheme": "W8A16", "tune": {"batch_size": 4}})
    arch = tiny_arch()
    with pytest.raises(UsageError, match=r"at least 4 calibration samples besides those held out.* are 4;"):
        stage.estimate(spec, PlanFacts(arch, "cpu", {"calibrate": Calibrate(num_samples=4, seq_len=16)}))
    stage.estimate(spec, PlanFacts(arch, "cpu", {"calibrate": Calibrate(num_samples=5, seq_len=16)}))

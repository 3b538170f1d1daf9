"""The `load` section of the validate stage: spec, gates, what `plan` expects, and both models measured."""

from typing import Any

import pytest
import torch

from compress.errors import UsageError
from compress.models.random_source import RandomSource
from compress.runtime.engine import Engine
from compress.stages import PlanFacts
from compress.stages.validate.estimate import check_lengths, check_time_gates, estimate
from compress.stages.validate.load import load_models
from compress.stages.validate.spec import Load, Validate, read_gates
from compress.validate.gates import evaluate
from tests.support.tiny_decoder import LLAMA, tiny_arch

CPU = {"cpu": 50.0}


def spec(load: dict[str, Any] | None, **others: Any) -> Validate:
    return Validate.model_validate({"load": load, **others})


def test_the_engine_has_room_for_the_longest_request() -> None:
    loaded = spec({"prompt_tokens": 900, "output_tokens": 100, "spread": 0.5, "max_batch_size": 24})
    config = loaded.engine_config(speculates=False)
    assert (config.max_batch_size, config.max_model_len) == (24, 4000)
    assert (
        spec({"prompt_tokens": 900, "output_tokens": 100}).engine_config(speculates=False).max_model_len
        == 1000
    )
    assert spec(None).engine_config(speculates=False).max_batch_size == 4


@pytest.mark.parametrize(
    ("load", "gates", "others", "message"),
    [
        (None, {"goodput": CPU}, {}, "needs requests under load"),
        (None, {"load.itl_ms_p99": CPU}, {}, "needs requests under load"),
        (None, {"itl_ms_p99": CPU}, {"latency": None}, "needs requests under load"),
        (None, {"tpot_ms_p50": CPU}, {"latency": None}, "'tpot_ms_p50' needs latency to be measured"),
        ({}, {"floor_frac": CPU}, {"latency": None}, "needs latency to be measured: leave out latency: null"),
        ({}, {"goodput": CPU}, {}, "needs limits of a good request"),
        ({}, {"load.goodput": CPU}, {}, "needs limits of a good request"),
    ],
)
def test_gates_on_what_no_load_measures_are_refused_by_plan(
    load: dict[str, Any] | None, gates: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_time_gates(spec(load, gates=gates, **others))


def test_gates_on_what_is_measured_pass_the_plan() -> None:
    check_time_gates(spec(None, gates={"itl_ms_p99": CPU, "kl_mean": 1.0}))
    check_time_gates(spec({}, gates={"ttft_ms_p99": CPU, "load.itl_ms_p99": CPU}))
    check_time_gates(spec({"goodput": {"ttft": 5.0}}, gates={"goodput": CPU}))


def test_only_what_is_measured_under_load_may_be_gated_there() -> None:
    with pytest.raises(UsageError, match="under load these are measured"):
        read_gates({"load.kl_mean": 1.0})
    with pytest.raises(UsageError, match=r"depends on the device: .* or --gate \w+@cuda-sm90="):
        read_gates({"goodput": 1.0})


def test_requests_that_are_longer_than_the_model_are_refused() -> None:
    arch = tiny_arch(LLAMA, max_position_embeddings=64)
    own = spec({"prompt_tokens": 16, "output_tokens": 4, "spread": 0.5}, seq_len=32, latency=None)
    with pytest.raises(UsageError, match=r"up to 80 tokens, and the model has 64"):
        check_lengths(own, arch, speculates=False)
    check_lengths(own.model_copy(update={"load": None}), arch, speculates=False)


def test_plan_counts_the_tokens_and_states_the_schedule() -> None:
    arch = tiny_arch(LLAMA, max_position_embeddings=1024)
    facts = PlanFacts(arch, "cpu", {})
    without = estimate(spec(None), facts)
    loaded = estimate(spec({"request_rate": 4.0, "num_requests": 20, "repeats": 2}), facts)
    tokens = 2 * 2 * 20 * (128 + 32)
    assert loaded.flops - without.flops == pytest.approx(2.0 * arch.num_params * tokens)
    assert "load: 4 runs of 20 requests, which arrive over 20 s" in loaded.notes


def test_both_models_serve_the_same_requests_and_gates_compare_the_candidate() -> None:
    arch = tiny_arch(LLAMA)
    cpu = torch.device("cpu")
    own = spec(
        {"num_requests": 4, "prompt_tokens": 6, "output_tokens": 3, "repeats": 2, "warmups": 1}, seq_len=8
    )
    config = Validate.model_validate({"latency": None, "seq_len": 8, "load": own.load}).engine_config(
        speculates=False
    )
    engines = {
        side: Engine(RandomSource(arch, device=cpu, dtype=torch.float32), device=cpu, config=config)
        for side in ("source", "dense", "candidate")
    }
    load = own.load
    assert isinstance(load, Load)
    source, candidate = load_models(engines, load, seed=0)
    assert (source.target, candidate.target) == ("source", "candidate")
    assert source.conditions == candidate.conditions
    for row in (source, candidate):
        assert [each["completed"] for each in row.repeats] == [4, 4]
        assert [each["total_output_tokens"] for each in row.repeats] == [12, 12]
    gates = read_gates({"ttft_ms_p99": {"cpu": 1e9}, "goodput": {"cpu": 1.0}})
    passed, absent = evaluate(gates, candidate.metrics(), device="cpu")
    assert passed.passed
    assert absent.note == "not measured"

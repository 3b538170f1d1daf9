"""Profiles of an engine on a CPU: kinds of ops, the gap, floors and verdict, and the files of traces."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from compress.errors import UsageError
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.validate.profile.ops import kind_of
from compress.validate.profile.phases import HOST_SHARE, Rates, profile_engine, verdict
from compress.validate.roofline import needed, total, work_of
from tests.support.tiny_source import tiny_source

RATES = Rates(1e9, 1e10)


def engine_of(**changes: object) -> Engine:
    config = EngineConfig(max_model_len=128, max_batch_size=4, **changes)  # type: ignore[arg-type]
    return Engine(tiny_source(), device=torch.device("cpu"), config=config)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("hopper_linear", "products"),
        ("sliced_product", "products"),
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)", "products"),
        ("_dequantize", "products"),
        ("aten::mm", "products"),
        ("attend_lanes", "attention"),
        ("merge_chunks", "attention"),
        ("_attention_prefill", "attention"),
        ("aten::scaled_dot_product_attention", "attention"),
        ("_rms_norm", "rows"),
        ("_rope_store", "rows"),
        ("_act_mul_quantize", "rows"),
        ("_quantize_rows", "rows"),
        ("route_rows", "routing"),
        ("_choose_rows", "routing"),
        ("combine", "routing"),
        ("_best", "sampling"),
        ("_end", "sampling"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("aten::index_select", "copies"),
        ("some_kernel", "other"),
    ],
)
def test_kernels_belong_to_kinds_of_ops(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_the_host_bounds_what_waits_for_it_and_else_the_higher_floor() -> None:
    assert verdict(HOST_SHARE, memory_ms=1, compute_ms=2) == "host"
    assert verdict(HOST_SHARE - 0.01, memory_ms=1, compute_ms=2) == "compute"
    assert verdict(0.0, memory_ms=2, compute_ms=1) == "memory"


def test_a_profile_has_both_phases_their_floors_and_traces(tmp_path: Path) -> None:
    engine = engine_of()
    prefill, decode = profile_engine(engine, RATES, prompt_tokens=40, batch_size=9, traces=tmp_path / "tiny")
    assert (prefill.phase, prefill.batch_size, prefill.prompt_tokens) == ("prefill", 1, 40)
    assert (decode.phase, decode.batch_size, decode.prompt_tokens) == ("decode", 4, 40)
    assert not engine.has_work
    assert engine.counts.reserved_positions == 0
    for each in (prefill, decode):
        assert each.ms > 0
        assert each.gap_ms == pytest.approx(max(0.0, each.ms - sum(op.ms for op in each.ops)))
        assert sum(op.share for op in each.ops) == pytest.approx(1)
        products = next(op for op in each.ops if op.kind == "products")
        parts = needed(
            work_of(engine), each.phase, batch_size=each.batch_size, prompt_tokens=40, context=40 + 10
        )
        assert products.floor_ms == pytest.approx(
            max(parts["products"].bytes / 1e9, parts["products"].flops / 1e10) * 1e3
        )
        assert max(each.memory_ms, each.compute_ms) == pytest.approx(max(RATES.bound_ms(total(parts))))
        assert each.advice
        assert each.trace == str(tmp_path / f"tiny.{each.phase}.json.gz")
        with gzip.open(each.trace) as file:
            events = json.load(file)["traceEvents"]
        assert any("mm" in str(event.get("name")) for event in events)


def test_what_is_profiled_fits_the_cache_and_the_longest_sequence() -> None:
    (_, decode) = profile_engine(engine_of(), RATES, prompt_tokens=1000, batch_size=1)
    assert decode.prompt_tokens == 128 - 20
    assert decode.trace is None
    engine = Engine(
        tiny_source(), device=torch.device("cpu"), config=EngineConfig(max_model_len=4, max_batch_size=1)
    )
    with pytest.raises(UsageError, match="ask for longer requests"):
        profile_engine(engine, RATES, prompt_tokens=2, batch_size=1)


def test_an_engine_with_requests_is_not_profiled() -> None:
    engine = engine_of()
    engine.add(Request("one", (1, 2, 3), SamplingParams(2)))
    with pytest.raises(UsageError, match="requests of its own"):
        profile_engine(engine, RATES, prompt_tokens=8, batch_size=1)

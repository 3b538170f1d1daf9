"""`compress doctor` lists the kernels of this machine, for people in few lines and as data in full."""

import json

import pytest

from compress.cli.app import main
from compress.cli.doctor import kernel_text
from compress.kernels.problem import EXPERT_OPS, OPS
from compress.quant.kv import INT4_HADAMARD, INT4_TOKEN_HEAD, KV_CACHES


def row(
    linear: str,
    scheme: str,
    *,
    op: str = "linear",
    kernel: str | None = "fast",
    phase: str = "decode",
    size: tuple[int, int] = (64, 32),
) -> dict[str, object]:
    m_range = [1, 128] if phase == "decode" else [1, 2048]
    return {
        "op": op,
        "linear": linear,
        "scheme": scheme,
        "n": size[0],
        "k": size[1],
        "m_range": m_range,
        "phase": phase,
        "activation": None,
        "kernel": kernel,
    }


def test_equal_rows_become_one_line() -> None:
    rows = [row(linear, scheme) for scheme in ("W4", "W8") for linear in ("qkv", "o")]
    rows += [row("qkv", "BF16", phase="prefill", kernel=None), row("rms_norm", "BF16", op="rms_norm")]
    unused = [{"op": "linear", "kernel": name, "reason": "needs sm_90"} for name in ("a", "b")]
    text = kernel_text({"device": "cuda", "dtype": "BF16", "model": "m", "rows": rows, "unused": unused})
    lines = [line.split() for line in text.splitlines()[2:]]
    assert lines == [
        ["linear", "decode", "1–128", "fast", "W4", "W8", "qkv", "o"],
        ["linear", "prefill", "1–2048", "none", "BF16", "qkv"],
        ["rms_norm", "decode", "1–128", "fast", "BF16"],
        ["not", "used", "here:", "needs", "sm_90"],
        ["linear:", "a,", "b"],
    ]


def test_a_name_with_several_sizes_is_listed_with_each() -> None:
    rows = [row("qkv", "W4"), row("qkv", "W4", size=(96, 32)), row("o", "W4")]
    rows += [row("attention", "BF16", op="attention", size=size) for size in ((128, 4), (256, 2))]
    text = kernel_text({"device": "cuda", "dtype": "BF16", "model": "m", "rows": rows, "unused": []})
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["linear", "decode", "1–128", "fast", "W4", "qkv", "64x32", "qkv", "96x32", "o"],
        ["attention", "decode", "1–128", "fast", "BF16", "128x4", "256x2"],
    ]


def test_the_document_has_every_op_and_the_text_its_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    served = json.loads(capsys.readouterr().out)["kernels"]
    assert {each["op"] for each in served["rows"]} == set(OPS) - set(EXPERT_OPS)
    assert all(each["kernel"] is not None for each in served["rows"])
    main(["doctor"])
    text = capsys.readouterr().out
    assert all(each["kernel"] in text for each in served["rows"])


def test_every_format_of_a_cache_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    rows = json.loads(capsys.readouterr().out)["kernels"]["rows"]
    formats = {"rope_store": set[str](), "attention_decode": set[str](), "attention_prefill": set[str]()}
    kernels = {(each["op"], each["scheme"]): each["kernel"] for each in rows if each["op"] in formats}
    for op, kv_format in kernels:
        formats[op].add(kv_format)
    dense = next(each["scheme"] for each in rows if each["op"] == "rms_norm")
    for op, listed in formats.items():
        assert listed == {dense, *KV_CACHES.values()}
        assert kernels[op, INT4_HADAMARD] == kernels[op, INT4_TOKEN_HEAD]


def test_a_model_of_experts_has_its_ops_and_sinks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--model", "gpt-oss-20b", "--json"])
    served = json.loads(capsys.readouterr().out)["kernels"]
    assert {"router", "experts"} <= {each["op"] for each in served["rows"]}
    assert all(each["sinks"] for each in served["rows"] if each["op"].startswith("attention"))
    text = kernel_text(served)
    assert "with sinks" in text
    assert "gpt-oss-20b" in text
    assert all(each["kernel"] in text for each in served["rows"])

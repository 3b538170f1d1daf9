"""The report is plain data, renders to one self-contained deterministic page, and shows only what was measured."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from compress.validate.accuracy import measure_accuracy
from compress.validate.card import render_markdown_card
from compress.validate.gates import evaluate, parse_gates
from compress.validate.latency import LatencyRow
from compress.validate.payoff import SpeedRow, predicted
from compress.validate.report import build_report, byte_size, label, number, percent, render_html
from compress.validate.roofline import Work, roofline
from compress.validate.speculation import AcceptanceRow, SpeculationEvidence
from compress.validate.stats import Estimate

KERNEL = {
    "linear": "attn.q+attn.k+attn.v",
    "op": "linear",
    "scheme": "W4A16_G128",
    "n": 1024,
    "k": 384,
    "m_range": [1, 4],
    "phase": "decode",
    "kernel": "reference.dequantized",
    "refused": {"w4.skinny": "needs CUDA"},
}


def latency_row(batch_size: int, tpot_ms: float) -> LatencyRow:
    estimate = Estimate(tpot_ms, tpot_ms * 0.9, tpot_ms * 1.1)
    numbers = dict.fromkeys(
        ("ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50", "tpot_ms_p95", "tpot_ms_p99"), estimate
    )
    gaps = dict.fromkeys(("itl_ms_p50", "itl_ms_p90", "itl_ms_p95", "itl_ms_p99"), tpot_ms)
    conditions = {
        "batch_size": batch_size,
        "prompt_tokens": 64,
        "output_tokens": 32,
        "repeats": 3,
        "warmups": 1,
        "prefix_cache": "cold",
    }
    return LatencyRow(
        **conditions,
        **numbers,
        **gaps,
        output_tokens_per_s=9.0,
        step_bytes=1000,
        floor_ms=tpot_ms / 4,
        floor_frac=0.25,
    )


def parts(*, kl_limit: float = 10.0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    source_VV = torch.randn(40, 40, generator=generator)
    noise_VV = torch.randn(40, 40, generator=generator)
    tokens_NS = torch.randint(40, (5, 30), generator=generator)
    accuracy = measure_accuracy(
        lambda t: source_VV[t], lambda t: (source_VV + 0.1 * noise_VV)[t], tokens_NS, num_bytes=700
    )
    gates = parse_gates({"kl_mean": kl_limit, "top1": 0.01, "tpot_ms_p50": {"cuda-sm90": 2.0}})
    rates = {"ttft_ms": 5.0, "tpot_ms": 2.0, "bandwidth_bytes_per_s": 1e9, "flops_per_s": 1e9}
    return {
        "recipe": {"digest": "sha256:aa", "text": "version: 1"},
        "artifact": {
            "digest": "sha256:bb",
            "scheme": "W4A16_G128",
            "source": "<script>alert(1)</script>",
            "sizes": [
                {"kind": "linears", "source_bytes": 8_000_000, "candidate_bytes": 2_000_000},
                {"kind": "head", "source_bytes": 1_000_000, "candidate_bytes": 1_000_000},
            ],
        },
        "layers": [
            {
                "layer": layer,
                "linear": linear,
                "error_before": 0.2 + layer,
                "error_after": 0.1 + layer,
                "damping": 0.01,
            }
            for layer in range(3)
            for linear in ("attn.q", "moe.experts.0.gate", "moe.experts.1.gate")
        ],
        "accuracy": accuracy,
        "latency_source": [latency_row(1, 4.0), latency_row(4, 5.0)],
        "latency_candidate": [latency_row(1, 2.0), latency_row(4, 3.0)],
        "kernels": [{**KERNEL, "layer": layer} for layer in (0, 1, 2, 5)]
        + [{**KERNEL, "layer": None, "linear": "head"}],
        "roofline": roofline(
            Work(1000, 10, 2000, 100, 4), batch_size=1, prompt_tokens=64, output_tokens=32, **rates
        ),
        "gates": evaluate(gates, accuracy.metrics(), device="cpu"),
        "calibration": {"data": "mixed", "overlap": "0 of 145 n-grams are shared"},
        "environment": {"device": "a processor", "device_key": "cpu", "memory_bytes": 4_000_000_000},
        "stages": [
            {"stage": "source", "size_bytes": 100, "ppl": 9.0, "batch_size": 1, "tpot_ms": 4.0},
            {"stage": "pruned", "size_bytes": 75, "kl_source": 0.5, "note": "elsewhere"},
            {
                "stage": "quantized",
                "size_bytes": 25,
                "ppl": 9.5,
                "kl_source": 0.25,
                "kl_before": 0.125,
                "batch_size": 1,
                "tpot_ms": 2.0,
            },
        ],
        "speculation": speculation(),
        "kv_cache": {
            "format": "FP8_STATIC",
            "warning": "range spent on <outliers>",
            "layers": [
                {
                    "layer": layer,
                    "cache": name,
                    "amax": 7.0,
                    "scale": 7 / 448,
                    "saturated_frac": 0.0,
                    "flushed_frac": 0.25,
                    "worst_head": 1,
                    "error": 0.03 * (1 + layer),
                    "error_token_head": 0.026,
                }
                for layer in range(6)
                for name in "kv"
            ],
        },
    }


def speculation() -> dict[str, Any]:
    """Two proposers, greedy and not, two categories and batch sizes."""
    acceptance = []
    speed = []
    for name in ("draft", "ngram"):
        for temperature in (1.0, 0.0):
            own = {"proposer": name, "temperature": temperature}
            for category in ("all", "code", "<prose>"):
                length = Estimate(2.5, 2.25, 2.75)
                acceptance.append(AcceptanceRow(**own, category=category, num_prompts=4, num_steps=90, acceptance_length=length,
                                                acceptance_rates=(0.8, 0.7), repeated_4grams=0.125))  # fmt: skip
            for batch_size in (1, 4):
                row = SpeedRow(**own, batch_size=batch_size, num_requests=4, num_equal=4 if temperature == 0 else None, tpot_ms_plain=10.0,
                               tpot_ms=5.0, speedup=Estimate(2.0, 1.5, 2.5), acceptance_length=2.5, draft_ms=1.0, verify_ms=11.0,
                               draft_frac=2 / 13)  # fmt: skip
                speed.append(predicted(row, (0.8, 0.7)) if name == "draft" else row)
    facts = {
        "k": 2,
        "rule": "rejection",
        "num_prompts": 2,
        "prompt_tokens": 8,
        "output_tokens": 16,
        "data": {"code": "c", "<prose>": "p"},
    }
    curve = [
        {"step": 1, "tokens": 100, "loss": 3.0},
        *({"step": n, "tokens": 100 * n, "kl": 1 / n, "acceptance_length": n} for n in (1, 2)),
    ]
    draft = {
        "kind": "model",
        "params": 5,
        "curve": curve,
        "before": {"kl": 1.5, "top1": 0.25},
        "after": {"kl": 0.5, "top1": 0.5},
    }
    return {**facts, **SpeculationEvidence(tuple(acceptance), tuple(speed)).as_json(), "draft": draft}


class Outline(HTMLParser):
    """Every tag and attribute of a page; refuses tags that do not nest."""

    VOID = frozenset({"meta", "br", "path", "use", "rect"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in {"meta", "br"}:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    page = render_html(build_report(title="A & B", **parts()))
    outline = Outline(page)
    assert not {"script", "link", "img", "iframe", "object", "embed", "image"} & set(outline.tags)
    assert outline.tags.count("svg") == 6
    references = [
        value
        for name, value in outline.attributes
        if name in {"src", "href", "xlink:href", "clip-path", "srcset"}
    ]
    assert references
    assert all(re.fullmatch(r"#\S+|url\(#\S+\)", reference) for reference in references)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_ids_are_unique_and_every_reference_has_one() -> None:
    outline = Outline(render_html(build_report(title="t", **parts())))
    ids = [value for name, value in outline.attributes if name == "id"]
    references = {
        value.strip("url()#")
        for name, value in outline.attributes
        if name in {"href", "xlink:href", "clip-path"}
    }
    assert len(ids) == len(set(ids))
    assert references <= set(ids)


def test_text_of_others_is_escaped() -> None:
    page = render_html(build_report(title="A & B", **parts()))
    assert "<title>A &amp; B</title>" in page
    assert "&lt;script&gt;alert(1)" in page


def test_the_same_report_gives_the_same_bytes() -> None:
    report = build_report(title="t", **parts())
    assert render_html(report) == render_html(json.loads(json.dumps(report)))
    assert report == build_report(title="t", **parts())


@pytest.mark.parametrize("absent", sorted(parts()))
def test_a_part_that_was_not_measured_is_absent(absent: str) -> None:
    kept = {name: part for name, part in parts().items() if name != absent}
    report = build_report(title="t", **kept)
    whole = build_report(title="t", **parts())
    Outline(render_html(report))
    changed = {key for key in whole if report.get(key) != whole[key]}
    follows = {"gates": {"verdict"}, "kv_cache": {"warnings"}}
    assert changed == {absent if absent in whole else absent.partition("_")[0]} | follows.get(absent, set())


def test_a_report_of_nothing_judges_nothing() -> None:
    report = build_report(title="t")
    assert report["verdict"]["passed"] is None
    assert "Measured, not judged" in render_html(report)


def test_a_warning_stands_at_the_head_of_page_and_card_and_the_worst_caches_are_listed() -> None:
    report = build_report(title="t", **parts())
    page = render_html(report)
    assert page.index("range spent on &lt;outliers&gt;") < page.index("Mean KL")
    listed = re.findall(r"<tr><td>(\d)</td><td>(keys|values)</td>", page)
    assert listed == [(str(layer), name) for layer in (5, 4, 3, 2) for name in ("keys", "values")]
    card = render_markdown_card(
        report, base_model="m/b", license_id="mit", serve_command="s", eval_command="e"
    )
    assert card.index("**Warning.** range spent") < card.index("## Recovery")


def test_every_number_of_speculation_and_of_stages_is_on_the_page() -> None:
    report = build_report(title="t", **parts())
    page = render_html(report)
    for words in (
        "<strong>16 of 16</strong>",
        "&lt;prose&gt;",
        "2.25 … 2.75",
        "80 % · 70 %",
        "1.50 … 2.50",
        "4 of 4",
        "Speculation pays at batch 4",
    ):
        assert words in page
    assert "Speculation pays" in report["speculation"]["speed"][0]["advice"]
    assert re.search(r"<td[^>]*>pruned</td>.*?75\.0 %.*?elsewhere", page)
    assert "warnings" in build_report(title="t", speculation={**speculation(), "num_equal": 15})


def test_the_verdict_counts_only_gates_that_apply_and_gives_the_reason() -> None:
    passed = build_report(title="t", **parts())["verdict"]
    failed = build_report(title="t", **parts(kl_limit=1e-9))["verdict"]
    assert (passed["passed"], passed["num_decided"], passed["num_not_applicable"], passed["reasons"]) == (
        True,
        2,
        1,
        [],
    )
    assert failed["passed"] is False
    assert len(failed["reasons"]) == 1
    assert "Mean KL" in failed["reasons"][0]
    assert "1e-09" in failed["reasons"][0]


def test_numbers_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        build_report(title="t", calibration={"loss": float("nan")})


def test_numbers_read_well() -> None:
    assert [number(value) for value in (0.0123456, 12.3456, 1234.56, 65536, 0.0, None)] == [
        "0.0123",
        "12.3",
        "1,235",
        "65,536",
        "0",
        "–",
    ]
    assert number(0.0000123) == "1.23 × 10⁻⁵"
    assert [byte_size(value) for value in (532, 532_480, 16_060_000_000)] == ["532 B", "532 kB", "16.1 GB"]
    assert [percent(value) for value in (0.5, 0.9999, 1.0, 1.42)] == [
        "50.0 %",
        "> 99.9 %",
        "100.0 %",
        "142.0 %",
    ]
    assert label("quantize.kl_mean") == "Mean KL, quantize alone"


def test_the_model_card_has_front_matter_the_hub_reads_and_the_numbers_of_the_report() -> None:
    report = build_report(title="small", **parts())
    commands = {"serve_command": "compress serve out", "eval_command": "compress validate out"}
    card = render_markdown_card(
        report, base_model="org/model-1.5", license_id="apache-2.0", language="no", **commands
    )
    _, front, body = card.split("---\n", 2)
    yaml = YAML(typ="safe")
    yaml.version = (1, 1)  # the hub reads YAML 1.1, where a bare `no` is false
    assert yaml.load(front) == {
        "base_model": "org/model-1.5",
        "base_model_relation": "quantized",
        "license": "apache-2.0",
        "language": "no",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["compressed"],
    }
    assert number(report["accuracy"]["kl_mean"]["value"]) in body
    assert "0 of 145 n-grams are shared" in body
    assert "compress serve out" in body
    assert "| draft | 2.50 [2.25, 2.75] | 80 % 70 % | × 2.00 |" in body
    assert "sha256:bb" in body
    tables = [line.count("|") for line in body.splitlines() if line.startswith("|")]
    assert set(tables[:7]) == {5}
    assert set(tables[7:-4]) == {7}
    assert set(tables[-4:]) == {5}


def test_a_card_of_a_report_with_little_in_it_has_no_empty_sections() -> None:
    card = render_markdown_card(
        build_report(title="t"), base_model="m/b", license_id="mit", serve_command="s", eval_command="e"
    )
    assert "## Recovery" not in card
    assert "## Latency" not in card
    assert "No gate was set" in card


def test_layers_with_the_same_kernels_are_one_line() -> None:
    page = render_html(build_report(title="kernels", **parts()))
    assert page.count("reference.dequantized") == 2
    assert "<td>0–2, 5</td>" in page
    assert "these times show neither the speed nor the memory" in page


def test_refusals_are_said_once_and_only_where_the_reference_served() -> None:
    rows = [
        {
            **KERNEL,
            "layer": layer,
            "refused": {"w4.skinny": "needs CUDA", "w4.wide": "needs CUDA", "w8": "for <8 bits"},
        }
        for layer in range(3)
    ]
    served = {**KERNEL, "layer": 3, "kernel": "w4.skinny", "refused": {"w4.quicker": "for K = 64"}}
    page = render_html(build_report(title="kernels", **{**parts(), "kernels": [*rows, served]}))
    assert page.count("needs CUDA") == 1
    assert "<li>w4.skinny, w4.wide: needs CUDA</li><li>w8: for &lt;8 bits</li>" in page
    assert "w4.quicker" not in page
    assert "stood aside" not in render_html(build_report(title="kernels", **{**parts(), "kernels": [served]}))

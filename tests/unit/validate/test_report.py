"""The report is plain data, becomes one self-contained deterministic page, shows only what was measured."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from compress.validate.display import byte_size, label, number, percent, ranges, signed_percent
from compress.validate.parts import PARTS, Part
from compress.validate.parts.gates import GatesPart
from compress.validate.parts.kernels import KernelsPart
from compress.validate.parts.latency import LatencyPart
from compress.validate.parts.provenance import ProvenancePart
from compress.validate.parts.pruning import rows_of_source, unit_scores
from compress.validate.parts.speculation import SpeculationPart
from compress.validate.report import LAYOUT, build_report, render_html
from tests.support.report_parts import KERNEL, latency_row, pruning, report_parts, speculation


def report(**changed: Part) -> dict[str, Any]:
    return build_report(title="A & B", parts=list((report_parts() | changed).values()))


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return report()


@pytest.fixture(scope="module")
def page(document: dict[str, Any]) -> str:
    return render_html(document)


@pytest.fixture(scope="module")
def pictures(document: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {name: dict.fromkeys(part.plots(document), "<svg></svg>") for name, part in PARTS.items()}


@pytest.fixture
def no_drawing(pictures: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave every picture empty: drawing takes most of the time of a page."""
    for name, part in PARTS.items():
        monkeypatch.setattr(part, "plots", staticmethod(lambda report, name=name: pictures[name]))


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


def test_every_part_is_found_and_has_its_place_and_its_template() -> None:
    parts = dict(PARTS.items())
    assert parts.keys() == report_parts().keys()
    assert len({part.page_order for part in parts.values()}) == len(parts)
    for name, part in parts.items():
        file = sys.modules[part.__module__].__file__
        assert file is not None
        assert Path(file).stem == name
        assert Path(file).with_suffix(".html.j2").is_file()


def test_the_document_has_the_layout_of_its_schema() -> None:
    names = list(report())
    assert names == [name for name in LAYOUT if name in names]
    assert set(LAYOUT) - set(names) == {"guided", "tuning", "data_free"}


def test_entries_of_other_parts_come_last() -> None:
    class Weather(Part):
        def as_json(self) -> dict[str, Any]:
            return {"weather": "fair"}

    document = build_report(title="t", parts=[Weather(), *report_parts().values()])
    assert list(document)[-1] == "weather"


def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    outline = Outline(page)
    assert not {"script", "link", "img", "iframe", "object", "embed", "image"} & set(outline.tags)
    assert outline.tags.count("svg") == 18
    references = [
        value
        for name, value in outline.attributes
        if name in {"src", "href", "xlink:href", "clip-path", "srcset"}
    ]
    assert references
    assert all(re.fullmatch(r"#\S+|url\(#\S+\)", reference) for reference in references)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_ids_are_unique_and_every_reference_has_one(page: str) -> None:
    outline = Outline(page)
    ids = [value for name, value in outline.attributes if name == "id"]
    references = {
        value.strip("url()#")
        for name, value in outline.attributes
        if name in {"href", "xlink:href", "clip-path"}
    }
    assert len(ids) == len(set(ids))
    assert references <= set(ids)


def test_colours_of_pictures_are_variables_that_the_page_defines_for_light_and_dark(page: str) -> None:
    style, _, body = page.partition("</style>")
    light, _, dark = style.partition("prefers-color-scheme: dark")
    used = set(re.findall(r"var\((--[a-z-]+)", page))
    assert {"--plot-source", "--plot-candidate", "--plot-floor", "--plot-ink"} <= used
    for colours in (light, dark):
        assert {name for name in used if name != "--rule"} <= set(re.findall(r"(--[a-z-]+):", colours))
    named = re.sub(r"var\(--plot-[a-z]+, #[0-9a-f]{6}\)", "", body)
    assert not re.search(r"(?:fill|stroke): ?#", named)


def test_paragraphs_and_lists_break_words_that_are_wider_than_a_narrow_window(page: str) -> None:
    """Names of kernels and gates may be longer than a line of a phone; the page must not scroll sideways."""
    styles = "".join(re.findall(r"<style>(.*?)</style>", page, re.DOTALL))
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", styles)
    wrapping = {
        each.strip()
        for names, rule in rules
        if "overflow-wrap: anywhere" in rule
        for each in names.split(",")
    }
    assert {"h1", "p", "li", "code"} <= wrapping


def test_text_of_others_is_escaped(page: str) -> None:
    assert "<title>A &amp; B</title>" in page
    assert "&lt;script&gt;alert(1)" in page


def test_the_same_report_gives_the_same_bytes(document: dict[str, Any], page: str) -> None:
    assert page == render_html(json.loads(json.dumps(document)))
    assert document == report()


@pytest.mark.usefixtures("no_drawing")
@pytest.mark.parametrize("absent", sorted(report_parts()))
@pytest.mark.one_in(16)
def test_a_part_that_was_not_measured_is_absent(absent: str) -> None:
    parts = report_parts()
    without = build_report(title="A & B", parts=[part for name, part in parts.items() if name != absent])
    whole = report()
    Outline(render_html(without))
    changed = {key for key in whole if without.get(key) != whole[key]}
    follows = {"experts": {"warnings"}, "kv_cache": {"warnings"}, "by_name": {"warnings"}}
    written = {name for name, entry in parts[absent].as_json().items() if entry}
    assert changed == written | follows.get(absent, set())


def test_a_report_of_nothing_judges_nothing() -> None:
    document = build_report(title="t")
    assert document["verdict"]["passed"] is None
    assert "Measured, not judged" in render_html(document)


def test_a_warning_is_at_the_head_of_the_page_and_the_worst_caches_are_listed(page: str) -> None:
    assert page.index("range spent on &lt;outliers&gt;") < page.index("Mean KL")
    listed = re.findall(r"<tr><td>(\d)</td><td>(keys|values)</td>", page)
    assert listed == [(str(layer), name) for layer in (5, 4, 3, 2) for name in ("keys", "values")]


@pytest.mark.slow
def test_an_unstable_latency_is_named_in_warning_headline_table_and_picture() -> None:
    reason = "repeats spread over 50 % of their median"
    shaky = LatencyPart([latency_row(1, 14.0)], [latency_row(1, 169.0, instability=reason)])
    document = report(latency=shaky)
    (warning,) = [each for each in document["warnings"] if "Latency" in each]
    assert f"candidate, batch 1: {reason}" in warning
    assert "source" not in warning
    row = document["latency"]["candidate"][0]
    assert (row["unstable"], row["tpot_instability"]) == (True, reason)
    page = render_html(document)
    assert page.index("Per token, batch 1") < page.index(">unstable<") < page.index("<h2>")
    assert "slower" not in page
    assert "candidate<br><span" in page
    assert "169, unstable" in page
    assert "12 × slower" in render_html(
        report(latency=LatencyPart([latency_row(1, 14.0)], [latency_row(1, 169.0)]))
    )


@pytest.mark.usefixtures("no_drawing")
def test_a_gate_without_evidence_says_so_on_the_page() -> None:
    (gate, *_) = [
        each
        for each in report_parts()["gates"].results  # type: ignore[attr-defined]
        if each.passed
    ]
    unproven = replace(
        gate, value=None, bound=None, passed=False, note="no evidence: 3 was measured, but ..."
    )
    document = report(gates=GatesPart([unproven]))
    assert document["verdict"]["reasons"] == ["Mean KL: no evidence: 3 was measured, but ...."]
    assert '<span class="pill fail">no evidence</span>' in render_html(document)


def test_every_number_of_speculation_and_of_stages_is_on_the_page(
    document: dict[str, Any], page: str
) -> None:
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
    assert "Speculation pays" in document["speculation"]["speed"][0]["advice"]
    assert re.search(r"<td[^>]*>pruned</td>.*?75\.0 %.*?elsewhere", page)


def test_numbers_in_a_list_are_shown_as_single_ones_are() -> None:
    facts = speculation()
    facts["draft"]["acceptance_of_steps"] = [0.5119090676307678, 0.25]
    shown = render_html(report(speculation=SpeculationPart(facts)))
    assert f"<dd>{number(0.5119090676307678)}, {number(0.25)}</dd>" in shown


def test_speculation_that_changes_tokens_or_proves_nothing_is_a_warning() -> None:
    facts = speculation()
    assert SpeculationPart(facts).warnings() == []
    (changed,) = SpeculationPart({**facts, "num_equal": 15}).warnings()
    assert "changed 1 of 16" in changed
    rows = [{**row, "unstable": True, "instability": "other work ran"} for row in facts["speed"]]
    (unstable,) = SpeculationPart({**facts, "speed": rows}).warnings()
    assert unstable.count("other work ran") == 1


def test_the_verdict_counts_only_gates_that_apply_and_gives_the_reason() -> None:
    passed = report()["verdict"]
    failed = build_report(title="t", parts=list(report_parts(kl_limit=1e-9).values()))["verdict"]
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
        build_report(title="t", parts=[ProvenancePart(calibration={"loss": float("nan")})])


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
    assert [signed_percent(value) for value in (0.123, -0.07, 0.001)] == ["+12 %", "−7 %", "0 %"]
    assert label("quantize.kl_mean") == "Mean KL, quantize alone"
    assert ranges([7, 0, 2, 1, 3]) == "0–3, 7"


def test_layers_with_the_same_kernels_are_one_line(page: str) -> None:
    assert page.count("reference.dequantized") == 2
    assert ">0–2, 5</td>" in page
    assert "these times show neither the speed nor the memory" in page


@pytest.mark.usefixtures("no_drawing")
def test_refusals_are_listed_once_and_only_where_the_reference_served() -> None:
    rows = [
        {
            **KERNEL,
            "layer": layer,
            "refused": {"w4.skinny": "needs CUDA", "w4.wide": "needs CUDA", "w8": "for <8 bits"},
        }
        for layer in range(3)
    ]
    served = {**KERNEL, "layer": 3, "kernel": "w4.skinny", "refused": {"w4.quicker": "for K = 64"}}
    page = render_html(report(kernels=KernelsPart([*rows, served])))
    assert page.count("needs CUDA") == 1
    assert "<li>w4.skinny, w4.wide: needs CUDA</li><li>w8: for &lt;8 bits</li>" in page
    assert "w4.quicker" not in page
    assert "replaced the reference" not in render_html(report(kernels=KernelsPart([served])))


def test_layers_and_units_of_later_rounds_have_the_numbers_of_the_source() -> None:
    facts = pruning()
    facts["rounds"][1]["layers"] = [
        {**facts["rounds"][0]["layers"][2], "layer": 0, "kept": [0], "num_units": 1}
    ]
    (row,) = rows_of_source(facts)
    assert row["source_layer"] == 1
    scores = unit_scores(facts)
    assert scores is not None
    assert scores.kept == [[False, False], [False, True], [False, True]]
    assert scores.shares[0] == [1 / 3, 1.0]

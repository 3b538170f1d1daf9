"""The model card: front matter that the hub reads, and the numbers of the report."""

import shlex
import subprocess

import pytest
from huggingface_hub import ModelCard
from ruamel.yaml import YAML

from compress.validate.card import render_markdown_card
from compress.validate.display import markdown_code, markdown_sentence, markdown_text, number, shell_word
from compress.validate.parts.latency import LatencyPart
from compress.validate.parts.provenance import ProvenancePart
from compress.validate.report import build_report
from tests.support.report_parts import latency_row, report_parts

REPORT = build_report(title="small", parts=list(report_parts().values()))


def card_of(report: dict[str, object], *, base_model: str = "m/b", language: str | None = None) -> str:
    return render_markdown_card(
        report,
        base_model=base_model,
        license_id="apache-2.0",
        serve_command="compress serve out",
        eval_command="compress validate out",
        language=language,
    )


def test_the_front_matter_is_what_the_hub_reads_and_the_text_has_the_numbers_of_the_report() -> None:
    _, front, body = card_of(REPORT, base_model="org/model-1.5", language="no").split("---\n", 2)
    yaml = YAML(typ="safe")
    yaml.version = (1, 1)  # the hub reads YAML 1.1, where a bare `no` is false
    assert yaml.load(front) == {
        "base_model": "org/model-1.5",
        "base_model_relation": "finetune",
        "license": "apache-2.0",
        "language": "no",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["compressed"],
    }
    assert number(REPORT["accuracy"]["kl_mean"]["value"]) in body
    assert "0 of 145 n-grams are shared" in body
    assert "compress serve out" in body
    assert "Pruned to 2 of 4 query heads, 1 of 2 KV heads" in body
    assert "| draft | 2.50 [2.25, 2.75] | 80 % 70 % | × 2.00 |" in body
    assert "sha256:bb" in body


def test_rows_of_a_table_have_as_many_cells_as_its_head() -> None:
    tables = [part.splitlines() for part in card_of(REPORT).split("\n\n") if part.startswith("|")]
    assert len(tables) == 9
    for rows in tables:
        assert len({row.count("|") for row in rows}) == 1


@pytest.mark.parametrize(
    "base_model",
    [
        "./a\n---\nlicense: mit",
        "---",
        "./out--- x",
        "a: b # c",
        "it's",
        "no",
        "1.5",
        "@x",
        "a\u2028b",
        "x " * 99,
        "\x85",
        'a"\\b',
        "a\x1b\u202eb",
    ],
)
def test_no_name_of_a_model_breaks_the_front_matter(base_model: str) -> None:
    read = ModelCard(card_of(REPORT, base_model=base_model))
    assert read.data.base_model == base_model
    assert read.data.license == "apache-2.0"
    assert read.text.strip().startswith("# small")


def test_a_warning_comes_before_the_numbers() -> None:
    card = card_of(REPORT)
    assert card.index("**Warning.** range spent") < card.index("## Recovery")


def test_an_unstable_latency_is_marked_in_the_table_and_below() -> None:
    parts = report_parts()
    parts["latency"] = LatencyPart(
        [latency_row(1, 14.0)], [latency_row(1, 169.0, instability="repeats spread over 90 %")]
    )
    card = card_of(build_report(title="t", parts=list(parts.values())))
    assert "| 1 | 169 | 14.0 | 169 (unstable) | 169 | 50 % | 25 % |" in card
    assert "**Times marked unstable prove nothing:**" in card
    assert (
        "**Warning.** Latency is unstable and proves nothing here (candidate, batch 1: repeats spread" in card
    )
    assert "unstable" not in card_of(REPORT)


def test_a_report_with_little_in_it_has_no_empty_sections() -> None:
    card = card_of(build_report(title="t"))
    assert "## Recovery" not in card
    assert "## Latency" not in card
    assert "No gate was set" in card


@pytest.mark.parametrize("base_model", ["./a\n---\nlicense: mit", "---", "a\r\n---\r\nb", "\x85a\n"])
def test_front_matter_is_one_line_a_fact_whatever_the_path(base_model: str) -> None:
    lines = card_of(REPORT, base_model=base_model).split("\n")
    end = lines.index("---", 1)
    assert [line.partition(":")[0] for line in lines[1:end] if not line.startswith("- ")] == [
        "base_model",
        "base_model_relation",
        "license",
        "library_name",
        "pipeline_tag",
        "tags",
    ]
    assert YAML(typ="safe").load("\n".join(lines[1:end]))["base_model"] == base_model
    assert "---" not in "".join(lines[1:end])


INJECTED = "t\n\n# Heading\n\n[click](https://evil) <img src=x> ![i](x) | `code` **bold** _it_ \x1b[31m"


def test_titles_of_data_cards_and_other_names_are_text_and_no_markdown() -> None:
    parts = report_parts()
    parts["provenance"] = ProvenancePart(calibration={"title": INJECTED, "num_samples": 8})
    report = build_report(title=INJECTED, parts=list(parts.values()))
    report["warnings"] = [INJECTED]
    report["artifact"] = {**report["artifact"], "scheme": INJECTED}
    card = card_of(report, base_model=INJECTED)
    body = card.split("---\n", 2)[2]
    assert "\n# Heading" not in body
    assert "\x1b" not in card
    outside_code = body.replace(markdown_code(INJECTED), "")
    for active in ("[click](", " <img", "![i]", "**bold", " _it"):
        assert active not in outside_code
    assert "- Title: t\\\\n" in body
    assert r"\[click\](https://evil) \<img src=x\>" in body


def test_markdown_shows_ordinary_text_as_it_is() -> None:
    for text in ("Python 3.11 library (PSF), 4 files", "kl_mean 0.1 is above 0.05", "org/model-1.5"):
        assert markdown_text(text) == markdown_sentence(text) == text
    assert markdown_code("W4A16_G128") == "`W4A16_G128`"
    assert markdown_code("a``b") == "``` a``b ```"
    assert markdown_sentence("run `compress *` _now_") == r"run `compress *` \_now\_"


@pytest.mark.parametrize("word", ["model", "a b", "$(touch x)", "it's", "a;b", "-x", "a\n```\nb", "t\tb'\\n"])
def test_a_word_of_a_printed_command_is_that_word_in_a_shell(word: str) -> None:
    written = shell_word(word)
    assert "\n" not in written
    done = subprocess.run(
        ["bash", "-c", f"printf '%s' -- {written}"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"--{word}"
    if "\n" not in word and "\t" not in word:
        assert shlex.split(written) == [word]

"""The comparison as one self-contained HTML page and as a table for a terminal: both are made of the
document alone.
"""

from collections.abc import Mapping
from typing import Any

from compress.validate.compare.difference import COMPARED, TASKS, compared_of
from compress.validate.compare.pictures import pareto_pictures
from compress.validate.display import Json, byte_size, interval, number, percent
from compress.validate.report import template_environment

TEMPLATE = "compare/page.html.j2"
SIGNS = {"better": "▲", "worse": "▼", "equal": "=", "undecided": "≈", "incomparable": "–"}
_OPPOSITE = {"better": "worse", "worse": "better"}


def render_compare_page(document: Json) -> str:
    """Return the page, readable offline and in print."""
    from markupsafe import Markup

    # Markup is trusted here: matplotlib wrote it and escapes the text that it is given.
    pictures = [{**each, "svg": Markup(each["svg"])} for each in pareto_pictures(document)]
    page = template_environment().get_template(TEMPLATE)
    return page.render(
        report=document,
        pictures=pictures,
        columns=columns(document),
        cell=cell,
        claims=claims(document),
        matrix=matrix(document),
        compared=compared_of,
        signs=SIGNS,
        paired=any(each["paired"] for pair in document["pairs"] for each in pair["differences"]),
    )


def columns(document: Json) -> list[str]:
    """Return the metrics that any model has, in the order of the table."""
    names = dict.fromkeys(name for model in document["models"] for name in model["readings"])
    return [*(name for name in COMPARED if name in names), *(name for name in names if name not in COMPARED)]


def cell(metric: str, reading: Json | None) -> tuple[str, str]:
    """Return a reading as its value and its interval in words; dashes where it was not measured."""
    if reading is None:
        return "–", ""
    if metric == "size_bytes":
        return byte_size(reading["value"]), ""
    is_share = metric == "top1" or metric.startswith(TASKS)
    shown = percent(reading["value"], 2) if is_share else number(reading["value"], 4)
    if reading["unproven"]:
        return shown, "unstable"
    exact = reading["lower"] == reading["upper"]
    if is_share:
        return shown, "" if exact else f"[{percent(reading['lower'])}, {percent(reading['upper'])}]"
    return shown, "" if exact else interval(reading, 3)


def claims(document: Json) -> list[str]:
    """Return a sentence for each pair in which one dominates the other."""
    found = []
    for pair in document["pairs"]:
        if pair["winner"] is None:
            continue
        first = pair["winner"] == pair["one"]
        loser = pair["other"] if first else pair["one"]
        verdicts = {each["metric"]: each["verdict"] for each in pair["differences"]}
        better = [compared_of(name).words for name, verdict in verdicts.items() if verdict in _OPPOSITE]
        equal = [compared_of(name).words for name, verdict in verdicts.items() if verdict == "equal"]
        out = _left_out(pair["left_out"])
        found.append(
            f"{pair['winner']} dominates {loser}: better in {' and '.join(better)}"
            + (f", equal in {' and '.join(equal)}" if equal else "")
            + (f"; left out: {', '.join(out)}" if out else "")
            + "."
        )
    return found


def _left_out(reasons: Mapping[str, str]) -> list[str]:
    """Return the objectives that decide nothing for a pair, one text for each reason."""
    names: dict[str, list[str]] = {}
    for metric, reason in reasons.items():
        names.setdefault(reason, []).append(compared_of(metric).words)
    return [f"{' and '.join(own)} ({reason})" for reason, own in names.items()]


def matrix(document: Json) -> list[list[Json | None]]:
    """Return a row for each model with, against each other one, who dominates and the verdict of every
    objective; None against itself.
    """
    labels = [model["label"] for model in document["models"]]
    known: dict[tuple[str, str], Json] = {}
    for pair in document["pairs"]:
        one = pair["one"]
        other = pair["other"]
        verdicts = {each["metric"]: each["verdict"] for each in pair["differences"]}
        turned = {name: _OPPOSITE.get(verdict, verdict) for name, verdict in verdicts.items()}
        known[one, other] = {"winner": pair["winner"], "verdicts": verdicts}
        known[other, one] = {"winner": pair["winner"], "verdicts": turned}
    return [[known.get((row, column)) for column in labels] for row in labels]


def table_rows(document: Json) -> list[list[Any]]:
    """Return the table for a terminal: a head, one row a model, and the sources."""
    names = columns(document)
    rows: list[list[Any]] = [["model", "form", *(compared_of(name).words for name in names)]]
    for model in (*document["models"], *document["sources"]):
        cells = [" ".join(filter(None, cell(name, model["readings"].get(name)))) for name in names]
        rows.append([model["label"], model["form"], *cells])
    return rows

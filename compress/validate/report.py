"""The report: one JSON document, and the same content as one self-contained HTML page (inline SVG, no script,
nothing loaded).

`build_report` joins parts (`parts/`) that other code measured; a part that was not measured is absent from
the document and from the page. The document holds plain JSON values only. `render_html` is a pure function of
the document: the same document gives the same bytes.
"""

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.validate.display import (
    Json,
    byte_size,
    label,
    number,
    percent,
    signed_percent,
)
from compress.validate.parts import PARTS, Part
from compress.validate.parts.gates import GatesPart

if TYPE_CHECKING:
    import jinja2

SCHEMA = 1
LAYOUT = (
    "schema",
    "title",
    "verdict",
    "warnings",
    "recipe",
    "artifact",
    "gates",
    "accuracy",
    "scoring",
    "tasks",
    "generation",
    "long_context",
    "latency",
    "load",
    "roofline",
    "stages",
    "speculation",
    "kernels",
    "experts",
    "layers",
    "guided",
    "tuning",
    "data_free",
    "by_name",
    "kv_cache",
    "mixed",
    "pruning",
    "distillation",
    "recovery",
    "calibration",
    "environment",
)
"""Order of the entries of a document of schema 1; those of other parts follow."""
_ALWAYS = ("schema", "title", "verdict")


def build_report(*, title: str, parts: Sequence[Part] = ()) -> Json:
    """Return the document, schema 1; without a `GatesPart` nothing is judged.

    Raises:
        ValueError: a number is not finite, which JSON cannot hold.
    """
    entries: Json = {"schema": SCHEMA, "title": title, **GatesPart().as_json()}
    entries["warnings"] = [warning for part in parts for warning in part.warnings()]
    for part in parts:
        entries |= part.as_json()
    names = [*LAYOUT, *sorted(entries.keys() - set(LAYOUT))]
    document = {name: entries[name] for name in names if entries.get(name) or name in _ALWAYS}
    return json.loads(json.dumps(document, allow_nan=False))  # type: ignore[no-any-return]


def parts_in_order() -> list[type[Part]]:
    """Return all parts in the order of the page."""
    return sorted((part for _, part in PARTS.items()), key=lambda part: part.page_order)


def render_html(report: Json) -> str:
    """Return the page of a document, readable offline and in print."""
    tiles = []
    sections = []
    for part in parts_in_order():
        blocks = _blocks(part, report)
        tiles.append(blocks.get("tiles", ""))
        sections.append(blocks["section"])
    page = template_environment().get_template("report.html.j2")
    return page.render(report=report, tiles=tiles, sections=sections)


@cache
def template_environment() -> "jinja2.Environment":
    """Return the templates' environment, made once: each template is compiled when it is first used."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("compress.validate", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "num": number,
        "bytes": byte_size,
        "pct": percent,
        "change": signed_percent,
        "label": label,
        "plain": "{:g}".format,
    }
    return environment


@cache
def _template(part: type[Part]) -> "jinja2.Template":
    """Return the template of a part: the file of the same name."""
    file = sys.modules[part.__module__].__file__
    assert file is not None
    return template_environment().from_string(Path(file).with_suffix(".html.j2").read_text(encoding="utf-8"))


def _blocks(part: type[Part], report: Json) -> dict[str, Any]:
    """Return the blocks of a part's template, each rendered by itself."""
    from markupsafe import Markup

    template = _template(part)
    values = {
        "report": report,
        # Markup is trusted here: matplotlib wrote it and escapes the text that it is given.
        "plots": {name: Markup(svg) for name, svg in part.plots(report).items()},
        "macros": template_environment().get_template("macros.html.j2").module,
        **part.values(report),
    }
    return {
        name: Markup("".join(block(template.new_context(values)))) for name, block in template.blocks.items()
    }

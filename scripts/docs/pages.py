"""Every generated page, and the marked regions of pages that are written by hand.

A template is Markdown with Jinja expressions. Templates of results pages contain no number: numbers are expressions.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scripts.docs import markdown
from scripts.docs.recipe_reference import RecipeReference
from scripts.docs.result_files import ROOT, result_file
from scripts.docs.tables import performance, pruning, quality, speculation

TEMPLATES = Path(__file__).parent / "templates"
NOTICE = "<!-- Written by `python -m scripts.docs` from {source}; edit that and run it again. -->\n"


def environment() -> Environment:
    """Return the Jinja environment of the templates; an unknown name is an error."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    found.globals |= {
        "fixed": markdown.fixed,
        "significant": markdown.significant,
        "gigabytes": markdown.gigabytes,
        "percent": markdown.signed_percent,
        "result_file": result_file,
        "table": markdown.table,
        "quality": quality,
        "pruning": pruning,
        "speculation": speculation,
        "performance": performance,
        "recipe": RecipeReference(),
        "formats": format_names,
        "gates": gate_table,
    }
    return found


def rendered(template: str) -> str:
    """Return the page of one template."""
    text = environment().get_template(template).render()
    return NOTICE.format(source=f"`scripts/docs/templates/{template}`") + "\n" + text


def format_names() -> str:
    """Return the names of the export formats."""
    from compress.export import FORMATS

    return ", ".join(f"`{name}`" for name in FORMATS.names())


def gate_table() -> str:
    """Return the table of metrics that a gate may name."""
    from compress.validate.gates import METRICS

    rows = [
        [f"`{name}`", metric.relation, "names a device" if metric.per_device else ""]
        for name, metric in METRICS.items()
    ]
    return markdown.table(["gate", "good", ""], rows)


PAGES: Mapping[str, Callable[[], str]] = {
    "docs/recipe.md": partial(rendered, "recipe.md"),
    f"docs/results/{name}.md": partial(rendered, f"results/{name}.md")
    for name in ("quality", "pruning", "speculation", "performance")
}
"""Path of a page and the function that returns its text."""


def write() -> list[str]:
    """Write every page that is out of date, and return the paths of those."""
    changed = []
    for name, page in PAGES.items():
        path = ROOT / name
        text = page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(name)
    return changed

"""Every generated page, and the marked regions of pages that are written by hand.

A template is Markdown with Jinja expressions. Templates of results pages contain no number: numbers are expressions.
"""

from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scripts.docs import markdown
from scripts.docs.recipe_reference import RecipeReference
from scripts.docs.result_files import ROOT, result_file
from scripts.docs.tables import performance, pruning, quality, schemes, speculation

TEMPLATES = Path(__file__).parent / "templates"
PAGES = (
    "recipe.md",
    "results/quality.md",
    "results/pruning.md",
    "results/speculation.md",
    "results/performance.md",
)
"""Pages of `docs/` that are written from the template of the same name."""
NOTICE = "<!-- Written by `python -m scripts.docs` from `scripts/docs/templates/{name}`: edit that, and run it. -->\n\n"


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
        "table": markdown.table,
        "fixed": markdown.fixed,
        "significant": markdown.significant,
        "gigabytes": markdown.gigabytes,
        "percent": markdown.signed_percent,
        "result_file": result_file,
        "quality": quality,
        "pruning": pruning,
        "speculation": speculation,
        "performance": performance,
        "schemes": schemes,
        "recipe": RecipeReference(),
    }
    return found


def rendered(name: str) -> str:
    """Return the page of one template."""
    return NOTICE.format(name=name) + environment().get_template(name).render()


def generated() -> Mapping[Path, str]:
    """Return the text of every generated file, by its path."""
    return {ROOT / "docs" / name: rendered(name) for name in PAGES}


def write() -> list[Path]:
    """Write every generated file that is out of date, and return their paths."""
    changed = []
    for path, text in generated().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed

"""Every generated page, and the marked regions of pages that are written by hand.

A template is Markdown with Jinja expressions. Templates of results pages contain no number: numbers are
expressions.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scripts.docs import markdown
from scripts.docs.journeys import JOURNEYS
from scripts.docs.pictures import floors, pictures
from scripts.docs.recipe_reference import RecipeReference
from scripts.docs.result_files import ROOT, result_file
from scripts.docs.tables import (
    cpu,
    devices,
    families,
    formats,
    interop,
    mixtures,
    performance,
    pruning,
    quality,
    readme,
    schemes,
    serving,
    shapes,
    speculation,
    tasks,
)
from scripts.slow_host import LAUNCH_S

TEMPLATES = Path(__file__).parent / "templates"
PAGES = (
    "recipe.md",
    "models.md",
    "choosing.md",
    "techniques.md",
    "architecture.md",
    "results/quality.md",
    "results/pruning.md",
    "results/speculation.md",
    "results/performance.md",
    "results/mixtures.md",
    "results/serving.md",
    "results/shapes.md",
    "results/tasks.md",
    "results/interop.md",
)
"""Pages of `docs/` that are written from the template of the same name."""
COPIES = {"data_cards.md": "calib_data/README.md", "model.md": "compress/reference/README.md"}
"""Pages of `docs/` that are the README of another directory."""
REGIONS: Mapping[str, Callable[[], str]] = {"schemes": schemes.schemes, "best": readme.best}
"""Name of a marked region of README, and the function that fills it."""
NOTICE = (
    "<!-- Written by `python -m scripts.docs` from `scripts/docs/templates/{name}`: "
    "edit that, and run it. -->\n\n"
)


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
        "cpu": cpu,
        "devices": devices,
        "formats": formats,
        "interop": interop,
        "mixtures": mixtures,
        "serving": serving,
        "shapes": shapes,
        "tasks": tasks,
        "slow_launch_us": 1e6 * LAUNCH_S,
        "families": families,
        "schemes": schemes,
        "recipe": RecipeReference(),
        "journeys": JOURNEYS,
        "floors": floors,
        "warning_error": warning_error,
        "picture": picture,
    }
    return found


def warning_error() -> str:
    """Return the error of a head's keys or values from which on calibration warns of one scale a layer."""
    from compress.calibrate import kv

    return f"{kv.COARSE:g}"


def picture(name: str, title: str) -> str:
    """Return the HTML of a picture that follows the reader's light or dark page."""
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="pictures/{name}-dark.svg">\n'
        f'  <img alt="{title}" src="pictures/{name}-light.svg">\n</picture>'
    )


def rendered(name: str) -> str:
    """Return the page of one template."""
    return NOTICE.format(name=name) + environment().get_template(name).render()


def copied(source: str) -> str:
    """Return the text of a README elsewhere in the tree as a page, without its YAML head."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if text.startswith("---\n"):
        text = text.split("---\n", 2)[2].lstrip()
    return f"<!-- Copied by `python -m scripts.docs` from `{source}`: edit that, and run it. -->\n\n" + text


def with_regions(source: str) -> str:
    """Return a hand-written page with its marked regions filled.

    Raises:
        LookupError: a region has no function, or no end.
    """
    text = (ROOT / source).read_text(encoding="utf-8")
    for name in re.findall(r"<!-- begin: (\w+) -->", text):
        begin = f"<!-- begin: {name} -->"
        before, _, rest = text.partition(begin)
        _, end, after = rest.partition(f"<!-- end: {name} -->")
        if not end or name not in REGIONS:
            raise LookupError(f"{source}: the region {name} has no end or nothing that fills it")
        text = f"{before}{begin}\n{REGIONS[name]()}\n{end}{after}"
    return text


def generated() -> Mapping[Path, str]:
    """Return the text of every generated file, by its path."""
    docs = ROOT / "docs"
    return {
        ROOT / "README.md": with_regions("README.md"),
        **{docs / name: rendered(name) for name in PAGES},
        **{docs / name: copied(source) for name, source in COPIES.items()},
        **{docs / "pictures" / name: text for name, text in pictures()},
    }


def write() -> list[Path]:
    """Write every generated file that is out of date, and return their paths."""
    changed = []
    for path, text in generated().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed

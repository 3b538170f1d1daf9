"""The documents are what the generator writes, hold no number of their own, and name files that exist."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from compress.cli.app import COMMANDS, GROUPS
from scripts.docs.journeys import JOURNEYS
from scripts.docs.pages import TEMPLATES, generated
from scripts.docs.pictures import PACKAGES, floors
from tests.docs.blocks import ROOT

RESULTS = sorted((TEMPLATES / "results").glob("*.md"))
EXPRESSION = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.S)
NAME = re.compile(r"`[^`\n]+`|\b[A-Za-z][\w-]*\d[\w.-]*|\bk = |top-1|arXiv \d{4}\.\d+")
"""Code spans and names that have digits in them: FP8, EAGLE-3, p99."""
LINKS = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)|srcset=\"([^\"]+)\"|src=\"([^\"]+)\"")


@pytest.fixture(scope="module")
def written() -> dict[Path, str]:
    return dict(generated())


def test_generated_files_are_up_to_date(written: dict[Path, str]) -> None:
    stale = [
        path.relative_to(ROOT).as_posix()
        for path, text in written.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run `python -m scripts.docs`"


def test_no_picture_is_left_over(written: dict[Path, str]) -> None:
    assert set((ROOT / "docs" / "pictures").iterdir()) == {path for path in written if path.suffix == ".svg"}


@pytest.mark.parametrize("template", RESULTS, ids=lambda path: path.name)
def test_no_number_is_typed_on_a_results_page(template: Path) -> None:
    prose = NAME.sub("", EXPRESSION.sub("", template.read_text(encoding="utf-8")))
    assert [line for line in prose.splitlines() if re.search(r"\d", line)] == []


def test_every_results_page_is_generated_whole(written: dict[Path, str]) -> None:
    pages = set((ROOT / "docs" / "results").glob("*.md"))
    assert pages == {path for path in written if path.parent.name == "results"}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_links_and_pictures_lead_to_files() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "calib_data").glob("*.md")]
    broken = []
    for page in pages:
        for found in LINKS.findall(page.read_text(encoding="utf-8")):
            target = next(each for each in found if each)
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Return the names that links to headings of a page have, as the site and its host make them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_to_headings_lead_to_headings() -> None:
    broken = []
    for page in [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for name, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text):
            target = page.parent / name if name else page
            if anchor not in anchors(target):
                broken.append(f"{page.relative_to(ROOT)}: {name}#{anchor}")
    assert broken == []


def test_files_that_the_tree_in_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.partition("```text\ncompress/\n")[2].partition("```")[0]
    inside = re.findall(r"^  ((?:[\w.]+/? )*[\w.]+/?)  ", tree, flags=re.M)
    names = [name for line in inside for name in line.split()]
    assert names
    assert [name for name in names if not (ROOT / "compress" / name).exists()] == []
    outside = re.findall(r"(?:^|  )([a-z_]+/)  ", re.sub(r"^  .*$", "", tree, flags=re.M), flags=re.M)
    assert outside
    assert [name for name in outside if not (ROOT / name).exists()] == []


def test_every_layer_is_explained() -> None:
    known = {name for layer in floors() for name in layer}
    assert known <= set(PACKAGES)
    missing = [name for name in known if not list((ROOT / "compress").glob(f"{name}*"))]
    assert missing == []


def symbols(path: Path) -> set[str]:
    """Return the names that a module defines at its top, and the methods of its classes as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


@pytest.mark.parametrize("journey", JOURNEYS, ids=lambda journey: journey.name)
def test_a_journey_names_at_most_twelve_files_that_exist(journey) -> None:  # type: ignore[no-untyped-def]
    assert len({stop.path for stop in journey.stops}) <= 12
    for stop in journey.stops:
        assert (ROOT / stop.path).is_file(), f"{journey.name}: {stop.path}"
        assert stop.symbol in symbols(ROOT / stop.path), f"{journey.name}: {stop.path} has no {stop.symbol}"


def test_paths_that_pages_name_exist() -> None:
    """Code spans that look like a file of the package, its tests or its scripts."""
    looks_like = re.compile(
        r"`((?:compress|tests|scripts|recipes|benchmarks|calib_data|examples|kernels|quant|models)"
        r"/[\w./-]+\.\w+)`"
    )
    missing = []
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        if page.name in ("LOG.md", "extend.md"):
            continue
        for name in looks_like.findall(page.read_text(encoding="utf-8")):
            if not any((place / name).exists() for place in (ROOT, ROOT / "compress")):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert missing == []


def test_contents_name_every_command() -> None:
    table = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("## Commands")[2]
    named = set(re.findall(r"`([a-z-]+)`", table.partition("## ")[0]))
    assert {*COMMANDS, *GROUPS} <= named


def test_nothing_is_fetched_when_a_page_is_read() -> None:
    config = YAML(typ="safe").load(ROOT / "mkdocs.yml")
    assert config["theme"]["font"] is False
    own = [config.get("extra_css", []), config.get("extra_javascript", [])]
    assert not [name for names in own for name in names if "://" in name]
    remote = re.compile(r"(?:src|href)=\"https?://|@import|url\(\s*['\"]?https?:")
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.svg"), *(ROOT / "docs").rglob("*.css")]
    assert [page.name for page in pages if remote.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs: `make docs` installs it"
)
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    html = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    remote = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"https?://[^\"]+")
    assert {path.name: remote.findall(text) for path, text in html.items() if remote.search(text)} == {}

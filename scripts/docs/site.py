"""The hook by which mkdocs puts the result files on the site, so that links to them lead somewhere there as
they do in the repository. It imports nothing of this project: mkdocs loads it as a file, from anywhere.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
IN_REPOSITORY = "](../../benchmarks/"
ON_SITE = "](../benchmarks/"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add every file under `benchmarks/` to the site."""
    for path in sorted((ROOT / "benchmarks").rglob("*.json")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a results page with its links to result files as they are on the site."""
    return markdown.replace(IN_REPOSITORY, ON_SITE)

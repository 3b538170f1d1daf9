"""Code blocks of the documents: where they are, what they are, and why some of them do not run in a test.

A block that a test cannot run has a comment before it, `<!-- skip: needs a GPU -->`. A block with a title is
the file of that name.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from scripts.docs.pages import COPIES

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "CHANGELOG.md",
        ROOT / "calib_data" / "README.md",
        ROOT / "compress" / "reference" / "README.md",
        *(page for page in (ROOT / "docs").rglob("*.md") if page.name not in COPIES),
    ]
)
"""All pages but those that are copies of a README."""
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)(?P<rest>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S
)
TITLE = re.compile(r'title="([^"]+)"')
SKIP = re.compile(r"<!-- skip: (?P<reason>[^>]+?) -->\s*$")


@dataclass(frozen=True)
class Block:
    """One code block of a page."""

    page: Path
    line: int
    language: str
    text: str
    skip: str | None
    title: str | None

    @property
    def name(self) -> str:
        """The place of the block: `docs/python.md:12`."""
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        marked = SKIP.search(before)
        titled = TITLE.search(match["rest"])
        indent = len(match["indent"])
        lines = [line[indent:] for line in match["text"].splitlines()]
        found.append(
            Block(
                page,
                before.count("\n") + 1,
                match["language"],
                "\n".join(lines) + "\n",
                None if marked is None else marked["reason"],
                None if titled is None else titled[1],
            )
        )
    return found


def commands_of(block: Block) -> list[list[str]]:
    """Return the commands of a shell block as words; lines joined by a backslash are one command."""
    joined = block.text.replace("\\\n", " ")
    commands = [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [words for words in commands if words]

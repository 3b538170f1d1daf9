"""The parts of a report, one file each: the facts of a section, its pictures, its lines in the model card,
and its template.

`PARTS` finds the files by itself. A new section is `<name>.py` with a class like those here, `<name>.html.j2`
next to it, and the line in `stages/validate` that makes it. Everything but `as_json` and `warnings` reads the
finished document, so that a report can be drawn again from its JSON alone.
"""

from typing import ClassVar, Protocol

from compress.plugins import PluginSet
from compress.validate.display import Json


class Part(Protocol):
    """One section of the report.

    The template has the blocks `section` and, where the part has headline numbers, `tiles`. Both see the
    document as `report`, the pictures by name as `plots`, what `values` returns, and the macros of
    `macros.html.j2` as `macros`.
    """

    page_order: ClassVar[int]
    """Place on the page and in the model card: smaller numbers come first."""

    def as_json(self) -> Json:
        """Return entries for the top level of the document; empty ones are left out of it."""

    def warnings(self) -> list[str]:
        """Return sentences for the head of page and model card; `compress run` prints them too."""
        return []

    @staticmethod
    def values(report: Json) -> Json:
        """Return further names for the template."""
        del report
        return {}

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return pictures by name, as SVG."""
        del report
        return {}

    @staticmethod
    def sentence(report: Json) -> str:
        """Return a sentence for the first paragraph of the model card, or an empty string."""
        del report
        return ""

    @staticmethod
    def card(report: Json) -> list[str]:
        """Return paragraphs for the model card."""
        del report
        return []


PARTS: PluginSet[type[Part]] = PluginSet("report part", "compress.validate.parts")

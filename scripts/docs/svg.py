"""Pictures as SVG text, drawn twice: for a light and for a dark page.

A picture is a function of a `Canvas`. Colours are names, and each theme gives them values; the background
stays transparent.
"""

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

THEMES = {
    "light": {
        "ink": "#1f2328",
        "soft": "#59636e",
        "line": "#818b98",
        "fill": "#f6f8fa",
        "edge": "#d1d9e0",
        "blue": "#0969da",
        "blue_fill": "#ddf4ff",
        "green": "#1a7f37",
        "green_fill": "#dafbe1",
    },
    "dark": {
        "ink": "#f0f6fc",
        "soft": "#9198a1",
        "line": "#656c76",
        "fill": "#151b23",
        "edge": "#3d444d",
        "blue": "#4493f8",
        "blue_fill": "#121d2f",
        "green": "#3fb950",
        "green_fill": "#12261e",
    },
}
SANS = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"


@dataclass
class Canvas:
    """The elements of one picture, in pixels from the top left corner."""

    width: int
    height: int
    theme: str
    title: str
    parts: list[str] = field(default_factory=list)

    def colour(self, name: str) -> str:
        """Return the value of a colour in this theme."""
        return THEMES[self.theme][name]

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str = "fill", edge: str = "edge"
    ) -> None:
        """Draw a rounded rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'fill="{self.colour(fill)}" stroke="{self.colour(edge)}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 14,
        colour: str = "ink",
        anchor: str = "start",
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        """Write one line whose baseline is at y."""
        weight = ' font-weight="600"' if bold else ""
        family = f' font-family="{MONO}"' if mono else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{self.colour(colour)}" '
            f'text-anchor="{anchor}"{weight}{family}>{escape(text)}</text>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, *, arrow: bool = True) -> None:
        """Draw a straight line, with an arrow at its end."""
        end = f' marker-end="url(#arrow-{self.theme})"' if arrow else ""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{self.colour("line")}" '
            f'stroke-width="1.5"{end}/>'
        )

    def disc(self, x: float, y: float, radius: float, text: str) -> None:
        """Draw a filled circle with a short text in it."""
        self.parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{self.colour("blue_fill")}" '
            f'stroke="{self.colour("blue")}"/>'
        )
        self.text(x, y + 4.5, text, size=13, colour="blue", anchor="middle", bold=True)

    def document(self) -> str:
        """Return the SVG file."""
        marker = (
            f'<marker id="arrow-{self.theme}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{self.colour("line")}"/></marker>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{SANS}" role="img">'
        )
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, f"<defs>{marker}</defs>", *self.parts, "</svg>", ""])

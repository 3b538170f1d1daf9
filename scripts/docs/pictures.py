"""The pictures of README and of the architecture page."""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from scripts.docs.journeys import JOURNEYS, Journey
from scripts.docs.result_files import ROOT
from scripts.docs.svg import THEMES, Canvas

PACKAGES: Mapping[str, str] = {
    "cli": "one command a file",
    "api": "load, generate, quantize, run",
    "llm": "text in, text out",
    "serve": "HTTP server",
    "pipeline": "the only loop over stages",
    "stages": "one stage a file or folder; budgets",
    "validate": "accuracy, latency, gates, report",
    "distill": "training",
    "export": "checkpoint formats",
    "runtime": "the engine that serves",
    "methods": "papers, one a file",
    "kernels": "ops on CPU and GPU",
    "calibrate": "layer by layer, statistics",
    "data": "text, cards, tokens",
    "models": "the canonical decoder, families",
    "quant": "schemes, codes, packing",
    "schedule": "text for schedulers",
    "outcome": "webhooks, metrics",
    "registry": "push and pull",
    "recipe": "YAML and its errors",
    "sign": "signatures of models",
    "artifact": "manifest, workspace",
    "ranks": "processes that share work",
    "context": "device, seed, progress",
    "machine": "facts of the device",
    "plugins": "members found by name",
    "digest": "sha256",
    "untrusted": "JSON, files, text",
    "errors": "what a user reads",
}
"""The contents of each package and root module in a few words."""
STAGES = (("calibrate", "prune", "distill", "quantize"), ("recover", "draft", "export", "validate"))


def floors() -> list[list[str]]:
    """Return the layers of the package from high to low, as the import contract states them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["type"] == "layers")
    return [[name.strip() for name in layer.split("|")] for layer in layers]


def overview(canvas: Canvas) -> None:
    """Draw what a run does, from recipe to registry, and the layers of the code below."""
    top = 8
    _card(canvas, 1, top, 128, 132, "recipe.yaml", ["model, seed,", "stages, push"])
    canvas.line(131, top + 66, 151, top + 66)
    canvas.box(155, top, 338, 132, fill="blue_fill", edge="blue")
    canvas.text(324, top + 24, "stages", anchor="middle", bold=True)
    for row, names in enumerate(STAGES):
        width = 338 / len(names)
        for idx, name in enumerate(names):
            canvas.text(
                155 + width * (idx + 0.5), top + 54 + 24 * row, name, size=14, anchor="middle", mono=True
            )
    canvas.text(324, top + 108, "each result is kept by content:", size=13, colour="soft", anchor="middle")
    canvas.text(324, top + 124, "a second run does nothing", size=13, colour="soft", anchor="middle")
    canvas.line(495, top + 66, 515, top + 66)
    _card(canvas, 519, top, 124, 132, "artifact", ["safetensors,", "compress.json", "vLLM loads it"])
    canvas.line(645, top + 66, 679, top + 66)
    canvas.text(661, top + 58, "gates", size=12, colour="green", anchor="middle")
    _card(canvas, 683, top, 136, 132, "registry", ["blobs, tags", "and the evidence:", "report, card"])
    canvas.text(0, 176, "The code: imports point down only", size=13, colour="soft")
    _floors(canvas, 0, 186, 820, 25)


def layers(canvas: Canvas) -> None:
    """Draw the layers of the package with what each package holds."""
    _floors(canvas, 0, 4, 820, 48, explained=True)


def journey(told: Journey, canvas: Canvas) -> None:
    """Draw the stops of one journey, and what travels between them."""
    for idx, stop in enumerate(told.stops):
        y = 8 + STOP * idx
        if idx:
            canvas.line(18, y - STOP + 34, 18, y + 4)
        canvas.disc(18, y + 20, 14, str(idx + 1))
        canvas.box(46, y, 594, STOP - 14)
        canvas.text(58, y + 21, stop.path.removeprefix("compress/"), size=14, mono=True, bold=True)
        canvas.text(628, y + 21, stop.symbol, size=13, mono=True, colour="blue", anchor="end")
        for row, line in enumerate(_wrapped(stop.does, 84)):
            canvas.text(58, y + 42 + 18 * row, line, size=13.5, colour="soft")


STOP = 82
"""Height of a stop of a journey with the way to the next one."""


def pictures() -> Iterator[tuple[str, str]]:
    """Yield file name and SVG text of every picture in both themes."""
    num_floors = len(floors())
    drawings: dict[str, tuple[int, int, str, Callable[[Canvas], None]]] = {
        "overview": (
            820,
            190 + 25 * num_floors,
            "From recipe to registry, and the layers of the code",
            overview,
        ),
        "layers": (820, 8 + 48 * num_floors, "The layers of the package", layers),
    }
    for told in JOURNEYS:
        height = 8 + STOP * len(told.stops)
        drawings[f"journey-{told.name}"] = (644, height, told.title, partial(journey, told))
    for name, (width, height, title, draw) in drawings.items():
        for theme in THEMES:
            canvas = Canvas(width, height, theme, title)
            draw(canvas)
            yield f"{name}-{theme}.svg", canvas.document()


def _card(
    canvas: Canvas, x: float, y: float, width: float, height: float, name: str, lines: list[str]
) -> None:
    canvas.box(x, y, width, height)
    canvas.text(x + width / 2, y + 36, name, size=14, anchor="middle", mono=True, bold=True)
    for row, line in enumerate(lines):
        canvas.text(x + width / 2, y + 62 + 20 * row, line, size=13, colour="soft", anchor="middle")


def _floors(
    canvas: Canvas, x: float, y: float, width: float, height: float, *, explained: bool = False
) -> None:
    for row, names in enumerate(floors()):
        each = width / len(names)
        for idx, name in enumerate(names):
            left = x + each * idx
            middle = left + each / 2
            top = y + height * row
            canvas.box(left + 1, top + 1, each - 2, height - 4)
            if explained:
                canvas.text(middle, top + 19, name, anchor="middle", mono=True, bold=True)
                canvas.text(middle, top + 37, PACKAGES[name], size=13, colour="soft", anchor="middle")
            else:
                canvas.text(middle, top + height / 2 + 3.5, name, size=13, anchor="middle", mono=True)


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines

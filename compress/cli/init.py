"""`compress init`: write a commented recipe to start from, one of the files of `recipes/`.

The first comment line of a recipe is its purpose. An installed package has the recipes in
`compress/recipes/`, where the build puts them; a checkout has them next to the package, in `recipes/`.
"""

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.output import note, write_data
from compress.errors import UsageError, did_you_mean

PRESETS = ("quickstart", "w4a16", "full", "prune-distill", "draft", "matrix")
"""The recipes that need no other file and no access to a model: names of files in `recipes/`."""
PACKAGE = Path(__file__).parents[1]


def init(
    path: Annotated[Path, typer.Argument(help="Where to write the recipe.")] = Path("recipe.yaml"),
    preset: Annotated[
        str, typer.Option(help="The template to start from; --list shows them.")
    ] = "quickstart",
    show: Annotated[bool, typer.Option("--list", help="List the templates and exit.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented recipe to start from."""
    from compress.artifact.atomic import write_atomic

    installed = PACKAGE / "recipes"
    folder = installed if installed.is_dir() else PACKAGE.parent / "recipes"
    templates = {name: folder / f"{name}.yaml" for name in PRESETS}
    if show:
        write_data("\n".join(f"{name}: {_purpose(file)}" for name, file in templates.items()))
        return
    if preset not in templates:
        raise UsageError(
            f"unknown template '{preset}'.{did_you_mean(preset, templates)} `compress init --list` says what "
            "each is for."
        )
    if path.exists() and not force:
        raise UsageError(f"{path} exists already; give another path, or --force to replace it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, templates[preset].read_bytes())
    note(f"wrote {path} ({preset}); next: compress plan {path}")


def _purpose(file: Path) -> str:
    return file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")

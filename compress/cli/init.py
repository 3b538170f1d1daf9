"""`compress init`: a commented recipe to start from. A preset is one file in `presets/`; its first comment line says what it is for."""

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.output import note, write_data
from compress.errors import UsageError, did_you_mean

PRESETS = Path(__file__).parent / "presets"


def init(
    path: Annotated[Path, typer.Argument(help="Where to write the recipe.")] = Path("recipe.yaml"),
    preset: Annotated[
        str, typer.Option(help="Which recipe to start from; --list shows them.")
    ] = "quickstart",
    show: Annotated[bool, typer.Option("--list", help="List the presets and exit.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented recipe to start from."""
    from compress.artifact.atomic import write_atomic

    presets = {file.stem: file for file in sorted(PRESETS.glob("*.yaml"))}
    if show:
        write_data("\n".join(f"{name}: {_purpose(file)}" for name, file in presets.items()))
        return
    if preset not in presets:
        raise UsageError(
            f"unknown preset '{preset}'.{did_you_mean(preset, presets)} `compress init --list` says what each is for."
        )
    if path.exists() and not force:
        raise UsageError(f"{path} exists already; give another path, or --force to replace it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, presets[preset].read_bytes())
    note(f"wrote {path} ({preset}); next: compress plan {path}")


def _purpose(file: Path) -> str:
    return file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")

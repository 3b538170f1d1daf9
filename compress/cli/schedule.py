"""`compress schedule render`: the text with which a scheduler runs a recipe; nothing is installed."""

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.output import note, write_data
from compress.errors import UsageError


def render(
    target: Annotated[
        str,
        typer.Argument(
            help="Scheduler: airflow, cron, github, kubernetes, skypilot or systemd.", show_default=False
        ),
    ],
    recipe: Annotated[
        str,
        typer.Argument(help="Recipe (YAML), as a path from the directory of the run.", show_default=False),
    ],
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            help="Five fields of cron, such as '0 3 * * mon-fri', or @daily.",
            show_default=False,
        ),
    ] = None,
    timezone: Annotated[
        str | None,
        typer.Option("--timezone", help="Time zone, such as Europe/Berlin.", show_default=False),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="Name of the schedule; that of the recipe by default.", show_default=False
        ),
    ] = None,
    workdir: Annotated[
        str | None,
        typer.Option("--workdir", help="Directory in which the run starts.", show_default=False),
    ] = None,
    executable: Annotated[
        str, typer.Option("--executable", help="The program; an absolute path for cron and systemd.")
    ] = "compress",
    image: Annotated[
        str | None,
        typer.Option("--image", help="Container image in which compress is installed.", show_default=False),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", help="Their number; for skypilot also the kind, H100:1.", show_default=False),
    ] = None,
    volumes: Annotated[
        list[str] | None,
        typer.Option(
            "--volume", help="Claim and path of a volume, models:/srv/models; repeatable.", show_default=False
        ),
    ] = None,
    runners: Annotated[
        list[str] | None,
        typer.Option("--runner", help="Label of a GitHub runner; repeatable.", show_default=False),
    ] = None,
    metrics_file: Annotated[
        str | None,
        typer.Option("--metrics-file", help="Option of `compress run`, passed on.", show_default=False),
    ] = None,
    workspace: Annotated[
        str | None,
        typer.Option("--workspace", help="Option of `compress run`, passed on.", show_default=False),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Option of `compress run`, passed on.", show_default=False),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Option of `compress run`, passed on.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Write the files into this directory.", show_default=False),
    ] = None,
) -> None:
    """Print the text with which a scheduler runs a recipe at set times; nothing is installed."""
    from compress.artifact.atomic import write_atomic
    from compress.schedule.cron_expression import parse_cron
    from compress.schedule.scheduled_run import ScheduledRun, Volume, name_of, run_options
    from compress.schedule.target import render as render_target

    run = ScheduledRun(
        recipe=recipe,
        name=name_of(recipe) if name is None else name,
        executable=executable,
        options=run_options(metrics_file=metrics_file, workspace=workspace, device=device, offline=offline),
        schedule=None if schedule is None else parse_cron(schedule),
        timezone=timezone,
        workdir=workdir,
        image=image,
        gpus=gpus,
        volumes=tuple(Volume.parse(each) for each in volumes or ()),
        runners=tuple(runners or ()),
    )
    files = render_target(target, run)
    _check_recipe(Path(workdir or ".") / recipe)
    if output is None:
        write_data("\n".join(each.text for each in files).rstrip("\n"))
        return
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output {output} is a file; name a directory.", where="--output")
    output.mkdir(parents=True, exist_ok=True)
    for each in files:
        write_atomic(output / each.name, each.text.encode())
        note(f"wrote {output / each.name}")


def _check_recipe(path: Path) -> None:
    """Check the recipe where it is on this machine; where it is not, print a note."""
    if not path.exists():
        note(f"{path} is not on this machine, so the recipe was not checked")
        return
    from compress.recipe import load_recipe

    load_recipe(path)

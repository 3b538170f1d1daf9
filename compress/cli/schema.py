"""`compress schema`: the JSON Schema of recipes, which gives editors completion and errors while typing."""

from compress.cli.output import write_data


def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    import json

    from compress.recipe import recipe_schema
    from compress.stages import STAGES

    write_data(json.dumps(recipe_schema({kind: stage.spec for kind, stage in STAGES.items()}), indent=2))

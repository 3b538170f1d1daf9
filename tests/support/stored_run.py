"""A recipe's run without a model and without its stages: every entry that a run would store, under its key,
with a small file in place of the result.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.artifact.key_parts import KeyParts
from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.pipeline import RunDir, Step, build_steps, lock_of
from compress.pipeline.keys import key_parts, ports_read, source_digests
from compress.recipe import Recipe, parse_recipe
from compress.registry.model_source import ModelSource

STAGES: list[dict[str, Any]] = [
    {"kind": "calibrate", "num_samples": 4, "seq_len": 32},
    {"kind": "quantize", "scheme": "W4A16_G128"},
    {"kind": "export"},
]


def recipe_of(stages: list[dict[str, Any]] | None = None, **top: Any) -> tuple[Recipe, list[Step]]:
    """Return a recipe and its steps."""
    document = {"version": 1, "model": "builtin://reference", "stages": stages or STAGES, **top}
    recipe = parse_recipe(json.dumps(document), file="recipe.yaml")
    return recipe, build_steps(recipe)


def source_named(name: str = "a") -> ModelSource:
    """Return a source of that name, whose digest is another for each name."""
    return ModelSource("builtin", Path("model"), None, "sha256:" + name.encode().hex().rjust(64, "0"))


def store_run(
    workspace: Workspace,
    recipe: Recipe,
    steps: list[Step],
    *,
    source: ModelSource | None = None,
    run: RunDir | None = None,
    until: int | None = None,
) -> list[tuple[KeyParts, Artifact]]:
    """Store what a run of the recipe would, and link it from its run directory; return keys and artifacts."""
    source = source or source_named()
    digests = source_digests(source)
    stored = []
    if run is not None:
        run.write_lock(lock_of(recipe, steps, source), model_digest=source.digest)
        run.link_workspace(workspace.root)
    for step in steps[:until]:
        parts = key_parts(step, digests, recipe.seed, "cpu")
        parents = {port.value: digests[port] for port in ports_read(step, digests)}
        artifact = store_entry(workspace, parts, parents)
        digests[step.stage.gives] = artifact.digest
        if run is not None:
            run.link(step.stage.kind, artifact)
        stored.append((parts, artifact))
    return stored


def store_entry(workspace: Workspace, parts: KeyParts, parents: Mapping[str, str]) -> Artifact:
    """Store an entry whose content follows from its key."""

    def build(writer: ArtifactWriter) -> None:
        (writer.path / "config.json").write_text(json.dumps({"key": parts.key}))
        (writer.path / "part").mkdir()
        (writer.path / "part" / "weights.bin").write_bytes(parts.digest.encode() * 200)
        writer.describe(role=parts.stage)

    workspace.describe_key(parts)
    return workspace.commit(parts.key, parts.stage, parents, build)

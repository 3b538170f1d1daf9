"""Provenance records what was there, and what was not."""

import importlib.metadata
from pathlib import Path

import pytest

from compress.pipeline.provenance import provenance
from compress.registry.model_source import resolve_model


def test_a_missing_library_is_recorded_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    present = importlib.metadata.version

    def version(name: str) -> str:
        if name == "compressed-tensors":
            raise importlib.metadata.PackageNotFoundError(name)
        return present(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\n")
    libraries = provenance(recipe, resolve_model("builtin", "reference", None, offline=True), {})["libraries"]
    assert libraries["compressed-tensors"] is None
    assert libraries["torch"] == present("torch")

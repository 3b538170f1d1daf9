"""Provenance records what was there, and what was not."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from compress.digest import digest_file
from compress.pipeline.bom import bill_of_materials
from compress.pipeline.provenance import Inputs, provenance
from compress.pipeline.slsa import slsa_statement
from compress.pipeline.steps import Step
from compress.pipeline.texts import Text, texts_of
from compress.registry.model_source import ModelSource
from compress.stages import STAGES
from compress.stages.calibrate import Calibrate
from tests.contract.test_registry_contract import make_artifact


def test_a_missing_library_is_recorded_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    present = importlib.metadata.version

    def version(name: str) -> str:
        if name == "compressed-tensors":
            raise importlib.metadata.PackageNotFoundError(name)
        return present(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\n")
    libraries = document_of(recipe, source_named("builtin://reference"))["libraries"]
    assert libraries["compressed-tensors"] is None
    assert libraries["torch"] == present("torch")


def source_named(name: str, revision: str | None = None) -> ModelSource:
    return ModelSource(Path("somewhere"), name, revision, "sha256:" + "a" * 64)


def document_of(
    recipe: Path, source: ModelSource, model: str = "builtin://reference", texts: tuple[Text, ...] = ()
) -> dict[str, Any]:
    resolved = {"model": model, "seed": 0, "stages": []}
    return provenance(Inputs(recipe, resolved, texts, "2026-01-01T00:30:00+0100"), source, {})


def test_models_and_data_sets_have_the_identity_that_other_tools_look_up(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\n")
    artifact = make_artifact(tmp_path)
    commit, manifest = "0" * 40, "sha256:" + "1" * 64
    card = Text("calibrate", "card.yaml", "sha256:" + "2" * 64, "A", "MIT", "web", "org/set", "3" * 40)
    hub = document_of(recipe, source_named("org/model", commit), f"hf://org/model@{commit}", (card, card))
    statement = slsa_statement(hub, artifact)
    model, text, _ = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert model["uri"] == f"hf://org/model@{commit}"
    assert model["digest"]["gitCommit"] == commit
    assert text["digest"] == {"sha256": "2" * 64, "gitCommit": "3" * 40}
    assert statement["predicate"]["runDetails"]["metadata"]["startedOn"] == "2025-12-31T23:30:00Z"
    bom = bill_of_materials(hub, artifact, {"title": "A model", "warnings": ["It is small."]})
    source, dataset = bom["components"]
    assert source["purl"] == f"pkg:huggingface/org/model@{commit}"
    assert (dataset["version"], dataset["data"][0]["name"]) == ("3" * 40, "org/set")
    assert bom["metadata"]["component"]["modelCard"]["considerations"] == {
        "technicalLimitations": ["It is small."]
    }
    pushed = document_of(recipe, source_named("oci://host/model:a", manifest), f"oci://host/model@{manifest}")
    model = slsa_statement(pushed, artifact)["predicate"]["buildDefinition"]["resolvedDependencies"][0]
    assert model["digest"]["sha256"] == "1" * 64
    local = document_of(recipe, source_named("./model"), "/home/somebody/model")
    assert "somebody" not in json.dumps([local, slsa_statement(local, artifact)])
    for each in (hub, pushed, local):
        document = bill_of_materials(each, artifact, {"title": "A model"})
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document)) is None


def test_the_bill_of_materials_has_no_time(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\n")
    artifact = make_artifact(tmp_path)
    facts = document_of(recipe, source_named("builtin://reference"))
    later = {**facts, "started": "2027-01-01T00:00:00+0000", "finished": "2027-01-02T00:00:00+0000"}
    assert bill_of_materials(facts, artifact, {}) == bill_of_materials(later, artifact, {})
    assert slsa_statement(facts, artifact) != slsa_statement(later, artifact)


def test_the_texts_of_a_mix_are_named_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    for name, title in (("one", "First"), ("two", "Second")):
        (tmp_path / f"{name}.yaml").write_text(
            f"{{kind: local, title: {title}, license: MIT, source: here, language: en, paths: [a.txt], "
            "format: txt}"
        )
    (tmp_path / "mix.yaml").write_text(
        "{kind: mix, title: Both, license: MIT, source: here, language: en, "
        "cards: [{card: one.yaml, weight: 1}, {card: two.yaml, weight: 1}]}"
    )
    step = Step(STAGES.get("calibrate"), Calibrate(data=str(tmp_path / "mix.yaml")))
    assert [each.title for each in texts_of([step])] == ["First", "Second"]
    assert {each.card_digest for each in texts_of([step])} == {
        digest_file(tmp_path / "one.yaml"),
        digest_file(tmp_path / "two.yaml"),
    }

"""Where models come from: every file that decides the function or the text is in the digest, and hub names
are pinned to a commit.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from compress.errors import StorageError, UsageError
from compress.registry import model_source
from compress.registry.model_source import FETCHED_FILES, kept_model, model_digest, resolve_model
from tests.support.tiny_decoder import tiny_arch, tiny_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's client send requests, whatever the environment of the tests says."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tiny_checkpoint(tmp_path / "model", tiny_arch())
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "README.md").write_text("a model")
    return path


def test_a_directory_is_a_model(model: Path) -> None:
    source = resolve_model("path", str(model), None)
    assert (source.path, source.name, source.revision) == (model, str(model), None)
    assert source.digest == model_digest(model)
    assert [file.name for file in source.text_files()] == ["chat_template.jinja", "tokenizer.json"]
    with pytest.raises(UsageError, match=r"does not exist \(looked from .*\)\.$"):
        resolve_model("path", str(model / "no"), None)
    with pytest.raises(UsageError, match=r"config\.json is a file; a model is the directory"):
        resolve_model("path", str(model / "config.json"), None)
    with pytest.raises(UsageError, match="For the model of the hub write hf://Qwen/Qwen3-8B"):
        resolve_model("path", "Qwen/Qwen3-8B", None)


def test_the_portable_name_is_that_of_the_model_however_its_directory_is_spelled(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model)
    spellings = (".", f"../{model.name}", str(model))
    assert {resolve_model("path", each, None).portable_name for each in spellings} == {"model"}
    assert resolve_model("builtin", "reference", None).portable_name == "builtin://reference"


def test_licences_and_notes_travel_without_being_the_model(model: Path, tmp_path: Path) -> None:
    before = model_digest(model)
    (model / "LICENSE.txt").write_text("terms")
    (model / "SYSTEM_PROMPT.txt").write_text("You are a model.")
    assert model_digest(model) == before
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    (model / "tekken.json").write_text("{}")
    assert model_digest(model) != before, "they decide the text"
    copy = tmp_path / "copy"
    copy.mkdir()
    source = resolve_model("path", str(model), None)
    source.copy_text_files(copy)
    source.copy_documents(copy)
    assert sorted(each.relative_to(copy).as_posix() for each in copy.rglob("*") if each.is_file()) == [
        "LICENSE.txt",
        "SOURCE_README.md",
        "SYSTEM_PROMPT.txt",
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
        "tekken.json",
        "tokenizer.json",
    ]
    again = tmp_path / "again"
    again.mkdir()
    resolve_model("path", str(tiny_checkpoint(tmp_path / "made", tiny_arch())), None).copy_documents(again)
    assert list(again.iterdir()) == []
    (tmp_path / "made" / "SOURCE_README.md").write_bytes((copy / "SOURCE_README.md").read_bytes())
    (tmp_path / "made" / "README.md").write_text("the card of a candidate")
    resolve_model("path", str(tmp_path / "made"), None).copy_documents(again)
    assert (again / "SOURCE_README.md").read_text() == "a model", (
        "the first source's, through any number of steps"
    )


def test_a_bundled_model_goes_by_its_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_source.BUILTIN, "reference", model)
    source = resolve_model("builtin", "reference", None)
    assert (source.path, source.name) == (model, "builtin://reference")
    with pytest.raises(UsageError, match="Did you mean 'reference'"):
        resolve_model("builtin", "referense", None)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
)
def test_the_digest_moves_with_every_file_that_matters(model: Path, name: str) -> None:
    before = model_digest(model)
    data = (model / name).read_bytes()
    (model / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert model_digest(model) != before
    (model / name).write_bytes(data)
    assert model_digest(model) == before
    (model / name).unlink()
    assert model_digest(model) != before


def test_the_digest_moves_when_a_file_is_renamed_or_added(model: Path) -> None:
    before = model_digest(model)
    (model / "merges.txt").write_text("a b")
    with_merges = model_digest(model)
    assert with_merges != before
    (model / "merges.txt").rename(model / "vocab.json")
    assert model_digest(model) not in (before, with_merges)


def test_the_digest_does_not_see_the_place_or_what_does_not_decide(model: Path, tmp_path: Path) -> None:
    before = model_digest(model)
    for name in ("README.md", "training.log", "pytorch_model.bin", "modeling_custom.py"):
        (model / name).write_text("something else")
    (model / "original").mkdir()
    (model / "original" / "config.json").write_text("{}")
    assert model_digest(model) == before
    shutil.copytree(model, tmp_path / "elsewhere")
    assert model_digest(tmp_path / "elsewhere") == before


def test_consolidated_weights_beside_those_of_transformers_are_no_part_of_a_model(model: Path) -> None:
    alone = model_digest(model)
    (model / "consolidated.safetensors").write_bytes(b"the same weights once more")
    assert model_digest(model) == alone
    (model / "model.safetensors").unlink()
    assert model_digest(model) not in (alone, "")
    before = model_digest(model)
    (model / "consolidated.safetensors").write_bytes(b"others")
    assert model_digest(model) != before


PUBLISHED = {
    "config.json": True,
    "model-00001-of-00002.safetensors": True,
    "model.safetensors.index.json": True,
    "tokenizer.json": True,
    "additional_chat_templates/tool_use.jinja": True,
    "consolidated.safetensors": False,
    "consolidated-00001-of-00026.safetensors": False,
    "consolidated.safetensors.index.json": False,
    "original/model--00001-of-00007.safetensors": False,
    "original/model.safetensors.index.json": False,
    "formats/gptq/model.safetensors": False,
    "pytorch_model.bin": False,
}
"""Files of repositories, and whether they are needed."""


class Hub:
    """Stands where the network would: records what was asked for and hands out one snapshot directory."""

    def __init__(self, model: Path, cache: Path) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._snapshot = cache / "snapshots" / COMMIT
        self.files = sorted(each.name for each in model.iterdir())
        shutil.copytree(model, self._snapshot)

    def model_info(self, name: str, *, revision: str | None = None) -> SimpleNamespace:
        self.asked.append(("info", revision))
        return SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=each) for each in self.files])

    def snapshot_download(
        self,
        name: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: list[str],
        local_files_only: bool,
    ) -> str:
        self.asked.append(("download", revision))
        self.fetched = list(
            filter_repo_objects(PUBLISHED, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        assert allow_patterns == list(FETCHED_FILES)
        assert not any(pattern.endswith((".bin", ".py", ".pt", "*")) for pattern in allow_patterns)
        assert local_files_only == (("info", None) not in self.asked and revision is None)
        return str(self._snapshot)


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(model, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_a_hub_model_is_pinned_to_its_commit_before_it_is_fetched(hub: Hub, model: Path) -> None:
    source = resolve_model("hf", "org/name", None)
    assert hub.asked == [("info", None), ("download", COMMIT)]
    assert (source.name, source.revision, source.digest) == ("org/name", COMMIT, model_digest(model))


def test_weights_that_nothing_reads_are_not_fetched(hub: Hub) -> None:
    resolve_model("hf", "org/name", None)
    assert hub.fetched == [name for name, needed in PUBLISHED.items() if needed]


def test_a_hub_client_that_is_offline_asks_the_cache_only(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model("hf", "org/name", None).revision == COMMIT
    assert hub.asked == [("download", None)]


def test_a_commit_needs_no_question(hub: Hub) -> None:
    assert resolve_model("hf", "org/name", COMMIT).revision == COMMIT
    assert hub.asked == [("download", COMMIT)]


def test_a_branch_is_resolved(hub: Hub) -> None:
    resolve_model("hf", "org/name", "v2")
    assert hub.asked == [("info", "v2"), ("download", COMMIT)]


def test_offline_asks_the_cache_only(hub: Hub) -> None:
    assert resolve_model("hf", "org/name", None, offline=True).revision == COMMIT
    assert hub.asked == [("download", None)]


def test_a_model_that_is_not_in_the_cache_is_said_to_be_missing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        StorageError, match="'org/never-fetched' at revision 'main' could not be had in the local cache"
    ):
        resolve_model("hf", "org/never-fetched", None, offline=True)


def test_a_kept_model_is_the_one_that_a_run_would_take_and_is_not_fetched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(model, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)

    def of_cache(name: str, *, local_files_only: bool, **others: Any) -> str:
        assert local_files_only
        hub.asked.append(("kept", others["revision"]))
        return str(tmp_path / "cache" / "snapshots" / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", of_cache)
    kept = kept_model("org/name", "v2", offline=False)
    assert hub.asked == [("info", "v2"), ("kept", COMMIT)]
    assert kept is not None
    assert (kept.name, kept.revision, kept.digest) == ("org/name", COMMIT, model_digest(model))


@pytest.mark.parametrize("index", ["{}", "[", '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'])
def test_a_model_without_all_of_its_weights_is_not_kept(
    index: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "cache" / "snapshots" / COMMIT
    assert kept_model("org/name", None, offline=True) is not None
    (snapshot / "model.safetensors.index.json").write_text(index)
    assert kept_model("org/name", None, offline=True) is None
    (snapshot / "model.safetensors.index.json").unlink()
    (snapshot / "model.safetensors").unlink()
    assert kept_model("org/name", None, offline=True) is None
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    assert kept_model("org/never-fetched", None, offline=True) is None


def test_a_model_of_which_a_run_would_fetch_more_is_not_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program fetched its weights and its config alone."""
    hub = Hub(model, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    snapshot = tmp_path / "cache" / "snapshots" / COMMIT
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **others: str(snapshot))
    hub.files += ["pytorch_model.bin", "original/model.safetensors"]
    assert kept_model("org/name", COMMIT, offline=False) is not None
    hub.files.append("vocab.txt")
    assert kept_model("org/name", COMMIT, offline=False) is None
    assert kept_model("org/name", COMMIT, offline=True) is not None, "a run offline takes what is there"
    (snapshot / "vocab.txt").write_text("")
    assert kept_model("org/name", COMMIT, offline=False) is not None


def test_what_is_kept_of_a_commit_needs_no_hub_that_answers(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes it as it is then, too. Of a branch nobody says which commit it is."""
    snapshot = tmp_path / "cache" / "snapshots" / COMMIT
    monkeypatch.setattr(
        huggingface_hub, "HfApi", lambda: huggingface_hub.hf_api.HfApi(endpoint="http://127.0.0.1:9")
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **others: str(snapshot))
    kept = kept_model("org/name", COMMIT, offline=False)
    assert kept is not None
    assert kept.revision == COMMIT
    assert kept_model("org/name", "v2", offline=False) is None


def test_weights_without_a_config_are_no_kept_model(hub: Hub, tmp_path: Path) -> None:
    """A plan asks the hub for the config then."""
    snapshot = tmp_path / "cache" / "snapshots" / COMMIT
    index = snapshot / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert kept_model("org/name", None, offline=True) is not None
    (snapshot / "config.json").unlink()
    assert kept_model("org/name", None, offline=True) is None
    index.unlink()
    assert kept_model("org/name", None, offline=True) is None


def test_a_network_that_is_down_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own client against a port where nobody listens."""
    monkeypatch.setattr(
        huggingface_hub, "HfApi", lambda: huggingface_hub.hf_api.HfApi(endpoint="http://127.0.0.1:9")
    )
    with pytest.raises(
        StorageError, match="'org/name' at revision 'main' could not be had from the Hugging Face hub"
    ):
        resolve_model("hf", "org/name", None)


def test_a_name_that_no_hub_model_can_have_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="'a/b/c' is not the name of a model"):
        resolve_model("hf", "a/b/c", None, offline=True)

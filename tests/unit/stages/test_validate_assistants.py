"""An assistant that a recipe names: it is measured before other proposers, its memory is planned, and results
depend on its files."""

import json
from pathlib import Path

import pytest

from compress.errors import CompressError, UsageError
from compress.export import open_checkpoint
from compress.models.assistant_reader import read_assistant
from compress.models.weights import dense
from compress.registry.model_source import ModelSource
from compress.runtime.speculative.assistant import AssistantModel
from compress.runtime.speculative.ngram import NGram
from compress.stages import Input, Inputs, PlanFacts, Port
from compress.stages.validate import _depends
from compress.stages.validate.assistants import served_assistant
from compress.stages.validate.draft_estimate import bytes_of, draft_bytes
from compress.stages.validate.estimate import estimate
from compress.stages.validate.proposers import draft_method, proposers_of
from compress.stages.validate.spec import Speculation, Validate
from tests.support.tiny_assistant import CLUSTERS, Pair, saved_pair

CONFIG = Validate(seq_len=32).engine_config(speculates=True)
K = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return saved_pair(tmp_path_factory.mktemp("pair"), **CLUSTERS)


def spec_of(named: Path | str) -> Validate:
    own = {"assistant": str(named), "prompt_tokens": 16, "output_tokens": 16}
    return Validate.model_validate({"seq_len": 32, "latency": None, "speculative": own})


def inputs_of(pair: Pair) -> Inputs:
    return Inputs(ModelSource(pair.target_path, "target", None, "sha256:0"), {})


def test_it_is_measured_before_prompt_lookup(pair: Pair) -> None:
    inputs = inputs_of(pair)
    named = Speculation(assistant=str(pair.assistant_path))
    found = proposers_of(named, inputs, offline=True)
    assert list(found) == ["assistant", "ngram"]
    assert isinstance(found["assistant"], AssistantModel)
    assert isinstance(found["ngram"], NGram)
    assert list(proposers_of(named.model_copy(update={"kind": "ngram"}), inputs, offline=True)) == [
        "ngram",
        "assistant",
    ]
    assert proposers_of(Speculation(), inputs, offline=True) == {}
    assert draft_method(inputs) is None


def test_its_memory_is_planned_without_pages(pair: Pair) -> None:
    arch = open_checkpoint(pair.target_path).arch
    num_params = sum(dense(each).numel() for each in read_assistant(pair.assistant_path).weights.values())
    for device, width in (("cpu", 4), ("cuda", 2)):
        facts = PlanFacts(arch, device, {})
        served = served_assistant(spec_of(pair.assistant_path).speculative, arch)
        assert served is not None
        assert bytes_of(served, device, CONFIG, K) == width * num_params
        assert draft_bytes(facts, CONFIG, K, assistant=served) == width * num_params
    planned = estimate(spec_of(pair.assistant_path), PlanFacts(arch, "cpu", {}))
    assert f"with a draft of {4 * num_params / 1e9:.3f} GB" in " ".join(planned.notes)


def test_a_plan_refuses_one_of_another_model_and_names_one_that_is_not_here(
    pair: Pair, tmp_path: Path
) -> None:
    arch = open_checkpoint(pair.target_path).arch
    with pytest.raises(UsageError, match="this one has 96 tokens and hidden size 32"):
        estimate(spec_of(pair.assistant_path), PlanFacts(arch.replace(hidden_size=32), "cpu", {}))
    with pytest.raises(UsageError, match="does not exist"):
        estimate(spec_of(tmp_path / "nothing"), PlanFacts(arch, "cpu", {}))
    with pytest.raises(CompressError, match="model_type = 'gemma4_text'"):
        estimate(spec_of(pair.target_path), PlanFacts(arch, "cpu", {}))
    elsewhere = "hf://nobody/assistant@" + "0" * 40
    notes = " ".join(estimate(spec_of(elsewhere), PlanFacts(arch, "cpu", {})).notes)
    assert f"{elsewhere} is not on this machine: its memory is not counted" in notes


def test_results_depend_on_its_files_and_a_name_must_not_move(pair: Pair, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    copied.mkdir()
    for file in pair.assistant_path.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    before, same = (_depends(spec_of(path), "cpu")["assistant"] for path in (pair.assistant_path, copied))
    assert before == same
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "centroid_intermediate_top_k": 4}))
    assert _depends(spec_of(copied), "cpu")["assistant"] != before
    assert "assistant" not in _depends(Validate(), "cpu")
    with pytest.raises(UsageError, match="names a branch that moves"):
        _depends(spec_of("hf://google/gemma-4-E2B-it-assistant"), "cpu")


def test_a_draft_folder_with_an_assistant_is_no_method_of_vllm_alone(pair: Pair, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    (exported / "draft").mkdir(parents=True)
    for file in pair.assistant_path.iterdir():
        (exported / "draft" / file.name).write_bytes(file.read_bytes())
    source = ModelSource(pair.target_path, "target", None, "sha256:0")
    inputs = Inputs(source, {Port.CHECKPOINT: Input(exported, "sha256:1")})
    assert draft_method(inputs) is None
    assert list(proposers_of(Speculation(), inputs, offline=True)) == ["assistant", "ngram"]
    named = Speculation(assistant=str(pair.assistant_path))
    with pytest.raises(UsageError, match=r"the candidate carries an assistant in .*exported.draft; one"):
        proposers_of(named, inputs, offline=True)

"""Tasks, texts and long contexts in the validate stage: the keys of a recipe, what `plan` refuses, and a
whole run of a model beside itself, with its gates."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.errors import RecipeError, UsageError
from compress.recipe import parse_spec, read_yaml
from compress.registry.model_source import ModelSource
from compress.stages import Input, Inputs, PlanFacts, Port
from compress.stages.validate import validate
from compress.stages.validate.estimate import check_answers, check_gates_by_name, check_lengths, estimate
from compress.stages.validate.spec import Validate, read_gates
from compress.validate.display import label
from compress.validate.report import render_html
from tests.support.tiny_decoder import LLAMA, tiny_arch


def spec(text: str) -> Validate:
    tree, where = read_yaml(text, file="recipe.yaml")
    return parse_spec(Validate, tree, where)


@pytest.fixture
def items(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    rows = [
        {"question": f"x{idx} =", "choices": [f" {idx}", f" f({idx})"], "answer": idx % 2} for idx in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_a_recipe_states_tasks_by_kind() -> None:
    own = spec(
        "tasks:\n- {kind: jsonl, name: mine, data: mine.jsonl, stop: ['.'], margin: 0.02}\n"
        "- {kind: lm_eval, name: gsm8k, filter: flexible-extract, limit: 100}\n"
        "gates: {tasks.mine.accuracy_drop: 0.01}"
    )
    mine, theirs = own.tasks
    assert (mine.kind, mine.margin, theirs.kind, theirs.limit) == ("jsonl", 0.02, "lm_eval", 100)  # type: ignore[attr-defined]
    assert [(gate.name, gate.limit) for gate in read_gates(own.gates)] == [("tasks.mine.accuracy_drop", 0.01)]
    assert label("tasks.mine.accuracy_drop") == "Drop of accuracy, mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks:\n- {kind: jsno, name: a, data: b}", r"2:\d+.*unknown kind 'jsno'"),
        ("tasks:\n- {kind: jsonl, name: a.b, data: b}", "name"),
        ("tasks:\n- {kind: jsonl, name: a, data: b, fields: {questoin: q}}", "items have no 'questoin'"),
        ("tasks:\n- {kind: jsonl, name: a, data: b, extract: '('}", "not a regular expression"),
        ("tasks:\n- {kind: jsonl, name: a, data: b}\n- {kind: jsonl, name: a, data: c}", "called 'a'"),
        ("gates: {tasks.a.kl_mean: 1}", "of a task the drop of accuracy is limited"),
        ("gates: {accuracy_drop: 1}", "of a task the drop of accuracy is limited"),
        ("gates: {tasks.accuracy_drop: 1}", "no stage 'tasks'"),
    ],
)
def test_a_slip_is_refused_where_it_is(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        spec(text)


def test_plan_refuses_answers_that_leave_no_token_for_a_question(items: Path, tmp_path: Path) -> None:
    arch = tiny_arch(LLAMA, max_position_embeddings=256)
    small = "seq_len: 64\nlatency: {prompt_tokens: 8, output_tokens: 8}\n"
    task = f"tasks:\n- {{kind: jsonl, name: mine, data: {items}, max_length: 128"
    check_lengths(spec(f"{small}{task}}}"), arch, speculates=False)  # its answers are chosen
    with items.open("a") as file:
        file.write('\n{"question": "x =", "reference": "1"}')
    with pytest.raises(UsageError, match=r"task 'mine' generates up to 256 tokens.* may have 128"):
        check_lengths(spec(f"{small}{task}}}"), arch, speculates=False)
    check_lengths(spec(f"{small}{task}, max_tokens: 127}}"), arch, speculates=False)
    (tmp_path / "prompts.txt").write_text("once\n")
    prompts = f"generation: {{prompts: {tmp_path / 'prompts.txt'}, max_tokens: 300}}"
    with pytest.raises(UsageError, match=r"generation generates up to 300 tokens.* may have 256"):
        check_lengths(spec(small + prompts), arch, speculates=False)


def test_answers_are_compared_with_the_length_of_their_own_task(items: Path, tmp_path: Path) -> None:
    """Sequences of other parts of the recipe may be longer."""
    arch = tiny_arch(LLAMA, max_position_embeddings=1024)
    with items.open("a") as file:
        file.write('\n{"question": "x =", "reference": "1"}')
    (tmp_path / "prompts.txt").write_text("once\n")
    prompts = f"generation: {{prompts: {tmp_path / 'prompts.txt'}, max_tokens: 512, max_length: 512}}\n"
    task = f"tasks:\n- {{kind: jsonl, name: mine, data: {items}, max_length: 128, max_tokens: 200}}"
    for part, message in ((task, "'mine' generates up to 200 .* have 128"), (prompts, "512 .* have 512")):
        with pytest.raises(UsageError, match=message):
            check_lengths(spec(f"seq_len: 1024\nlatency: null\n{part}"), arch, speculates=False)


def test_plan_refuses_chat_of_a_model_without_a_template(items: Path, tmp_path: Path) -> None:
    own = spec(f"seq_len: 64\nlatency: null\ntasks:\n- {{kind: jsonl, name: a, data: {items}, chat: true}}")
    facts = PlanFacts(tiny_arch(LLAMA, max_position_embeddings=4096), "cpu", {}, source=tmp_path)
    with pytest.raises(UsageError, match="the task 'a' has `chat: true`, and the model has no chat template"):
        estimate(own, facts)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert estimate(own, facts).peak_bytes


def test_plan_refuses_gates_on_other_tasks_and_files_that_are_not_there(items: Path) -> None:
    own = spec(
        f"tasks:\n- {{kind: jsonl, name: mine, data: {items}}}\ngates: {{tasks.mien.accuracy_drop: 0.1}}"
    )
    with pytest.raises(UsageError, match=r"names no task of this recipe\. Did you mean 'mine'"):
        check_answers(own, offline=True)
    with pytest.raises(UsageError, match="not a file"):
        check_answers(spec("tasks:\n- {kind: jsonl, name: a, data: nowhere.jsonl}"), offline=True)
    with pytest.raises(UsageError, match="not a file of prompts"):
        check_answers(spec("generation: {prompts: nowhere.txt}"), offline=True)
    with pytest.raises(UsageError, match="needle_lengths has 200, and there are windows of 100"):
        check_answers(spec("long_context: {seq_len: 100, needle_lengths: [64, 200]}"), offline=True)
    with pytest.raises(UsageError, match="`generation` runs on the bundled runtime"):
        check_gates_by_name(spec("generation: {prompts: some.txt}"))


def test_a_model_beside_itself_gives_the_same_answers_and_texts_and_a_report(
    tmp_path: Path, model_dir: Path, items: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(\nimport os\n", encoding="utf-8")
    own = spec(
        f"latency: null\nnum_samples: 2\nseq_len: 16\n"
        f"tasks:\n- {{kind: jsonl, name: mine, data: {items}, delimiter: ''}}\n"
        f"generation: {{prompts: {prompts}, max_tokens: 6}}\n"
        "long_context: {seq_len: 100, num_samples: 2, num_buckets: 2, depths: [0.5], needle_lengths: [96], "
        "kv_formats: [INT4_TOKEN_HEAD]}\n"
        "gates: {tasks.mine.accuracy_drop: 0.01}"
    )
    source = ModelSource(model_dir, "tiny", None, "sha256:" + "0" * 64)

    def copy(writer: ArtifactWriter) -> None:
        shutil.copytree(model_dir, writer.path, dirs_exist_ok=True)
        writer.describe(role="checkpoint")

    whole = Workspace(tmp_path / "work").commit("key", "export", {}, copy)
    inputs = Inputs(
        source,
        {
            Port.SOURCE: Input(model_dir, source.digest),
            Port.CHECKPOINT: Input(whole.path, whole.digest),
        },
    )
    out = tmp_path / "evidence"
    out.mkdir()
    validate(own, inputs, ArtifactWriter(out), Context("cpu", 0, tmp_path))
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    (row,) = report["tasks"]["rows"]
    assert (row["num_items"], row["drop"]["value"], row["verdict"]) == (6, 0.0, "too few items to tell")
    (gate,) = report["gates"]
    assert (gate["name"], gate["passed"]) == ("tasks.mine.accuracy_drop", False)
    assert "within the limit, but not with confidence" in gate["note"]
    assert [each["num_same"] for each in report["generation"]["rows"]] == [2, 2]
    at_length = report["long_context"]
    assert [each["model"] for each in at_length["positions"]] == ["candidate", "INT4_TOKEN_HEAD"]
    same, coarse = (each["rows"] for each in at_length["positions"])
    assert [bucket["kl_mean"]["value"] for bucket in same] == [0.0, 0.0]
    assert all(bucket["kl_mean"]["value"] > 0 for bucket in coarse)
    assert [each["model"] for each in at_length["needle"]] == ["source", "candidate", "INT4_TOKEN_HEAD"]
    page = render_html(report)
    for heading in ("Tasks", "Generated texts", "Long context"):
        assert f"<h2>{heading}</h2>" in page
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "## Tasks" in card
    assert "too few items to tell" in card

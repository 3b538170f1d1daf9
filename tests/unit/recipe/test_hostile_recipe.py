"""Recipes and data cards that mean nothing, or are made to harm: refused before any work, at their place, and
soon.
"""

from pathlib import Path

import pytest

from compress.data.card import load_card
from compress.errors import RecipeError, UsageError
from compress.models.family import family_of
from compress.pipeline.steps import build_steps, estimates
from compress.recipe import load_cases, load_recipe, parse_recipe, read_yaml
from compress.recipe.source import MAX_BYTES
from tests.support.hostile import make_fifo, refusal
from tests.support.tiny_decoder import LLAMA

HEAD = "version: 1\nmodel: builtin://reference\n"
ARCH = family_of(LLAMA).read_config(LLAMA | {"max_position_embeddings": 128, "vocab_size": 2048})


def _steps(stages: str) -> None:
    recipe = parse_recipe(f"{HEAD}stages:\n{stages}", file="r.yaml")
    estimates(build_steps(recipe), ARCH, "cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: true\nmodel: a\nstages: [{kind: calibrate}]", "r.yaml:1:1: version: true is not 1"),
        ("version: false\nmodel: a\nstages: [{kind: calibrate}]", "r.yaml:1:1: version: false is not 1"),
        ("version: 1.0\nmodel: a\nstages: [{kind: calibrate}]", "r.yaml:1:1: version:"),
        (f"{HEAD}stages: [calibrate]", "r.yaml:3:10: stages[0]: must be a mapping with a kind, such as {"),
        (f"{HEAD}stages: [quantize]", "such as {kind: quantize}, not \"quantize\""),
        (f"{HEAD}stages: [[1]]", "stages[0]: must be a mapping"),
        (f"{HEAD}stages: [null]", "stages[0]: must be a mapping"),
        (f"{HEAD}stages: []", "r.yaml:3:1: stages:"),
        (f"{HEAD}stages: {{kind: calibrate}}", "r.yaml:3:1: stages:"),
        (f"{HEAD}stages: 3", "r.yaml:3:1: stages:"),
        (f"{HEAD}stages: [{', '.join(['{kind: export}'] * 65)}]", "r.yaml:3:1: stages:"),
        (f"{HEAD}seed: true\nstages: [{{kind: export}}]", "r.yaml:3:1: seed:"),
        (f'{HEAD}stages: [{{kind: "\\ud800"}}]', "is not text"),
        (f'{HEAD}stages: [{{kind: "a\\0"}}]', "r.yaml:3:17: the character \\x00 is not text"),
        (f'{HEAD}stages: [{{"\\e[2J": 1}}]', "is not text"),
        (f"{HEAD}stages: &a [*a]", "anchors and aliases"),
        (f"{HEAD}stages: [*a]", "anchors and aliases"),
        (f"{HEAD}<<: 3", "merge keys"),
        (f"{HEAD}stages: !!python/object:os.system [a]", "the tag"),
    ],
)  # fmt: skip
def test_a_wrong_frame_is_refused_at_its_place(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, file="r.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value), "one mistake is one line"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("  - kind: quantize\n  - kind: quantize\n", "r.yaml:5:5: stages[1].kind: a second 'quantize'"),
        (
            "  - kind: quantize\n" + "  - {kind: draft, init: {keep_layers: 1}}\n" * 2,
            "a second 'draft'",
        ),
        ("  - kind: calibrate\n" * 2, "a second 'calibrate'"),
        ("  - kind: quantize\n" + "  - kind: export\n" * 2, "a second 'export'"),
        ("  - kind: quantize\n  - kind: export\n" + "  - kind: validate\n" * 2, "a second 'validate'"),
        ("  - {kind: distill, batch_size: 1" + "0" * 30 + "}\n", "r.yaml:4:21: stages[0].batch_size:"),
        ("  - {kind: distill, tokens: 1" + "0" * 30 + "}\n", "stages[0].tokens:"),
        ("  - {kind: distill, seq_len: 1" + "0" * 30 + "}\n", "stages[0].seq_len:"),
        ("  - {kind: distill, lora: {rank: 1" + "0" * 30 + "}}\n", "stages[0].lora.rank:"),
        ("  - {kind: draft, batch_size: 1" + "0" * 30 + "}\n", "stages[0].batch_size:"),
        ("  - {kind: calibrate, num_samples: 1" + "0" * 390 + "}\n", "stages[0].num_samples:"),
        ("  - {kind: calibrate, num_samples: true}\n", "stages[0].num_samples:"),
        ("  - {kind: validate, latency: {batch_sizes: [0]}}\n", "stages[0].latency.batch_sizes[0]:"),
        ("  - {kind: validate, latency: {batch_sizes: [-1]}}\n", "stages[0].latency.batch_sizes[0]:"),
        ("  - {kind: validate, latency: {batch_sizes: [1, 100000]}}\n", "latency.batch_sizes[1]:"),
        ("  - {kind: validate, latency: {batch_sizes: []}}\n", "latency.batch_sizes:"),
        ("  - {kind: validate, speculative: {batch_sizes: [0]}}\n", "speculative.batch_sizes[0]:"),
    ],
)
def test_a_wrong_stage_is_refused_at_its_place(stages: str, message: str) -> None:
    assert message in refusal(lambda: _steps(stages), exit_codes=(2,))


@pytest.mark.parametrize(
    ("key", "settings", "ngram"),
    [
        ("latency", "seq_len: 64", ""),
        ("speculative", "seq_len: 64, latency: null", "kind: ngram, prompt_tokens: 100"),
    ],
)
def test_a_model_that_is_too_short_for_a_measurement_names_the_key(
    key: str, settings: str, ngram: str
) -> None:
    more = f", speculative: {{{ngram}}}" if ngram else ""
    before = "  - {kind: calibrate, seq_len: 64}\n  - {kind: quantize, scheme: FP8_DYNAMIC}\n"
    validate = f"  - {{kind: validate, {settings}{more}}}\n"
    message = refusal(lambda: _steps(before + validate), exit_codes=(2,))
    assert f"{key}.prompt_tokens" in message
    assert "128 positions" in message
    assert f"{key}: null" in message
    advice = message.partition("such as ")[2].partition(", or ")[0]
    given, _ = read_yaml(f"{{{advice}}}", file="advice")
    assert sum(given[key].values()) <= 128


LARGE: dict[str, str] = {
    "nested brackets": "[" * 100_000,
    "nested mappings": "{a: " * 50_000,
    "nested lists": "".join(" " * depth + "-\n" for depth in range(900)),
    "many keys": "".join(f"k{idx}: 1\n" for idx in range(30_000)),
    "many items": "[" + "1," * 100_000 + "1]",
    "too long": "a" * (MAX_BYTES + 1),
    "many stages": f"{HEAD}stages: [" + "{kind: export}, " * 2000 + "]",
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_or_nested_file_is_refused_soon(name: str) -> None:
    refusal(lambda: parse_recipe(LARGE[name], file="r.yaml"), exit_codes=(2,))


@pytest.mark.parametrize("kind", ["fifo", "directory", "long", "binary", "missing"])
def test_a_file_that_is_no_text_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    if kind == "fifo":
        make_fifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(b"a" * (MAX_BYTES + 1) if kind == "long" else b"\xff\xfe")
    for load in (load_recipe, lambda place: load_card(str(place))):
        assert str(path) in refusal(lambda load=load: load(path), exit_codes=(2,))


@pytest.mark.parametrize("ref", ["a\0b", "\ud800", "a" * 5000, "builtin://", "builtin://x\x1b"], ids=ascii)
def test_a_card_that_is_no_path_is_refused(ref: str) -> None:
    with pytest.raises(UsageError):
        load_card(ref)


def test_a_range_is_wide_enough_for_every_recipe_here() -> None:
    for path in sorted(Path(__file__).parents[3].glob("recipes/*.yaml")):
        for recipe in load_cases(path):
            assert build_steps(recipe)

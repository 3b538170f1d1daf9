"""Recipes: what the YAML means, where errors point, and that specs are checked strictly."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, field_validator
from ruamel.yaml import YAML

from compress.errors import RecipeError, UsageError
from compress.recipe import (
    ByKind,
    ModelRef,
    Position,
    Push,
    Spec,
    dump_yaml,
    load_recipe,
    parse_model_ref,
    parse_recipe,
    parse_spec,
    read_yaml,
    recipe_schema,
    unknown_kind_error,
)

RECIPE = """\
# a comment
version: 1
model: builtin://reference
seed: 7
stages:
  - {kind: calibrate, num_samples: 128}
  - kind: quantize
    smooth: {kind: awq, grid: 20}
push: {to: layout://registry, name: reference-w4, aliases: [candidate]}
"""


class NoSmooth(Spec):
    kind: Literal["none"] = "none"


class Awq(Spec):
    kind: Literal["awq"] = "awq"
    grid: int = 20
    duo_scaling: bool = True


class Gptq(Spec):
    kind: Literal["gptq"] = "gptq"
    damp_frac: float = 0.01


class Quantize(Spec):
    scheme: Literal["W4A16_G128", "FP8_DYNAMIC"]
    smooth: Annotated[NoSmooth | Awq, Field(discriminator="kind")] = NoSmooth()
    round: Annotated[Spec, ByKind(lambda: {"gptq": Gptq})] = Gptq()
    passes: tuple[Annotated[NoSmooth | Awq, Field(discriminator="kind")], ...] = ()
    per_device: dict[str, Awq] = Field(default_factory=dict)
    num_rows: int | Literal["auto"] = "auto"


def spec_error(text: str, spec: type[Spec] = Quantize) -> str:
    raw, where = read_yaml(text, file="r.yaml")
    with pytest.raises(RecipeError) as caught:
        parse_spec(spec, raw, where)
    return str(caught.value)


def recipe_error(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, file="r.yaml")
    return str(caught.value)


# -------------------------------------------------------------------------------------------------------
# scalars and YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("300_000", 300_000),
        ("-12", -12),
        ("+3", 3),
        ("0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("1e-4", 1e-4),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1_000.5", 1000.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("off", "off"),
        ("yes", "yes"),
        ("on", "on"),
        ("y", "y"),
        ("2026-01-31", "2026-01-31"),
        ("1:30", "1:30"),
        ("1__0", "1__0"),
        ("_1", "_1"),
        ("1.2.3", "1.2.3"),
        ("'300'", "300"),
        ('"true"', "true"),
        ("hf://org/name@1e10", "hf://org/name@1e10"),
        ("W4A16_G128", "W4A16_G128"),
    ],
)
def test_a_scalar_means_what_it_says(text: str, value: Any) -> None:
    got, _ = read_yaml(f"key: {text}\n", file="r.yaml")
    assert got == {"key": value}
    assert type(got["key"]) is type(value)


@pytest.mark.parametrize("text", ["0123", "-007", "1_0e999", ".inf", "-.Inf", ".nan", "9" * 5000])
def test_a_number_that_could_be_misread_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"^r\.yaml:1:6: .*quote it"):
        read_yaml(f"key: {text}\n", file="r.yaml")


def test_keys_are_text() -> None:
    assert read_yaml("1: a\non: b\ntrue: c\n", file="r.yaml")[0] == {"1": "a", "on": "b", "true": "c"}


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "3:1", "a: duplicate key, first given at line 1"),
        ("a:\n  - {x: 1, x: 2}\n", "2:12", "a[0].x: duplicate key"),
        ("a:\n\t- 1\n", "2:1", "tab"),
        ("a: !!python/object:os.system x\n", "1:4", "tag"),
        ("a: ! x\n", "1:4", "tag"),
        ("a: &x 1\n", "1:4", "anchor"),
        ("a: [1]\nb: *a\n", "2:4", "alias"),
        ("a: 1\n<<: {b: 2}\n", "2:1", "merge"),
        ("? [1]\n: 2\n", "1:3", "key"),
        (": 2\n", "1:1", "key"),
        ("%YAML 1.1\n---\na: no\n", "2:1", "directive"),
        ("a: 1\n---\nb: 2\n", "2:1", "second document"),
        ("a: 'x\n", "2:1", "quoted"),
        ("a: 1\nb: x\x07y\n", "2:5", "control character"),
        ("a: " + "[" * 100 + "]" * 100, "1:68", "deep"),
    ],
)
def test_yaml_that_is_not_read_is_refused_at_its_place(text: str, place: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_yaml(text, file="r.yaml")
    assert str(caught.value).startswith(f"r.yaml:{place}: ")
    assert words in str(caught.value)


def test_positions_are_those_of_keys_and_items() -> None:
    _, where = read_yaml(RECIPE, file="r.yaml")
    lines = RECIPE.splitlines()
    for path, position in where.positions.items():
        if path and isinstance(path[-1], str):
            assert lines[position.line - 1][position.column - 1 :].startswith(path[-1])
    assert where.positions["stages", 1] == Position(7, 5)
    assert (
        where.under("stages", 1).positions["smooth", "grid"] == where.positions["stages", 1, "smooth", "grid"]
    )


printed = st.characters(codec="utf-8", exclude_categories=["Cc"], include_characters="\t\n\r\x85")
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(printed),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(printed, min_size=1), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(plain)
def test_dump_is_the_inverse_of_read(value: Any) -> None:
    text = dump_yaml(value)
    got = read_yaml(text, file="r.yaml")[0]
    assert json.dumps(got) == json.dumps(value)


def test_dump_agrees_with_another_yaml_reader() -> None:
    value = {"a": {"b": [1, 2.5, None, True, "no", "x: y", {"c": []}]}, "d": {}, "1": "ü\n"}
    assert YAML(typ="safe", pure=True).load(dump_yaml(value)) == value


# ------------------------------------------------------------------------------------------------------- the
# recipe


def test_a_recipe_keeps_its_stages_raw() -> None:
    recipe = parse_recipe(RECIPE, file="r.yaml")
    assert (recipe.version, recipe.model, recipe.seed, recipe.file) == (1, "builtin://reference", 7, "r.yaml")
    assert [stage.kind for stage in recipe.stages] == ["calibrate", "quantize"]
    assert recipe.stages[1].raw == {"smooth": {"kind": "awq", "grid": 20}}
    assert recipe.push == Push(to="layout://registry", name="reference-w4", aliases=("candidate",))


def test_seed_and_push_may_be_left_out() -> None:
    recipe = parse_recipe("version: 1\nmodel: ./m\nstages: [{kind: quantize}]\n", file="r.yaml")
    assert (recipe.seed, recipe.push) == (0, None)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("stages:", "stagse:", "r.yaml:5:1: stagse: unknown key. Did you mean 'stages'?"),
        ("version: 1", "version: 2", "r.yaml:2:1: version: 2 is not 1."),
        ("version: 1", "version: '1'", 'r.yaml:2:1: version: "1" is not 1.'),
        ("version: 1\n", "", "r.yaml:2:1: version: a required key is missing."),
        (
            "builtin:",
            "buildin:",
            "r.yaml:3:1: model: unknown scheme 'buildin://' of a model reference. Did you mean 'builtin'?",
        ),
        ("seed: 7", "seed: -1", "r.yaml:4:1: seed: "),
        ("seed: 7", "seed: true", "r.yaml:4:1: seed: "),
        ("{kind: calibrate,", "{kin: calibrate,", "r.yaml:6:5: stages[0].kind: a required key is missing."),
        ("{kind: calibrate, num_samples: 128}", "calibrate", "r.yaml:6:5: stages[0]: must be a mapping"),
        ("aliases", "alias", "r.yaml:9:51: push.alias: unknown key. Did you mean 'aliases'?"),
    ],
)
def test_a_wrong_frame_is_refused_at_its_place(old: str, new: str, expected: str) -> None:
    assert expected in recipe_error(RECIPE.replace(old, new))


@pytest.mark.parametrize(("text", "words"), [("", "mapping"), ("- 1\n", "mapping"), ("hello\n", "mapping")])
def test_a_top_level_that_is_no_mapping_is_refused(text: str, words: str) -> None:
    assert words in recipe_error(text)


def test_empty_stages_are_refused() -> None:
    assert recipe_error("version: 1\nmodel: m\nstages: []\n").startswith("r.yaml:3:1: stages: ")


def test_all_problems_are_listed_in_file_order() -> None:
    lines = recipe_error("version: 3\nmodle: x\nstages: []\nsed: 1\n").splitlines()
    assert [line.split(": ")[1] for line in lines] == ["version", "model", "modle", "stages", "sed"]


def test_unknown_kind_points_at_the_kind() -> None:
    entry = parse_recipe(RECIPE.replace("kind: quantize", "kind: quantise"), file="r.yaml").stages[1]
    message = str(unknown_kind_error(entry, ["quantize", "prune"]))
    assert message == "r.yaml:7:5: stages[1].kind: unknown stage 'quantise'. Did you mean 'quantize'?"


def test_a_file_that_cannot_be_read_is_a_recipe_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot read"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff")
    with pytest.raises(RecipeError, match="UTF-8"):
        load_recipe(tmp_path / "latin.yaml")


def test_a_byte_order_mark_does_not_move_columns(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + RECIPE.replace("seed", "sed").encode())
    with pytest.raises(RecipeError, match=r"bom\.yaml:4:1: sed"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("builtin://reference", ModelRef("builtin", "reference")),
        ("./models/a@b", ModelRef("path", "./models/a@b")),
        ("models/a", ModelRef("path", "models/a")),
        ("hf://org/name@abc", ModelRef("hf", "org/name", "abc")),
        ("hf://gpt2", ModelRef("hf", "gpt2")),
    ],
)
def test_model_references(text: str, ref: ModelRef) -> None:
    assert parse_model_ref(text) == ref


@pytest.mark.parametrize(
    "text",
    ["", "  ", "s4://b/m", "builtin://", "builtin://../x", "hf://a/b/c", "hf://a/b@", "hf://../x", "hf://"],
)
def test_other_model_references_are_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_model_ref(text)


# -------------------------------------------------------------------------------------------------------
# specs


def test_a_spec_is_read_with_its_unions() -> None:
    raw, where = read_yaml(
        "{scheme: FP8_DYNAMIC, smooth: {kind: awq, grid: 5}, round: {kind: gptq, damp_frac: 1}, num_rows: 4}",
        file="r.yaml",
    )
    spec = parse_spec(Quantize, raw, where)
    assert spec.smooth == Awq(grid=5)
    assert spec.round == Gptq(damp_frac=1.0)
    assert spec.model_dump(mode="json")["round"]["damp_frac"] == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{scheme: FP8_DYNAMIC, smoth: {}}", "r.yaml:1:23: smoth: unknown key. Did you mean 'smooth'?"),
        ("{scheme: FP8_DYNAMC}", "Did you mean 'FP8_DYNAMIC'?"),
        (
            "scheme: FP8_DYNAMIC\nsmooth: {kind: awq, gird: 5}",
            "r.yaml:2:21: smooth.gird: unknown key. Did you mean 'grid'?",
        ),
        (
            "scheme: FP8_DYNAMIC\nsmooth: {kind: aqw}",
            "r.yaml:2:10: smooth.kind: unknown kind 'aqw'. Did you mean 'awq'?",
        ),
        ("scheme: FP8_DYNAMIC\nsmooth: {grid: 5}", "r.yaml:2:1: smooth.kind: a required key is missing."),
        (
            "scheme: FP8_DYNAMIC\nround: {kind: gptq, dampfrac: 5}",
            "r.yaml:2:21: round.dampfrac: unknown key. Did you mean 'damp_frac'?",
        ),
        (
            "scheme: FP8_DYNAMIC\nround: {kind: gtpq}",
            "r.yaml:2:9: round.kind: unknown kind 'gtpq'. Did you mean 'gptq'?",
        ),
        (
            "scheme: FP8_DYNAMIC\npasses:\n  - kind: none\n  - {kind: awq, duo_scalign: 1}",
            "r.yaml:4:17: passes[1].duo_scalign: unknown key. Did you mean 'duo_scaling'?",
        ),
        (
            "scheme: FP8_DYNAMIC\nper_device: {a100: {kind: awq, grd: 1}}",
            "per_device.a100.grd: unknown key. Did you mean 'grid'?",
        ),
        ("scheme: FP8_DYNAMIC\nsmooth: {kind: awq, grid: '5'}", "r.yaml:2:21: smooth.grid: "),
        ("scheme: FP8_DYNAMIC\nsmooth: {kind: awq, duo_scaling: yes}", "r.yaml:2:21: smooth.duo_scaling: "),
        ("scheme: FP8_DYNAMIC\nnum_rows: many", "r.yaml:2:1: num_rows: "),
    ],
)
def test_spec_errors_point_at_the_key_and_name_the_nearest(text: str, expected: str) -> None:
    message = spec_error(text)
    assert expected in message
    assert len(message.splitlines()) == 1


def test_errors_of_a_stage_carry_the_path_in_the_whole_file() -> None:
    entry = parse_recipe(RECIPE, file="r.yaml").stages[1]
    with pytest.raises(RecipeError) as caught:
        parse_spec(Quantize, entry.raw, entry.where)
    assert str(caught.value) == "r.yaml:7:5: stages[1].scheme: a required key is missing."


class Heads(Spec):
    """A kind that shares its name with a key, inside a union and validated by hand."""

    kind: Literal["heads"] = "heads"
    heads: int = 1


class Prune(Spec):
    part: Annotated[NoSmooth | Heads, Field(discriminator="kind")] = NoSmooth()
    method: Any = None

    @field_validator("method")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if value == "lost":
            raise UsageError("unknown method 'lost'.")
        if value == "odd":
            raise ValueError("must be even")
        return Heads.model_validate(value) if isinstance(value, dict) else value


def test_a_key_named_like_its_kind_is_found() -> None:
    assert spec_error("part: {kind: heads, heads: x}", Prune).startswith("r.yaml:1:21: part.heads: ")


def test_errors_out_of_validators_keep_their_place() -> None:
    assert spec_error("method: lost", Prune) == "r.yaml:1:1: unknown method 'lost'."
    assert spec_error("method: odd", Prune) == "r.yaml:1:1: method: must be even"
    assert spec_error("method: {heads: [x]}", Prune).startswith("r.yaml:1:10: method.heads: ")


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Awq().grid = 3  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------- the
# schema


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        return {node["$ref"]} if "$ref" in node else set().union(*map(references, node.values()), set())
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_the_schema_knows_every_stage_and_closes_every_reference() -> None:
    schema = json.loads(json.dumps(recipe_schema({"quantize": Quantize, "prune": Prune, "again": Prune})))
    assert schema["$schema"].endswith("2020-12/schema")
    assert set(schema["required"]) == {"version", "model", "stages"}
    assert schema["additionalProperties"] is False
    choices = schema["properties"]["stages"]["items"]["oneOf"]
    kinds = {
        schema["$defs"][choice["$ref"].removeprefix("#/$defs/")]["properties"]["kind"]["const"]
        for choice in choices
    }
    assert kinds == {"quantize", "prune", "again"}
    assert {reference.removeprefix("#/$defs/") for reference in references(schema)} <= set(schema["$defs"])
    quantize = schema["$defs"]["stage:quantize"]
    assert set(quantize["required"]) == {"kind", "scheme"}
    assert "damp_frac" in json.dumps(schema)


SIGNED = "version: 1\nmodel: {model}\nstages: [{{kind: export}}]\n"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{ref: ./m, signed_by: {}}", "r.yaml:2:19: model.signed_by: give a public key"),
        ("{ref: ./m}", "r.yaml:2:1: model.signed_by: a required key is missing."),
        (
            "{ref: ./m, signed_by: {kee: a}}",
            "r.yaml:2:31: model.signed_by.kee: unknown key. Did you mean 'key'?",
        ),
        (
            "{ref: ./m, signed_by: {key: a, issuer: b}}",
            "r.yaml:2:19: model.signed_by: give either a public key",
        ),
        ("{ref: 'hf://a/b', signed_by: {key: a}}", "r.yaml:2:9: model.ref: a signature covers every file"),
        ("{ref: 'builtin://reference', signed_by: {key: a}}", "r.yaml:2:9: model.ref: a signature covers"),
    ],
)
def test_who_must_have_signed_a_model_is_checked_where_it_is_written(model: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(SIGNED.format(model=model), file="r.yaml")
    (line,) = str(error.value).splitlines()
    assert line.startswith(message)


def test_a_model_may_say_who_must_have_signed_it() -> None:
    recipe = parse_recipe(SIGNED.format(model="{ref: ./m, signed_by: {key: a.pub}}"), file="r.yaml")
    assert recipe.model == "./m"
    assert recipe.signed_by is not None
    assert str(recipe.signed_by.verifier()) == "the key a.pub"
    assert parse_recipe(SIGNED.format(model="./m"), file="r.yaml").signed_by is None


@pytest.mark.parametrize("sign", ["{}", "{key: a, keyless: true}", "{keyless: true, password_file: a}"])
def test_how_an_artifact_is_signed_is_checked_where_it_is_written(sign: str) -> None:
    text = f"{SIGNED.format(model='./m')}push: {{to: 'layout://r', name: b, sign: {sign}}}\n"
    with pytest.raises(RecipeError, match=r"^r\.yaml:4:\d+: push\.sign: "):
        parse_recipe(text, file="r.yaml")

"""The key `notify` of a recipe."""

import json
from typing import Any

import pytest

from compress.errors import RecipeError
from compress.pipeline import build_steps, lock_of, resolve_source
from compress.recipe import parse_recipe

HOOK = {"webhook": "https://hooks.example/a", "headers": {"Authorization": "Bearer ${NOTIFY_TOKEN}"}}


def recipe_with(notify: Any) -> str:
    document = {
        "version": 1,
        "model": "builtin://reference",
        "stages": [{"kind": "quantize"}],
        "notify": notify,
    }
    return json.dumps(document)


@pytest.mark.parametrize(
    "notify", [HOOK, [HOOK], [HOOK, {"webhook": "http://localhost:8080/b", "on": ["error"]}]]
)
def test_one_webhook_or_several(notify: Any) -> None:
    found = parse_recipe(recipe_with(notify), file="r.yaml").notify
    assert [each.webhook for each in found] == [
        each["webhook"] for each in (notify if isinstance(notify, list) else [notify])
    ]
    assert found[0].on == ("done", "gate_failed", "error")


def test_a_recipe_without_it_has_none() -> None:
    text = '{"version": 1, "model": "builtin://reference", "stages": [{"kind": "export"}]}'
    assert parse_recipe(text, file="r.yaml").notify == ()


def test_the_lock_keeps_the_name_of_a_secret_and_gives_the_same_webhooks() -> None:
    recipe = parse_recipe(recipe_with([HOOK]), file="r.yaml")
    lock = lock_of(recipe, build_steps(recipe), resolve_source(recipe.model))
    assert "${NOTIFY_TOKEN}" in json.dumps(lock)
    assert parse_recipe(json.dumps(lock), file="lock").notify == recipe.notify


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"webhook": "http://hooks.example/a"}, "no TLS"),
        ({"webhook": "ftp://hooks.example/a"}, "a URL such as"),
        ({"webhook": "hooks.example/a"}, "a URL such as"),
        ({"webhook": "https://"}, "a URL such as"),
        ({"webhook": "https://[/a"}, "no URL"),
        ({"webhook": "https://host:port/a"}, "no URL"),
        ({"webhook": "https://me:pw@hooks.example/a"}, "password"),
        ({"headers": {"Authorization": "Bearer abc"}}, "environment variable"),
        ({"headers": {"cookie": "abc"}}, "environment variable"),
        ({"headers": {"Host": "elsewhere"}}, "not a header"),
        ({"headers": {"Bad name": "x"}}, "not a header"),
        ({"headers": {"X-A": "x\r\nX-B: y"}}, "characters"),
        ({"on": []}, "at least 1"),
        ({"on": ["success"]}, "'success'|\"success\""),
        ({"timeout_s": 0}, "greater than 0"),
        ({"timeout_s": 3600}, "less than or equal to 300"),
        ({"sign_with": "${KEY}"}, "match"),
        ({"url": "https://hooks.example"}, "unknown key"),
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_what_is_wrong_is_named_at_its_place(wrong: dict[str, Any], sentence: str, several: bool) -> None:
    hook = {**HOOK, **wrong}
    with pytest.raises(RecipeError, match=sentence) as caught:
        parse_recipe(recipe_with([hook] if several else hook), file="r.yaml")
    assert str(caught.value).startswith("r.yaml:1:")

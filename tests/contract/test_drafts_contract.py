"""What every kind of draft must keep: a new file under `stages/draft/inits/` is held to it without edits."""

from typing import Any

import pytest
from pydantic import ValidationError

from compress.recipe import Spec
from compress.stages.draft.inits import INITS
from compress.stages.draft.spec import Draft


@pytest.mark.parametrize(("name", "init"), INITS.items())
def test_a_kind_is_a_spec_that_documents_itself(name: str, init: Any) -> None:
    assert issubclass(init, Spec)
    assert init() == init.model_validate({"kind": name})  # every option has a default
    with pytest.raises(ValidationError, match="no_such_option"):
        init.model_validate({"kind": name, "no_such_option": 1})
    fields = {key: schema for key, schema in init.model_json_schema()["properties"].items() if key != "kind"}
    silent = [key for key, schema in fields.items() if not schema.get("description")]
    assert not silent, f"say what these options are: {silent}"
    assert Draft.model_validate({"init": {"kind": name}}).kind == init()


def test_without_a_kind_a_draft_is_layers_of_its_target() -> None:
    assert Draft.model_validate({"init": {"keep_layers": 3}}) == Draft.model_validate(
        {"init": {"kind": "pruned", "keep_layers": 3}}
    )
    assert Draft().init.model_dump()["kind"] == "pruned"

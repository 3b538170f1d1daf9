"""The recipe keys of `draft`: what the draft is at first, how it is trained, and in which scheme it is
served."""

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import Field, model_validator

from compress.recipe import ByKind, Spec
from compress.stages import specs_of
from compress.stages.draft.inits import INITS, Init
from compress.stages.draft.inits.pruned import Pruned
from compress.stages.draft.learning import DraftLearning


class Draft(DraftLearning):
    """A small model that proposes tokens to the compressed one, trained so that they are accepted."""

    init: Annotated[Spec, ByKind(lambda: specs_of(INITS))] = Field(
        Pruned(), description="what the draft is before it is trained"
    )

    @model_validator(mode="before")
    @classmethod
    def _pruned_by_default(cls, raw: Any) -> Any:
        """Take `init: {keep_layers: 2}` for `init: {kind: pruned, keep_layers: 2}`."""
        if isinstance(raw, Mapping) and isinstance(raw.get("init"), Mapping) and "kind" not in raw["init"]:
            return {**raw, "init": {"kind": "pruned", **raw["init"]}}
        return raw

    @property
    def kind(self) -> Init:
        """The spec of `init`, as the kind of draft that it is."""
        return cast(Init, self.init)

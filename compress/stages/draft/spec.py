"""What a recipe may say of a draft: where it begins, how it is trained, and in which scheme it is served."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from compress.recipe import ByKind, Spec
from compress.stages import specs_of
from compress.stages.distill.learning import Learning, Loss
from compress.stages.draft.inits import INITS, Init
from compress.stages.draft.inits.pruned import Pruned
from compress.stages.quantize.spec import Quantize


class Draft(Learning):
    """A small model that proposes tokens to the compressed one, and how it learns to be believed."""

    init: Annotated[Spec, ByKind(lambda: specs_of(INITS))] = Field(
        Pruned(), description="what the draft is before it is trained"
    )
    loss: Loss = Loss(kind="lk")
    tokens: int = Field(300_000, ge=1, description="to train on, all passes together")
    batch_size: int = Field(4, ge=1, description="windows a step")
    optimizer: Literal["adamw", "muon"] = "muon"
    lr: float = Field(3e-3, gt=0, description="at its peak, after the warm-up; then a cosine to zero")
    quantize: Quantize | None = Field(
        None,
        description="as the stage of that name, calibrated on the training text; left out, the draft stays "
        "dense",
    )

    @model_validator(mode="before")
    @classmethod
    def _pruned_by_default(cls, raw: Any) -> Any:
        """`init: {keep_layers: 2}` is `init: {kind: pruned, keep_layers: 2}`."""
        if isinstance(raw, Mapping) and isinstance(raw.get("init"), Mapping) and "kind" not in raw["init"]:
            return {**raw, "init": {"kind": "pruned", **raw["init"]}}
        return raw

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> Self:
        if self.quantize is not None and self.quantize.kv_cache is not None:
            raise ValueError(
                "quantize: a draft's keys and values stay in 16 bits, whatever the cache of the model. Leave "
                "out `kv_cache`."
            )
        return self

    @property
    def start(self) -> Init:
        return cast(Init, self.init)

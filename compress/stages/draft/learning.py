"""The recipe keys that every kind of draft has: how it is trained, and in which scheme it is served."""

from typing import Literal, Self

from pydantic import Field, model_validator

from compress.recipe import MAX_BATCH, MAX_TOKENS
from compress.stages.distill.learning import Learning, Loss
from compress.stages.quantize.spec import Quantize


class DraftLearning(Learning):
    """Text, loss and steps of a draft, and the scheme that its weights are served in."""

    loss: Loss = Field(Loss(kind="lk"), description="what the draft lowers")
    tokens: int = Field(300_000, ge=1, le=MAX_TOKENS, description="tokens to train on, over all passes")
    batch_size: int = Field(4, ge=1, le=MAX_BATCH, description="windows a step")
    optimizer: Literal["adamw", "muon"] = Field(
        "muon", description="`adamw`, or `muon` for the matrices and AdamW for the rest"
    )
    lr: float = Field(
        3e-3,
        gt=0,
        le=1_000,
        description="learning rate at its peak, after the warm-up; then a cosine to zero",
    )
    quantize: Quantize | None = Field(
        None,
        description="the keys of the stage of that name, calibrated on the training text; left out, the "
        "draft stays dense",
    )

    @model_validator(mode="after")
    def _check_kv_cache(self) -> Self:
        if self.quantize is not None and self.quantize.kv_cache is not None:
            raise ValueError(
                "quantize: the keys and values of a draft stay in 16 bits, whatever the cache of the model. "
                "Leave out `kv_cache`."
            )
        return self

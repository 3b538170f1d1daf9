"""The recipe keys of `recover`: those that every training has (`distill/learning.py`), the rate of scales,
and LoRA."""

from typing import Self

from pydantic import Field, model_validator

from compress.recipe import MAX_SIZE
from compress.stages.distill.learning import Learning
from compress.stages.distill.spec import Lora


class Recover(Learning):
    """How codes, scales and norms of a quantized model are trained to predict what its source predicts."""

    lr: float = Field(
        1e-2,
        gt=0,
        le=1_000,
        description="learning rate of the weights at its peak, in steps of their grid; with `lora` that of "
        "the low-rank terms, in the same unit",
    )
    scale_lr: float = Field(
        5e-4,
        ge=0,
        le=1,
        description="learning rate of the scales and of the norms at its peak, relative to what they were; "
        "0: they stay. Scales of one byte (NVFP4, MXFP4) stay in any case",
    )
    weight_decay: float = Field(
        0.0, ge=0, le=1_000, description="decay of weights a step, times the learning rate"
    )
    lora: Lora | None = Field(
        None,
        description="train low-rank terms that are merged before rounding; left out, every weight is "
        "trained, with a float32 master",
    )
    early_stop: int | None = Field(
        None,
        ge=1,
        le=MAX_SIZE,
        description="end after so many measurements in which the held-out KL fell by less than 0.5 %",
    )

    @model_validator(mode="after")
    def _check_pace(self) -> Self:
        if self.scale_pace > 1e3:
            raise ValueError(
                f"scale_lr {self.scale_lr:g} is more than 1,000 times lr {self.lr:g}; the two are relative "
                "changes of scales, and steps of the grid of codes."
            )
        return self

    @property
    def scale_pace(self) -> float:
        """The learning rate of scales over that of weights."""
        return self.scale_lr / self.lr

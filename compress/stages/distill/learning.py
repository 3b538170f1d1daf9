"""The recipe keys that every training against a teacher has, for a student that replaces it and for a
draft that proposes to it: text, loss and steps."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from compress.context import Context
from compress.data.tokens import TokenSet
from compress.distill.kept import KeptLogits
from compress.distill.learn import Curve
from compress.distill.losses import Divergence, Kind
from compress.distill.objective import Teacher
from compress.distill.train import Batch, TrainConfig, Windows
from compress.machine import arithmetic_class
from compress.models.tiles import has_bfloat16_tiles
from compress.recipe import MAX_BATCH, MAX_FACTOR, MAX_SAMPLES, MAX_SEQ_LEN, MAX_SIZE, MAX_TOKENS, Spec

LOG_ROWS = 200
"""Number of rows of the loss curve, about."""


class Loss(Spec):
    """The loss that training lowers."""

    kind: Kind = Field(
        "forward_kl",
        description="forward_kl weighs every token that the teacher may choose, reverse_kl those that the "
        "student chooses, js lies between; tv is what speculative sampling rejects of the student's "
        "proposals, lk its -log(1 - tv)",
    )
    temperature: float = Field(1.0, ge=1e-3, le=MAX_FACTOR, description="logits of both are divided by it")
    hard_frac: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the loss that is the cross entropy of the text's own next token",
    )
    top_k: int | None = Field(
        None,
        ge=1,
        le=MAX_SIZE,
        description="compute the teacher's likeliest tokens once and keep them on disk; left out, the "
        "teacher runs with the student",
    )

    def divergence(self) -> Divergence:
        return Divergence(self.kind, self.temperature, self.hard_frac)


class SampledText(Spec):
    """Text that the teacher writes: each window begins with tokens of the data, and the teacher samples
    the rest."""

    prompt_tokens: int = Field(
        16, ge=1, le=MAX_SEQ_LEN, description="tokens of the data that each window begins with"
    )
    temperature: float = Field(1.0, ge=0, le=MAX_FACTOR, description="0 takes the likeliest token")


class Learning(Spec):
    """The text, the loss and the steps of a training."""

    data: str = Field("builtin://python", description="training text: a data card or builtin://python")
    sample: SampledText | None = Field(
        None, description="train on text that the teacher writes from beginnings of the data"
    )
    tokens: int = Field(1_000_000, ge=1, le=MAX_TOKENS, description="tokens to train on, over all passes")
    passes: int = Field(1, ge=1, le=MAX_SAMPLES, description="how often each window of text is seen")
    seq_len: int = Field(
        512, ge=8, le=MAX_SEQ_LEN, description="documents are joined and cut into windows of so many tokens"
    )
    batch_size: int = Field(16, ge=1, le=MAX_BATCH, description="windows a step")
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        le=MAX_BATCH,
        description="windows computed at once; left out, as many as fill 8,192 tokens",
    )
    lr: float = Field(
        2e-4,
        gt=0,
        le=1_000,
        description="learning rate at its peak, after the warm-up; then a cosine to zero",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="`adamw`, or `muon` for the matrices and AdamW for the rest"
    )
    weight_decay: float = Field(
        0.01, ge=0, le=1_000, description="decay of weights a step, times the learning rate"
    )
    warmup_frac: float = Field(
        0.05, ge=0, lt=1, description="share of the steps in which the learning rate rises to its peak"
    )
    max_grad_norm: float = Field(
        1.0, gt=0, le=MAX_FACTOR, description="gradients are scaled down to this norm"
    )
    loss: Loss = Field(Loss(), description="what the student lowers")
    eval_samples: int = Field(
        16,
        ge=1,
        le=MAX_SAMPLES,
        description="windows of the data that are not trained on and measure what is learnt",
    )
    eval_every: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="steps between two measurements; left out, a twentieth of all steps",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="auto: bfloat16 on a GPU and on a CPU with AMX (twice as fast there), else float32",
    )
    recompute: bool = Field(
        False,
        description="keep only the input of each layer for the backward pass: less memory, a third more work",
    )
    compile: bool = Field(False, description="compile the models; worth its minute on a GPU")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.sample is not None and self.sample.prompt_tokens >= self.seq_len:
            raise ValueError(
                f"sample: prompt_tokens {self.sample.prompt_tokens} leaves nothing to write of seq_len "
                f"{self.seq_len}."
            )
        if self.batch_size % self.micro_batch:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch}."
            )
        if self.num_windows < self.batch_size:
            raise ValueError(
                f"{self.tokens} tokens in {self.passes} pass(es) are {self.num_windows} windows of "
                f"{self.seq_len}, fewer than a batch of {self.batch_size}. Give more tokens, or a smaller "
                "batch_size."
            )
        return self

    @property
    def micro_batch(self) -> int:
        """The number of windows that are computed at once."""
        if self.micro_batch_size is not None:
            return self.micro_batch_size
        fitting = [
            each
            for each in range(1, self.batch_size + 1)
            if self.batch_size % each == 0 and each * self.seq_len <= 8192
        ]
        return max(fitting, default=1)

    @property
    def num_windows(self) -> int:
        """The number of different windows to train on."""
        return self.tokens // self.seq_len // self.passes

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps."""
        return self.passes * (self.num_windows // self.batch_size)

    @property
    def steps_between_measurements(self) -> int:
        """The number of steps from one measurement on held-out text to the next."""
        return self.eval_every if self.eval_every is not None else max(1, self.num_steps // 20)

    @property
    def extent(self) -> str:
        """Tokens and steps in words, for notes."""
        return f"{self.num_steps * self.batch_size * self.seq_len:,} tokens in {self.num_steps:,} steps"

    def computes_in(self, device: torch.device) -> torch.dtype:
        """Return the dtype that the models compute in on a device."""
        if self.compute_dtype != "auto":
            dtype: torch.dtype = getattr(torch, self.compute_dtype)
            return dtype
        return torch.bfloat16 if device.type == "cuda" or has_bfloat16_tiles() else torch.float32

    def train_config(self, dtype: torch.dtype) -> TrainConfig:
        """Return the configuration of the training loop; its log has a row at every measurement."""
        every = self.steps_between_measurements
        return TrainConfig(
            num_steps=self.num_steps,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch,
            peak_lr=self.lr,
            optimizer=self.optimizer,
            warmup_frac=self.warmup_frac,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            compute_dtype=dtype,
            log_every=next(
                each for each in range(max(1, self.num_steps // LOG_ROWS), every + 1) if every % each == 0
            ),
        )


def training_batches(
    spec: Learning, training: TokenSet, teacher: Teacher, ctx: Context, *, digest: str, device: torch.device
) -> Callable[[int], Batch]:
    """Return step -> batch: tokens, their weights where some do not count, and with `top_k` the kept logits
    of the teacher of that digest."""
    tokens_NS: Tensor = training.tokens_NS
    windows = Windows(tokens_NS, batch_size=spec.batch_size, seed=ctx.seed)
    text_of = text_batches(windows, training)
    if spec.loss.top_k is None:
        return text_of
    kept = KeptLogits(
        ctx.scratch if ctx.kept is None else ctx.kept,
        tokens_NS,
        teacher=f"{digest} on {arithmetic_class(ctx.device)}",
        tokens=training.digest(),
        num_kept=spec.loss.top_k,
        temperature=spec.loss.temperature,
        log=ctx.progress.log,
    )
    kept.fill(
        teacher,
        ctx.ranks,
        lambda shards: ctx.boundary(
            shards, kept.num_shards, "computing the teacher's logits, shards on disk"
        ),
        device=device,
    )

    def batch_of(step: int) -> Batch:
        text = text_of(step)
        return (*(text if isinstance(text, tuple) else (text,)), *kept.rows(windows.chosen(step)))

    return batch_of


def text_batches(windows: Windows, training: TokenSet) -> Callable[[int], Batch]:
    """Return step -> tokens, with their weights where some of the text does not count."""
    counted_NS = training.counted_NS
    return windows.batch if counted_NS is None else partial(windows.weighted, counted_NS=counted_NS)


def learning_facts(spec: Learning, dtype: torch.dtype, curve: Curve) -> dict[str, Any]:
    """Return the facts of any training for the manifest; the caller adds those of the text."""
    keys = ("passes", "seq_len", "batch_size", "lr", "optimizer", "weight_decay", "warmup_frac")
    last = [row for row in curve if "kl" in row][-1]
    return {
        "loss": spec.loss.model_dump(mode="json"),
        "sampled": spec.sample is not None,
        "settings": {key: getattr(spec, key) for key in keys},
        "compute_dtype": str(dtype).removeprefix("torch."),
        "held_out_windows": spec.eval_samples,
        "tokens": last["tokens"],
        "num_steps": last["step"],
        "curve": curve,
    }

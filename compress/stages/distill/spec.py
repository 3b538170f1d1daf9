"""What a recipe may say of distillation: text, teacher, student, loss, and how long to train."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from compress.distill.losses import Divergence, Kind
from compress.distill.student import Shape
from compress.errors import RecipeError, UnsupportedFormat, UsageError
from compress.models.arch import Arch
from compress.recipe import Spec, checked_by, parse_model_ref

SOURCE = "source"


def _model(ref: str | None) -> None:
    if ref is not None and ref != SOURCE:
        try:
            parse_model_ref(ref)
        except RecipeError as error:
            raise UsageError(str(error)) from None


class Loss(Spec):
    """What the student lowers."""

    kind: Kind = Field("forward_kl", description="forward_kl covers what the teacher may say, reverse_kl keeps to it, js lies between")
    temperature: float = Field(1.0, gt=0, description="logits of both are divided by it")
    hard_frac: float = Field(0.0, ge=0, le=1, description="share of the loss that is the cross entropy of the text's own next token")
    top_k: int | None = Field(
        None, ge=1, description="keep the teacher's likeliest tokens on disk and use them; left out, the teacher runs beside the student"
    )

    def divergence(self) -> Divergence:
        return Divergence(self.kind, self.temperature, self.hard_frac)


class Lora(Spec):
    """Train low-rank terms beside frozen linears, and merge them at the end."""

    rank: int = Field(16, ge=1)
    alpha: float | None = Field(None, gt=0, description="size of the terms, divided by the rank; twice the rank by default")


class Student(Spec):
    """A smaller model of the source's family and tokenizer: by its own numbers, or a checkpoint."""

    layers: int | None = Field(None, ge=1)
    hidden: int | None = Field(None, ge=1)
    ffn: int | None = Field(None, ge=1)
    heads: int | None = Field(None, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    init: Literal["teacher", "random"] = Field(
        "teacher", description="weights: evenly chosen layers and channels of the teacher, or random"
    )
    checkpoint: Annotated[str | None, checked_by(_model)] = Field(None, description="a model reference; instead of all other keys")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.checkpoint is not None and self.model_fields_set - {"checkpoint"}:
            raise ValueError("a checkpoint has its own numbers and weights. Give it alone.")
        if self.checkpoint is None and self.shape() == Shape():
            raise ValueError("say what is smaller: layers, hidden, ffn, heads or kv_heads; or a checkpoint.")
        return self

    def shape(self) -> Shape:
        return Shape(self.layers, self.hidden, self.ffn, self.heads, self.kv_heads)


class Sample(Spec):
    """Text that the teacher writes: each window begins with tokens of the data and goes on as the teacher samples."""

    prompt_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, description="0 takes the likeliest token")


class Distill(Spec):
    """How the dense weights learn to say what the teacher says."""

    data: str = Field("builtin://python", description="training text: a data card or builtin://python")
    sample: Sample | None = Field(None, description="train on text that the teacher writes from beginnings of the data")
    tokens: int = Field(1_000_000, ge=1, description="to train on, all passes together")
    passes: int = Field(1, ge=1, description="how often each window of text is seen")
    seq_len: int = Field(512, ge=8, description="documents are joined and cut into windows of so many tokens")
    batch_size: int = Field(16, ge=1, description="windows a step")
    micro_batch_size: int | None = Field(None, ge=1, description="windows computed at once; left out, as many as fill 8,192 tokens")
    lr: float = Field(2e-4, gt=0, description="at its peak, after the warm-up; then a cosine to zero")
    optimizer: Literal["adamw", "muon"] = "adamw"
    weight_decay: float = Field(0.01, ge=0)
    warmup_frac: float = Field(0.05, ge=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0)
    loss: Loss = Loss()
    lora: Lora | None = Field(None, description="left out, all weights are trained, with float32 masters")
    teacher: Annotated[str, checked_by(_model)] = Field(SOURCE, description="`source`, or a model reference; it may be quantized")
    teacher_device: str | None = Field(None, description="where the teacher runs (`cuda:1`, `cpu`); left out, beside the student")
    student: Student | None = Field(None, description="left out, the dense weights as the stages before leave them, such as a pruned model")
    eval_samples: int = Field(16, ge=1, description="windows of the data that are not trained on and measure the recovery")
    eval_every: int | None = Field(None, ge=1, description="steps between two measurements; left out, a twentieth of all steps")
    early_stop: int | None = Field(
        None, ge=1, description="end after so many measurements in which the held-out KL fell by less than 0.5 %"
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 on a GPU and on a CPU with AMX (twice as fast there), else float32"
    )
    recompute: bool = Field(False, description="keep only the input of each layer for the backward pass: less memory, a third more work")
    compile: bool = Field(False, description="compile the models; worth its minute on a GPU")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.sample is not None and self.sample.prompt_tokens >= self.seq_len:
            raise ValueError(f"sample: prompt_tokens {self.sample.prompt_tokens} leaves nothing to write of seq_len {self.seq_len}.")
        if self.batch_size % self.micro_batch:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch}.")
        if self.num_windows < self.batch_size:
            raise ValueError(
                f"{self.tokens} tokens in {self.passes} pass(es) are {self.num_windows} windows of {self.seq_len}, fewer than a batch of "
                f"{self.batch_size}. Give more tokens, or a smaller batch_size."
            )
        return self

    @property
    def micro_batch(self) -> int:
        if self.micro_batch_size is not None:
            return self.micro_batch_size
        fitting = [each for each in range(1, self.batch_size + 1) if self.batch_size % each == 0 and each * self.seq_len <= 8192]
        return max(fitting, default=1)

    @property
    def num_windows(self) -> int:
        """Different ones, to train on."""
        return self.tokens // self.seq_len // self.passes

    @property
    def num_steps(self) -> int:
        return self.passes * (self.num_windows // self.batch_size)

    @property
    def steps_between_measurements(self) -> int:
        return self.eval_every if self.eval_every is not None else max(1, self.num_steps // 20)

    def refuse_nothing_to_learn(self, specs: Mapping[str, Any]) -> None:
        """Raises UsageError: as far as the recipe says, the student is its own teacher."""
        if self.teacher == SOURCE and self.student is None and "prune" not in specs:
            raise UsageError(
                "distill: the student would be the source itself, its own teacher. Put a prune stage before it, or give `student` or "
                "`teacher`."
            )


def check_dense(arch: Arch) -> None:
    """Raises UnsupportedFormat when the student's weights are codes."""
    if said := arch.config.get("quantization_config"):
        raise UnsupportedFormat(
            f"the student is quantized already (quant_method '{said.get('quant_method')}'), and training moves weights, not codes. Name "
            "the dense model that it was made from, and quantize after distilling."
        )

"""The recipe keys of `distill`: teacher and student, and those that every training has (`learning.py`)."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from compress.distill.student import Shape
from compress.errors import RecipeError, UsageError
from compress.models.arch import Arch
from compress.recipe import MAX_SIZE, Spec, checked_by, parse_model_ref
from compress.stages.dequantize import check_dense
from compress.stages.distill.learning import Learning

SOURCE = "source"


def _model(ref: str | None) -> None:
    if ref is not None and ref != SOURCE:
        try:
            parse_model_ref(ref)
        except RecipeError as error:
            raise UsageError(str(error)) from None


class Lora(Spec):
    """Low-rank terms that are trained next to frozen linears and merged at the end."""

    rank: int = Field(16, ge=1, le=MAX_SIZE, description="rank of the trained terms")
    alpha: float | None = Field(
        None,
        gt=0,
        le=MAX_SIZE,
        description="size of the terms, divided by the rank; twice the rank by default",
    )

    def check_rank(self, arch: Arch, stage: str, *, is_trained: Callable[[str], bool]) -> None:
        """Refuse a rank that no matrix of a linear can have. `is_trained` returns whether the linear of a
        name (`layers.0.attn.q`) gets a term.

        Raises:
            UsageError: the rank is more than the smaller side of such a linear.
        """
        shapes = {
            f"layers.{idx}.{name}": layer.linear_shape(name, arch.hidden_size)
            for idx, layer in enumerate(arch.layers)
            for name in layer.linears
            if is_trained(f"layers.{idx}.{name}")
        }
        smallest = min(shapes, key=lambda name: min(shapes[name]), default=None)
        if smallest is None or self.rank <= min(shapes[smallest]):
            return
        rows, columns = shapes[smallest]
        raise UsageError(
            f"{stage}: lora.rank {self.rank} is more than {min(rows, columns)}, the smaller side of "
            f"{smallest} ({rows} x {columns}). Give a rank of at most {min(rows, columns)}, or leave out "
            "`lora` to train every weight."
        )


class Student(Spec):
    """A smaller model of the source's family and tokenizer: by its own numbers, or a checkpoint."""

    layers: int | None = Field(None, ge=1, le=MAX_SIZE, description="decoder layers")
    hidden: int | None = Field(None, ge=1, le=MAX_SIZE, description="hidden size")
    ffn: int | None = Field(None, ge=1, le=MAX_SIZE, description="FFN channels")
    heads: int | None = Field(None, ge=1, le=MAX_SIZE, description="query heads")
    kv_heads: int | None = Field(None, ge=1, le=MAX_SIZE, description="KV heads")
    init: Literal["teacher", "random"] = Field(
        "teacher", description="weights: evenly chosen layers and channels of the teacher, or random"
    )
    checkpoint: Annotated[str | None, checked_by(_model)] = Field(
        None, description="a model reference; instead of all other keys"
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.checkpoint is not None and self.model_fields_set - {"checkpoint"}:
            raise ValueError("a checkpoint has its own numbers and weights. Give it alone.")
        if self.checkpoint is None and self.shape() == Shape():
            raise ValueError("name what is smaller: layers, hidden, ffn, heads or kv_heads; or a checkpoint.")
        return self

    def shape(self) -> Shape:
        """Return the numbers of the student, None where it has those of the teacher."""
        return Shape(self.layers, self.hidden, self.ffn, self.heads, self.kv_heads)


class Distill(Learning):
    """How the dense weights are trained to predict what the teacher predicts."""

    lora: Lora | None = Field(None, description="left out, all weights are trained, with float32 masters")
    teacher: Annotated[str, checked_by(_model)] = Field(
        SOURCE, description="`source`, or a model reference; it may be quantized"
    )
    teacher_device: str | None = Field(
        None, description="where the teacher runs (`cuda:1`, `cpu`); left out, with the student"
    )
    student: Student | None = Field(
        None,
        description="left out, the dense weights as the stages before leave them, such as a pruned model",
    )
    early_stop: int | None = Field(
        None,
        ge=1,
        le=MAX_SIZE,
        description="end after so many measurements in which the held-out KL fell by less than 0.5 %",
    )

    def refuse_nothing_to_learn(self, specs: Mapping[str, Any]) -> None:
        """Refuse a recipe by which the student is its own teacher.

        Raises:
            UsageError: the source would teach itself.
        """
        if self.teacher == SOURCE and self.student is None and "prune" not in specs:
            raise UsageError(
                "distill: the student would be the source itself, its own teacher. Put a prune stage before "
                "it, or give `student` or `teacher`."
            )


def check_student(arch: Arch) -> None:
    """Refuse a student whose weights are codes.

    Raises:
        UnsupportedFormat: the model is quantized.
    """
    check_dense(arch, "training moves weights, not codes")

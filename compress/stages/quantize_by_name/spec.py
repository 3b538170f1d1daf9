"""The stage's keys in a recipe: the scheme, the checkpoint format, and patterns that change the choice of
linears."""

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from compress.errors import UsageError
from compress.export import FormatByName, format_by_name
from compress.quant.scheme import SCHEMES, Scheme, scheme_named
from compress.recipe import Spec, checked_by, list_to_tuple

MAX_PATTERNS = 64
SCHEMES_BY_NAME = tuple(
    name for name, scheme in SCHEMES.items() if not scheme.has_static_inputs and scheme.scale_type != "e4m3"
)
"""Schemes whose codes and scales depend on the weight alone, and on no other weight that is multiplied as one
with it."""
Pattern = Annotated[str, Field(min_length=1, max_length=200)]
Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(list_to_tuple), Field(max_length=MAX_PATTERNS)]


def _check_scheme(name: str) -> None:
    if scheme_named(name).scale_type == "e4m3":
        raise UsageError(
            f"{name} has one global scale for linears that are multiplied as one, and which these are is not "
            f"known of a model that is quantized by name. Choose one of {', '.join(SCHEMES_BY_NAME)}."
        )
    if scheme_named(name).name not in SCHEMES_BY_NAME:
        raise UsageError(
            f"{name} takes a scale of the inputs, which calibration finds, and no text goes through a model "
            f"that is quantized by name. Choose one of {', '.join(SCHEMES_BY_NAME)}."
        )


class QuantizeByName(Spec):
    """The codes that a checkpoint's linears get, and which matrices count as linears."""

    scheme: Annotated[str, checked_by(_check_scheme)] = Field(
        "FP8_DYNAMIC",
        description=f"one of {', '.join(SCHEMES_BY_NAME)}",
        json_schema_extra={"enum": list(SCHEMES_BY_NAME)},
    )
    format: Annotated[str, checked_by(format_by_name)] = Field(
        "compressed-tensors", description="checkpoint format: `compressed-tensors`, or `fp8` for `FP8_BLOCK`"
    )
    include: Patterns = Field(
        (),
        description="matrices that are quantized although they do not look like linears: shell patterns over "
        "module names (`lm_head`, `*.mlp.gate`)",
    )
    ignore: Patterns = Field(
        (), description="matrices that stay dense: shell patterns over module names (`*.layers.0.*`)"
    )

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        reason = self.written_as.refusal_by_name(self.weights)
        if reason is not None:
            raise ValueError(f"format: {reason}")
        return self

    @property
    def weights(self) -> Scheme:
        """The scheme itself."""
        return scheme_named(self.scheme)

    @property
    def written_as(self) -> FormatByName:
        """The format itself."""
        return format_by_name(self.format)

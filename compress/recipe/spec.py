"""The base of what a recipe can configure: a `Spec` for each stage, method or data card, and errors that
point into the file.

A raw mapping is held against its spec strictly and as JSON: a quoted number is not a number, `yes` is not a
truth value, a list is a tuple.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema

from compress.errors import RecipeError, UsageError, did_you_mean
from compress.recipe.source import KeyPath, SourceMap

MAX_SAMPLES = 1 << 20
MAX_SEQ_LEN = 1 << 20
MAX_BATCH = 1 << 16
MAX_TOKENS = 10**12
MAX_SIZE = 1 << 24
MAX_FACTOR = 1e6
"""Largest numbers that a recipe may hold, of their kinds: far above what anybody runs, and small enough that
planning ends."""


class Spec(BaseModel):
    """Base of everything a file can configure: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True)
class ByKind:
    """A field whose Spec is chosen by its `kind`, among specs that plug-ins bring: `round: Annotated[Spec,
    ByKind(rounder_specs)]`.

    `specs` is called when the Spec that holds the field is built, and to explain an error.
    Each choice declares `kind: Literal["its name"]`.
    """

    specs: Callable[[], Mapping[str, type[Spec]]]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        choices = {kind: handler.generate_schema(spec) for kind, spec in self.specs().items()}
        return core_schema.tagged_union_schema(choices, discriminator="kind")


def checked_by(check: Callable[[Any], object]) -> AfterValidator:
    """Return the mark of a field whose value `check` refuses with a UsageError, so that the error points to
    the field's own place in the file: `scheme: Annotated[str, checked_by(scheme_named)]`.
    """

    def validate(value: Any) -> Any:
        try:
            check(value)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(validate)


def list_to_tuple(value: Any) -> Any:
    """Return a list as a tuple and any other value as it is.

    For `Annotated[tuple[...], BeforeValidator(list_to_tuple)]`: strict validation takes a list for a tuple
    only while it reads JSON, and a Spec inside another one that has a validator of its own is validated from
    Python values.
    """
    return tuple(value) if isinstance(value, list) else value


def parse_spec(spec_type: type[S], raw: Mapping[str, Any], where: SourceMap) -> S:
    """Return `raw` as a `spec_type`.

    Raises:
        RecipeError: naming every wrong key, one a line, each at its place in the file.
    """
    try:
        return spec_type.model_validate_json(json.dumps(dict(raw)), strict=True)
    except ValidationError as error:
        problems: dict[KeyPath, list[str]] = {}
        details = list(_flatten(error))
        for location, detail in details:
            if detail["type"] == "too_short" and any(
                len(other) > len(location) and other[: len(location)] == location for other, _ in details
            ):
                continue  # pydantic counts the items that are right
            if detail["type"] == "string_type" and isinstance(detail["input"], Mapping):
                branch = location[-1] == "str"  # a text or a mapping may be given, and the mapping is wrong
                if branch and any(
                    other != location and other[: len(location) - 1] == location[:-1] for other, _ in details
                ):
                    continue
            path, text = _explain(spec_type, raw, location, detail)
            problems.setdefault(path, []).append(text)
        found = sorted(problems.items(), key=lambda item: (where.at(item[0]).line, where.at(item[0]).column))
        raise RecipeError(
            "\n".join(str(where.error(path, " Or: ".join(dict.fromkeys(texts)))) for path, texts in found)
        ) from None
    except RecipeError:
        raise
    except UsageError as error:  # of a validator that is not a field's own (`checked_by`)
        raise where.error((), str(error)) from None


def _flatten(error: ValidationError, outer: KeyPath = ()) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Yield every single error; one raised by a validator that itself validated a Spec is opened up."""
    for detail in error.errors(include_url=False):
        location = outer + detail["loc"]
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ValidationError):
            yield from _flatten(cause, location)
        else:
            yield location, detail


def _explain(
    spec_type: type[BaseModel], raw: Mapping[str, Any], location: KeyPath, detail: Mapping[str, Any]
) -> tuple[KeyPath, str]:
    """Return the path in the file and the sentence for one pydantic error."""
    path, owner = _locate(spec_type, raw, location)
    context = detail.get("ctx", {})
    given = json.dumps(detail["input"], default=str)
    shown = given if len(given) <= 60 else given[:57] + "..."
    match detail["type"]:
        case "extra_forbidden":
            fields = owner.model_fields if owner else {}
            known = [field.alias or name for name, field in fields.items()]
            return path, f"unknown key.{did_you_mean(str(location[-1]), known)}"
        case "missing":
            return (*path, location[-1]), "a required key is missing."
        case "union_tag_not_found":
            return (*path, "kind"), "a required key is missing."
        case "union_tag_invalid":
            known = re.findall(r"'([^']*)'", context["expected_tags"])
            return (*path, "kind"), f"unknown kind '{context['tag']}'.{did_you_mean(context['tag'], known)}"
        case "literal_error" | "enum":
            known = re.findall(r"'([^']*)'", context["expected"])
            near = did_you_mean(str(detail["input"]), known) if known else ""
            return path, f"{shown} is not {context['expected']}.{near if 'Did you mean' in near else ''}"
        case "model_type" | "model_attributes_type":
            return path, f"must be a mapping of keys to values, not {shown}."
        case "value_error" | "assertion_error":
            return path, f"{context['error']}"
        case _:
            message = str(detail["msg"])
            return path, f"{message[0].lower()}{message[1:]}, not {shown}."


def _locate(spec_type: Any, raw: Any, location: KeyPath) -> tuple[KeyPath, type[BaseModel] | None]:
    """Return `location` without what pydantic adds (the tag of a union, the label of a branch), and the Spec
    that owns its last key.
    """
    path: KeyPath = ()
    annotation = spec_type
    value = raw
    owner = None
    tag_is_next = False
    for part in location:
        choices, tagged = _unwrap(annotation)
        if isinstance(value, Mapping):
            if tagged and tag_is_next and part == value.get("kind"):
                tag_is_next = False
                continue
            if part not in value:
                if (
                    tagged
                    and tag_is_next
                    and (named := [spec for spec in _specs(choices) if part in _literals(spec)])
                ):
                    annotation = named[0]  # a kind that the file leaves out
                continue
            owner = _owner(choices, value)
            annotation = _field(owner, str(part)) if owner else _element(choices, Mapping)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            annotation = _element(choices, Sequence)
        else:
            continue
        path = (*path, part)
        value = value[part]
        tag_is_next = True
    return path, owner


def _unwrap(annotation: Any) -> tuple[list[Any], bool]:
    """Return the alternatives of a type, and whether pydantic picks among them by `kind`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        for mark in marks:
            if isinstance(mark, ByKind):
                return list(mark.specs().values()), True
        choices, tagged = _unwrap(inner)
        return choices, tagged or any(getattr(mark, "discriminator", None) for mark in marks)
    if origin in (Union, UnionType):
        parts = [_unwrap(part) for part in get_args(annotation)]
        return [choice for choices, _ in parts for choice in choices], any(tagged for _, tagged in parts)
    return [annotation], False


def _owner(choices: list[Any], value: Mapping[str, Any]) -> type[BaseModel] | None:
    """Return the one Spec among `choices`, or the one that declares the `kind` that `value` gives."""
    specs = _specs(choices)
    if len(specs) == 1:
        return specs[0]
    return next((spec for spec in specs if value.get("kind") in _literals(spec)), None)


def _specs(choices: list[Any]) -> list[type[BaseModel]]:
    return [choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)]


def _literals(spec: type[BaseModel]) -> tuple[Any, ...]:
    kind = spec.model_fields.get("kind")
    return get_args(kind.annotation) if kind is not None and get_origin(kind.annotation) is Literal else ()


def _field(owner: type[BaseModel], key: str) -> Any:
    """Return the type of a field with its marks; `Any` for a key the Spec does not have."""
    for name, field in owner.model_fields.items():
        if key in (name, field.alias):
            marked = (field.annotation, field, *field.metadata)
            return Annotated.__class_getitem__(marked)  # type: ignore[attr-defined]
    return Any


def _element(choices: list[Any], container: type) -> Any:
    """Return the type of what a mapping or a sequence among `choices` holds."""
    for choice in choices:
        origin = get_origin(choice)
        if isinstance(origin, type) and issubclass(origin, container):
            return get_args(choice)[1 if container is Mapping else 0]
    return Any

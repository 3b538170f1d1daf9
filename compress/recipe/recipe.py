"""A recipe: a model, a seed, and stages kept as `{kind, raw mapping, position}` until the stage's own Spec is
loaded and checks them.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.json_schema import models_json_schema

from compress.errors import RecipeError, UsageError, did_you_mean
from compress.recipe.matrix import Case, Matrix, fill, read_cases, refuse_placeholders
from compress.recipe.model_ref import parse_model_ref
from compress.recipe.notify import Notify
from compress.recipe.source import SourceMap, read_source, read_yaml
from compress.recipe.spec import MAX_FACTOR, Spec, parse_spec
from compress.sign.choice import signer_of, verifier_of
from compress.sign.signature import Signer, Verifier

S = TypeVar("S", bound=Spec)
_MAX_SEED = 2**63 - 1
_MAX_STAGES = 64


@dataclass(frozen=True)
class StageEntry:
    """One stage as the file has it: `raw` without `kind`, and `where`, the positions of its keys (paths
    relative to this stage).
    """

    kind: str
    index: int
    raw: Mapping[str, Any]
    where: SourceMap


Change = Annotated[float, Field(ge=-MAX_FACTOR, le=MAX_FACTOR)]


class ChampionGates(Spec):
    """How much worse than the champion a candidate may be, at the bad end of the interval of the change: on
    the same tokens, and for times on the same machine.
    """

    against_alias: str = Field(min_length=1, description="the alias whose artifact is the champion")
    kl_increase: Change | None = Field(
        None, description="of the mean KL, in nats; 0 where no limit is given at all"
    )
    ppl_ratio: Change | None = Field(None, description="perplexity over the champion's")
    top1_drop: Change | None = Field(None, description="of the share of agreement with the source")
    size_ratio: Change | None = Field(None, description="bytes over the champion's")
    ttft_ratio: Change | None = Field(None, description="median time to the first token over the champion's")
    tpot_ratio: Change | None = Field(None, description="median time per token over the champion's")

    tasks: dict[str, Change] = Field(
        default_factory=dict, description="task -> loss of the share of right answers"
    )

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are given, by name; `tasks.<name>.accuracy_drop` for a task."""
        given = self.model_dump(exclude={"against_alias", "tasks"}, exclude_none=True)
        return given | {f"tasks.{name}.accuracy_drop": value for name, value in self.tasks.items()}


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _checked(spec: S, make: Callable[[], object]) -> S:
    """Return a spec of which `make` makes something; ValueError, which has a place in the file, where not."""
    try:
        make()
    except UsageError as error:
        raise ValueError(str(error)) from None
    return spec


class SignWith(Spec):
    """How the artifact is signed before it is pushed: with a private key, or keyless."""

    key: str | None = Field(None, min_length=1, description="private key, a PEM file")
    password_file: str | None = Field(
        None, min_length=1, description="file with its password; else COMPRESS_KEY_PASSWORD has it"
    )
    keyless: bool = Field(False, description="sign by the identity of this workload, with Sigstore")
    trust_config: str | None = Field(
        None, min_length=1, description="roots of trust of a private Sigstore instance"
    )

    @model_validator(mode="after")
    def _one_way(self) -> "SignWith":
        return _checked(self, self.signer)

    def signer(self) -> Signer:
        """Return who signs.

        Raises:
            UsageError: neither or both ways are given.
        """
        return signer_of(
            key=_path(self.key),
            password_file=_path(self.password_file),
            keyless=self.keyless,
            trust_config=_path(self.trust_config),
        )


class SignedBy(Spec):
    """The one who must have signed the model: the owner of a key, or an identity."""

    key: str | None = Field(None, min_length=1, description="public key, a PEM file")
    identity: str | None = Field(
        None, min_length=1, description="identity of a keyless signature, such as a mail address"
    )
    issuer: str | None = Field(
        None, min_length=1, description="URL of the OpenID Connect issuer that vouches for it"
    )
    trust_config: str | None = Field(
        None, min_length=1, description="roots of trust of a private Sigstore instance"
    )
    signature: str | None = Field(
        None, min_length=1, description="the signature of a directory; `<directory>.sig` beside it by default"
    )

    @model_validator(mode="after")
    def _one_way(self) -> "SignedBy":
        return _checked(self, self.verifier)

    def verifier(self) -> Verifier:
        """Return by whom the model must be signed.

        Raises:
            UsageError: nobody is named, or two are, or half an identity.
        """
        found = verifier_of(
            key=_path(self.key),
            identity=self.identity,
            issuer=self.issuer,
            trust_config=_path(self.trust_config),
        )
        if found is None:
            raise UsageError("give a public key (key), or an identity with its issuer.")
        return found


class SignedModel(Spec):
    """A model, and who must have signed it."""

    ref: str = Field(min_length=1, description="a directory, or an artifact of a registry")
    signed_by: SignedBy = Field(description="who must have signed it, or nothing runs")


class Push(Spec):
    """The registry, name and tags that the finished artifact gets."""

    to: str = Field(min_length=1, description="registry, such as layout://registry")
    name: str = Field(min_length=1, description="name of the artifact in the registry")
    aliases: tuple[str, ...] = Field((), description="tags that point at this artifact after the push")
    gates: ChampionGates | None = Field(
        None, description="pushed only if it is as good as what an alias of the registry holds"
    )
    sign: SignWith | None = Field(None, description="signed before the push; the signature travels with it")


class Cache(Spec):
    """Registries through which machines exchange results of stages. They decide no result."""

    source: str | None = Field(
        None,
        alias="from",
        min_length=1,
        description="cache that a run pulls from, such as oci://host/path/stages",
    )
    target: str | None = Field(
        None, alias="to", min_length=1, description="cache that a run pushes what it built to"
    )


@dataclass(frozen=True)
class Recipe:
    """A recipe as its file has it; of one with a matrix, one `case`."""

    version: int
    model: str
    seed: int
    stages: tuple[StageEntry, ...]
    push: Push | None
    file: str
    notify: tuple[Notify, ...] = ()
    cache: Cache = field(default_factory=Cache)
    case: Case | None = None
    signed_by: SignedBy | None = None
    """The one who must have signed the model, or nothing runs."""


class _StageHead(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")
    kind: str = Field(min_length=1)


class _RecipeHead(Spec):
    version: Literal[1]
    model: str | SignedModel = Field(
        description="builtin://reference, ./path, hf://org/name@revision, or an artifact such as "
        "oci://host/path/name:tag, s3://bucket/prefix/name:tag, models:/name@alias; "
        "or a mapping of such a reference and who must have signed it"
    )
    seed: int = Field(0, ge=0, le=_MAX_SEED)
    matrix: Matrix | None = None
    stages: tuple[_StageHead, ...] = Field(min_length=1, max_length=_MAX_STAGES)
    push: Push | None = None
    notify: Notify | tuple[Notify, ...] = Field(
        (), description="a webhook, or a list of webhooks, that get the JSON document of each run"
    )
    cache: Cache = Field(default_factory=Cache)

    @field_validator("version", mode="before")
    @classmethod
    def _version(cls, version: Any) -> Any:
        if isinstance(version, bool | float):  # `true` and 1.0 equal 1 in Python
            raise ValueError(f"{json.dumps(version)} is not 1.")
        return version


def load_recipe(path: Path, *, case: str | None = None) -> Recipe:
    """Read a recipe file; of one with a matrix, the case of that name.

    Raises:
        RecipeError: the file cannot be read, is not YAML, or its frame (version, model, seed, matrix, stages,
            push, notify, cache) is wrong; it has a matrix and no case is named, or not this one.
    """
    return parse_recipe(_read(path), file=str(path), case=case)


def load_cases(path: Path) -> list[Recipe]:
    """Read a recipe file, and return the recipe, or one for each case of its matrix; errors are those of
    `load_recipe`.
    """
    return parse_cases(_read(path), file=str(path))


def parse_recipe(text: str, *, file: str, case: str | None = None) -> Recipe:
    """Return the recipe in `text`; each stage is kept raw, for its owner to check with `parse_spec`.

    Raises:
        RecipeError: as `load_recipe`.
    """
    recipes = parse_cases(text, file=file)
    names = [each.case.name for each in recipes if each.case is not None]
    if case is None and not names:
        return recipes[0]
    if not names:
        raise RecipeError(f"{file}: there is no case {case}: the recipe has no matrix.")
    if case is None:
        raise RecipeError(
            f"{file}: the recipe has a matrix, and one of its {len(names)} cases is wanted here.",
            hint=f"Name it: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}.",
        )
    if case not in names:
        raise RecipeError(f"{file}: the matrix has no case '{case}'.{did_you_mean(case, names)}")
    return recipes[names.index(case)]


def parse_cases(text: str, *, file: str) -> list[Recipe]:
    """Return the recipe in `text`, or one for each case of its matrix.

    Raises:
        RecipeError: as `load_recipe`; or cases that would push to one name.
    """
    tree, where = read_yaml(text, file=file)
    if not isinstance(tree, dict):
        raise where.error((), "a recipe is a mapping with the keys version, model and stages.")
    if "matrix" not in tree:
        refuse_placeholders(tree, where)
        return [_parsed(tree, where, None)]
    recipes = []
    for case in read_cases(tree["matrix"], where):
        filled, places = fill(tree, case, where)
        recipes.append(_parsed(filled, places, case))
    pushed = [(each.push.to, each.push.name) for each in recipes if each.push is not None]
    if len(set(pushed)) != len(pushed):
        raise where.error(
            ("push", "name"),
            "several cases of the matrix would push to one name, in place of one another; put $(matrix.axis) "
            "into it.",
        )
    return recipes


def _read(path: Path) -> str:
    return read_source(path, file=str(path), what="recipe", hint="`compress init` writes one to start from.")


def _parsed(tree: dict[str, Any], where: SourceMap, case: Case | None) -> Recipe:
    _check_stages(tree.get("stages"), where)
    head = parse_spec(_RecipeHead, tree, where)
    signed = head.model if isinstance(head.model, SignedModel) else None
    ref = str(head.model) if signed is None else signed.ref
    try:
        model = parse_model_ref(ref)
    except RecipeError as error:
        raise where.error(("model",), str(error)) from None
    if signed is not None and model.scheme in ("builtin", "hf"):
        raise where.error(
            ("model", "ref"),
            "a signature covers every file of a model, and of this one only a part is fetched; name a "
            "directory, or an artifact of a registry.",
        )
    stages = tuple(
        StageEntry(
            raw["kind"],
            index,
            {key: value for key, value in raw.items() if key != "kind"},
            where.under("stages", index),
        )
        for index, raw in enumerate(tree["stages"])
    )
    notify = (head.notify,) if isinstance(head.notify, Notify) else head.notify
    return Recipe(
        head.version,
        ref,
        head.seed,
        stages,
        head.push,
        where.file,
        notify=notify,
        cache=head.cache,
        case=case,
        signed_by=None if signed is None else signed.signed_by,
    )


def _check_stages(stages: Any, where: SourceMap) -> None:
    """Raise RecipeError where a stage is no mapping, or has no kind; each stage on a line of its own."""
    if not isinstance(stages, list):
        return  # the spec of the head explains that
    wrong = []
    for idx, each in enumerate(stages[:_MAX_STAGES]):
        if not isinstance(each, Mapping):
            kind = each if isinstance(each, str) and re.fullmatch(r"[a-z]+", each) else "calibrate"
            problem = f"must be a mapping with a kind, such as {{kind: {kind}}}, not {json.dumps(each):.60}."
            wrong.append(str(where.error(("stages", idx), problem)))
    if wrong:
        raise RecipeError("\n".join(wrong))


def unknown_kind_error(entry: StageEntry, known: Iterable[str]) -> RecipeError:
    """Return the error for a stage whose kind is not registered."""
    return entry.where.error(("kind",), f"unknown stage '{entry.kind}'.{did_you_mean(entry.kind, known)}")


def recipe_schema(stage_specs: Mapping[str, type[Spec]]) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a whole recipe, each stage one of `stage_specs` by its `kind`."""
    template = "#/$defs/{model}"
    models: list[type[BaseModel]] = [_RecipeHead, *dict.fromkeys(stage_specs.values())]
    names, collected = models_json_schema([(model, "validation") for model in models], ref_template=template)
    definitions: dict[str, Any] = collected["$defs"]
    name_of = {model: names[model, "validation"]["$ref"].removeprefix("#/$defs/") for model in models}
    head = definitions.pop(name_of[_RecipeHead])
    definitions.pop(_StageHead.__name__)
    stages = {}
    for kind, spec in sorted(stage_specs.items()):
        body = definitions[name_of[spec]]
        properties = {"kind": {"const": kind}} | body.get("properties", {})
        stages[f"stage:{kind}"] = body | {
            "title": kind,
            "properties": properties,
            "required": ["kind", *body.get("required", [])],
        }
    head["properties"]["stages"]["items"] = {
        "oneOf": [{"$ref": template.format(model=name)} for name in stages]
    }
    head |= {"title": "compress recipe", "description": "One model, and the stages that compress it."}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **head, "$defs": definitions | stages}

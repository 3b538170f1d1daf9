"""The reference of recipe keys, from the JSON Schema that `compress schema` prints.

A section of the page is one stage or one nested group of keys; its heading is the path of the key, such as
`quantize.smooth`. A group that two stages share is shown once, and the second place links to the first.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.docs.markdown import table

Schema = Mapping[str, Any]
MEANINGS: Mapping[str, str] = {
    "Recipe.version": "the version of the recipe's form",
    "Recipe.seed": "decides every random draw of the run",
    "Recipe.matrix": "axes of values; the recipe is run once for each combination",
    "Recipe.stages": "what to do, in order",
    "Recipe.push": "where the finished artifact goes; left out, nowhere",
    "Recipe.cache": "registries that results of stages are pulled from and pushed to; decides no result",
}
"""Meanings of the keys around the stages, which no Spec has."""
KINDS: Mapping[str, str] = {
    "Awq": "AWQ (arXiv 2306.00978): the scale of each channel that loses least, searched on a grid",
    "SmoothQuant": (
        "SmoothQuant (arXiv 2211.10438): the scale that splits the range between activations and weights"
    ),
    "Gptaq": "GPTAQ (arXiv 2504.02692): weights that make up for the error of the layers before this one",
    "Gptq": "GPTQ (arXiv 2210.17323): columns are rounded one by one, and later columns absorb the error",
    "Rtn": "round to nearest",
    "Descent": "re-fits scales and visits every code again until no single change lowers the error",
    "Activation": "units with the largest activations stay (Minitron, arXiv 2407.14679)",
    "Flap": "units whose activations vary most stay (FLAP, arXiv 2312.11983)",
    "Obs": (
        "units stay whose loss costs most once the others make up for it, one at a time "
        "(ZipLM, arXiv 2302.04089)"
    ),
    "RandomUnits": "units stay at random: the baseline",
    "Taylor": "units stay whose loss costs most KL, as gradients predict it (LLM-Pruner, arXiv 2305.11627)",
    "Wanda": "units with the largest activations times weights stay (Wanda, arXiv 2306.11695)",
    "BiasCompensation": (
        "adds the mean of what went to a bias, where the family's config has one (Llama; `attn.o` of Qwen3)"
    ),
    "LeastSquares": "gives the columns that stay the weights that lose least without the others",
    "NoCompensation": "leaves the columns that stay as they are",
}
"""Meanings of kinds whose Spec has no description."""


def recipe_schema_document() -> Schema:
    """Return the JSON Schema of recipes."""
    from compress.recipe import recipe_schema
    from compress.stages import STAGES

    return recipe_schema({kind: stage.spec for kind, stage in STAGES.items()})


@dataclass
class RecipeReference:
    """The tables of the page, in the order in which the template asks for them."""

    schema: Schema = field(default_factory=recipe_schema_document)
    sections: dict[str, str] = field(default_factory=dict)

    def frame(self) -> str:
        """Return the table of the keys at the top of a recipe, and of `push`."""
        stages = {"type": "array", "items": {"type": "stages"}}
        frame = {**self.schema, "title": "Recipe"}
        frame["properties"] = {**frame["properties"], "stages": stages}
        rows = list(self._rows("recipe", frame))
        return "\n\n".join([table(HEADER, rows), *self._nested("", frame)])

    def stage(self, kind: str) -> str:
        """Return the table of one stage, and those of the groups of keys inside it."""
        definition = self._definition(f"stage:{kind}")
        self.sections[kind.capitalize()] = kind
        named = {**definition, "title": kind.capitalize()}
        rows = list(self._rows(kind, named))
        return "\n\n".join([table(HEADER, rows), *self._nested(kind, definition)])

    def finish(self) -> str:
        """Return nothing, at the end of the page.

        Raises:
            LookupError: a stage has no section.
        """
        stages = {name.removeprefix("stage:") for name in self.schema["$defs"] if name.startswith("stage:")}
        if missing := sorted(stages - set(self.sections.values())):
            raise LookupError(f"the page has no section for {', '.join(missing)}")
        return ""

    def _nested(self, path: str, definition: Schema) -> Iterator[str]:
        """Yield a section for every group of keys below `definition` that is not shown yet."""
        for key, prop in definition["properties"].items():
            names = [name for name in _references(prop) if name not in self.sections]
            if not names:
                continue
            place = f"{path}.{key}".lstrip(".")
            for name in names:
                self.sections[name] = place
            found = {name: self._definition(name) for name in names}
            yield f"### `{place}`"
            yield self._group(place, found)
            for each in found.values():
                yield from self._nested(place, each)

    def _group(self, place: str, found: Mapping[str, Schema]) -> str:
        """Return the table of one group: its keys, or for each `kind` a line and its keys."""
        kinds = {name: each for name, each in found.items() if _kind(each) is not None}
        plain = [each for name, each in found.items() if name not in kinds]
        parts = []
        for each in plain:
            about = f"{_sentence(each['description'])}\n\n" if each.get("description") else ""
            parts.append(about + table(HEADER, list(self._rows(place, each))))
        if kinds:
            rows: list[list[str]] = []
            for name, each in kinds.items():
                about = each.get("description") or KINDS.get(name)
                if not about:
                    raise LookupError(f"{place}: say what the kind of {name} does")
                rows.append([f"`{_kind(each)}`", "", "", "", _flat(about).rstrip(".")])
                rows += [["", *row] for row in self._rows(place, each, without="kind")]
            parts.append(table(["`kind`", *HEADER], rows))
        return "\n\n".join(parts)

    def _rows(self, place: str, definition: Schema, *, without: str = "") -> Iterator[list[str]]:
        """Yield key, type, default and meaning of every key of one definition."""
        required = definition.get("required", [])
        for key, prop in definition["properties"].items():
            if key == without or (key == "kind" and place == definition["title"].lower()):
                continue
            meaning = prop.get("description") or MEANINGS.get(f"{definition['title']}.{key}")
            if not meaning:
                raise LookupError(f"{place}: say what the key {key} of {definition['title']} means")
            default = "required" if key in required else _default(prop)
            yield [f"`{key}`", self._type(place, key, prop), default, _flat(meaning)]

    def _type(self, place: str, key: str, prop: Schema) -> str:
        """Return the values that a key takes, in words; groups of keys link to their section."""
        if {"W4A16_G128", "dense"} <= set(prop.get("enum", ())):
            return "[scheme](choosing.md#schemes) or `dense`"
        if "enum" in prop:
            return ", ".join(f"`{value}`" for value in prop["enum"] if value is not None)
        if "const" in prop:
            return f"`{json.dumps(prop['const'])}`"
        choices = prop.get("anyOf") or prop.get("oneOf")
        if choices:
            words = [self._type(place, key, choice) for choice in choices if choice.get("type") != "null"]
            return " or ".join(dict.fromkeys(words))
        if "$ref" in prop:
            name = prop["$ref"].rpartition("/")[2]
            where = self.sections.get(name, f"{place}.{key}".removeprefix("recipe."))
            return f"[`{where}`](#{where.replace('.', '')})"
        match prop.get("type"):
            case "array":
                items = self._type(place, key, prop["items"]) if "items" in prop else "value"
                return f"list: {items}"
            case "object":
                return "mapping"
            case "integer" | "number" as kind:
                return kind + _bounds(prop)
            case kind:
                return "`true`, `false`" if kind == "boolean" else str(kind or "mapping")

    def _definition(self, name: str) -> Schema:
        found: Schema = self.schema["$defs"][name]
        return {**found, "title": name} if not name.startswith("stage:") else found


HEADER = ("key", "value", "default", "meaning")


def _references(prop: Schema) -> Iterator[str]:
    """Yield the names of the definitions that a property may hold."""
    if "$ref" in prop:
        yield prop["$ref"].rpartition("/")[2]
    items = [prop["items"]] if isinstance(prop.get("items"), Mapping) else []
    for choice in [*prop.get("anyOf", ()), *prop.get("oneOf", ()), *items]:
        yield from _references(choice)


def _kind(definition: Schema) -> str | None:
    """Return the only `kind` of a definition, or None where it has no kind or several."""
    value = definition["properties"].get("kind", {}).get("const")
    return None if value is None else str(value)


def _default(prop: Schema) -> str:
    value = prop.get("default")
    if value is None or value in ({}, []):
        return "left out"
    if isinstance(value, Mapping):
        return f"`{{kind: {value['kind']}}}`" if "kind" in value else "the defaults below"
    return f"`{json.dumps(value) if not isinstance(value, str) else value}`"


def _bounds(prop: Schema) -> str:
    """Return the limits of a number: `, at least 1`."""
    low = prop.get("minimum", prop.get("exclusiveMinimum"))
    high = prop.get("maximum", prop.get("exclusiveMaximum"))
    if low is not None and high is not None and high < 2**62:
        return f", {low:g} to {high:g}"
    if low is not None:
        return f", {'at least' if 'minimum' in prop else 'more than'} {low:g}"
    return ""


def _flat(text: str) -> str:
    """Return text for a cell of a table: one line, and no tags where it is not code."""
    line = " ".join(text.split()).replace("|", "\\|")
    parts = line.split("`")
    return "`".join(part if idx % 2 else part.replace("<", "&lt;") for idx, part in enumerate(parts))


def _sentence(text: str) -> str:
    return _flat(text)

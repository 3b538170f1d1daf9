"""What `transformers` makes of the fields of `config.json`, for each `model_type` that a family here reads:
`python -m scripts.config_defaults` writes `compress/models/config_defaults.json`.

    defaults   field -> the value that it has where a config leaves it out: the default of the configuration
               class, or else the default that every `getattr` for the field names
    reads      names that the configuration class (constructor, rope conversion, validation) or the modeling
               file reads, and what the modules that the modeling file imports read by `getattr`

The reads are those in the source text, found by its syntax tree: attributes of `config` and `self.config` (in
a configuration class, of `self`), `getattr` and `hasattr` with a literal name, and literal keys of `kwargs`.
It runs none of that code, and does not see names that are computed. `models/` imports no `transformers`, so
the facts ship as data; a test compares them with the installed version, which `constraints.txt` pins.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from compress.models.config_facts import FACTS_FILE
from compress.models.family import FAMILIES
from compress.models.wrapper import Wrapper

PACKAGE = Path(transformers.__file__).parent
_ABSENT = object()


class Reads(ast.NodeVisitor):
    """The names that source text reads from a configuration; `optional` maps a name that is read by `getattr`
    or `hasattr` to the defaults that the calls name."""

    def __init__(self, *, self_is_config: bool = False) -> None:
        self._self_is_config = self_is_config
        self.attributes: set[str] = set()
        self.optional: dict[str, list[Any]] = defaultdict(list)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[config, ast.Constant(value=str(name)), *default],
            ) if self._is_config(config):
                literal = default[0] if default else None
                self.optional[name].append(literal.value if isinstance(literal, ast.Constant) else _ABSENT)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="kwargs"), attr="get" | "pop"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                self.attributes.add(name)
            case ast.Call(func=ast.Attribute(value=config) as method) if self._is_config(config):
                self.visit(method.value)
                for each in (*node.args, *node.keywords):
                    self.visit(each)
                return
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        match node:
            case ast.Compare(
                left=ast.Constant(value=str(name)), ops=[ast.In()], comparators=[ast.Name(id="kwargs")]
            ):
                self.attributes.add(name)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load) and self._is_config(node.value):
            self.attributes.add(node.attr)
        self.generic_visit(node)

    def _is_config(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id="config" | "text_config") | ast.Attribute(attr="config"):
                return True
            case ast.Name(id="self"):
                return self._self_is_config
        return False


def reads_of(texts: Iterable[str], *, self_is_config: bool = False) -> Reads:
    """Return what several source texts read."""
    reads = Reads(self_is_config=self_is_config)
    for text in texts:
        one = _reads_of_one(text, self_is_config)
        reads.attributes |= one.attributes
        for name, defaults in one.optional.items():
            reads.optional[name] += defaults
    return reads


@functools.cache
def _reads_of_one(text: str, self_is_config: bool) -> Reads:
    """Return what one source text reads; most modeling files import the same modules."""
    reads = Reads(self_is_config=self_is_config)
    reads.visit(ast.parse(textwrap.dedent(text)))
    return reads


def _modeling_of(cls: type, model_type: str) -> str:
    """Return the name of the module that computes a model, which may be that of another one."""
    own = cls.__module__.replace(".configuration_", ".modeling_")
    if importlib.util.find_spec(own) is not None:
        return own
    return str(MODEL_FOR_CAUSAL_LM_MAPPING[cls].__module__)


def facts_of(model_type: str) -> dict[str, Any]:
    """Return the facts of one `model_type` of the installed `transformers`."""
    cls = CONFIG_MAPPING[model_type]
    modeling = inspect.getsource(importlib.import_module(_modeling_of(cls, model_type)))
    own = reads_of([modeling])
    shared = reads_of(_imported(modeling))
    classes = [each for each in cls.__mro__ if each.__module__.startswith("transformers")]
    configuration = reads_of(map(inspect.getsource, classes), self_is_config=True)
    optional: dict[str, list[Any]] = defaultdict(list)
    for reads in (own, shared, configuration):
        for name, defaults in reads.optional.items():
            optional[name] += defaults
    names = own.attributes | configuration.attributes | optional.keys() | cls.attribute_map.keys()
    return {
        "defaults": _agreed(optional) | class_defaults(cls),
        "reads": sorted(name for name in names if not name.startswith("__")),
    }


def class_defaults(cls: type) -> dict[str, Any]:
    """Return the default of each field that a configuration class declares and whose default JSON expresses;
    `null` is not listed, as a field that is `null` counts as absent."""
    found = {}
    for field in dataclasses.fields(cls):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value is not None and isinstance(value, bool | int | float | str | list | dict):
            found[field.name] = value
    return found


def _agreed(optional: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the default of each name for which all reads name the same literal, other than None."""
    return {
        name: defaults[0]
        for name, defaults in optional.items()
        if defaults[0] is not None
        and all(type(each) is type(defaults[0]) and each == defaults[0] for each in defaults)
        and defaults[0] is not _ABSENT
    }


def _imported(source: str) -> Iterable[str]:
    """Yield the text of each module of the package `transformers` itself that a modeling file imports."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.level == 3 and node.module is not None:
            file = PACKAGE / (node.module.replace(".", "/") + ".py")
            if file.is_file():
                yield file.read_text(encoding="utf-8")


def text_models() -> list[str]:
    """Return every `model_type` whose config a table reads, those inside of others too."""
    inside = {
        name: each.text_families if isinstance(each, Wrapper) else [name] for name, each in FAMILIES.items()
    }
    return sorted({kind for kinds in inside.values() for kind in kinds})


def document() -> dict[str, Any]:
    """Return all facts, as the file holds them."""
    return {
        "transformers": transformers.__version__,
        "every_model": {"defaults": class_defaults(PreTrainedConfig)},
        "models": {name: facts_of(name) for name in text_models() if name in CONFIG_MAPPING},
    }


def main() -> None:
    """Write the file, and print its path."""
    FACTS_FILE.write_text(json.dumps(document(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(FACTS_FILE)


if __name__ == "__main__":
    main()

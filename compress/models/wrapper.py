"""Models with a text decoder inside: towers of images or sound and projectors around a language model.

The text model is compressed. Every other tensor is untouched: a `WeightSource` has it among its outer weights
under `UNTOUCHED` and its own name, no decoder is built from it, and export writes it back as it was. So the
result loads in the class of the source.

A wrapper is a `Family` whose shapes are those of the family inside, read from `text_config` or another field
(`text_paths`), or from the top of the config in flat files from before that field existed. On disk its text
tensors have the names that the vendors published and that `transformers` writes; names that some versions
wrote, those of the modules in memory, are read too (`in_memory`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.family import Family
from compress.models.limits import MAX_LAYERS, MAX_SIZE
from compress.models.wide_codes import without_layout
from compress.untrusted.fields import Fields

FieldPath = tuple[str, ...]
"""Names of fields, each one inside of that before it."""

_TIES = "tie_word_embeddings"
_SHARED = ("dtype", "torch_dtype", "quantization_config")
"""Fields of the whole model that a text config may leave to it."""


def refuse_nothing(whole: Fields) -> None:
    """Refuse no config."""
    del whole


@dataclass(frozen=True)
class Wrapper(Family):
    """A model around one of `text_families` (the `model_type` of a text config -> its table).

    `text_paths` are the fields that may hold the text config; the first that a config states is read.
    `outside` are the config fields of flat files that are not the text model's. `ties_by_default`: the
    head is tied where no config states it and no tensors decide; `text_ties`: it is tied where the text
    config states so, even where the whole states the opposite; `own_head`: the class never ties it, so that
    a config which states a tie is refused. `check_whole` raises `UnsupportedArch` for what the config around
    the text config states and nothing here computes. `layers_of_images` is the field of the text
    config that lists, by their indices on disk, layers that do nothing without an image: they are untouched,
    and no layers of the decoder. `more_tokens` is the field of the text config that states the number of
    rows of the embedding after those of tokens with logits (`DiskNames.more_embeddings`).
    """

    text_families: Mapping[str, Family] = field(default_factory=dict)
    text_paths: tuple[FieldPath, ...] = (("text_config",),)
    outside: frozenset[str] = frozenset()
    ties_by_default: bool = False
    text_ties: bool = False
    own_head: bool = False
    check_whole: Callable[[Fields], None] = refuse_nothing
    layers_of_images: str | None = None
    more_tokens: str | None = None

    def states_tie(self, raw: Mapping[str, Any]) -> bool:
        stated = any(name in each for each in self._around(raw) for name in self.stated_names(_TIES, each))
        return stated or self.own_head or self._is_tied_by(self._stated_text(raw))

    def read_config(self, raw: Mapping[str, Any]) -> Arch:
        self.check_whole(Fields(raw, self._where, UnsupportedArch))
        text = self._text_of(raw)
        if self.own_head and text[_TIES]:
            fields = Fields(text, self._where, UnsupportedArch)
            raise fields.wrong(_TIES, text[_TIES], "false: the class of this family has a head of its own")
        return self._inner(text).read_config(text).replace(family=self.model_type, config=without_layout(raw))

    def of_arch(self, arch: Arch) -> Family:
        family = super().of_arch(arch)
        if self.more_tokens is None and self.layers_of_images is None:
            return family
        text = Fields(self.completed(arch.config), self._where, UnsupportedArch)
        if self.more_tokens is not None:
            family = replace(family, more_embeddings=text.integer(self.more_tokens, 0, MAX_SIZE))
        if self.layers_of_images is not None:
            passed = text.integers(self.layers_of_images, 0, MAX_LAYERS)
            family = replace(family, passed_layers=tuple(sorted(passed)))
        return family

    def write_config(self, arch: Arch) -> dict[str, Any]:
        text = self._text_of(arch.config)
        written = self._inner(text).write_config(arch.replace(config=text))
        path = self._path(arch.config)
        around = [self._with_tie(each, arch) for each in self._around(arch.config)]
        around[-1] |= {_TIES: arch.tied_head}
        config = {**around[0], "architectures": [self.class_name(arch.config)], "dtype": arch.dtype}
        if not path:
            return {**config, **written, **{name: config[name] for name in ("architectures", "model_type")}}
        stated = self._stated_text(arch.config)
        stated_here = {name for name in _ADDED if stated.get(name) is not None}
        written = {key: value for key, value in written.items() if key not in _ADDED or key in stated_here}
        if "model_type" in stated:
            written["model_type"] = stated["model_type"]
        if len(path) > 1 and _TIES not in stated:
            del written[_TIES]
        return _joined([config, *around[1:], written], path)

    def why_unstated(self, arch: Arch) -> str | None:
        text = self._text_of(arch.config)
        return self._inner(text).why_unstated(arch.replace(config=text))

    def _with_tie(self, config: Mapping[str, Any], arch: Arch) -> dict[str, Any]:
        """Return a config around the text config with the tie of a model where it states one."""
        names = [name for name in self.stated_names(_TIES, config) if name in config]
        return {**_without_shared(config), **dict.fromkeys(names, arch.tied_head)}

    def completed(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        text = self._text_of(raw)
        return self._inner(text).completed(text)

    def changed(self, raw: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        path = self._path(raw)
        if not path:
            return {**raw, **fields}
        return _joined([*self._around(raw), {**self._stated_text(raw), **fields}], path)

    def stated(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._stated_text(raw) or raw

    def unread_fields(self, config: Mapping[str, Any]) -> list[str]:
        text = self._text_of(config)
        return self._inner(text).unread_fields(text)

    def _inner(self, text: Mapping[str, Any]) -> Family:
        kind = str(text.get("model_type"))
        if kind not in self.text_families:
            raise UnsupportedArch(
                f"the text model inside this {self.model_type} model is '{kind:.80}'; known there: "
                f"{', '.join(self.text_families)}."
            )
        return self.text_families[kind]

    def _text_of(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config of the text model, as one of its own would state it."""
        stated = self._stated_text(raw)
        kind = next(iter(self.text_families))
        ties = self._ties(raw, stated)
        if not stated and not self.outside:
            paths = " or ".join(".".join(path) for path in self.text_paths)
            raise UnsupportedArch(f"{self._where} has no {paths}, which states the text model.")
        if not stated:
            flat = {name: value for name, value in raw.items() if name not in self.outside}
            return {**flat, "model_type": kind, **dict.fromkeys(self.stated_names(_TIES, raw), ties)}
        around = self._around(raw)
        shared = {name: each[name] for each in around for name in _SHARED if each.get(name) is not None}
        own = {name: value for name, value in stated.items() if name not in shared or value is not None}
        own |= dict.fromkeys(self.stated_names(_TIES, stated), ties)
        return {"model_type": kind, **shared, **own, _TIES: ties}

    def _path(self, raw: Mapping[str, Any]) -> FieldPath:
        """Return the fields to the text config, none of a flat config."""
        return next((path for path in self.text_paths if self._along(raw, path)[-1]), ())

    def _along(self, raw: Mapping[str, Any], path: FieldPath) -> list[Mapping[str, Any]]:
        """Return a config and what it has at each of the fields to another."""
        found = [raw]
        for name in path:
            found.append(Fields(found[-1], self._where, UnsupportedArch).mapping(name, default={}))
        return found

    def _stated_text(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        path = self._path(raw)
        return self._along(raw, path)[-1] if path else {}

    def _around(self, raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the config of the whole, and those between it and the text config."""
        return self._along(raw, self._path(raw)[:-1])

    def _is_tied_by(self, stated: Mapping[str, Any]) -> bool:
        return self.text_ties and stated.get(_TIES) is True

    def _ties(self, raw: Mapping[str, Any], stated: Mapping[str, Any]) -> Any:
        if self._is_tied_by(stated):
            return True
        levels = [{**each, **self.aliased(each)} for each in (*reversed(self._around(raw)), stated)]
        return next((each[_TIES] for each in levels if _TIES in each), self.ties_by_default)


def _without_shared(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _SHARED}


def _joined(configs: Sequence[Mapping[str, Any]], path: FieldPath) -> dict[str, Any]:
    """Return configs as one, in which each has the next at one of the fields."""
    first, *others = configs
    return {**first, path[0]: _joined(others, path[1:])} if others else dict(first)


_ADDED = ("architectures", "dtype")
"""Fields that a text config has only where the source's has them."""


def wrapper(model_type: str, architecture: str, *text_families: Family, **facts: Any) -> Wrapper:
    """Return a wrapper with the modules of all its text families, each named as the first that has it names
    it."""
    inner = {each.name: getattr(text_families[0], each.name) for each in dataclasses.fields(Family)}
    modules: dict[str, str] = {}
    for each in text_families:
        modules = {**each.layer_modules, **modules}
    return Wrapper(
        **{
            **inner,
            "layer_modules": modules,
            "expert_layouts": next(
                (each.expert_layouts for each in text_families if each.expert_layouts), ()
            ),
            "model_type": model_type,
            "architecture": architecture,
            "text_families": {each.model_type: each for each in text_families},
            **facts,
        }
    )


def sized(family: Family, **sizes: float) -> Family:
    """Return a text family whose configs may leave these sizes to the defaults of their class, as configs
    inside of others do."""
    return replace(family, defaults={**family.defaults, **sizes})


LLAVA_NAMES: Mapping[str, Any] = {
    "layer_prefix": "language_model.model.layers.",
    "outer_modules": {
        "embed": "language_model.model.embed_tokens",
        "norm": "language_model.model.norm",
        "head": "language_model.lm_head",
    },
    "in_memory": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head": "lm_head",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    "untouched": ("vision_tower", "multi_modal_projector"),
}
"""Names on disk and in memory of models like Llava: InternVL, Gemma 3 and Mistral 3, too."""
LLAVA_NEXT_NAMES: Mapping[str, Any] = {
    **LLAVA_NAMES,
    "in_memory": {**LLAVA_NAMES["in_memory"], "image_newline": "model.image_newline"},
    "untouched": (*LLAVA_NAMES["untouched"], "image_newline"),
}
"""Names on disk and in memory of models like Llava whose rows of images end with an embedding."""

LANGUAGE_MODEL_NAMES: Mapping[str, Any] = {
    "layer_prefix": "model.language_model.layers.",
    "outer_modules": {
        "embed": "model.language_model.embed_tokens",
        "norm": "model.language_model.norm",
        "head": "lm_head",
    },
    "untouched": ("model.visual",),
}
"""Names of models that are on disk as in memory, with their vision tower in `model.visual`: Qwen3-VL."""
LLAVA_MODEL_NAMES: Mapping[str, Any] = {
    **LANGUAGE_MODEL_NAMES,
    "untouched": ("model.vision_tower", "model.multi_modal_projector"),
}
"""Names of models that are on disk as in memory, with the modules of Llava: LFM2-VL."""

AUDIO_NAMES: Mapping[str, Any] = {
    **LLAVA_NAMES,
    "in_memory": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head": "lm_head",
        "audio_tower.": "model.audio_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    "untouched": ("audio_tower", "multi_modal_projector"),
}
"""Names on disk and in memory of models like Qwen2-Audio: Voxtral and GLM-ASR, too."""
AUDIO_MODEL_NAMES: Mapping[str, Any] = {
    **LANGUAGE_MODEL_NAMES,
    "untouched": ("model.audio_tower", "model.multi_modal_projector"),
}
"""Names of models that are on disk as in memory, with the modules of Qwen2-Audio: Qwen3-ASR."""

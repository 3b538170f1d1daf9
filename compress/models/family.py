"""Families of models as tables: how one Hugging Face architecture spells the canonical decoder in
`config.json` and in tensor names.

`read_config` turns a config into an `Arch`, `write_config` is its inverse; `to_disk` renames modules. A field
that may change the function and that no table reads is an error and not a guess; `config_facts.py` decides
which fields change nothing. Families are data, one file each in `archs/`, found by `FAMILIES`.
"""

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import DTYPES, MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Arch
from compress.models.config_facts import (
    HONOURED_FIELDS,
    IDLE_FIELDS,
    SHAPE_FIELDS,
    TRAINING_OF_ROUTERS,
    facts_of,
    is_same,
)
from compress.models.head_size import head_size
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import (
    FULL,
    RotatedLayers,
    Windows,
    chunk_of,
    every_layer,
    layer_types,
    no_window,
)
from compress.models.mixture import ExpertLayout, Mixture
from compress.models.rope_config import read_rope
from compress.plugins import PluginSet
from compress.untrusted.fields import Fields, shown
from compress.untrusted.text import one_line

MAX_NAMED = 12
"""Most fields that one sentence names."""
# Canonical module -> module on disk: the spelling that Llama introduced and most decoders kept.
OUTER_MODULES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_EXPERT = re.compile(r"moe\.experts\.(\d+)\.")
_CANONICAL_LAYER = re.compile(r"layers\.(\d+)\.(.+)")

# Norms of the outputs of the two halves of a layer, as most families with four norms spell them.
SANDWICH_NORMS = {
    "attn_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
# All modules of a layer whose two norms follow its halves.
POST_NORM_MODULES = {
    **{name: disk for name, disk in LAYER_MODULES.items() if name not in ("attn_norm", "ffn_norm")},
    "attn_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
# q, k and v, and gate and up, as one tensor each.
STACKED_QKV = dict.fromkeys(("attn.q", "attn.k", "attn.v"), "self_attn.qkv_proj")
STACKED_GATE_UP = dict.fromkeys(("ffn.gate", "ffn.up"), "mlp.gate_up_proj")

RareFacts = Callable[[Fields], dict[str, Any]]
"""config -> facts of an `Arch` that have a default."""
ImpliedFields = Callable[[Fields], dict[str, Any]]
"""config -> fields in the standard spelling that it implies and does not state so."""
FIELDS_BY_LAYER = ("layer_types", "no_rope_layers")
"""Fields that have an entry for each layer."""
PER_LAYER = "per_layer_config"
"""The field in which `transformers` states widths that single layers have for themselves, by their index."""


def no_facts(config: Fields) -> dict[str, Any]:
    return {}


def nothing_implied(config: Fields) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """One architecture as data. Bias entries name a boolean config field, or are constants of the
    architecture. `facts` reads the facts of few families, of which the config's names are in `known_fields`,
    those that the table reads in addition to the shapes; of each of `fixed_fields` the decoder computes one
    value only. `spelled` maps standard names of fields to the family's own; `implied` returns the standard
    fields that follow from older or shorter spellings.

    Canonical modules that `layer_modules` gives one name are stacked in that tensor, in the table's order;
    with `interleaved_rotary` neighbouring dimensions of a head rotate as a pair on disk (`layout.py`).
    `mixture` reads the experts of its layers, and `expert_layouts` are those in which checkpoints store them,
    the first one where none is read. A name of a parameter in `layer_modules` is one on disk, too.
    `full_widths` maps widths of layers (`LayerShape`) to the fields that state them for those with full
    attention, in families in which these layers have others than the rest; `full_keys_are_values` is a field
    or a constant like the biases, for the same layers.
    `dense_size` is the field of the width of a dense FFN.
    `aliases` maps names of fields to other names that some checkpoints state instead.
    `heads_divide_hidden`: `transformers` refuses a config whose number of heads does not divide the hidden
    size; `heads_span_hidden`: it takes the quotient of the two for the size of a head, whatever is stated.
    `in_memory` maps prefixes of names on disk to those of modules in `transformers`, where the two differ;
    `untouched` are the parts on disk that are none of the language model's (`wrapper.py`)."""

    model_type: str
    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    ffn_bias: bool | str = False
    qk_norm: bool | str = False
    heads_divide_hidden: bool = False
    heads_span_hidden: bool = False
    windows: Windows = no_window
    rotated_layers: RotatedLayers = every_layer
    facts: RareFacts = no_facts
    interleaved_rotary: bool = False
    full_widths: Mapping[str, str] = field(default_factory=dict)
    full_keys_are_values: bool | str = False
    dense_size: str = "intermediate_size"
    mixture: Mixture | None = None
    expert_layouts: tuple[ExpertLayout, ...] = ()
    spelled: Mapping[str, str] = field(default_factory=dict)
    implied: ImpliedFields = nothing_implied
    aliases: Mapping[str, str] = field(default_factory=dict)
    known_fields: frozenset[str] = frozenset()
    fixed_fields: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    outer_modules: Mapping[str, str] = field(default_factory=lambda: OUTER_MODULES)
    layer_modules: Mapping[str, str] = field(default_factory=lambda: LAYER_MODULES)
    layer_prefix: str = "model.layers."
    ignored_tensors: str = r"rotary_emb\.inv_freq$"
    in_memory: Mapping[str, str] = field(default_factory=dict)
    untouched: tuple[str, ...] = ()

    def read_config(self, raw: Mapping[str, Any]) -> Arch:
        """Read the facts of a `config.json`.

        Raises:
            UnsupportedArch: a field is missing, unknown, or has a value that the decoder does not support;
                the message names it.
        """
        self._refuse_unknown(raw)
        config = Fields(self.completed(raw), self._where, UnsupportedArch)
        num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
        hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
        num_heads = config.integer("num_attention_heads", 1, MAX_SIZE)
        widths = {
            "num_heads": num_heads,
            "num_kv_heads": config.integer("num_key_value_heads", 1, MAX_SIZE, default=num_heads),
            "head_dim": head_size(config, hidden_size, num_heads),
        }
        experts = [None] * num_layers if self.mixture is None else self.mixture.read(config, num_layers)
        ffn_size = config.integer(self.dense_size, 1, MAX_SIZE) if None in experts else 0
        windows = self.windows(config, num_layers)
        types = layer_types(config, num_layers)
        rotated = self.rotated_layers(config, num_layers)
        own_widths = {kind: self._widths_of(kind, config, widths) for kind in dict.fromkeys(types)}
        ropes = {kind: read_rope(config, kind, own["head_dim"]) for kind, own in own_widths.items()}
        if "partial_rotary_factor" not in self.known_fields and any(
            each.rotary_dim for each in ropes.values()
        ):
            raise config.wrong("partial_rotary_factor", "a part of each head", "1 in this family")
        if self.heads_span_hidden and widths["head_dim"] * num_heads != hidden_size:
            raise config.wrong("head_dim", widths["head_dim"], f"{hidden_size} / {num_heads} in this family")
        dtype = config.text("dtype", default=config.text("torch_dtype", default="float32"))
        if dtype not in DTYPES:
            raise config.wrong("dtype", dtype, f"one of {', '.join(DTYPES)}")
        eos_token_ids(config)
        facts = self.facts(config)
        return Arch(
            family=self.model_type,
            vocab_size=config.integer("vocab_size", 1, MAX_SIZE),
            hidden_size=hidden_size,
            max_position=config.integer("max_position_embeddings", 1, MAX_POSITIONS),
            layers=tuple(
                LayerShape(
                    **own_widths[kind],
                    intermediate_size=ffn_size if mixture is None else mixture.expert_size,
                    rope=ropes[kind] if rotates else None,
                    window=window,
                    chunk=chunk_of(config, kind),
                    experts=mixture,
                    keys_are_values=kind == FULL and _flag(self.full_keys_are_values, config),
                )
                for kind, rotates, window, mixture in zip(types, rotated, windows, experts, strict=True)
            ),
            norm_eps=config.number("rms_norm_eps", 0, 1),
            activation=facts.pop("activation", config.text("hidden_act")),
            tied_head=config.flag("tie_word_embeddings", default=False),
            qkv_bias=_flag(self.qkv_bias, config),
            o_bias=_flag(self.o_bias, config),
            ffn_bias=_flag(self.ffn_bias, config),
            qk_norm=_flag(self.qk_norm, config),
            dtype=dtype,
            config=dict(raw),
            **facts,
        )

    def _widths_of(self, kind: str, config: Fields, widths: Mapping[str, int]) -> dict[str, int]:
        """Return the widths of attention in layers of a type, given those of the model."""
        if kind != FULL:
            return dict(widths)
        own = {name: config.integer(field, 1, MAX_SIZE) for name, field in self.full_widths.items()}
        if own.get("head_dim", 0) % 2:
            raise config.wrong(self.full_widths["head_dim"], own["head_dim"], "even")
        return {**widths, **own}

    def why_unstated(self, arch: Arch) -> str | None:
        """Return the reason why no config of the family can state the layers of a model, None where one
        can."""
        if not self.full_widths:
            return (
                None if arch.is_uniform else "layers differ in width, which a stock config.json cannot say."
            )
        if arch.layers[-1].window is not None:
            return f"the last layer has a window; in {self.model_type} models it has full attention."
        shared = {(layer.num_heads, layer.intermediate_size) for layer in arch.layers}
        of_kind = {(layer.window is None, layer.widths) for layer in arch.layers}
        if len(shared) == 1 and len(of_kind) == len({is_full for is_full, _ in of_kind}):
            return None
        return f"layers of one type differ in width, which no config.json of {self.model_type} can say."

    def completed(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the fields that it leaves to their defaults, in the standard spelling."""
        values = {**self.defaults, **raw}
        if "rope_parameters" in self.defaults and raw.get("rope_scaling") and not raw.get("rope_parameters"):
            del values["rope_parameters"]  # the older name of the same
        values |= {name: values[own] for name, own in self.spelled.items() if own in values}
        values |= self._aliased(raw)
        return {**values, **self.implied(Fields(values, self._where, UnsupportedArch))}

    @property
    def _where(self) -> str:
        return f"config.json of this {self.model_type} model"

    def changed(self, raw: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """Return a config with other values of fields of the language model."""
        return {**raw, **fields}

    def to_memory(self, module: str) -> str:
        """Return the name of a disk module in the class of `transformers`: what configs call it."""
        return _other_prefix(module, self.in_memory)

    def from_memory(self, module: str) -> str:
        """Return the name on disk of a module or tensor; of one that has it, the same."""
        return _other_prefix(module, {theirs: ours for ours, theirs in self.in_memory.items()})

    def is_untouched(self, name: str) -> bool:
        """Return whether a tensor on disk is of a part that is none of the language model's."""
        return name.startswith(tuple(f"{part}." for part in self.untouched))

    def write_config(self, arch: Arch) -> dict[str, Any]:
        """Return the `config.json` of an `Arch`: the source's config with every field rewritten that the
        facts decide.

        Raises:
            UnsupportedArch: the widths differ between layers in a way that no config can express.
        """
        first = next((layer for layer in arch.layers if layer.window is not None), arch.layers[0])
        if reason := self.why_unstated(arch):
            raise UnsupportedArch(reason)
        config = dict(arch.config)
        config.update(
            architectures=[self.architecture],
            model_type=self.model_type,
            vocab_size=arch.vocab_size,
            hidden_size=arch.hidden_size,
            num_hidden_layers=arch.num_layers,
            num_attention_heads=first.num_heads,
            num_key_value_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            tie_word_embeddings=arch.tied_head,
            dtype=arch.dtype,
        )
        full = [layer for layer in arch.layers if layer.window is None]
        if self.full_widths and full:
            config.update({field: getattr(full[0], name) for name, field in self.full_widths.items()})
            config.pop(PER_LAYER, None)
        dense = [layer.intermediate_size for layer in arch.layers if layer.experts is None]
        if dense:
            config[self.dense_size] = dense[0]
        if self.mixture is not None:
            values = {**self.defaults, **config, **self._aliased(config)}
            stated = Fields(values, "the source's config", UnsupportedArch)
            experts = self.mixture.write([layer.experts for layer in arch.layers], stated)
            used = {name: other for name, other in self.aliases.items() if other in config}
            config.update({used.get(name, name): value for name, value in experts.items()})
        config.pop("torch_dtype", None)
        config.pop("quantization_config", None)
        for name in FIELDS_BY_LAYER:
            if config.get(name) is not None:
                config[name] = config[name][: arch.num_layers]
        return config

    def to_disk(self, module: str) -> str:
        """Disk name of a canonical module: `layers.3.attn.q` -> `model.layers.3.self_attn.q_proj`."""
        if match := _CANONICAL_LAYER.fullmatch(module):
            pattern, expert = _without_expert(match[2])
            disk = self._modules[pattern]
            return f"{self.layer_prefix}{match[1]}.{disk.replace('*', expert) if expert else disk}"
        return self.outer_modules[module]

    def tensor(self, parameter: str) -> str:
        """Name of the tensor on disk that holds a canonical parameter: `layers.3.attn.q.weight`."""
        match = _CANONICAL_LAYER.fullmatch(parameter)
        if match is not None and match[2] in self._modules:
            return self.to_disk(parameter)
        module, _, leaf = parameter.rpartition(".")
        suffix = f".{leaf}"
        if match is not None and _without_expert(match[2])[1]:
            suffix = self.expert_layouts[0].suffixes[leaf]
        return self.to_disk(module) + suffix

    def stacked_modules(self, module: str, num_experts: int = 0) -> tuple[str, ...]:
        """Return the canonical modules that one tensor on disk holds, in order, given one of them;
        `num_experts` is that of its layer."""
        match = _CANONICAL_LAYER.fullmatch(module)
        if match is None:
            return (module,)
        pattern, expert = _without_expert(match[2])
        disk = self._modules[pattern]
        names = [name for name, each in self._modules.items() if each == disk]
        if expert and "*" in disk:
            names = [name.replace("*", expert) for name in names]
        elif expert:
            names = [name.replace("*", str(idx)) for idx in range(num_experts) for name in names]
        return tuple(f"layers.{match[1]}.{name}" for name in names)

    def holds_all_experts(self, module: str) -> bool:
        """Return whether a canonical module is one of an expert and its tensor holds those of all."""
        match = _CANONICAL_LAYER.fullmatch(module)
        pattern, expert = _without_expert(match[2]) if match else ("", "")
        return bool(expert) and "*" not in self._modules[pattern]

    def as_stored(self, arch: Arch, names: Container[str]) -> "Family":
        """Return the family with the layout of experts in which tensors of these names are stored; without
        any of them the layout that is written."""
        first = next((idx for idx, layer in enumerate(arch.layers) if layer.experts is not None), None)
        if first is None:
            return self
        for layout in self.expert_layouts:
            family = self.with_layout(layout)
            name = family.tensor(f"layers.{first}.moe.experts.0.down.weight")
            if (f"{name}_blocks" if layout.mxfp4 else name) in names:
                return family
        return self

    def in_format(self, quant_method: str | None) -> "Family":
        """Return the family with the layout of experts that checkpoints of a `quant_method` have."""
        own = next((each for each in self.expert_layouts if quant_method in each.methods), None)
        return self if own is None else self.with_layout(own)

    def with_layout(self, layout: ExpertLayout) -> "Family":
        """Return the family with another layout of experts."""
        return replace(self, expert_layouts=(layout,))

    @cached_property
    def _modules(self) -> Mapping[str, str]:
        """Canonical module of a layer -> module on disk, those of experts with `*` for their index."""
        return {**self.layer_modules, **(self.expert_layouts[0].modules if self.expert_layouts else {})}

    def unread_fields(self, config: Mapping[str, Any]) -> list[str]:
        """Return the names of a config's fields that change nothing, because they have the default or nobody
        reads them; notes on training and token ids are not among them."""
        facts = facts_of(self.model_type)
        return sorted(name for name, value in self._others(config) if facts.is_inert(name, value))

    def _refuse_unknown(self, config: Mapping[str, Any]) -> None:
        facts = facts_of(self.model_type)
        refused = {name: value for name, value in self._others(config) if not facts.is_inert(name, value)}
        if refused:
            stated = [f"{_name(name)} = {shown(refused[name])}" for name in sorted(refused)]
            raise UnsupportedArch(
                f"config.json of this {self.model_type} model has {_some(stated, 3)}, which may change what "
                "the model computes and which the decoder does not honour. Remove it if it is a note of "
                "another tool; otherwise this model is not supported yet."
            )
        for name, value in self._fixed().items():
            if config.get(name) is not None and not is_same(config[name], value):
                raise UnsupportedArch(
                    f"config.json says {name} = {shown(config[name])}; the decoder computes {value!r} only."
                )

    def _others(self, config: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return the fields, other than `null`, that the table does not read."""
        read = IDLE_FIELDS | SHAPE_FIELDS | self.known_fields | self._fixed().keys()
        read |= set(self.aliases.values()) | (TRAINING_OF_ROUTERS if self.mixture is not None else set())
        read = (read - self.spelled.keys()) | set(self.spelled.values())
        return [(name, value) for name, value in config.items() if name not in read and value is not None]

    def _aliased(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that a config states by another name."""
        return {name: config[other] for name, other in self.aliases.items() if other in config}

    def _fixed(self) -> Mapping[str, Any]:
        return {**HONOURED_FIELDS, **self.fixed_fields}


def _without_expert(module: str) -> tuple[str, str]:
    """Return a module with `*` for the index of its expert, and that index, empty if it is of none."""
    match = _EXPERT.match(module)
    return (module, "") if match is None else (f"moe.experts.*.{module[match.end() :]}", match[1])


def unread_note(arch: Arch) -> str | None:
    """Return the sentence that names the fields of a model's `config.json` that change nothing; None where
    there is none."""
    names = family_of({"model_type": arch.family}).unread_fields(arch.config)
    if not names:
        return None
    return (
        f"config.json has fields that change nothing in a {arch.family} model and are not read: "
        f"{_some([_name(name) for name in names], MAX_NAMED)}."
    )


def eos_token_ids(config: Fields) -> list[int]:
    """Return the end-of-sequence ids of a config, which states none, one or a list."""
    name = "eos_token_id"
    if not config.has(name):
        return []
    return config.integers(name, 0, MAX_SIZE) if config.is_list(name) else [config.integer(name, 0, MAX_SIZE)]


FAMILIES: PluginSet[Family] = PluginSet("architecture", "compress.models.archs")


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a `config.json`.

    Raises:
        UnsupportedArch: no family is registered for this `model_type`.
    """
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES.names():
        classes = Fields(config, "config.json", UnsupportedArch).texts("architectures", default=())
        raise UnsupportedArch(
            f"architecture '{model_type:.80}' ({', '.join(classes) or 'no class named'}) "
            "is not supported; "
            f"known: {', '.join(FAMILIES.names())}."
        )
    return FAMILIES.get(model_type)


def _other_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with the first of the prefixes that it has replaced."""
    for old, new in prefixes.items():
        if name.startswith(old) or name == old.rstrip("."):
            return new.rstrip(".") + name[len(old.rstrip(".")) :]
    return name


def _flag(rule: bool | str, config: Fields) -> bool:
    return rule if isinstance(rule, bool) else config.flag(rule, default=False)


def _name(name: str) -> str:
    """Return a field's name as a sentence shows it: on one line, of at most 80 characters."""
    return one_line(f"{name:.80}")


def _some(texts: list[str], most: int) -> str:
    left_out = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {left_out} more" if left_out > 0 else "")

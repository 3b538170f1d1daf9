"""Families of models as tables: how one Hugging Face architecture spells the canonical decoder in
`config.json` and in tensor names.

`read_config` turns a config into an `Arch`, `write_config` is its inverse; `to_disk` renames modules
(`disk_names.py`). A field that may change the function and that no table reads is an error and not a guess
(`config_fields.py`); `config_facts.py` decides which fields change nothing. Families are data, one file each
in `archs/`, found by `FAMILIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import DTYPES, Arch
from compress.models.config_facts import (
    HONOURED_FIELDS,
    IDLE_FIELDS,
    SHAPE_FIELDS,
    TRAINING_OF_ROUTERS,
)
from compress.models.config_fields import TableFields
from compress.models.config_values import activation_of, eos_token_ids, ffn_sizes_of, head_dim_of
from compress.models.config_writer import why_unstated, written_config
from compress.models.disk_names import DiskNames, chosen_by_all
from compress.models.family_hooks import (
    DenseFields,
    ImpliedFields,
    LayerShapes,
    NamesByFacts,
    Notes,
    RareFacts,
    Restated,
    as_read,
    no_facts,
    no_head_gate,
    no_other_names,
    nothing_implied,
    nothing_restated,
)
from compress.models.latent import Latent
from compress.models.latent_config import LATENT_FIELDS, head_dim_of_latents
from compress.models.layer_shape import XIELU, Half, HeadGate, LayerShape
from compress.models.layer_types import (
    FULL,
    LINEAR,
    ONLY_FFN,
    RotatedLayers,
    Windows,
    chunk_of,
    every_layer,
    layer_types,
    no_window,
)
from compress.models.limits import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE
from compress.models.mixture import Mixture
from compress.models.recurrence import Recurrence
from compress.models.rope_config import check_one_rope, read_rope, score_factor
from compress.models.unknown_family import no_architecture, unknown_architecture
from compress.models.wide_codes import is_layout, without_layout
from compress.plugins import PluginSet
from compress.untrusted.fields import Fields


@dataclass(frozen=True, kw_only=True)
class Family(DiskNames):
    """One architecture as data, the names of its tensors among them. `other_names` are those of its class in
    checkpoints that have their own code, and in other programs; a config keeps the one that it states. Bias
    entries name a boolean config field, or are constants of the architecture. `facts` reads the facts of few
    families, of which the config's names are in `known_fields`, those that the table reads in addition to the
    shapes; of each of `fixed_fields` the decoder computes one value only. `spelled` maps standard names of
    fields to the family's own; `implied` returns the standard fields that follow from older or shorter
    spellings, and `restated` the fields to write that follow from several facts.

    `latent` reads the latents of attention, which all layers with attention have (`latent_config.py`), and
    `recurrence` what layers of linear attention have in its place (`delta_net_config.py`, `mamba1_config.py`,
    `mamba2_config.py`), or all layers in families whose attention and recurrences are `joint`. With
    `half_layers` a layer has one half only, which its type states; FFNs and experts that are not `gated` have
    no gates. Models that are `attention_free` have recurrences alone, and their configs state no widths of
    attention and of FFNs (`attention_free.py`). `mixture` reads the experts of its layers. `full_widths` maps
    widths of layers (`LayerShape`) to the fields that state them for those with full attention, in families
    in which these layers have others than the rest; `full_keys_are_values` is a field or a constant like the
    biases, for the same layers; `output_gate` is one for all layers, and `head_gate` reads that of heads.
    `heads_by_layer` is the field of the query heads of each layer, in families in which they may differ; with
    `ffn_by_layer` that of the width of a dense FFN may be a list of one for each layer. `shapes` is the last
    to change layers. `dense_size` is the field of the width of a dense FFN, where `dense_fields` does not
    return several fields. `aliases` maps names of fields to other names that some checkpoints state instead.
    `names_by_facts` are names of modules of layers that depend on the facts of a model.
    `derives_head_dim`: `transformers` refuses a config that states the size of a head;
    `heads_divide_hidden`: `transformers` refuses a config whose number of heads does not divide the hidden
    size; `heads_span_hidden`: it takes the quotient of the two for the size of a head, whatever is stated;
    `ffn_spans_hidden`: it takes a multiple of the hidden size for the width of an FFN, whatever is stated;
    `layers_are_numbered`: other parts of the model write to some of its layers or read them, by number;
    `has_adapters`: linears of its layers have adapters, in its files or others, that stay untouched and read
    what the linears read;
    `computed_otherwise`: a note on what the class of `transformers` computes otherwise, or needs, one for all
    models or by the facts of one."""

    model_type: str
    architecture: str
    other_names: tuple[str, ...] = ()
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    ffn_bias: bool | str = False
    qk_norm: bool | str = False
    heads_divide_hidden: bool = False
    heads_span_hidden: bool = False
    ffn_spans_hidden: bool = False
    derives_head_dim: bool = False
    names_by_facts: NamesByFacts = no_other_names
    layers_are_numbered: bool = False
    has_adapters: bool = False
    computed_otherwise: str | Notes | None = None
    windows: Windows = no_window
    rotated_layers: RotatedLayers = every_layer
    facts: RareFacts = no_facts
    shapes: LayerShapes = as_read
    full_widths: Mapping[str, str] = field(default_factory=dict)
    full_keys_are_values: bool | str = False
    output_gate: bool | str = False
    head_gate: Callable[[Fields], HeadGate | None] = no_head_gate
    heads_by_layer: str | None = None
    ffn_by_layer: bool = False
    dense_size: str = "intermediate_size"
    dense_fields: DenseFields | None = None
    latent: Callable[[Fields], Latent] | None = None
    recurrence: Callable[[Fields], Recurrence] | None = None
    joint: bool = False
    half_layers: bool = False
    attention_free: bool = False
    gated: bool = True
    mixture: Mixture | None = None
    spelled: Mapping[str, str] = field(default_factory=dict)
    implied: ImpliedFields = nothing_implied
    restated: Restated = nothing_restated
    aliases: Mapping[str, str] = field(default_factory=dict)
    known_fields: frozenset[str] = frozenset()
    fixed_fields: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def read_config(self, raw: Mapping[str, Any]) -> Arch:
        """Read the facts of a `config.json`.

        Raises:
            UnsupportedArch: a field is missing, unknown, or has a value that the decoder does not support;
                the message names it.
        """
        self._table_fields.check(raw)
        check_one_rope(raw, self._where)
        read = self._table_fields.without_unread(raw)
        config = self._fields(self.completed(read), read)
        num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
        hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
        num_heads = config.integer("num_attention_heads", 1, MAX_SIZE)
        widths = {
            "num_heads": num_heads,
            "num_kv_heads": config.integer("num_key_value_heads", 1, MAX_SIZE, default=num_heads),
        }
        latent = None if self.latent is None else self.latent(config)
        if latent is None:
            widths["head_dim"] = head_dim_of(config, hidden_size, num_heads)
        else:
            widths["head_dim"] = head_dim_of_latents(config)
        experts = [None] * num_layers if self.mixture is None else self.mixture.read(config, num_layers)
        ffn_sizes = [0] * num_layers
        if None in experts:
            ffn_sizes = ffn_sizes_of(config, self.dense_size, num_layers, by_layer=self.ffn_by_layer)
        windows = self.windows(config, num_layers)
        types = layer_types(config, num_layers)
        rotated = self.rotated_layers(config, num_layers)
        own_widths = {kind: self._widths_of(kind, config, widths) for kind in dict.fromkeys(types)}
        ropes = {
            kind: read_rope(config, kind, own["head_dim"] if latent is None else latent.rope_dim)
            for kind, own in own_widths.items()
            if kind != LINEAR and (latent is None or latent.rope_dim)
        }
        partial = [
            each.rotary_dim / own_widths[kind]["head_dim"] for kind, each in ropes.items() if each.rotary_dim
        ]
        if partial and (latent is not None or "partial_rotary_factor" not in self.known_fields):
            raise config.wrong("partial_rotary_factor", partial[0], "1 in this family")
        if self.heads_span_hidden and widths["head_dim"] * num_heads != hidden_size:
            raise config.wrong("head_dim", widths["head_dim"], f"{hidden_size} / {num_heads} in this family")
        by_default = "bfloat16" if is_layout(raw) else "float32"
        dtype = config.text("dtype", default=config.text("torch_dtype", default=by_default))
        if dtype not in DTYPES:
            raise config.wrong("dtype", dtype, f"one of {', '.join(DTYPES)}")
        eos_token_ids(config)
        facts = self.facts(config)
        if "norm_eps" not in facts:
            facts["norm_eps"] = config.number("rms_norm_eps", 0, 1)
        activation = facts.pop("activation", activation_of(config))
        if activation == XIELU and "ffn.alpha_p" not in self.layer_modules:
            name = self.spelled.get("hidden_act", "hidden_act")
            raise config.wrong(name, activation, "one without parameters in this family")
        if latent is not None:
            ropes = {kind: replace(each, rotary_dim=latent.rope_dim) for kind, each in ropes.items()}
            if latent.rope_dim and (factor := score_factor(config)) != 1:
                facts["attn_scale"] = factor * widths["head_dim"] ** -0.5
        layers = tuple(
            LayerShape(
                **own_widths[kind],
                intermediate_size=ffn_size if mixture is None else mixture.expert_size,
                rope=ropes[kind] if rotates and kind != LINEAR else None,
                window=window,
                chunk=chunk_of(config, kind),
                experts=mixture,
                keys_are_values=kind == FULL and _flag(self.full_keys_are_values, config),
                latent=None if kind == LINEAR else latent,
                output_gate=kind != LINEAR and _flag(self.output_gate, config),
                head_gate=None if kind == LINEAR else self.head_gate(config),
                recurrence=self._recurrence(config) if kind == LINEAR or self.joint else None,
                only_half=self._only_half(config, kind),
                gated=self.gated,
                joint=self.joint and kind != LINEAR,
            )
            for kind, rotates, window, mixture, ffn_size in zip(
                types, rotated, windows, experts, ffn_sizes, strict=True
            )
        )
        return Arch(
            family=self.model_type,
            vocab_size=config.integer("vocab_size", 1, MAX_SIZE),
            hidden_size=hidden_size,
            max_position=min(
                config.integer("max_position_embeddings", 1, MAX_POSITIONS),
                facts.pop("max_position", MAX_POSITIONS),
            ),
            layers=self.shapes(config, self._with_own_heads(config, layers)),
            activation=activation,
            tied_head=config.flag("tie_word_embeddings", default=False),
            qkv_bias=_flag(self.qkv_bias, config),
            o_bias=_flag(self.o_bias, config),
            ffn_bias=_flag(self.ffn_bias, config),
            qk_norm=_flag(self.qk_norm, config),
            dtype=dtype,
            config=without_layout(raw),
            **facts,
        )

    def _with_own_heads(self, config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
        """Return the layers with the query heads that a config states for each."""
        name = self.heads_by_layer
        if name is None or not config.has(name):
            return layers
        heads = config.integers(name, 1, MAX_SIZE)
        if len(heads) < len(layers):
            raise config.wrong(name, list(heads), f"a number for each of {len(layers)} layers")
        return tuple(replace(layer, num_heads=own) for layer, own in zip(layers, heads, strict=False))

    def _recurrence(self, config: Fields) -> Recurrence:
        if self.recurrence is None:
            raise config.wrong("layer_types", LINEAR, f"{FULL} or a type of layer that the family has")
        return self.recurrence(config)

    def _only_half(self, config: Fields, kind: str) -> Half | None:
        """Return the half that a layer of a type has, None where it has both."""
        if not self.half_layers and kind in ONLY_FFN:
            raise config.wrong("layer_types", kind, "a type of layer that the family has")
        if not self.half_layers:
            return None
        return "ffn" if kind in ONLY_FFN else "mixer"

    def _widths_of(self, kind: str, config: Fields, widths: Mapping[str, int]) -> dict[str, Any]:
        """Return the widths of attention in layers of a type, given those of the model."""
        if kind != FULL:
            return dict(widths)
        own = {name: config.integer(field, 1, MAX_SIZE) for name, field in self.full_widths.items()}
        if own.get("head_dim", 0) % 2:
            raise config.wrong(self.full_widths["head_dim"], own["head_dim"], "even")
        return {**widths, **own}

    def of_arch(self, arch: Arch) -> "Family":
        """Return the table with the names that modules have in a model of these facts."""
        own = self.names_by_facts(arch)
        always = chosen_by_all(arch)
        if not own and not always and not self.in_layer_before:
            return self
        names = self.with_last_norm(arch.num_layers) if self.in_layer_before else self
        return replace(names, layer_modules={**self.layer_modules, **own}, always=always)

    @property
    def shared_norms(self) -> tuple[str, ...]:
        """The norms of a layer whose outputs untouched parts read, too."""
        if self.has_adapters:
            return ("attn_norm", "ffn_norm")
        return ("ffn_norm",) if self.more_experts else ()

    def why_unstated(self, arch: Arch) -> str | None:
        """Return the reason why no config of the family can state the layers of a model, None where one
        can."""
        return why_unstated(self, arch)

    def completed(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the fields that it leaves to their defaults, in the standard spelling."""
        values = {**self.defaults, **raw}
        if "rope_parameters" in self.defaults and raw.get("rope_scaling") and not raw.get("rope_parameters"):
            del values["rope_parameters"]  # the older name of the same
        values |= self.aliased(raw)
        values |= {name: values[own] for name, own in self.spelled.items() if own in values}
        return {**values, **self.implied(self._fields(values, raw))}

    def _fields(self, values: Mapping[str, Any], raw: Mapping[str, Any]) -> Fields:
        """Return the fields of a config in the standard spelling, which errors name as `raw` spells them."""
        spelled = {name: own for name, own in self.spelled.items() if own in values or name not in values}
        aliases = {name: other for name, other in self.aliases.items() if other in raw}
        return Fields(values, self._where, UnsupportedArch, written_as={**spelled, **aliases})

    def states_tie(self, raw: Mapping[str, Any]) -> bool:
        """Return whether a config decides if the head is the embedding; where it does not, tensors do."""
        return True

    @property
    def _where(self) -> str:
        return f"config.json of this {self.model_type} model"

    def class_name(self, raw: Mapping[str, Any]) -> str:
        """Return the name of the class that the config of an export states."""
        stated = raw.get("architectures")
        known = [each for each in stated if each in self.other_names] if isinstance(stated, list) else []
        return known[0] if known else self.architecture

    def changed(self, raw: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """Return a config with other values of fields of the language model."""
        return {**raw, **fields}

    def write_config(self, arch: Arch) -> dict[str, Any]:
        """Return the `config.json` of an `Arch`: the source's config with every field rewritten that the
        facts decide.

        Raises:
            UnsupportedArch: the widths differ between layers in a way that no config can express.
        """
        return written_config(self, arch)

    def unread_fields(self, config: Mapping[str, Any]) -> list[str]:
        """Return the names of a config's fields that change nothing, because they have the default or nobody
        reads them; notes on training and token ids are not among them."""
        return self._table_fields.inert_others(config)

    def stated(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of the text model as a config states them."""
        return raw

    def aliased(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that a config states by another name."""
        return {name: config[other] for name, other in self.aliases.items() if other in config}

    def stated_names(self, name: str, config: Mapping[str, Any]) -> list[str]:
        """Return the names of a field that a config states: its own, the other one, or both; its own where
        there are none."""
        return [each for each in (name, self.aliases.get(name)) if each in config] or [name]

    @property
    def _table_fields(self) -> TableFields:
        fixed = {**HONOURED_FIELDS, **self.fixed_fields}
        read = IDLE_FIELDS | SHAPE_FIELDS | self.known_fields | fixed.keys()
        read |= LATENT_FIELDS if self.latent is not None else set()
        read |= TRAINING_OF_ROUTERS if self.mixture is not None else set()
        read = (read - self.spelled.keys()) | {*self.spelled.values(), *self.aliases.values()}
        return TableFields(self.model_type, read, fixed, attends_fully=self.windows is no_window)


FAMILIES: PluginSet[Family] = PluginSet("architecture", "compress.models.archs")


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a `config.json`.

    Raises:
        UnsupportedArch: no family is registered for this `model_type`, or the config names none.
    """
    if config.get("model_type") is None:
        raise no_architecture(FAMILIES.names())
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES.names():
        classes = Fields(config, "config.json", UnsupportedArch).texts("architectures", default=())
        raise unknown_architecture(model_type, classes, FAMILIES.names())
    return FAMILIES.get(model_type)


def family_of_arch(arch: Arch) -> Family:
    """Return the family of a model that was read, with the names that its modules have."""
    return family_of({"model_type": arch.family}).of_arch(arch)


def _flag(rule: bool | str, config: Fields) -> bool:
    return rule if isinstance(rule, bool) else config.flag(rule, default=False)

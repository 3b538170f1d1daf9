"""The tensors of a family's checkpoints as a table: how they are named (`tensor_names.py`), and how canonical
parameters lie in them (`layout.py`)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from compress.models.arch import Arch
from compress.models.mixture import ExpertLayout
from compress.models.module_names import EMBED, LAYER_MODULES, OUTER_MODULES
from compress.models.mtp_names import MtpNames
from compress.models.tensor_names import TensorNames, with_other_parts, with_other_prefix
from compress.quant.kv import KV_SCALES

_UNREAD = ("gate_proj.weight", "up_proj.weight")
"""The tensors of an expert that returns its input, which nobody reads."""
SCALES_BESIDE_LINEARS = ("modelopt",)
"""Each `quant_method` that names the scale of keys `k_proj.k_scale` instead of `k_scale`."""


def _is_of(parts: Sequence[str], name: str) -> bool:
    """Return whether a name is one of some parts, or of what is in one."""
    return name in parts or name.startswith(tuple(f"{part}." for part in parts))


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in names.items()}


def chosen_by_all(arch: Arch) -> range:
    """Return the indices of the experts of a layer that every token chooses, in the first with experts."""
    first = next((layer.experts for layer in arch.layers if layer.experts is not None), None)
    return range(0) if first is None else range(first.num_chosen, first.num_experts)


@dataclass(frozen=True, kw_only=True)
class DiskNames:
    """How checkpoints of a family name and lay out what the decoder has. Canonical modules that
    `layer_modules` gives one name are stacked in that tensor, in the table's order; a name of a parameter in
    it is one on disk, too. With `interleaved_rotary` neighbouring dimensions of a head rotate as a pair on
    disk, and with `reversed_rotary` pairs turn by the negative angle there (`layout.py`). In modules on disk
    of `rows_in_turns` the rows of their linears take turns, by head, or `num_turns` of them. `expert_layouts`
    are those in which checkpoints store experts, the first one where none is read.
    `in_one_row` are vectors of a layer that checkpoints store as a matrix of one row, and `in_heads` those
    that they store as one with a row for each head, if heads have weights of their own; `transposed` are
    linears of a layer that they store as [I, O], if they are dense. `in_parts` maps a module of a layer to
    those under whose names its rows are stored, some after the others. `in_memory` maps prefixes of names on
    disk to those of modules in `transformers`, where the two differ, and `in_memory_inside` maps modules of
    layers that it alone renames; `other_prefixes` maps prefixes of names in some checkpoints, such as those
    of a model without its head, to those that the others have, and `other_modules` does so for modules of
    layers. `untouched` are the parts on disk that are
    none of the language model's (`wrapper.py`), `untouched_in_layers` those inside of its layers. With
    `more_experts` the experts after those that the router of a layer chooses among are such parts, too;
    with `unread_experts` the gates and ups of experts that return their input are.
    `first_rows` maps a vector of a layer to the number of rows of the matrix whose first row it is; the other
    rows are of such parts, and the matrix is among `untouched_in_layers`. `untouched_elsewhere` is what vLLM
    calls modules of theirs where that is another name, and tensors whose names match `ignored_tensors` are
    read by nobody. Parameters of a layer that are `zero_if_absent` are zeros in checkpoints that do not store
    them. `rope_exponents` is the untouched tensor that holds the trained exponents of a rope's frequencies
    (`trained_rope.py`), and `ngram_buffers` are the untouched tensors of a layer that hold what n-grams are
    hashed with (`ngram_buffers.py`). `mtp` are the names of the layer that predicts a further token,
    `first_layer` is the index of the first layer on disk, and with `halves_apart` each half of a layer has an
    index of its own; with `layers_in_pairs` every two layers are one on disk (`tensor_names.py`).
    `passed_layers` are the indices on disk, in ascending order, of layers that are none of the language
    model's and stay untouched, and `passed_modules` are those of their modules that hold matrices.
    `in_layer_before` are modules of a layer that are stored with the layer before it: a norm that ends one is
    that before attention of the next, and after the last layer the last norm. A
    checkpoint stores `more_embeddings` rows after those of the embedding, which stay untouched. With
    `embed_parts` it stores all these rows in two tensors of these names. `apart` maps the linears of a
    stacked tensor to the names of one tensor each, which checkpoints of the `apart_methods`, and some others,
    have in its place.
    `always` are the indices of the experts of a model that every token chooses, which may have tensors of
    their own (`ExpertLayout.always`)."""

    interleaved_rotary: bool = False
    reversed_rotary: bool = False
    rows_in_turns: frozenset[str] = frozenset()
    num_turns: int | None = None
    expert_layouts: tuple[ExpertLayout, ...] = ()
    in_one_row: frozenset[str] = frozenset()
    in_heads: frozenset[str] = frozenset()
    in_parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    first_rows: Mapping[str, int] = field(default_factory=dict)
    outer_modules: Mapping[str, str] = field(default_factory=lambda: OUTER_MODULES)
    layer_modules: Mapping[str, str] = field(default_factory=lambda: LAYER_MODULES)
    layer_prefix: str = "model.layers."
    ignored_tensors: str = r"rotary_emb\.inv_freq$"
    in_memory: Mapping[str, str] = field(default_factory=dict)
    in_memory_inside: Mapping[str, str] = field(default_factory=dict)
    other_prefixes: Mapping[str, str] = field(default_factory=dict)
    other_modules: Mapping[str, str] = field(default_factory=dict)
    untouched: tuple[str, ...] = ()
    untouched_in_layers: tuple[str, ...] = ()
    more_experts: bool = False
    unread_experts: bool = False
    untouched_elsewhere: tuple[str, ...] = ()
    zero_if_absent: frozenset[str] = frozenset()
    rope_exponents: str | None = None
    ngram_buffers: tuple[str, ...] = ()
    mtp: MtpNames | None = None
    first_layer: int = 0
    halves_apart: bool = False
    layers_in_pairs: bool = False
    passed_layers: tuple[int, ...] = ()
    passed_modules: tuple[str, ...] = ()
    in_layer_before: frozenset[str] = frozenset()
    more_embeddings: int = 0
    embed_parts: tuple[str, ...] = ()
    apart: Mapping[str, str] = field(default_factory=dict)
    apart_methods: tuple[str, ...] = ()
    always: range = range(0)

    def to_memory(self, module: str) -> str:
        """Return the name of a disk module in classes of consumers: what configs call it."""
        return with_other_prefix(module, self.in_memory)

    def names_in_memory(self, module: str) -> tuple[str, ...]:
        """Return all names that consumers have for a disk module: that of `to_memory`, and the one of
        `transformers` if it is another."""
        name = self.to_memory(module)
        return tuple(dict.fromkeys((name, with_other_parts(name, self.in_memory_inside))))

    def from_memory(self, module: str) -> str:
        """Return the name on disk of a module or tensor; of one that has it, the same."""
        name = with_other_prefix(module, self.other_prefixes)
        name = with_other_prefix(name, _inverse(self.in_memory))
        return with_other_parts(name, {**_inverse(self.in_memory_inside), **self.other_modules})

    def is_untouched(self, name: str, other_experts: range = range(0)) -> bool:
        """Return whether a tensor on disk is of a part that is none of the language model's; `other_experts`
        are the indices of experts on disk that are such parts (`stored_tensors.py`)."""
        if _is_of(self.untouched, name):
            return True
        _, in_layers, of_layer = name.partition(self.layer_prefix)
        idx, _, inside = of_layer.partition(".")
        if not in_layers:
            return False
        if idx in map(str, self.passed_layers) or _is_of(self.untouched_in_layers, inside):
            return True
        expert = re.match(r"mlp\.experts\.(\d{1,6})\.(.*)", inside)
        if expert is None or int(expert[1]) not in other_experts:
            return False
        return not self.unread_experts or expert[2] in _UNREAD

    @property
    def untouched_parts(self) -> tuple[str, ...]:
        """The `untouched` parts, and the modules with matrices of the layers that are none of the language
        model's, by their names on disk."""
        layers = (f"{self.layer_prefix}{idx}" for idx in self.passed_layers)
        return (*self.untouched, *(f"{layer}.{each}" for layer in layers for each in self.passed_modules))

    @property
    def untouched_modules(self) -> tuple[str, ...]:
        """The parts that are none of the language model's, by their names on disk, by those in memory that
        differ from them by more than a `model.` in front, and by those of vLLM."""
        parts = self.untouched_parts
        others = [self.to_memory(part) for part in parts]
        short = {part.removeprefix("model.") for part in parts}
        in_memory = (each for each in others if each.removeprefix("model.") not in short)
        return (*parts, *in_memory, *self.untouched_elsewhere)

    def to_disk(self, module: str) -> str:
        """Disk name of a canonical module: `layers.3.attn.q` -> `model.layers.3.self_attn.q_proj`."""
        return self._names.module(module)

    def tensor(self, parameter: str) -> str:
        """Name of the tensor on disk that holds a canonical parameter: `layers.3.attn.q.weight`."""
        return self._names.tensor(parameter)

    def num_rows(self, arch: Arch, parameter: str, size: int) -> int | None:
        """Return the rows of the matrix that a checkpoint stores in place of a vector of so many numbers,
        None where it stores the parameter as it is."""
        _, _, of_layer = parameter.partition("layers.")
        idx, _, name = of_layer.partition(".")
        if name in self.in_heads and arch.own_qk_norm:
            return size // arch.layers[int(idx)].head_dim
        return 1 if name in self.in_one_row else None

    def parts(self, stored: str) -> tuple[str, ...]:
        """Return the tensors that a checkpoint stores in place of one, whose rows they have in this order;
        none where it stores that one."""
        if self.embed_parts and stored == self.tensor(EMBED):
            return self.embed_parts
        module, _, leaf = stored.rpartition(".")
        whole = next((each for each in self.in_parts if module.endswith(f".{each}")), None)
        if whole is None:
            return ()
        return tuple(f"{module.removesuffix(whole)}{part}.{leaf}" for part in self.in_parts[whole])

    def whole_of(self, part: str) -> str | None:
        """Return the tensor of which a checkpoint stores some rows under a name, None where that is all."""
        if part in self.embed_parts:
            return self.tensor(EMBED)
        module, _, leaf = part.rpartition(".")
        for whole, parts in self.in_parts.items():
            for each in parts:
                if module.endswith(f".{each}"):
                    return f"{module.removesuffix(each)}{whole}.{leaf}"
        return None

    def is_transposed(self, parameter: str) -> bool:
        """Return whether a checkpoint stores the matrix of a canonical parameter as [I, O]."""
        _, _, name = parameter.partition("layers.")[2].partition(".")
        return name.removesuffix(".weight") in self.transposed

    def rows_with_others(self, parameter: str) -> int:
        """Return the rows of the matrix whose first row is a canonical parameter, 0 where it is no row."""
        _, _, name = parameter.partition("layers.")[2].partition(".")
        return self.first_rows.get(name, 0)

    def may_be_absent(self, parameter: str) -> bool:
        """Return whether a canonical parameter is zeros where a checkpoint does not store it."""
        return parameter.partition("layers.")[2].partition(".")[2] in self.zero_if_absent

    def stacked_modules(self, module: str, num_experts: int = 0) -> tuple[str, ...]:
        """Return the canonical modules that one tensor on disk holds, in order, given one of them;
        `num_experts` is that of its layer."""
        return self._names.stacked_modules(module, num_experts)

    def holds_all_experts(self, module: str) -> bool:
        """Return whether a canonical module is one of an expert and its tensor holds those of all."""
        return self._names.holds_all_experts(module)

    def in_format(self, quant_method: str | None) -> Self:
        """Return the table with the layout of experts, the names of stacked linears and those of the scales
        of a KV cache that checkpoints of a `quant_method` have."""
        own = next((each for each in self.expert_layouts if quant_method in each.methods), None)
        family = self if own is None else self.with_layout(own)
        family = family.with_modules(self.apart) if quant_method in self.apart_methods else family
        return family.with_scales_of_kv(beside_linears=quant_method in SCALES_BESIDE_LINEARS)

    def with_scales_of_kv(self, *, beside_linears: bool) -> Self:
        """Return the table with the scales of keys and values under the linears that make them, or under the
        attention."""
        modules = {name: each for name, each in self.layer_modules.items() if name not in KV_SCALES.values()}
        if beside_linears:
            modules |= {
                name: f"{modules['attn']}.{kind}_proj.{kind}_scale" for kind, name in KV_SCALES.items()
            }
        return self if modules == self.layer_modules else replace(self, layer_modules=modules)

    def with_last_norm(self, num_layers: int) -> Self:
        """Return the table with the norm that ends the last layer as the last norm."""
        last = f"{self.layer_prefix}{num_layers - 1 + self.first_layer}.{self.layer_modules['attn_norm']}"
        return replace(self, outer_modules={**self.outer_modules, "norm": last})

    def with_modules(self, modules: Mapping[str, str]) -> Self:
        """Return the table with other names of modules of a layer."""
        return replace(self, layer_modules={**self.layer_modules, **modules})

    def with_layout(self, layout: ExpertLayout) -> Self:
        """Return the table with another layout of experts."""
        return replace(self, expert_layouts=(layout,))

    @cached_property
    def _names(self) -> TensorNames:
        layout = self.expert_layouts[0] if self.expert_layouts else ExpertLayout({})
        modules = {**self.layer_modules, **layout.modules, **layout.names_of(self.always)}
        return TensorNames(
            self.outer_modules,
            self.layer_prefix,
            modules,
            layout.suffixes,
            first_layer=self.first_layer,
            halves_apart=self.halves_apart,
            layers_in_pairs=self.layers_in_pairs,
            passed_layers=self.passed_layers,
            in_layer_before=self.in_layer_before,
        )

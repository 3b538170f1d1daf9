"""Names on disk of the canonical modules and parameters, by the table of a family."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_EXPERT = re.compile(r"moe\.experts\.(\d+)\.")
_CANONICAL_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class TensorNames:
    """The names in the checkpoints of a family.

    Args:
        outer_modules: canonical module -> module on disk, outside of the layers. Parameters may be among
            them.
        layer_prefix: how the names of a layer begin, before its index.
        layer_modules: canonical module of a layer -> module on disk; those of experts have `*` for their
            index, and a name on disk without `*` is that of all experts. Single experts may have names of
            their own. Parameters may be among them.
        expert_suffixes: leaf of a parameter of an expert -> what the name of its tensor ends in, after that
            of the module.
        first_layer: the index on disk of the first layer.
        halves_apart: whether the second half of a layer, which is its FFN or its experts with their norms,
            has an index of its own on disk, that after the first half's.
        layers_in_pairs: whether every two layers are one on disk, where names of its modules have `{half}` in
            place of the index of the layer in it.
        passed_layers: the indices on disk of layers that are none of the decoder's, in ascending order.
        in_layer_before: canonical modules of a layer that are stored with the layer before it.
    """

    outer_modules: Mapping[str, str]
    layer_prefix: str
    layer_modules: Mapping[str, str]
    expert_suffixes: Mapping[str, str]
    first_layer: int = 0
    halves_apart: bool = False
    layers_in_pairs: bool = False
    passed_layers: tuple[int, ...] = ()
    in_layer_before: frozenset[str] = frozenset()

    def module(self, module: str) -> str:
        """Return the name of a canonical module: `layers.3.attn.q` -> `model.layers.3.self_attn.q_proj`. One
        that is a single tensor, whose weight the table names, has the name of that tensor."""
        if match := _CANONICAL_LAYER.fullmatch(module):
            pattern, expert = self._pattern(match[2])
            disk = self.layer_modules.get(pattern) or self.layer_modules[f"{pattern}.weight"]
            idx = self.first_layer + int(match[1]) * (2 if self.halves_apart else 1)
            idx -= pattern in self.in_layer_before
            idx += self.halves_apart and pattern.startswith(("ffn", "moe"))
            if self.layers_in_pairs:
                idx, half = divmod(idx, 2)
                disk = disk.replace("{half}", str(half))
            for passed in self.passed_layers:
                idx += passed <= idx
            return f"{self.layer_prefix}{idx}.{disk.replace('*', expert) if expert else disk}"
        return self.outer_modules.get(module) or self.outer_modules[f"{module}.weight"]

    def tensor(self, parameter: str) -> str:
        """Return the name of the tensor that holds a canonical parameter: `layers.3.attn.q.weight`."""
        match = _CANONICAL_LAYER.fullmatch(parameter)
        if (match is not None and match[2] in self.layer_modules) or parameter in self.outer_modules:
            return self.module(parameter)
        module, _, leaf = parameter.rpartition(".")
        suffix = f".{leaf}"
        if match is not None and _without_expert(match[2])[1]:
            suffix = self.expert_suffixes[leaf]
        return self.module(module) + suffix

    def stacked_modules(self, module: str, num_experts: int) -> tuple[str, ...]:
        """Return the canonical modules that one tensor holds, in order, given one of them;
        `num_experts` is that of its layer. A layer has an `ffn` or a `moe`, so no tensor holds parts of
        both."""
        match = _CANONICAL_LAYER.fullmatch(module)
        pattern, expert = self._pattern(match[2]) if match else ("", "")
        if match is None or pattern not in self.layer_modules:
            return (module,)
        disk = self.layer_modules[pattern]
        half = pattern.partition(".")[0]
        names = [
            name
            for name, each in self.layer_modules.items()
            if each == disk and name.partition(".")[0] == half
        ]
        if expert and "*" in disk:
            names = [name.replace("*", expert) for name in names]
        elif expert:
            own = self.own_experts
            names = [
                name.replace("*", str(idx)) for idx in range(num_experts) if idx not in own for name in names
            ]
        return tuple(f"layers.{match[1]}.{name}" for name in names)

    def holds_all_experts(self, module: str) -> bool:
        """Return whether a canonical module is one of an expert and its tensor holds those of all."""
        match = _CANONICAL_LAYER.fullmatch(module)
        is_expert = match is not None and _EXPERT.match(match[2]) is not None
        return match is not None and is_expert and "*" not in self.layer_modules[self._pattern(match[2])[0]]

    @property
    def own_experts(self) -> frozenset[int]:
        """The indices of the experts that have names of their own."""
        found = (_EXPERT.match(name) for name in self.layer_modules)
        return frozenset(int(match[1]) for match in found if match is not None)

    def _pattern(self, module: str) -> tuple[str, str]:
        """Return the name of a module of a layer in the table, and the index of its expert, empty if it is of
        none or of one with names of its own."""
        return (module, "") if module in self.layer_modules else _without_expert(module)


def with_other_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with the first of the prefixes that it has replaced."""
    for old, new in prefixes.items():
        if name.startswith(old) or name == old.rstrip("."):
            return new.rstrip(".") + name[len(old.rstrip(".")) :]
    return name


def with_other_parts(name: str, parts: Mapping[str, str]) -> str:
    """Return a name of a layer's module or tensor with parts of whole words replaced."""
    closed = f"{name}."
    for old, new in parts.items():
        closed = closed.replace(f".{old}.", f".{new}.")
    return closed[:-1]


def _without_expert(module: str) -> tuple[str, str]:
    """Return a module with `*` for the index of its expert, and that index, empty if it is of none."""
    match = _EXPERT.match(module)
    return (module, "") if match is None else (f"moe.experts.*.{module[match.end() :]}", match[1])

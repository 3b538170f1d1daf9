"""Mixtures of experts as tables: how a family states them in `config.json`, and how it stores their tensors.

Checkpoints store experts apart (`mlp.experts.3.gate_proj.weight`), or all experts of a layer in one tensor of
three dimensions. One family may be found in several layouts: the hub has what its first code wrote, and
`transformers` can save what it has in memory. The layout that was read is the one that is written again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.experts import MAX_EXPERT_SIZE, MAX_EXPERTS, MAX_SCALE, Experts, checked
from compress.models.limits import MAX_LAYERS
from compress.untrusted.fields import Fields

EXPERT = "moe.experts.*."
"""How the tables spell the modules of each expert."""
_GATE_UP_DOWN = ("gate", "up", "down")
FIRST_DENSE = "first_k_dense_replace"
DENSE_LAYER = "dense"
SPARSE_LAYER = "sparse"


@dataclass(frozen=True)
class ExpertLayout:
    """How a checkpoint stores the experts of a layer.

    Args:
        modules: canonical module -> module on disk, of the experts and of whatever else this layout spells in
            its own way. A name with `*` is one of each expert; a name without holds all of them.
        suffixes: leaf -> what the tensor's name ends in, after the module's.
        transposed: matrices of a tensor that holds all experts are [I, O].
        flat: a tensor that holds all experts has two dimensions, with the matrices of experts one below the
            other, and that of down has its matrices [I, O].
        interleaved: the rows of gate and up take turns.
        mxfp4: weights are blocks of four-bit floats with a scale each (`quant/mxfp4.py`); read only.
        methods: each `quant_method` whose checkpoints have this layout, whatever dense ones have.
        always: gate, up and down of the experts that every token chooses (`Experts.always`) -> the tensors
            that hold theirs, where they are not among the others.
    """

    modules: Mapping[str, str]
    suffixes: Mapping[str, str] = field(default_factory=lambda: {"weight": ".weight", "bias": ".bias"})
    transposed: bool = False
    flat: bool = False
    interleaved: bool = False
    mxfp4: bool = False
    methods: tuple[str, ...] = ()
    always: Mapping[str, str] = field(default_factory=dict)

    def is_transposed(self, module: str) -> bool:
        """Return whether the tensor of all experts has the matrices [I, O] of a linear, whose name ends in
        gate, up or down."""
        return self.transposed or (self.flat and module.endswith("down"))

    def names_of(self, always: range) -> dict[str, str]:
        """Return the names on disk of the modules of the experts with these indices, which every token
        chooses; none where they are among the others."""
        return {f"moe.experts.{idx}.{part}": name for idx in always for part, name in self.always.items()}


def apart(
    prefix: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"), **how: Any
) -> ExpertLayout:
    """Return the layout with a tensor for each linear of each expert, `PREFIX.3.NAME.weight`."""
    modules = {
        f"{EXPERT}{ours}": f"{prefix}.*.{theirs}" for ours, theirs in zip(_GATE_UP_DOWN, names, strict=True)
    } | how.pop("modules", {})
    return ExpertLayout(modules, **how)


def in_one(gate_up: str, down: str, **how: Any) -> ExpertLayout:
    """Return the layout with the gates and ups of all experts in one tensor, and the downs in another."""
    names = dict(zip(_GATE_UP_DOWN, (gate_up, gate_up, down), strict=True))
    modules = {f"{EXPERT}{ours}": theirs for ours, theirs in names.items()} | how.pop("modules", {})
    return ExpertLayout(modules, **how)


BARE = {"weight": "", "bias": "_bias"}
"""The suffixes of parameters that belong to no linear module."""
AS_IN_MEMORY = in_one("mlp.experts.gate_up_proj", "mlp.experts.down_proj", suffixes=BARE)
"""The layout that `transformers` 5 has in memory for most families."""


@dataclass(frozen=True)
class Mixture:
    """How a family states its experts. `fields` maps facts of `Experts` to fields of the config, `facts`
    holds those that the family fixes.

    Args:
        is_sparse: (config, number of layers) -> whether each layer has experts.
        state_sparse: the inverse: whether each layer has experts -> fields of the config.
        read_more: config -> facts that no single field holds.
    """

    fields: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)
    is_sparse: Callable[[Fields, int], list[bool]] = lambda config, num_layers: [True] * num_layers
    state_sparse: Callable[[list[bool]], dict[str, Any]] = lambda is_sparse: {}
    read_more: Callable[[Fields], dict[str, Any]] = lambda config: {}

    def read(self, config: Fields, num_layers: int) -> list[Experts | None]:
        """Return the experts of each layer."""
        is_sparse = self.is_sparse(config, num_layers)
        if not any(is_sparse):
            return [None] * num_layers
        facts: dict[str, Any] = dict(self.facts)
        for fact, name in self.fields.items():
            if fact in ("renormalize", "shared_gate"):
                facts[fact] = config.flag(name)
            elif fact == "scale":
                facts[fact] = config.number(name, -MAX_SCALE, MAX_SCALE)
            else:
                least = 0 if fact in ("shared_size", "zero_experts") else 1
                facts[fact] = config.integer(
                    name, least, MAX_EXPERT_SIZE if fact.endswith("size") else MAX_EXPERTS
                )
        experts = checked(facts | self.read_more(config), config)
        return [experts if sparse else None for sparse in is_sparse]

    def write(self, layers: Sequence[Experts | None], config: Fields) -> dict[str, Any]:
        """Return the fields of a config that its experts decide; which layers have them only where the
        config given does not state it.

        Raises:
            UnsupportedArch: the family's config cannot state which layers have experts.
        """
        is_sparse = [each is not None for each in layers]
        stated = {} if self.is_sparse(config, len(layers)) == is_sparse else self.state_sparse(is_sparse)
        first = next((each for each in layers if each is not None), None)
        return stated | {name: getattr(first, fact) for fact, name in self.fields.items() if first}


def shared_of(name: str) -> Callable[[Fields], dict[str, Any]]:
    """Return the reader of the width of shared experts, which are one FFN, where a config states how many
    there are, each as wide as a routed one."""

    def read(config: Fields) -> dict[str, Any]:
        each = config.integer("moe_intermediate_size", 1, MAX_EXPERT_SIZE)
        return {"shared_size": each * config.integer(name, 0, 64)}

    return read


def sparse_by_step(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts in Qwen's mixtures: every `decoder_sparse_step`-th without those of
    `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", 1, MAX_EXPERT_SIZE, default=1)
    named = config.has("mlp_only_layers")
    dense = config.integers("mlp_only_layers", 0, MAX_EXPERT_SIZE) if named else []
    return [(idx + 1) % step == 0 and idx not in dense for idx in range(num_layers)]


def state_steps(is_sparse: list[bool]) -> dict[str, Any]:
    """Return the fields by which Qwen's mixtures state their dense layers."""
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [idx for idx, sparse in enumerate(is_sparse) if not sparse],
    }


def sparse_by_type(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts where a config states the type of each FFN, and that all do where it
    states none; a pruned model may list more layers than it has."""
    if not config.has("mlp_layer_types"):
        return [True] * num_layers
    types = config.texts("mlp_layer_types")
    if len(types) < num_layers or set(types) - {DENSE_LAYER, SPARSE_LAYER}:
        known = f"{num_layers} times {DENSE_LAYER} or {SPARSE_LAYER}"
        raise config.wrong("mlp_layer_types", types, known)
    return [kind == SPARSE_LAYER for kind in types[:num_layers]]


def state_types(is_sparse: list[bool]) -> dict[str, Any]:
    """Return the type of the FFN of each layer."""
    return {"mlp_layer_types": [SPARSE_LAYER if sparse else DENSE_LAYER for sparse in is_sparse]}


def sparse_after_first(config: Fields, num_layers: int, field: str = FIRST_DENSE) -> list[bool]:
    """Return which layers have experts: all after the first ones, whose number a field states."""
    first = config.integer(field, 0, MAX_EXPERT_SIZE)
    return [idx >= first for idx in range(num_layers)]


def state_first(is_sparse: list[bool], field: str = FIRST_DENSE) -> dict[str, Any]:
    """Return the number of dense layers, which are the first ones."""
    first = is_sparse.index(True) if True in is_sparse else len(is_sparse)
    if not all(is_sparse[first:]):
        raise UnsupportedArch(
            "dense layers follow layers with experts; the config of this family has dense layers first."
        )
    return {field: first}


def sparse_by_type_or_count(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts where the types of FFNs decide, and where a config states none, the
    number of the first dense layers."""
    read = sparse_by_type if config.has("mlp_layer_types") else sparse_after_first
    return read(config, num_layers)


def sparse_by_both(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts where a config states it twice: `transformers` reads the type of each
    FFN, vLLM and SGLang read how many of the first layers are dense."""
    read = sparse_after_first if config.has(FIRST_DENSE) else _sparse_by_type_or_first
    return read(config, num_layers)


def _sparse_by_type_or_first(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts in `transformers`: all but the first where no types are stated."""
    if config.has("mlp_layer_types"):
        return sparse_by_type(config, num_layers)
    return [idx > 0 for idx in range(num_layers)]


def state_both(is_sparse: list[bool]) -> dict[str, Any]:
    """Return the fields of both kinds of programs."""
    return {**state_types(is_sparse), **state_first(is_sparse)}


def check_dense_layers(config: Fields) -> None:
    """Refuse a config that contradicts itself: the types of its FFNs and the number of its first dense layers
    state different layers."""
    if not (config.has("mlp_layer_types") and config.has(FIRST_DENSE)):
        return
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    if sparse_by_type(config, num_layers) != sparse_after_first(config, num_layers):
        wanted = "the number of dense layers, all first, that mlp_layer_types states"
        raise config.wrong(FIRST_DENSE, config.integer(FIRST_DENSE, 0, MAX_LAYERS), wanted)


def same_dense_layers(config: Fields) -> dict[str, Any]:
    """Return no facts; refuse a config of which programs read other layers as dense."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    if sparse_by_both(config, num_layers) != _sparse_by_type_or_first(config, num_layers):
        wanted = "the number of dense layers, all first, that mlp_layer_types states (1 if it is absent)"
        raise config.wrong(FIRST_DENSE, config.integer(FIRST_DENSE, 0, MAX_LAYERS), wanted)
    return {}

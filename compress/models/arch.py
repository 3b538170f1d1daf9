"""The facts of a decoder: shapes, rope, norms, biases. Data only, without modules and tensors.

An `Arch` holds everything that the canonical decoder needs and nothing about names on disk, which are in
`family.py`. Widths are stated per layer, because pruning may make them differ. Facts travel as JSON in an
artifact's manifest (`to_json` / `from_json` are inverse).
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from compress.errors import StorageError, UnsupportedArch
from compress.untrusted.fields import Fields

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DTYPES = ("float64", "float32", "bfloat16", "float16")
MAX_SIZE = 1 << 24
"""Largest width, number of heads, and vocabulary that is read: 100 times those of the largest models, and
small enough that no product of two overflows."""
MAX_LAYERS = 4096
MAX_POSITIONS = 1 << 31
THETAS = (1.01, 1e15)
FACTORS = (1.0, 1e6)
"""Ranges of a rope's base and of the factor that its positions are stretched by."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864) of one layer and the rescaling of its frequencies.

    The whole head rotates. `linear` divides every frequency by `factor` (arXiv 2306.15595); `llama3`
    and `yarn` (arXiv 2309.00071) rescale each dimension by its wavelength against `original_max_position`.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class LinearGroup:
    """Linears of a layer that read one input; a runtime stacks their rows, in this order, into one product.

    `tap` names the point of the forward where that input is observed.
    """

    name: str
    tap: str
    linears: tuple[str, ...]


LINEAR_GROUPS: Mapping[str, LinearGroup] = {
    group.name: group
    for group in (
        LinearGroup("qkv", "attn_in", ("attn.q", "attn.k", "attn.v")),
        LinearGroup("o", "attn_out", ("attn.o",)),
        LinearGroup("gate_up", "ffn_in", ("ffn.gate", "ffn.up")),
        LinearGroup("down", "ffn_mid", ("ffn.down",)),
    )
}
"""The linear groups of a dense layer by name, in execution order."""


@dataclass(frozen=True)
class LayerShape:
    """The widths of one decoder layer; `window` is the number of positions that a query sees including
    itself, None for all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: Rope
    window: int | None = None

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        """The linear groups of this layer, in execution order."""
        return tuple(LINEAR_GROUPS.values())

    @property
    def linears(self) -> dict[str, str]:
        """Canonical linear name -> the tap that observes its input, in execution order."""
        return {linear: group.tap for group in self.groups for linear in group.linears}

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """The numbers of query heads and KV heads, the head dimension and the FFN channels."""
        return self.num_heads, self.num_kv_heads, self.head_dim, self.intermediate_size

    def linear_shape(self, linear: str, hidden_size: int) -> tuple[int, int]:
        """Return [O, I] of a canonical linear of this layer."""
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        ffn_size = self.intermediate_size
        shapes = {
            "attn.q": (q_size, hidden_size),
            "attn.k": (kv_size, hidden_size),
            "attn.v": (kv_size, hidden_size),
            "attn.o": (hidden_size, q_size),
            "ffn.gate": (ffn_size, hidden_size),
            "ffn.up": (ffn_size, hidden_size),
            "ffn.down": (hidden_size, ffn_size),
        }
        return shapes[linear]

    def group_shape(self, group: LinearGroup, hidden_size: int) -> tuple[int, int]:
        """Return [O, I] of the product that computes all linears of a group, their rows stacked."""
        shapes = [self.linear_shape(linear, hidden_size) for linear in group.linears]
        return sum(rows for rows, _ in shapes), shapes[0][1]


@dataclass(frozen=True)
class Arch:
    """All facts of one decoder-only language model.

    `config` keeps the source's `config.json` as it was, so that export writes back every field that does
    not change the function here (token ids, initializer range, ...) and rewrites those that do.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_position: int
    layers: tuple[LayerShape, ...]
    norm_eps: float
    activation: str
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    ffn_bias: bool
    qk_norm: bool
    dtype: str
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UnsupportedArch(
                f"activation '{self.activation}' is not known to the decoder; it knows "
                f"{', '.join(ACTIVATIONS)}."
            )
        for idx, layer in enumerate(self.layers):
            if layer.num_heads % layer.num_kv_heads:
                raise UnsupportedArch(
                    f"layer {idx}: {layer.num_heads} query heads cannot share {layer.num_kv_heads} KV heads "
                    "evenly."
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same widths, as a stock `config.json` requires."""
        return len({layer.widths for layer in self.layers}) == 1

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.config.get("eos_token_id")
        return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)

    @property
    def num_linear_params(self) -> int:
        """Weights of all decoder linears (those a weight-only scheme quantizes)."""
        return sum(
            math.prod(layer.linear_shape(name, self.hidden_size))
            for layer in self.layers
            for name in layer.linears
        )

    @property
    def num_params(self) -> int:
        """All parameters; a tied head counts once. Biases and norms included."""
        heads = 1 if self.tied_head else 2
        total = heads * self.vocab_size * self.hidden_size + self.hidden_size + self.num_linear_params
        for layer in self.layers:
            total += 2 * self.hidden_size + (2 * layer.head_dim if self.qk_norm else 0)
            for name in layer.linears:
                total += layer.linear_shape(name, self.hidden_size)[0] if self.has_bias(name) else 0
        return total

    def has_bias(self, linear: str) -> bool:
        if linear in ("attn.q", "attn.k", "attn.v"):
            return self.qkv_bias
        return self.o_bias if linear == "attn.o" else self.ffn_bias

    def replace(self, **changes: Any) -> "Arch":
        return dataclasses.replace(self, **changes)

    def to_json(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the facts as a manifest stores them: those of the model, and those of each layer."""
        facts = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "layers"
        }
        return {**facts, "config": dict(self.config)}, [dataclasses.asdict(layer) for layer in self.layers]

    @staticmethod
    def from_json(facts: Mapping[str, Any], layers: Iterable[Mapping[str, Any]]) -> "Arch":
        """Read what `to_json` wrote; other keys of a layer's mapping (its scheme) are not the
        architecture's.

        Raises:
            StorageError: a value is missing, unknown, of another type or out of range.
        """
        known = {field.name for field in dataclasses.fields(Arch)} - {"layers"}
        if odd := sorted(facts.keys() ^ known):
            raise StorageError(f"the arch of a manifest has missing or unknown fields: {', '.join(odd)}.")
        model = Fields(facts, "the arch of a manifest", StorageError)
        for name in ("family", "activation", "dtype"):
            model.text(name)
        for name in ("vocab_size", "hidden_size"):
            model.integer(name, 1, MAX_SIZE)
        model.integer("max_position", 1, MAX_POSITIONS)
        model.number("norm_eps", 0, 1)
        for name in ("tied_head", "qkv_bias", "o_bias", "ffn_bias", "qk_norm"):
            model.flag(name)
        model.mapping("config")
        return Arch(**facts, layers=tuple(_layer_of(layer, idx) for idx, layer in enumerate(layers)))


def _layer_of(stored: Mapping[str, Any], idx: int) -> LayerShape:
    """Return the shape of a layer that a manifest states."""
    layer = Fields(stored, f"layer {idx} of a manifest", StorageError)
    rope = layer.fields("rope")
    if odd := sorted(set(rope) - {field.name for field in dataclasses.fields(Rope)}):
        raise StorageError(f"{rope.where} has unknown fields: {', '.join(odd)}.")
    if rope.text("kind") not in ROPE_KINDS:
        raise rope.wrong("kind", rope.text("kind"), f"one of {', '.join(ROPE_KINDS)}")
    rope.number("theta", *THETAS)
    stated = set(rope)
    for name in stated - {"kind", "theta", "truncate", "original_max_position"}:
        rope.number(name, 0, FACTORS[1])
    if "original_max_position" in stated:
        rope.integer("original_max_position", 0, MAX_POSITIONS)
    if "truncate" in stated:
        rope.flag("truncate")
    return LayerShape(
        num_heads=layer.integer("num_heads", 1, MAX_SIZE),
        num_kv_heads=layer.integer("num_kv_heads", 1, MAX_SIZE),
        head_dim=layer.integer("head_dim", 1, MAX_SIZE),
        intermediate_size=layer.integer("intermediate_size", 1, MAX_SIZE),
        rope=Rope(**layer.mapping("rope")),
        window=layer.integer("window", 1, MAX_POSITIONS) if layer.has("window") else None,
    )

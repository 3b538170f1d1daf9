"""Sources of weights, layer by layer: the one interface between a store of weights and everything that reads
them.

A `WeightSource` yields canonical tensors of one layer at a time, dense or quantized, so that a model
larger than memory streams through calibration, export and the runtime's loader alike. Two stores
implement it: a Hugging Face directory (`checkpoint.py`) and the project's own intermediate artifacts
(`canonical.py`).
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from compress.errors import UnsupportedFormat
from compress.models.altup import stream_names
from compress.models.arch import Arch
from compress.models.decoder import Decoder, DecoderLayer
from compress.models.embedding import EMBED_NORM, EMBED_NORM_BIAS, EmbeddingTables, embed_norm
from compress.models.experts import EXPERTS_OF_TOKENS, FLOAT32_PARAMETERS
from compress.models.layer_embedding import LAYER_EMBEDS, LayerEmbeddings
from compress.models.layer_shape import LayerShape
from compress.quant.kv import KV_SCALES
from compress.quant.scheme import QuantizedWeight

UNTOUCHED = "untouched."
"""Prefix of the outer weights that are not the decoder's; their own names follow (`wrapper.py`)."""
_LEAVES_OF_CODES = ("weight_scale", "weight_packed", "qweight", "qzeros")
"""How the last parts of names of codes and of their scales begin, in dtypes that dense weights may have."""
POSITIONS = "positions.weight"
"""The table of learned positions among the outer weights."""
Weights = Mapping[str, Tensor | QuantizedWeight]
"""Module parameters by canonical name; a quantized linear is stored under its module's name with `.weight`.
"""


class LayerSource(Protocol):
    """A source of layers alone."""

    @property
    def arch(self) -> Arch: ...

    def layer(self, layer_idx: int) -> Weights:
        """Return the parameters of one layer, names relative to it."""


class WeightSource(Protocol):
    @property
    def arch(self) -> Arch: ...

    @property
    def kv_format(self) -> str | None:
        """Format of the KV cache that the model is to be served with (`quant/kv.py`), None where none is
        stated."""

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        """Return `embed.weight` and `norm.weight`, `head.weight` when the head is not tied, `norm.bias`,
        `head.bias` and `positions.weight` where there are any, those of the embeddings for each layer where
        tokens have them (`layer_embedding.py`), those of the head's hyper-connection and of the streams of
        AltUp where there are any, and those under `UNTOUCHED`."""

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        """Return the parameters of one layer, names relative to it (`attn.q.weight`, ...), and `KV_SCALES`
        where the cache has static ones."""


def dense(value: Tensor | QuantizedWeight, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor, or the dequantized codes; a quantized weight is rounded to its scale's dtype first,
    as every consumer does."""
    tensor = value.dequantize() if isinstance(value, QuantizedWeight) else value
    return tensor if dtype is None else tensor.to(dtype)


def stored_as(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a model of `dtype` stores a parameter."""
    if name.endswith(EXPERTS_OF_TOKENS):
        return torch.int64
    return torch.float32 if name.endswith(FLOAT32_PARAMETERS) else dtype


def rounded(name: str, value: Tensor, dtype: torch.dtype, *, where: str) -> Tensor:
    """Return a parameter of the part `where` of a model of `dtype`, such as `layers.3`, in the dtype in which
    the model stores it.

    Raises:
        UnsupportedFormat: a finite number is beyond the range of float16.
    """
    stored = value.to(stored_as(name, dtype))
    if stored.dtype == torch.float16 != value.dtype and bool((stored.isinf() & value.isfinite()).any()):
        raise UnsupportedFormat(
            f"the weight '{where}.{name}' of the model has numbers beyond the range of float16, which "
            "config.json states: state bfloat16 or float32 there."
        )
    return stored


def rounded_to(
    weights: Weights, dtype: torch.dtype, *, where: str = "outer"
) -> dict[str, Tensor | QuantizedWeight]:
    """Return parameters of the part `where` of a model of `dtype`, tensors of more bits than it stores, or in
    the other format of 16 bits, rounded; codes and untouched ones stay.

    Raises:
        UnsupportedFormat: as `rounded`.
    """
    found = dict(weights)
    for name, value in found.items():
        if isinstance(value, QuantizedWeight) or name.startswith(UNTOUCHED) or not value.is_floating_point():
            continue
        if value.dtype.itemsize >= stored_as(name, dtype).itemsize:
            found[name] = rounded(name, value, dtype, where=where)
    return found


def layer_embed_weights(outer: Weights) -> dict[str, Tensor]:
    """Return the dense weights by which embeddings for each layer are computed, those for the model among
    them; none where tokens have none."""
    names = [name for name in outer if name.startswith(f"{LAYER_EMBEDS}.")]
    return {name: dense(outer[name]) for name in (*names, "embed.weight")} if names else {}


def embedding_tables(
    outer: Weights, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> EmbeddingTables:
    """Return the dense tables from which the input of the first layer is computed, on a device or where they
    are; the projections of streams in `dtype` or as they are."""
    embed_VD = dense(outer["embed.weight"])
    positions = outer.get(POSITIONS)
    positions_PD = None if positions is None else dense(positions)
    if device is not None:
        embed_VD = embed_VD.to(device)
        positions_PD = None if positions_PD is None else positions_PD.to(device)
    names = sorted((name for name in outer if name.startswith("embed.streams.")), key=_index_of)
    projections = tuple(dense(outer[name]).to(device=device, dtype=dtype) for name in names)
    norm_D = embed_norm_of(outer)
    norm_D = None if norm_D is None else norm_D.to(embed_VD.device)
    return EmbeddingTables(embed_VD, positions_PD, projections, norm_D)


def _index_of(name: str) -> int:
    return int(name.split(".")[2])


def split_outer(
    outer: Weights,
) -> tuple[dict[str, Tensor | QuantizedWeight], dict[str, Tensor | QuantizedWeight]]:
    """Return the outer weights of the decoder, and those that are untouched."""
    untouched = {name: value for name, value in outer.items() if name.startswith(UNTOUCHED)}
    return {name: value for name, value in outer.items() if name not in untouched}, untouched


def check_untouched(outer: Weights) -> None:
    """Check that untouched weights are dense, because no config that is written describes codes of theirs.

    Raises:
        UnsupportedFormat: one is a code, or a scale.
    """
    for name, value in outer.items():
        if name.startswith(UNTOUCHED) and isinstance(value, Tensor):
            is_code = value.element_size() < 2 and value.dtype != torch.bool
            if is_code or name.rpartition(".")[2].startswith(_LEAVES_OF_CODES):
                raise UnsupportedFormat(
                    f"'{name.removeprefix(UNTOUCHED)}' is a code or a scale of a part that stays as it is, "
                    "and the config that is written would describe it as dense. Name a checkpoint whose "
                    "parts other than the language model are dense."
                )


def without_codes(arch: Arch) -> Arch:
    """Return the facts of a model without the parts of its config that describe codes."""
    return arch.replace(
        config={key: value for key, value in arch.config.items() if key != "quantization_config"}
    )


class Dense:
    """A quantized model with its weights dequantized, in its own dtype and without a format of its KV
    cache."""

    kv_format: str | None = None

    def __init__(self, source: "WeightSource") -> None:
        self._source = source
        self.arch = without_codes(source.arch)

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        outer = self._source.outer()
        check_untouched(outer)
        return self._dense(outer)

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return self._dense(self._source.layer(layer_idx))

    def _dense(self, weights: Weights) -> dict[str, Tensor | QuantizedWeight]:
        dtype: torch.dtype = getattr(torch, self.arch.dtype)
        return {
            name: value if name.startswith(UNTOUCHED) else dense(value, stored_as(name, dtype))
            for name, value in weights.items()
            if not name.endswith(tuple(KV_SCALES.values()))
        }


def fill_(
    module: nn.Module, weights: Weights, *, dtype: torch.dtype, device: torch.device, narrow: bool = False
) -> None:
    """Assign every parameter of a module built on the meta device; both sides must name the same parameters.

    Scales of a KV cache are ignored: a decoder attends to keys and values as its linears compute them.
    With `narrow`, matrices of fewer bits than `dtype` stay so.
    """
    state = {}
    for name, value in weights.items():
        if name.endswith(tuple(KV_SCALES.values())):
            continue
        tensor = dense(value)
        kept = (
            torch.float32
            if name.endswith((*FLOAT32_PARAMETERS, EXPERTS_OF_TOKENS))
            else (
                tensor.dtype
                if narrow and tensor.dim() == 2 and tensor.dtype.itemsize < dtype.itemsize
                else dtype
            )
        )
        state[name] = tensor.to(device=device, dtype=kept)
    module.load_state_dict(state, strict=True, assign=True)


def embed_norm_of(outer: Weights) -> Tensor | None:
    """Return the weight of the norm of the embedding [D], with its bias [2, D], None where it has none."""
    if EMBED_NORM not in outer:
        return None
    bias = outer.get(EMBED_NORM_BIAS)
    return embed_norm(dense(outer[EMBED_NORM]), None if bias is None else dense(bias))


def norm_weights(outer: Weights, name: str = "norm") -> Weights:
    """Return the parameters of a norm among the outer weights, of the last by default, by their names in its
    module."""
    prefix = f"{name}."
    return {name.removeprefix(prefix): each for name, each in outer.items() if name.startswith(prefix)}


def refill_(linear: nn.Linear, value: Tensor | QuantizedWeight) -> None:
    """Another weight, as `fill_` would put it there."""
    linear.weight = nn.Parameter(dense(value).to(linear.weight), requires_grad=False)


def build_layer(
    arch: Arch,
    layer_idx: int,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    narrow: bool = False,
) -> DecoderLayer:
    """Build one decoder layer with the weights given, ready to run. `narrow`: linears are widened to `dtype`
    product by product."""
    with torch.device("meta"):
        layer = DecoderLayer(arch, layer_idx)
    fill_(layer, weights, dtype=dtype, device=device, narrow=narrow)
    return layer.requires_grad_(False)


def build_decoder(source: WeightSource, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build the whole decoder with its weights, ready to run."""
    with torch.device("meta"):
        decoder = Decoder(source.arch)
    weights: dict[str, Tensor | QuantizedWeight] = split_outer(source.outer())[0]
    for idx in range(source.arch.num_layers):
        weights.update({f"layers.{idx}.{name}": value for name, value in source.layer(idx).items()})
    if source.arch.tied_head:
        weights["head.weight"] = weights["embed.weight"]
    fill_(decoder, weights, dtype=dtype, device=device)
    if source.arch.tied_head:
        decoder.head.weight = decoder.embed.weight
    return decoder.requires_grad_(False)


def parameter_names(arch: Arch) -> tuple[dict[str, tuple[int, ...]], list[dict[str, tuple[int, ...]]]]:
    """Return expected parameters and their shapes: (outer, one mapping per layer). A tied head is not a
    parameter of its own."""
    outer: dict[str, tuple[int, ...]] = {"embed.weight": (arch.vocab_size, arch.hidden_size)}
    if arch.num_position_rows:
        outer[POSITIONS] = (arch.num_position_rows, arch.hidden_size)
    if not arch.unit_norms and arch.norms_stream:
        outer["norm.weight"] = (arch.hidden_size,)
    if arch.embed_norm_weight:
        outer[EMBED_NORM] = (arch.hidden_size,)
        outer |= {EMBED_NORM_BIAS: (arch.hidden_size,)} if arch.norm_bias else {}
    if arch.norm_bias:
        outer["norm.bias"] = (arch.hidden_size,)
    if arch.hyper is not None:
        of_head = arch.hyper.shapes(arch.hidden_size, of_head=True)
        outer |= {f"norm.hyper.{leaf}": shape for leaf, shape in of_head.items()}
    size = arch.hidden_size, arch.hidden_size
    outer |= {f"{name}.weight": size for name in stream_names(arch)}
    with torch.device("meta"):
        if not arch.tied_head:
            outer["head.weight"] = (arch.vocab_size, arch.hidden_size)
        if arch.head_bias:
            outer["head.bias"] = (arch.vocab_size,)
        if arch.layer_embed_size:
            of_layers = LayerEmbeddings(arch).named_parameters(LAYER_EMBEDS)
            outer |= {name: tuple(each.shape) for name, each in of_layers}
        shapes: dict[LayerShape, dict[str, tuple[int, ...]]] = {}
        for idx, shape in enumerate(arch.layers):
            if shape not in shapes:
                layer = DecoderLayer(arch, idx)
                shapes[shape] = {name: tuple(each.shape) for name, each in layer.named_parameters()}
    return outer, [dict(shapes[shape]) for shape in arch.layers]


def names_with_scales(
    arch: Arch, *, kv_scales: bool
) -> tuple[dict[str, tuple[int, ...]], list[dict[str, tuple[int, ...]]]]:
    """Return the names and shapes of the tensors in a checkpoint: (outer, one mapping a layer)."""
    outer, layers = parameter_names(arch)
    scales = dict.fromkeys(KV_SCALES.values(), ()) if kv_scales else {}
    return outer, [
        names | (scales if layer.attends and layer.kv_source is None else {})
        for layer, names in zip(arch.layers, layers, strict=True)
    ]


class MemorySource:
    """A decoder in memory as a source of its weights (trained models, tests)."""

    kv_format: str | None = None

    def __init__(self, decoder: Decoder, *, dtype: torch.dtype, untouched: Weights | None = None) -> None:
        self._decoder = decoder
        self._dtype = dtype
        self._untouched = untouched or {}

    @property
    def arch(self) -> Arch:
        return self._decoder.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        names = parameter_names(self.arch)[0]
        own = {
            name: self._decoder.get_parameter(name).detach().to(stored_as(name, self._dtype))
            for name in names
        }
        return {**own, **self._untouched}

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return {
            name: p.detach().to(stored_as(name, self._dtype))
            for name, p in self._decoder.layers[layer_idx].named_parameters()
        }

"""From a source of weights to what the runner reads: linears fused, a kernel chosen for each, weights repacked once, layer by layer.

q, k and v (gate and up) read the same input and become one projection, so one product instead of three. Linears of different schemes
cannot share a kernel: a projection is a row of parts, each a run of linears with one scheme (one part, unless precision is mixed).
Every part has a kernel for decode rows, whose rows must not depend on one another, and one for prefill rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.kernels.select import DENSE_SCHEMES, Kernel, Op, Problem, candidates, select
from compress.models.arch import Arch, LayerShape
from compress.models.weights import Weights, WeightSource, dense
from compress.quant.scheme import QuantizedWeight

Phase = Literal["decode", "prefill"]
PROJECTIONS = {"qkv": ("attn.q", "attn.k", "attn.v"), "o": ("attn.o",), "gate_up": ("ffn.gate", "ffn.up"), "down": ("ffn.down",)}


@dataclass(frozen=True)
class Target:
    """Where and how the model runs: what every kernel choice depends on."""

    device: torch.device
    dtype: torch.dtype
    max_batch_size: int
    max_step_tokens: int

    def problem(self, op: Op, *, n: int, k: int = 0, phase: Phase = "decode", scheme: str | None = None) -> Problem:
        return Problem(
            op=op,
            n=n,
            k=k,
            m_min=1,
            m_max=self.max_batch_size if phase == "decode" else self.max_step_tokens,
            row_invariant=phase == "decode",
            scheme=scheme if scheme is not None else DENSE_SCHEMES[self.dtype],
            dtype=self.dtype,
            device=self.device.type,
            sm=_compute_capability(self.device),
        )


@dataclass(frozen=True)
class Placed:
    """A kernel bound to its problem and, for a linear, to weights in its layout."""

    kernel: Kernel
    problem: Problem
    packed: Tensor | tuple[Tensor, ...] | None = None

    def report(self, *, layer: int | None, linear: str) -> dict[str, Any]:
        problem = self.problem
        faster = [each for each in candidates(problem.op) if each.rank > self.kernel.rank]
        return {
            "layer": layer,
            "linear": linear,
            "op": problem.op,
            "scheme": problem.scheme,
            "n": problem.n,
            "k": problem.k,
            "m_range": [problem.m_min, problem.m_max],
            "phase": "decode" if problem.row_invariant else "prefill",
            "kernel": self.kernel.name,
            "refused": {each.name: each.refusal(problem) for each in faster},
        }


@dataclass(frozen=True)
class Part:
    """Linears of one scheme, stacked along O."""

    linears: tuple[str, ...]
    decode: Placed
    prefill: Placed
    bias_O: Tensor | None


@dataclass(frozen=True)
class Projection:
    """Parts over the same input; outputs follow each other along O."""

    parts: tuple[Part, ...]

    def __call__(self, x_TI: Tensor, phase: Phase) -> Tensor:
        outputs = []
        for part in self.parts:
            placed = part.decode if phase == "decode" else part.prefill
            outputs.append(placed.kernel.fn(x_TI, placed.packed, part.bias_O))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    @property
    def weight_bytes(self) -> int:
        """Bytes one decode step reads of it."""
        return sum(_num_bytes(part.decode.packed) for part in self.parts)

    def report(self, layer: int | None) -> list[dict[str, Any]]:
        """One row for each part and phase."""
        placed = [(part, each) for part in self.parts for each in (part.decode, part.prefill)]
        return [each.report(layer=layer, linear="+".join(part.linears)) for part, each in placed]


@dataclass(frozen=True)
class LayerWeights:
    """One layer as it runs. `qk_norm` holds a weight for every query and key head, [H + K, C]; None when heads are not normed."""

    shape: LayerShape
    attn_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None
    o: Projection
    ffn_norm: Tensor
    gate_up: Projection
    down: Projection

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True)
class ModelWeights:
    """The whole model as it runs. A tied head is a second copy of the embedding, in its kernel's layout."""

    arch: Arch
    target: Target
    embed_VD: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Projection

    @property
    def weight_bytes(self) -> int:
        """Bytes one decode step reads: all linears and the head, in the layout of their decode kernels."""
        return sum(each.weight_bytes for layer in self.layers for each in layer.projections) + self.head.weight_bytes


def load_model(source: WeightSource, target: Target) -> ModelWeights:
    """Stream the source layer by layer onto the device.

    Raises:
        EnvironmentUnfit: the dtype is none that the runtime computes in, or no kernel supports a linear.
    """
    if target.dtype not in DENSE_SCHEMES:
        raise EnvironmentUnfit(f"the runtime computes in {', '.join(DENSE_SCHEMES.values())}; {target.dtype} was asked for.")
    outer = source.outer()
    head = {"head.weight": outer["embed.weight" if source.arch.tied_head else "head.weight"]}
    return ModelWeights(
        arch=source.arch,
        target=target,
        embed_VD=_vector(outer, "embed.weight", target),
        layers=tuple(_load_layer(source, layer_idx, target) for layer_idx in range(source.arch.num_layers)),
        norm=_vector(outer, "norm.weight", target),
        head=place(("head",), head, target),
    )


def place(linears: Sequence[str], weights: Weights, target: Target) -> Projection:
    """Fuse linears over the same input, choose kernels, repack."""

    def scheme_of(linear: str) -> str | None:
        weight = weights[f"{linear}.weight"]
        return weight.scheme.name if isinstance(weight, QuantizedWeight) else None

    parts = [_place_part(tuple(run), scheme, weights, target) for scheme, run in groupby(linears, key=scheme_of)]
    return Projection(tuple(parts))


def _place_part(linears: tuple[str, ...], scheme: str | None, weights: Weights, target: Target) -> Part:
    stacked = [weights[f"{linear}.weight"] for linear in linears]
    out_features, in_features = sum(weight.shape[0] for weight in stacked), stacked[0].shape[1]
    packed: dict[Any, Tensor | tuple[Tensor, ...]] = {}
    placed: dict[Phase, Placed] = {}
    for phase in ("decode", "prefill"):
        problem = target.problem("linear", n=out_features, k=in_features, phase=phase, scheme=scheme)
        kernel = select(problem)
        assert kernel.repack is not None, f"linear kernel {kernel.name} has no repack"
        if kernel.repack not in packed:
            packed[kernel.repack] = kernel.repack(stacked, dtype=target.dtype, device=target.device)
        placed[phase] = Placed(kernel, problem, packed[kernel.repack])
    biased = f"{linears[0]}.bias" in weights
    bias_O = torch.cat([_vector(weights, f"{linear}.bias", target) for linear in linears]) if biased else None
    return Part(linears, placed["decode"], placed["prefill"], bias_O)


def _load_layer(source: WeightSource, layer_idx: int, target: Target) -> LayerWeights:
    shape, weights = source.arch.layers[layer_idx], source.layer(layer_idx)
    qk_norm = None
    if source.arch.qk_norm:
        q_norm, k_norm = (_vector(weights, f"attn.{name}.weight", target) for name in ("q_norm", "k_norm"))
        qk_norm = torch.cat((q_norm.expand(shape.num_heads, -1), k_norm.expand(shape.num_kv_heads, -1)))
    return LayerWeights(
        shape=shape,
        attn_norm=_vector(weights, "attn_norm.weight", target),
        qk_norm=qk_norm,
        ffn_norm=_vector(weights, "ffn_norm.weight", target),
        **{name: place(linears, weights, target) for name, linears in PROJECTIONS.items()},
    )


def _vector(weights: Weights, name: str, target: Target) -> Tensor:
    return dense(weights[name]).to(device=target.device, dtype=target.dtype)


def _num_bytes(packed: Tensor | tuple[Tensor, ...] | None) -> int:
    tensors = (packed,) if isinstance(packed, Tensor) else packed or ()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _compute_capability(device: torch.device) -> int:
    """90 for Hopper, 0 without a GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor

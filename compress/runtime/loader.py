"""From a source of weights to what the runner reads: linears fused, a kernel chosen for each, weights repacked once, layer by layer.

q, k and v (gate and up) read the same input and become one projection, so one product instead of three. Linears of different schemes
cannot share a kernel: a projection is a row of parts, each a run of linears with one scheme (one part, unless precision is mixed).
Every part has a kernel for decode rows, whose rows must not depend on one another, and one for prefill rows; both read one copy of the
weights where they agree on its layout.

A decode kernel may apply the gate itself (`Projection.gated`), and norm and quantize its own input (`Projection.prepares`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, RawRows
from compress.kernels.problem import DENSE_SCHEMES, KernelDevice, Phase, Problem
from compress.kernels.select import Kernel, candidates, refusals, select
from compress.models.arch import Arch, LayerShape
from compress.models.weights import Weights, WeightSource, dense
from compress.quant.kv import KV_SCALES
from compress.quant.scheme import QuantizedWeight

Rows = Tensor | QuantizedRows | RawRows
FEW_ROWS = 128


@dataclass(frozen=True)
class Target:
    """Where and how the model runs: what every kernel choice depends on."""

    device: torch.device
    dtype: torch.dtype
    max_batch_size: int
    max_step_tokens: int

    @property
    def max_decode_rows(self) -> int:
        """Rows up to which decode kernels serve: a full batch, and short prompts."""
        return max(self.max_batch_size, self.few_rows)

    @property
    def few_rows(self) -> int:
        """Tokens up to which a prompt is short: on CUDA its time is then the bytes of the weights, as in decoding."""
        return FEW_ROWS if self.device.type == "cuda" else 0

    @property
    def machine(self) -> KernelDevice:
        return KernelDevice.from_torch(
            self.device, self.dtype, decode_rows=self.max_decode_rows, prefill_rows=self.max_step_tokens
        )


@dataclass(frozen=True)
class Placed:
    """A kernel bound to its problem and, for a linear, to weights in its layout."""

    kernel: Kernel
    problem: Problem
    packed: Any = None

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
    """Linears of one scheme, stacked along O. `quant` says how they want their input, None as it is."""

    linears: tuple[str, ...]
    decode: Placed
    prefill: Placed
    bias_O: Tensor | None
    quant: ActivationQuant | None
    quantize: Callable[[Tensor, ActivationQuant], QuantizedRows]

    def __call__(self, x: Rows, phase: Phase, **epilogue: Any) -> Tensor:
        placed = self.decode if phase == "decode" else self.prefill
        if self.quant is not None and isinstance(x, Tensor):
            x = RawRows(x, quant=self.quant) if placed.kernel.prepares else self.quantize(x, self.quant)
        return placed.kernel.fn(x, placed.packed, self.bias_O, **epilogue)


@dataclass(frozen=True)
class Projection:
    """Parts over the same input; outputs follow each other along O."""

    parts: tuple[Part, ...]

    def __call__(
        self, x: Rows, phase: Phase, *, residual: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """[T, O], or [T, O / 2] where it is `gated`; `residual` is added."""
        if len(self.parts) == 1:
            return self.parts[0](x, phase, residual_TO=residual, out_dtype=out_dtype)
        y = torch.cat([part(x, phase, out_dtype=out_dtype) for part in self.parts], dim=-1)
        return y if residual is None else residual + y

    @property
    def quant(self) -> ActivationQuant | None:
        """How the op before is to give the rows: as all parts want them, if they agree and it is by whole rows; else each part quantizes
        its input for itself."""
        quant = self.parts[0].quant if len(self.parts) == 1 else None
        return None if quant is None or quant.group_size is not None else quant

    def prepares(self, phase: Phase) -> bool:
        """Whether the kernel takes rows that are not yet normed and quantized."""
        placed = self.parts[0].decode if phase == "decode" else self.parts[0].prefill
        return len(self.parts) == 1 and placed.kernel.prepares

    def gated(self, phase: Phase) -> bool:
        """Whether the kernel applies the activation and multiplies."""
        placed = self.parts[0].decode if phase == "decode" else self.parts[0].prefill
        return placed.problem.activation is not None

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
    """One layer as it runs. `qk_norm` holds a weight for every query and key head, [H + K, C]; None when heads are not normed. `kv_scales`
    are the static scales (of keys, of values) of the cache; None when the source has none."""

    shape: LayerShape
    attn_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None
    o: Projection
    ffn_norm: Tensor
    gate_up: Projection
    down: Projection
    kv_scales: tuple[float, float] | None

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
    def kv_scales(self) -> list[tuple[float, float]] | None:
        """Of every layer, or None."""
        scales = [layer.kv_scales for layer in self.layers if layer.kv_scales is not None]
        return scales if len(scales) == len(self.layers) else None

    @property
    def weight_bytes(self) -> int:
        """Bytes one decode step reads: all linears and the head, in the layout of their decode kernels."""
        return (
            sum(each.weight_bytes for layer in self.layers for each in layer.projections)
            + self.head.weight_bytes
        )


def load_model(source: WeightSource, target: Target) -> ModelWeights:
    """Stream the source layer by layer onto the device.

    Raises:
        EnvironmentUnfit: the dtype is none that the runtime computes in, or no kernel supports a linear.
    """
    if target.dtype not in DENSE_SCHEMES:
        raise EnvironmentUnfit(
            f"the runtime computes in {', '.join(DENSE_SCHEMES.values())}; {target.dtype} was asked for."
        )
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


def place(
    linears: Sequence[str], weights: Weights, target: Target, *, activation: str | None = None
) -> Projection:
    """Fuse linears over the same input, choose kernels, repack. `activation` is applied where one part holds both and its kernel can."""

    def scheme_of(linear: str) -> str | None:
        weight = weights[f"{linear}.weight"]
        return weight.scheme.name if isinstance(weight, QuantizedWeight) else None

    runs = [(scheme, tuple(run)) for scheme, run in groupby(linears, key=scheme_of)]
    activation = activation if len(runs) == 1 else None
    return Projection(tuple(_place_part(run, scheme, weights, target, activation) for scheme, run in runs))


def _place_part(
    linears: tuple[str, ...], scheme: str | None, weights: Weights, target: Target, activation: str | None
) -> Part:
    stacked = [weights[f"{linear}.weight"] for linear in linears]
    out_features = sum(weight.shape[0] for weight in stacked)
    in_features = stacked[0].shape[1]
    packed: dict[Any, Any] = {}
    placed: dict[Phase, Placed] = {}
    for phase in ("decode", "prefill"):
        problem = target.machine.problem("linear", n=out_features, k=in_features, phase=phase, scheme=scheme)
        if activation is not None and phase == "decode":
            gated = replace(problem, activation=activation)
            problem = gated if len(refusals(gated)) < len(candidates("linear")) else problem
        kernel = select(problem)
        assert kernel.repack is not None, f"linear kernel {kernel.name} has no repack"
        if kernel.repack not in packed:
            packed[kernel.repack] = kernel.repack(
                stacked, dtype=target.dtype, device=target.device, gated=problem.activation is not None
            )
        placed[phase] = Placed(kernel, problem, packed[kernel.repack])
    biased = f"{linears[0]}.bias" in weights
    return Part(
        linears,
        placed["decode"],
        placed["prefill"],
        bias_O=torch.cat([_vector(weights, f"{linear}.bias", target) for linear in linears])
        if biased
        else None,
        quant=_input_quant(stacked, target),
        quantize=select(target.machine.problem("quantize_rows", n=in_features, scheme=scheme)).fn,
    )


def _input_quant(stacked: Sequence[Tensor | QuantizedWeight], target: Target) -> ActivationQuant | None:
    """Linears over one input share its static scale; where a checkpoint states several, the largest saturates none of them."""
    quantized = [
        weight
        for weight in stacked
        if isinstance(weight, QuantizedWeight) and weight.scheme.activation is not None
    ]
    if not quantized:
        return None
    scales = [weight.input_scale.to(torch.float32) for weight in quantized if weight.input_scale is not None]
    static_scale = torch.stack(scales).amax().to(target.device) if scales else None
    scheme = quantized[0].scheme
    return ActivationQuant(
        static_scale, scheme.code_dtype, scheme.group_size if scheme.activation == "group" else None
    )


def _load_layer(source: WeightSource, layer_idx: int, target: Target) -> LayerWeights:
    shape = source.arch.layers[layer_idx]
    weights = source.layer(layer_idx)
    qk_norm = None
    if source.arch.qk_norm:
        q_norm, k_norm = (_vector(weights, f"attn.{name}.weight", target) for name in ("q_norm", "k_norm"))
        qk_norm = torch.cat((q_norm.expand(shape.num_heads, -1), k_norm.expand(shape.num_kv_heads, -1)))
    return LayerWeights(
        shape=shape,
        attn_norm=_vector(weights, "attn_norm.weight", target),
        qk_norm=qk_norm,
        ffn_norm=_vector(weights, "ffn_norm.weight", target),
        **{
            group.name: place(
                group.linears,
                weights,
                target,
                activation=source.arch.activation if group.name == "gate_up" else None,
            )
            for group in shape.groups
        },
        kv_scales=_kv_scales(weights),
    )


def _kv_scales(weights: Weights) -> tuple[float, float] | None:
    k_scale, v_scale = (weights.get(name) for name in KV_SCALES.values())
    return None if k_scale is None or v_scale is None else (float(dense(k_scale)), float(dense(v_scale)))


def _vector(weights: Weights, name: str, target: Target) -> Tensor:
    return dense(weights[name]).to(device=target.device, dtype=target.dtype)


def _num_bytes(packed: Any) -> int:
    """Of all tensors in a packed weight."""
    if isinstance(packed, Tensor):
        return packed.numel() * packed.element_size()
    if is_dataclass(packed):
        return sum(_num_bytes(getattr(packed, each.name)) for each in fields(packed))
    return sum(_num_bytes(each) for each in packed) if isinstance(packed, tuple) else 0

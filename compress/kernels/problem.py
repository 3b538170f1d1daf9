"""The problem posed to a kernel: one op at one shape, number format and device, posed for decode or for
prefill."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

import torch

Op = Literal[
    "linear",
    "rms_norm",
    "post_norm",
    "act_mul",
    "quantize_rows",
    "rope_store",
    "hadamard",
    "delta_net",
    "mamba2",
    "selective_scan",
    "short_conv",
    "residual_conv",
    "latent_store",
    "latent_heads",
    "latent_attention",
    "head_linear",
    "compressed_store",
    "compressed_attention",
    "index_store",
    "index_choice",
    "pool_choice",
    "block_choice",
    "attention_decode",
    "attention_prefill",
    "soft_cap",
    "hyper_mix",
    "hyper_spread",
    "gated_mix",
    "altup_first",
    "altup_predict",
    "altup_correct",
    "altup_add",
    "altup_join",
    "router",
    "experts",
]
OPS: tuple[Op, ...] = get_args(Op)
Phase = Literal["decode", "prefill"]
PHASES: tuple[Phase, ...] = get_args(Phase)
EXPERT_OPS: tuple[Op, ...] = ("router", "experts")
"""The ops that only layers with a mixture of experts have."""
RECURRENCE_OPS: Mapping[str, Op] = {
    "delta": "delta_net",
    "mamba": "mamba2",
    "lightning": "mamba2",
    "mamba1": "selective_scan",
    "conv": "short_conv",
    "residual_convs": "residual_conv",
}
"""The op of a layer with a recurrence, or with convolutions, by the name of its module."""
CONVOLUTION_OPS: Mapping[str, Op] = {"mamba1": "short_conv"}
"""The op of the convolution, by the name of a recurrence's module, where one kernel convolves and another
computes the recurrence."""
DENSE_SCHEMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Scheme names of dense weights, and format names of unquantized KV caches, by dtype."""


@dataclass(frozen=True)
class Problem:
    """One op, its sizes, and the rows M it must serve. `n` and `k` are

        linear                           O and I
        attention, rope_store, hadamard  the head dimension, and the query heads of a KV head
        delta_net, mamba2                the dimensions of a key, and of a value
        selective_scan                   the numbers of the state of a channel, and the channels
        short_conv, residual_conv        0, and the channels of the state of a layer
        latent_store                     the width of a latent, and the dimensions that rotate
        latent_attention                 the width of a latent, and the heads
        latent_heads                     the head dimension, and 0
        head_linear                      O and I of one head
        compressed_store                 the head dimension, and the dimensions that rotate
        compressed_attention             the head dimension, and the heads
        index_store                      the numbers of a key of an indexer, and those that rotate
        index_choice, pool_choice,
        block_choice                     the numbers of a key of an indexer, and its heads
        gated_mix                        the hidden size, and the rank of the gates
        hyper_mix, hyper_spread, altup_* the hidden size, and the streams
        experts                          the hidden size D, and the size F of one expert
        others                           the row size, and 0

    `row_invariant` demands that the bits of a row depend on that row alone: not on M, not on the other rows,
    not on its place among them. Decode rows always demand it. `scheme` names the quantization scheme, or the
    dtype of a dense weight (`BF16`, `F32`); for attention and rope_store it names the format of the KV cache.
    `activation` makes a linear gated, and names that of experts; `softcap` and `sinks` are true where
    attention scores have a cap, and each head a score without a value; with `relative` they have terms of the
    distance of keys, and with `alibi` they fall with it. `experts` and `top_k` count the experts of a layer
    and those that serve one token; a router first chooses among `expert_groups` groups of experts, where
    there is more than one. `indexer` has the heads and the numbers of a key of the indexer of compressed
    attention, zeros without one. `sm` is the compute capability times ten, 0 without a GPU.
    """

    op: Op
    n: int
    k: int
    m_min: int
    m_max: int
    row_invariant: bool
    scheme: str
    dtype: torch.dtype
    device: str
    sm: int
    activation: str | None = None
    softcap: bool = False
    sinks: bool = False
    experts: int = 0
    top_k: int = 0
    expert_groups: int = 1
    relative: bool = False
    alibi: bool = False
    indexer: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class KernelDevice:
    """A device as kernels are selected for it: its type, compute capability times ten (0 without a GPU), the
    model's dtype, and the most rows that decode and prefill must serve at once."""

    device: str
    sm: int
    dtype: torch.dtype
    decode_rows: int = 128
    prefill_rows: int = 2048

    @property
    def dense(self) -> str:
        """Scheme of a dense weight, and format of an unquantized KV cache."""
        return DENSE_SCHEMES[self.dtype]

    @staticmethod
    def from_torch(device: torch.device, dtype: torch.dtype, **rows: int) -> "KernelDevice":
        """Describe a torch device; `rows` are `decode_rows` and `prefill_rows`."""
        return KernelDevice(device.type, compute_capability(device), dtype, **rows)

    def with_prompts_of(self, factor: int) -> "KernelDevice":
        """Return this device where prompts have so many times the rows."""
        return replace(self, prefill_rows=self.prefill_rows * factor)

    def problem(
        self,
        op: Op,
        *,
        n: int,
        k: int = 0,
        phase: Phase = "decode",
        scheme: str | None = None,
        activation: str | None = None,
        softcap: bool = False,
        sinks: bool = False,
        experts: int = 0,
        top_k: int = 0,
        expert_groups: int = 1,
        relative: bool = False,
        alibi: bool = False,
        indexer: tuple[int, int] = (0, 0),
    ) -> Problem:
        """Pose a problem to this device; `scheme` None means dense."""
        return Problem(
            op=op,
            n=n,
            k=k,
            m_min=1,
            m_max=self.decode_rows if phase == "decode" else self.prefill_rows,
            row_invariant=phase == "decode",
            scheme=scheme if scheme is not None else self.dense,
            dtype=self.dtype,
            device=self.device,
            sm=self.sm,
            activation=activation,
            softcap=softcap,
            sinks=sinks,
            experts=experts,
            top_k=top_k,
            expert_groups=expert_groups,
            relative=relative,
            alibi=alibi,
            indexer=indexer,
        )


@cache
def compute_capability(device: torch.device) -> int:
    """Return a device's compute capability times ten; 0 for a device that is no GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor

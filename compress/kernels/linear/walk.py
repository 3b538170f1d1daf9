"""From attention's output to the next layer's qkv in one launch, for very few rows: `walk.cu`, and when it serves.

    h1 = h + o(x);  m = act(gate) * up of norm(h1);  h2 = h1 + down(m);  next = norm(h2) W^T

At one to four rows a layer's linears are so short that a fifth to a third of their time is waiting: for the launch before to end, and for
memory to come up to speed. Here the weights of a linear are on their way while blocks still wait for its input. Rows have the bits that
`stream.cu` gives them.
"""

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.linear.plan import FORMATS, STATIC_BYTES, TILE_BYTES, TILE_ROWS, WARPS, Format, Gpu, Shape, num_parts_of
from compress.kernels.linear.stream import ACTIVATIONS, gpu_of, source_text
from compress.kernels.linear.w4a16 import PackedW4
from compress.kernels.nvrtc import Function, Launch, Source

MAX_TOKENS = 4
MAX_LINEARS = 4
_STAGES = (7, 6, 5, 4)
_ALIGNMENT = 1024
_BESIDE_BYTES = 146 * 1024
"""Of shared memory for a block that leaves room for one of decode attention."""
_ALONE_BYTES = 117 * 1024


@dataclass(frozen=True)
class Link:
    """One linear of a walk. `norm_weight_K`: its input is normed first."""

    packed: PackedW4
    bias_O: Tensor | None = None
    norm_weight_K: Tensor | None = None

    @property
    def shape(self) -> Shape:
        return Shape("w4" if self.packed.symmetric else "w4_asym", self.packed.n, self.packed.k, self.packed.gated)


@dataclass(frozen=True)
class Walk:
    """The linears of one layer from `o` on, and the first of the next where there is one. `counters` int32 [2] are its own, and zero."""

    o: Link
    gate_up: Link
    down: Link
    following: Link | None
    activation: str
    eps: float
    counters: Tensor

    @property
    def links(self) -> tuple[Link, ...]:
        return (self.o, self.gate_up, self.down) if self.following is None else (self.o, self.gate_up, self.down, self.following)

    def __call__(self, x_TI: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states [T, D] behind the layer, and the following linear's output [T, O]."""
        num_tokens, device, dtype = x_TI.shape[0], x_TI.device, hidden_TD.dtype
        gpu = gpu_of(device)
        stages = stages_of(self, num_tokens, gpu)
        assert stages is not None, "more rows than a walk serves: ask `refusal` first"
        middle_TD, out_TD = torch.empty_like(hidden_TD), torch.empty_like(hidden_TD)
        gated_TF = torch.empty(num_tokens, self.down.packed.k, dtype=dtype, device=device)
        following_TO = None if self.following is None else torch.empty(num_tokens, self.following.packed.n, dtype=dtype, device=device)
        steps = [
            _linear(self.o, x_TI.contiguous(), middle_TD, gpu, residual=hidden_TD.contiguous()),
            _linear(self.gate_up, middle_TD, gated_TF, gpu),
            _linear(self.down, gated_TF, out_TD, gpu, residual=middle_TD),
        ]
        if self.following is not None and following_TO is not None:
            steps.append(_linear(self.following, out_TD, following_TO, gpu))
        arguments = _Arguments((_Linear * MAX_LINEARS)(*steps), self.counters.data_ptr(), len(steps), num_tokens, self.eps)
        launch = Launch(
            grid=(gpu.num_sms, 1),
            threads=WARPS * 32,
            shared_bytes=max(_shared_bytes(self, num_tokens, stages), _ALONE_BYTES),
            overlap=True,
        )
        _function(self.o.shape.format, dtype, self.activation, stages, device)(launch, arguments, device=device)
        return out_TD, following_TO


def refusal(walk: Walk, num_tokens: int, gpu: Gpu) -> str | None:
    """Why these linears cannot be walked for so many rows, or None."""
    if gpu.sm != 90:
        return "walks linears on sm_90"
    if num_tokens > MAX_TOKENS:
        return f"for M up to {MAX_TOKENS}"
    if len({link.shape.format for link in walk.links}) > 1:
        return "the linears differ in format"
    for link in walk.links:
        tiles, parts = _dealt(link, gpu)
        if tiles * parts > WARPS:
            return f"N = {link.packed.n} gives a multiprocessor more than {WARPS} row tiles and parts"
    return None if stages_of(walk, num_tokens, gpu) is not None else "too little shared memory"


def stages_of(walk: Walk, num_tokens: int, gpu: Gpu) -> int | None:
    """The deepest ring that leaves room for attention, else the deepest there is room for."""
    for limit in (min(_BESIDE_BYTES, gpu.shared_bytes), gpu.shared_bytes):
        for stages in _STAGES:
            if _shared_bytes(walk, num_tokens, stages) <= limit - STATIC_BYTES:
                return stages
    return None


def _shared_bytes(walk: Walk, num_tokens: int, stages: int) -> int:
    """Rings, and above them x of the widest linear; sums over parts lie where x was."""
    x_bytes = max(num_tokens * link.packed.k * 2 for link in walk.links)
    sums_bytes = num_tokens * WARPS * (TILE_ROWS + 4) * 4
    return _ALIGNMENT + WARPS * stages * TILE_BYTES[walk.o.shape.format] + max(x_bytes, sums_bytes)


def _dealt(link: Link, gpu: Gpu) -> tuple[int, int]:
    """Row tiles of a block at most, and parts of K."""
    return -(-link.shape.num_tiles // gpu.num_sms), num_parts_of(link.shape, gpu.num_sms)


class _Linear(ctypes.Structure):
    """`Linear` of walk.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("w", "x", "norm_weight", "bias", "residual", "y")),
        *((name, ctypes.c_int) for name in ("n", "k", "num_tiles", "tiles", "parts", "gated")),
    ]


class _Arguments(ctypes.Structure):
    """`Args` of walk.cu."""

    _fields_ = [
        ("linears", _Linear * MAX_LINEARS),
        ("counters", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("num_linears", "num_tokens")),
        ("norm_eps", ctypes.c_float),
    ]


def _linear(link: Link, x: Tensor, y: Tensor, gpu: Gpu, *, residual: Tensor | None = None) -> _Linear:
    tensors = (link.packed.blocks, x, link.norm_weight_K, link.bias_O, residual, y)
    tiles, parts = _dealt(link, gpu)
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    return _Linear(*pointers, link.packed.n, link.packed.k, link.shape.num_tiles, tiles, parts, int(link.packed.gated))


@functools.cache
def _function(weight_format: Format, dtype: torch.dtype, activation: str, stages: int, device: torch.device) -> Function:
    gpu = gpu_of(device)
    source = source_of(weight_format, dtype, activation, stages)
    return Function(source, device=device, shared_bytes=gpu.shared_bytes - STATIC_BYTES, sm=gpu.sm)


def source_of(weight_format: Format, dtype: torch.dtype, activation: str, stages: int) -> Source:
    macros = {
        "FORMAT": FORMATS.index(weight_format),
        "F16": int(dtype == torch.float16),
        "ACT": ACTIVATIONS.index(activation),
        "NT": 1,
        "WGMMA": 0,
        "STAGES": stages,
    }
    return Source(source_text("numbers.cuh", "pieces.cuh", "walk.cu"), "walk_linears", tuple(macros.items()))

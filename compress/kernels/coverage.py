"""The table of kernels that serve a device: every op, for the shapes of one model, each scheme and KV format,
decode and prefill.

The kernels are those that `select` takes for the problems that a loader poses. No weights are needed, so that
`compress doctor` can print the table for a person, and a benchmark can time what is served.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress.kernels.operands.paged import FP8_STATIC, TOKEN_HEAD_FORMATS
from compress.kernels.operands.recurrent_states import padded_rows
from compress.kernels.problem import CONVOLUTION_OPS, PHASES, RECURRENCE_OPS, KernelDevice, Op, Phase, Problem
from compress.kernels.select import candidates
from compress.models.arch import Arch
from compress.models.arch_params import is_compressed
from compress.models.experts import Experts
from compress.models.gated_residual import GatedResiduals
from compress.models.latent import Latent
from compress.models.layer_shape import LayerShape
from compress.models.linear_groups import LINEAR_GROUPS, LinearGroup
from compress.quant.kv import (
    FP8_TOKEN_HEAD,
    HADAMARD_HEAD_DIMS,
    INT4_HADAMARD,
    INT8_TOKEN_HEAD,
    page_format,
    transforms_heads,
)
from compress.quant.scheme import SCHEMES

LINEARS = (*LINEAR_GROUPS, "head")
"""The products of a dense model by name: its linear groups and the head."""


@dataclass(frozen=True)
class Served:
    """One problem and the kernel that serves it, None where all refuse; `refused` has the reasons of the
    faster candidates. `kv_format` is the format of a KV cache whose pages the problem is posed for, where it
    is not the format of the pages itself."""

    name: str
    phase: Phase
    problem: Problem
    kernel: str | None
    refused: dict[str, str]
    kv_format: str | None = None

    def as_json(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "op": problem.op,
            "linear": self.name,
            "scheme": self.kv_format or problem.scheme,
            "n": problem.n,
            "k": problem.k,
            "m_range": [problem.m_min, problem.m_max],
            "phase": self.phase,
            "activation": problem.activation,
            "sinks": problem.sinks,
            "relative": problem.relative,
            "alibi": problem.alibi,
            "kernel": self.kernel,
            "refused": self.refused,
        }


def linear_shape(arch: Arch, name: str, *, layer_idx: int = 0) -> tuple[int, int]:
    """Return [O, I] of a product of `LINEARS` in the first layer from `layer_idx` on that has it."""
    if name == "head":
        return arch.vocab_size, arch.hidden_size
    having = (
        layer.group_shape(group, arch.hidden_size)
        for layer in arch.layers[layer_idx:]
        for group in layer.groups
        if group.name == name
    )
    layer = arch.layers[layer_idx]
    return next(having, None) or layer.group_shape(LINEAR_GROUPS[name], arch.hidden_size)


def linear_shapes(arch: Arch) -> list[tuple[str, tuple[int, int]]]:
    """Return the names and [O, I] of the products that every row goes through, and of the head: a name comes
    with each shape that it has in some layer. A shared expert's are `shared.gate_up` and `shared.down`."""
    found = [
        (group.name, _served_shape(layer, group, arch.hidden_size))
        for layer in dict.fromkeys(arch.layers)
        for group in layer.groups
        if not group.name.startswith("expert.")
    ]
    return [*dict.fromkeys(found), ("head", linear_shape(arch, "head"))]


def _served_shape(layer: LayerShape, group: LinearGroup, hidden_size: int) -> tuple[int, int]:
    rows, columns = layer.group_shape(group, hidden_size)
    is_padded = layer.recurrence is not None and f"{layer.recurrence.module}.dt" in group.linears
    return padded_rows(rows) if is_padded else rows, columns


def linear_problems(
    arch: Arch, device: KernelDevice, name: str, shape: tuple[int, int], *, scheme: str, phase: Phase
) -> list[Problem]:
    """Return the problems of a fused linear in the order in which they are tried: in decode, gate_up first
    with its activation."""
    n, k = shape
    fuses = name.endswith("gate_up") and phase == "decode" and any(map(arch.fused_activation, arch.layers))
    activations = (arch.activation, None) if fuses else (None,)
    return [
        device.problem("linear", n=n, k=k, phase=phase, scheme=scheme, activation=each)
        for each in activations
    ]


def coverage(arch: Arch, device: KernelDevice) -> list[Served]:
    """Return the kernels of every op of a model of this shape."""
    schemes = (device.dense, *SCHEMES)
    shapes = linear_shapes(arch)
    rows = [
        _served(name, phase, linear_problems(arch, device, name, shape, scheme=scheme, phase=phase))
        for scheme in schemes
        for name, shape in shapes
        for phase in PHASES
        if _divides(scheme, shape[1])
    ]
    mixture = next((layer.experts for layer in arch.layers if layer.experts is not None), None)
    if mixture is not None:
        for parts in dict.fromkeys(layer.shared_parts for layer in arch.layers if layer.experts is not None):
            rows += [each for each in _experts(arch, mixture, device, parts) if each not in rows]
    has_others = arch.has_latents or is_compressed(arch)
    rows += _latents(arch, device) + ([] if has_others else _cached(arch, device)) + _compressed(arch, device)
    rows += _blocks(arch, device)
    rows += _recurrences(arch, device)
    layer = arch.layers[0]
    has_gate = any(each.has_output_gate for each in arch.layers)
    gated = ("down", "shared.down", "o") if has_gate else ("down", "shared.down")
    row_wise: list[tuple[Op, int]] = [
        ("rms_norm", arch.hidden_size),
        ("post_norm", arch.hidden_size),
        *(("act_mul", arch.hidden_size) for each in arch.layers[:1] if each.norm_gate_rank),
        *dict.fromkeys(("act_mul", shape[1]) for name, shape in shapes if name in gated),
        ("quantize_rows", arch.hidden_size),
        ("soft_cap", arch.vocab_size),
        ("hadamard", layer.head_dim),
    ]
    rows += [_served(op, "decode", [device.problem(op, n=size)]) for op, size in row_wise]
    return rows + _streams(arch, device)


def _streams(arch: Arch, device: KernelDevice) -> list[Served]:
    """Return the kernels of residuals of several streams. A model with one stream gets those of four, and a
    model without gated residuals gets the rank of Qwen4."""
    num_streams = 4 if arch.hyper is None else arch.hyper.num_streams
    hyper: tuple[Op, ...] = ("hyper_mix", "hyper_spread")
    altup: tuple[Op, ...] = ("altup_first", "altup_predict", "altup_correct", "altup_add", "altup_join")
    counts = [(op, num_streams) for op in hyper] + [(op, arch.altup_streams or 4) for op in altup]
    rows = [_served(op, "decode", [device.problem(op, n=arch.hidden_size, k=count)]) for op, count in counts]
    rank = arch.hyper.rank if isinstance(arch.hyper, GatedResiduals) else 320
    return rows + [
        _served("gated_mix", phase, [device.problem("gated_mix", n=arch.hidden_size, k=rank, phase=phase)])
        for phase in PHASES
    ]


def _cached(arch: Arch, device: KernelDevice) -> list[Served]:
    """Return the kernels of attention over keys and values, in each format of their cache."""
    attending = [layer for layer in arch.layers if layer.attends] or arch.layers[:1]
    heads: dict[tuple[int, int], list[LayerShape]] = {}
    for layer in attending:
        heads.setdefault((layer.head_dim, layer.num_heads // layer.num_kv_heads), []).append(layer)
    return [row for layers in heads.values() for row in _attending(arch, device, layers)]


def _attending(arch: Arch, device: KernelDevice, layers: Sequence[LayerShape]) -> list[Served]:
    """Return the kernels of attention of layers with heads alike."""
    head_dim = layers[0].head_dim
    facts: dict[str, Any] = {
        "softcap": arch.attn_softcap is not None,
        "sinks": any(map(arch.has_sinks, layers)),
        "relative": any(layer.relative is not None for layer in layers),
        "alibi": any(layer.alibi is not None for layer in layers),
    }
    rows: list[Served] = []
    cached: tuple[tuple[Op, Phase], ...] = (
        ("rope_store", "decode"),
        ("attention_decode", "decode"),
        ("attention_prefill", "prefill"),
    )
    transformed = (INT4_HADAMARD,) if head_dim in HADAMARD_HEAD_DIMS else ()
    kv_formats = (device.dense, *TOKEN_HEAD_FORMATS, *transformed, FP8_STATIC)
    for op, phase in cached:
        for kv_format in kv_formats:
            problem = device.problem(
                op,
                n=head_dim,
                k=layers[0].num_heads // layers[0].num_kv_heads,
                phase=phase,
                scheme=page_format(kv_format),
                **(facts if op != "rope_store" else {}),
            )
            own = kv_format if transforms_heads(kv_format) else None
            rows.append(replace(_served(op, phase, [problem]), kv_format=own))
    return rows


def _latents(arch: Arch, device: KernelDevice) -> list[Served]:
    """Return the kernels of latent attention and of its indexers: of the widths of DeepSeek-V3.2, and of
    GLM-5.3 where they choose pools, where a model has none."""
    having = dict.fromkeys(
        (layer.latent, layer.num_heads, layer.head_dim) for layer in arch.layers if layer.latent is not None
    )
    of_deepseek = Latent(q_rank=1536, kv_rank=512, rope_dim=64, value_dim=128, interleaved=True)
    formats = (device.dense, FP8_TOKEN_HEAD, INT8_TOKEN_HEAD)
    dense = (device.dense,)
    problems: list[tuple[Op, Phase, int, int, tuple[str, ...]]] = []
    for latent, num_heads, head_dim in having or [(of_deepseek, arch.layers[0].num_heads, 192)]:
        problems += [
            ("latent_store", "decode", latent.kv_rank, latent.rope_dim, formats),
            ("head_linear", "decode", latent.kv_rank, head_dim - latent.rope_dim, dense),
            ("latent_attention", "decode", latent.kv_rank, num_heads, formats),
            ("head_linear", "decode", latent.value_dim, latent.kv_rank, dense),
            ("latent_heads", "decode", head_dim, 0, dense),
        ]
        if having:
            problems.append(("attention_prefill", "prefill", head_dim, 1, dense))
    indexers = {latent.indexer for latent, _, _ in having if latent.indexer is not None}
    rotating = {
        (latent.indexer.head_dim, latent.rope_dim) for latent, _, _ in having if latent.indexer is not None
    }
    problems += [("index_store", "decode", *each, dense) for each in sorted(rotating) or [(128, 64)]]
    choices: tuple[tuple[Op, bool, int], ...] = (("index_choice", False, 64), ("pool_choice", True, 32))
    for op, pooled, heads in choices:
        of_op = [each for each in indexers if (each.pool_size > 0) is pooled]
        sizes = sorted({(each.head_dim, each.num_heads) for each in of_op}) or [(128, heads)]
        problems += [(op, "decode", *each, dense) for each in sizes]
    with_sinks = ("latent_attention", "attention_prefill") if having and arch.attn_sinks else ()
    return [
        _served(op, phase, [device.problem(op, n=n, k=k, phase=phase, scheme=scheme, sinks=op in with_sinks)])
        for op, phase, n, k, schemes in dict.fromkeys(problems)
        for scheme in schemes
    ]


def _compressed(arch: Arch, device: KernelDevice) -> list[Served]:
    """Return the kernels of compressed attention: of the widths of DeepSeek-V4 where a model has none."""
    widths = dict.fromkeys(
        (layer.head_dim, layer.compressed.rope_dim, layer.num_heads, layer.compressed.index_widths)
        for layer in arch.layers
        if layer.compressed is not None
    )
    problems = [
        problem
        for head_dim, rope_dim, num_heads, indexer in widths or [(512, 64, 64, (64, 128))]
        for problem in (
            device.problem("compressed_store", n=head_dim, k=rope_dim),
            device.problem("compressed_attention", n=head_dim, k=num_heads, sinks=True, indexer=indexer),
        )
    ]
    return [_served(each.op, "decode", [each]) for each in dict.fromkeys(problems)]


def _blocks(arch: Arch, device: KernelDevice) -> list[Served]:
    """Return the kernels of indexers of blocks: of the widths of MiniMax-M3 where a model has none."""
    indexers = {layer.block_indexer for layer in arch.layers if layer.block_indexer is not None}
    sizes = sorted({(each.head_dim, each.num_heads) for each in indexers}) or [(128, 4)]
    return [_served("block_choice", "decode", [device.problem("block_choice", n=n, k=k)]) for n, k in sizes]


def _recurrences(arch: Arch, device: KernelDevice) -> list[Served]:
    """Return the kernels of recurrences and of convolutions: of the dimensions of Qwen3.5, Granite 4, Jamba
    1.5 Mini, LFM2 and Inkling-Small where a model has none."""
    found = set(arch.states)
    dims: dict[Op, set[tuple[int, int]]] = {op: set() for op in RECURRENCE_OPS.values()}
    for each in found:
        dims[RECURRENCE_OPS[each.module]].add((each.key_dim, each.value_dim))
        if each.module in CONVOLUTION_OPS:
            dims[CONVOLUTION_OPS[each.module]].add((0, each.num_channels))
    if not found:
        dims = {"delta_net": {(128, 128)}, "mamba2": {(128, 64)}, "selective_scan": {(16, 8192)}}
        dims |= {"short_conv": {(0, 2048)}, "residual_conv": {(0, 10240)}}
    return [
        _served(op, "decode", [device.problem(op, n=key_dim, k=value_dim)])
        for op, of_op in dims.items()
        for key_dim, value_dim in sorted(of_op)
    ]


def _experts(arch: Arch, facts: Experts, device: KernelDevice, shared_parts: int) -> list[Served]:
    """Return the kernels of the router and of the experts of a layer, to which the shared one counts in
    decode as so many parts if it has their scheme."""
    hidden_size = arch.hidden_size
    num_shared: dict[Phase, int] = {"decode": shared_parts if device.sm else 0, "prefill": 0}
    rows = [
        _served(
            "router",
            phase,
            [
                device.problem(
                    "router",
                    n=facts.of_router.num_experts,
                    k=hidden_size,
                    phase=phase,
                    experts=facts.of_router.num_experts,
                    top_k=facts.top_k + num_shared[phase],
                    expert_groups=facts.num_groups,
                )
            ],
        )
        for phase in PHASES
    ]
    served = {phase: facts.served_choices(facts.top_k + num_shared[phase]) for phase in PHASES}
    return rows + [
        _served(
            "experts",
            phase,
            [
                device.with_prompts_of(served[phase][0]).problem(
                    "experts",
                    n=facts.width(hidden_size),
                    k=facts.expert_size,
                    phase=phase,
                    scheme=scheme,
                    activation=facts.activation_of(arch.activation),
                    experts=facts.num_experts + num_shared["decode"],
                    top_k=served[phase][1],
                )
            ],
        )
        for scheme in (device.dense, *SCHEMES)
        for phase in PHASES
        if _divides(scheme, facts.width(hidden_size)) and _divides(scheme, facts.expert_size)
    ]


def _divides(scheme: str, in_features: int) -> bool:
    """Return whether a weight of so many columns has this scheme: they are whole scale groups."""
    size = SCHEMES[scheme].group_size if scheme in SCHEMES else None
    return size is None or in_features % size == 0


def _served(name: str, phase: Phase, problems: Sequence[Problem]) -> Served:
    """Return the first problem that a kernel serves, with the kernel that `select` takes for it."""
    for problem in problems:
        refused: dict[str, str] = {}
        for kernel in candidates(problem.op):
            reason = kernel.refusal(problem)
            if reason is None:
                faster = {other.name for other in candidates(problem.op) if other.priority > kernel.priority}
                return Served(
                    name,
                    phase,
                    problem,
                    kernel.name,
                    {other: why for other, why in refused.items() if other in faster},
                )
            refused[kernel.name] = reason
    return Served(name, phase, problems[-1], None, refused)


def unused(rows: Sequence[Served]) -> list[dict[str, str]]:
    """Return {op, kernel, reason} for each kernel above the reference that serves none of these rows."""
    idle: list[dict[str, str]] = []
    for op in dict.fromkeys(row.problem.op for row in rows):
        problems = [row.problem for row in rows if row.problem.op == op]
        serving = {row.kernel for row in rows if row.problem.op == op}
        for kernel in candidates(op):
            if kernel.priority > 0 and kernel.name not in serving:
                reasons = dict.fromkeys(kernel.refusal(problem) for problem in problems)
                reason = "; ".join(each for each in reasons if each is not None)
                idle.append(
                    {
                        "op": op,
                        "kernel": kernel.name,
                        "reason": reason if None not in reasons else "a faster one serves all it could",
                    }
                )
    return idle
